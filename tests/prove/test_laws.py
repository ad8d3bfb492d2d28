"""The laws of a real run, each shown to break."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from partita.facts.layout import Layout
from partita.facts.precision import PRESETS
from partita.facts.work import Training
from partita.plan.account import account
from partita.prove import laws
from partita.prove.compare import Piece
from partita.prove.ranks import Seen, Times
from partita.prove.reference import Reference
from partita.prove.witness import Witness
from tests.tiny import tiny_model

CASE = account(tiny_model(tied=True), Layout.parse("full_shard", 2), Training(4, 8, PRESETS["fp32"])).case
REFERENCE = Reference("", (1.0,), (2.0,), (("a", "b", "c", "d"),), 0.0)
SUM = ("all_reduce", ("dp",), "float32", 4, (0, 1), None)
GATHER = ("all_gather", ("dp",), "float32", 8, (0, 1), None)
SEND, RECV = ("send", ("dp",), "float32", 8, (0, 1), 1), ("recv", ("dp",), "float32", 8, (0, 1), 0)


def shards(rank: int) -> list[Piece]:
    out = []
    for name, held in CASE.by_name.items():
        first, *rest = held.parameter.shape
        chunk = -(-first // 2)
        lo, hi = min(rank * chunk, first), min((rank + 1) * chunk, first)
        out.append(Piece(name, (((lo, hi),), *(((0, n),) for n in rest)), 0.0, 1.0))
    return out


def seen(rank: int) -> Seen:
    return Seen(
        Witness("recorded", rank, 2, (), ((),), ()),
        losses=(1.0,),
        norms=(2.0,),
        samples=(("a", "c") if rank == 0 else ("b", "d"),),
        initial=shards(rank),
        gradients=[],
        parameters=[],
        misplaced=(),
        issued=(SUM, GATHER, SEND if rank == 0 else RECV),
        tied=True,
        times=Times((1.0,), True, {}),
    )


def broken(second: Seen) -> list[str]:
    return [f.name for f in laws.check(CASE, REFERENCE, [seen(0), second]) if not f.holds]


def test_a_good_run_breaks_nothing() -> None:
    assert broken(seen(1)) == []


BREAKS: dict[str, Callable[[Seen], Seen]] = {
    "coverage": lambda s: replace(s, initial=s.initial[1:]),
    "placements": lambda s: replace(s, misplaced=("norm.weight lies whole",)),
    "norm": lambda s: replace(s, norms=(2.0000000001,)),
    "ties": lambda s: replace(s, tied=False),
    "order": lambda s: replace(s, issued=(GATHER, SUM, RECV)),
    "initial values": lambda s: replace(s, initial=[replace(s.initial[0], difference=1e-20), *s.initial[1:]]),
    "data": lambda s: replace(s, samples=(("b", "b"),)),
}


@pytest.mark.parametrize("law", BREAKS)
def test_each_law_breaks_alone(law: str) -> None:
    assert broken(BREAKS[law](seen(1))) == [law]


def test_overlapping_shards_a_message_nobody_takes_and_a_loss_of_its_own() -> None:
    assert broken(replace(seen(1), initial=shards(0))) == ["coverage"]
    assert broken(replace(seen(1), issued=(SUM, GATHER))) == ["order"]
    assert broken(replace(seen(1), issued=(SUM, GATHER, RECV[:3] + (4, (0, 1), 0)))) == ["order"]
    assert broken(replace(seen(1), losses=(float("nan"),))) == ["norm"]
