"""The learning rate of a step: warm-up, then constant, linear or cosine.  Pure functions of the step number."""

from __future__ import annotations

import math
from dataclasses import dataclass

from partita.facts.errors import BadInput

KINDS = ("cosine", "linear", "constant")


@dataclass(frozen=True)
class Schedule:
    """``warmup`` steps up to ``peak``, then down to ``final`` (a rate, not a share) at step ``steps``.

    The rate rises by equal amounts from the first step on, which is not wasted on a rate of 0.  Cosine is half a
    period (SGDR, arXiv 1608.03983, equation 5, without restarts).  Steps count from 0; behind ``steps`` the rate
    stays.  ``constant`` never falls and has no ``final``.
    """

    peak: float
    steps: int
    warmup: int = 0
    kind: str = "cosine"
    final: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise BadInput(f"schedule {self.kind!r} is not known; what works: {', '.join(KINDS)}")
        if not (math.isfinite(self.peak) and self.peak > 0):
            raise BadInput(f"a learning rate of {self.peak} does not train; it must be above 0")
        if not 0 <= self.final <= self.peak:
            raise BadInput(f"a final learning rate of {self.final} must lie between 0 and the peak, {self.peak}")
        if self.steps < 1:
            raise BadInput(f"{self.steps} steps do not train; use 1 or more")
        if not 0 <= self.warmup < self.steps:
            raise BadInput(
                f"a warm-up of {self.warmup} steps does not fit into {self.steps} steps; use 0 to {self.steps - 1}"
            )

    def rate(self, step: int) -> float:
        """The learning rate of step ``step`` (from 0)."""
        if step < self.warmup:
            return self.peak * (step + 1) / (self.warmup + 1)
        if self.kind == "constant":
            return self.peak
        done = min(1.0, (step - self.warmup) / (self.steps - self.warmup))
        left = 1 - done if self.kind == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.final + (self.peak - self.final) * left
