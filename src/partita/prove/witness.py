"""Witness: what one rank did, as ledger rows, whether it was a dry run or a recording."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from partita.facts.ledger import Memory, Traffic, row_json
from partita.facts.mesh import EVERY, Ranks

STEADY = 2  # the third step: buckets are rebuilt, optimizer state is there
TrafficKey = tuple[str, str, tuple[str, ...], str, int, str]


@dataclass(frozen=True)
class Witness:
    """Rows of one rank.

    ``steps`` holds the rows of each step from the first to the steady one; ``memory`` the persistent bytes, read after
    an optimizer's step; ``peaks`` the largest number of live bytes by phase.  ``stand_ins`` names the parts of torch
    that something else stood in for.
    """

    name: str
    rank: int
    world: int
    init: tuple[Traffic, ...]
    steps: tuple[tuple[Traffic, ...], ...]
    memory: tuple[Memory, ...]
    peaks: dict[str, int] = field(default_factory=dict)
    stand_ins: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def steady(self) -> tuple[Traffic, ...]:
        return self.steps[-1]

    @property
    def early(self) -> tuple[Traffic, ...]:
        """What the steps before the steady one sent beyond it, as rows of phase ``early`` and kind ``control``: they
        happen once and take no part in the volume of a step."""
        usual = Counter({key(r): r.count for r in self.steady})
        beyond: Counter[TrafficKey] = Counter()
        for rows in self.steps[:-1]:
            beyond += Counter({key(r): r.count for r in rows}) - usual
        merged: Counter[TrafficKey] = Counter()
        for (_, verb, axis, dtype, size, _), count in beyond.items():
            merged["early", verb, axis, dtype, size, "control"] += count
        return tuple(
            Traffic("-", verb, axis, EVERY, dtype, size, n, phase, None, "recorded", kind=kind)
            for (phase, verb, axis, dtype, size, kind), n in merged.items()
        )

    def json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "rank": self.rank,
            "world": self.world,
            "init": [row_json(r) for r in self.init],
            "steps": [[row_json(r) for r in rows] for rows in self.steps],
            "memory": [row_json(r) for r in self.memory],
            "peaks": self.peaks,
            "stand_ins": list(self.stand_ins),
            "seconds": self.seconds,
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> Witness:
        """The inverse of ``json``."""
        return Witness(
            data["name"],
            data["rank"],
            data["world"],
            tuple(_traffic(r) for r in data["init"]),
            tuple(tuple(_traffic(r) for r in rows) for rows in data["steps"]),
            tuple(_memory(r) for r in data["memory"]),
            dict(data["peaks"]),
            tuple(data["stand_ins"]),
            data["seconds"],
        )


def key(row: Traffic) -> TrafficKey:
    """What rows of several witnesses are joined on, and their kind."""
    return (*row.key, row.kind)


def _traffic(data: dict[str, Any]) -> Traffic:
    return Traffic(**{**data, "axis": tuple(data["axis"]), "ranks": Ranks.parse(data["ranks"])})


def _memory(data: dict[str, Any]) -> Memory:
    return Memory(**{**data, "ranks": Ranks.parse(data["ranks"])})
