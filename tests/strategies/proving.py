"""A proof of one layout on the pool's ranks, for the tests of rooms: plan, recording and one device, joined."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from partita.facts.layout import Layout
from partita.facts.model import Model
from partita.facts.precision import PRESETS
from partita.facts.work import Training
from partita.prove.proof import Proof
from partita.prove.prove import Report, judge
from partita.prove.ranks import Seen, observe
from partita.prove.reference import Reference, one_device
from tests.tiny import tiny_model

SEQUENCE = 8


def proof(
    text: str, world: int, model: Model | None = None, precision: str = "fp64", each: int = 2, **more: Any
) -> Proof:
    """A proof of a tiny model: ``each`` micro-batches a rank, a learning rate that moves parameters visibly."""
    layout = Layout.parse(text, world)
    terms = {"optimizer": "adamw", "lr": 1e-2, "clip": 0.5} | more
    work = Training(each * layout.dp * layout.mb, SEQUENCE, PRESETS[precision], **terms)
    return Proof(model or tiny_model(), layout, work)


def alone(rank: int, world: int, given: Proof, folder: str) -> Reference:
    return one_device(given, folder)


def together(rank: int, world: int, given: Proof, reference: Reference) -> Seen:
    return observe(given, reference)


class Prover:
    """Runs proofs; one device runs once for every model and work."""

    def __init__(self, ranks: Any, folders: Any) -> None:
        self.ranks, self.folders = ranks, folders
        self.made: dict[object, Reference] = {}

    def __call__(self, given: Proof) -> Report:
        key = (given.model, given.work)
        if key not in self.made:
            folder: Path = self.folders.mktemp("reference")
            self.made[key] = self.ranks(1).run(alone, given, str(folder))[0]
        reference = self.made[key]
        seen = self.ranks(given.layout.world).run(together, given, reference)
        return judge(given, reference, seen, [])


def peaks(report: Report) -> dict[str, float]:
    """How far the predicted peak of each phase is from the tracked one, as a share."""
    return {p.phase: p.off for p in report.table.peaks if p.off is not None}
