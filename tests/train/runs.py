"""Options of tiny runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from partita.facts.layout import Layout
from partita.facts.precision import PRESETS
from partita.facts.work import Training
from partita.train.options import Evaluation, Options
from partita.train.schedule import Schedule
from tests.tiny import tiny_model


def tiny_run(
    out: Path | str,
    layout: str = "ddp",
    ranks: int = 1,
    steps: int = 20,
    precision: str = "fp32",
    global_batch: int = 4,
    **changes: Any,
) -> Options:
    """A run of a tiny model on random tokens of uneven counts: row 0 of each global batch counts nowhere."""
    work = {k: changes.pop(k) for k in ("optimizer", "clip", "momentum") if k in changes}
    options = Options(
        model=tiny_model(layers=2),
        layout=Layout.parse(layout, ranks),
        work=Training(global_batch, 9, PRESETS[precision], **{"clip": 0.7, **work}),
        schedule=Schedule(3e-3, steps, warmup=2),
        evaluation=Evaluation(every=5, samples=7),
        out=str(out),
        device="cpu",
        ranks=ranks,
        tensorboard=False,
        samples_shown=0,
    )
    return replace(options, **changes)
