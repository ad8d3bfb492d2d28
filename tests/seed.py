"""The seed of the tests' changing part. Most tests are fixed; some draw their cases anew each day."""

from __future__ import annotations

import os
import time


def value() -> int:
    """PARTITA_SEED, or today's number, so that parametrised names stay the same while a run collects and reports."""
    text = os.environ.setdefault("PARTITA_SEED", str(int(time.time()) // 86400))
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"PARTITA_SEED={text!r} is not a whole number.") from None
