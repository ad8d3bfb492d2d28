"""Rows: sums, selections, joins of two witnesses, and link bytes of every verb."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from partita.facts.layout import Layout
from partita.facts.ledger import LINK_SHARE, Gradient, Ledger, Memory, Traffic, join, row_json, select
from partita.facts.mesh import EVERY, Mesh, Ranks
from partita.facts.work import Training
from partita.plan.account import account
from tests.tiny import tiny_model

MESH = Mesh.of(Layout.parse("dp=4 tp=2"))


def memory(**fields: object) -> Memory:
    row = Memory("step", "parameters", "persistent", "device", EVERY, "float32", 100, "why")
    return replace(row, **fields)  # type: ignore[arg-type]


def traffic(**fields: object) -> Traffic:
    row = Traffic("ddp", "all_reduce", ("dp",), EVERY, "float32", 1000, 1, "backward", None, "why")
    return replace(row, **fields)  # type: ignore[arg-type]


def ledger(*rows: Memory | Traffic | Gradient) -> Ledger:
    def of(kind: type) -> tuple:  # type: ignore[type-arg]
        return tuple(r for r in rows if isinstance(r, kind))

    return Ledger(MESH, of(Memory), of(Traffic), of(Gradient))


GRADIENT = Gradient("ddp", "blocks.*.attn.q.weight", ("dp",), "partial", "all_reduce, sum", "counted tokens")


# Link bytes


@pytest.mark.parametrize(
    ("verb", "sent_of_4"),
    [
        # 1,000 bytes over 4 ranks: all-reduce 2(r-1)/r, gather and scatter and all-to-all (r-1)/r.
        ("all_reduce", 1500),
        ("all_gather", 750),
        ("reduce_scatter", 750),
        ("all_to_all", 750),
        ("send", 1000),
        ("recv", 0),
        ("barrier", 0),
    ],
)
def test_link_bytes_of_each_verb(verb: str, sent_of_4: int) -> None:
    assert traffic(verb=verb).link_bytes(MESH) == sent_of_4
    assert traffic(verb=verb, count=3).link_bytes(MESH) == 3 * sent_of_4


def test_link_bytes_of_an_all_reduce_are_those_of_its_two_halves() -> None:
    for axis in (("dp",), ("tp",), ("dp", "tp"), ("dp{0,2,3}",), ("{0,3,5}",)):
        both = traffic(verb="reduce_scatter", axis=axis).link_bytes(MESH) + traffic(
            verb="all_gather", axis=axis
        ).link_bytes(MESH)
        assert abs(traffic(axis=axis).link_bytes(MESH) - both) <= 1
    assert traffic(axis=("dp{0,2,3}",), bytes=900).link_bytes(MESH) == 1200


def test_link_bytes_of_a_large_row_are_whole_bytes() -> None:
    """8.75 GB of gradients over 4 replicas: a ring sends 13.125 GB."""
    assert traffic(bytes=8_750_000_000).link_bytes(MESH) == 13_125_000_000
    huge = traffic(bytes=2**40 + 4, count=3 * 10**5)
    assert huge.link_bytes(MESH) == (2**40 + 4) * 3 * 10**5 * 6 // 4


def test_every_verb_has_a_share_and_one_rank_sends_nothing_in_a_collective() -> None:
    for verb in set(LINK_SHARE) - {"send", "recv", "barrier"}:
        assert LINK_SHARE[verb](1) == 0


# Sums


def test_sums_of_one_rank() -> None:
    found = ledger(
        memory(),
        memory(object="optimizer state", bytes=200),
        memory(object="gradients", phase="step", bytes=50),
        memory(object="activations", phase="forward", bytes=7),
        memory(object="activations", phase="forward", bytes=8),
        memory(object="optimizer state", tier="host", bytes=400),
        traffic(count=2),
        traffic(verb="barrier", bytes=0, kind="control"),
        traffic(verb="broadcast", bytes=64, kind="control"),
        traffic(verb="all_gather", axis=("tp",), bytes=10),
    )
    assert found.memory_by("phase", "object") == {
        ("persistent", "parameters"): 100,
        ("persistent", "optimizer state"): 600,
        ("step", "gradients"): 50,
        ("forward", "activations"): 15,
    }
    assert found.memory_by("tier") == {("device",): 365, ("host",): 400}
    assert found.payload_bytes() == 2010
    assert found.link_bytes() == 3000 + 5
    assert found.persistent_bytes(MESH.coordinate(0)) == 350
    assert found.persistent_bytes(MESH.coordinate(0), "host") == 400


def test_persistent_bytes_count_gradients_once() -> None:
    """They are alive in backward too, where a row of that phase says so."""
    found = ledger(
        memory(),
        memory(object="gradients", phase="step", bytes=50),
        memory(object="gradients", phase="backward", bytes=50),
    )
    assert found.persistent_bytes(MESH.coordinate(0)) == 150


def test_persistent_bytes_count_the_padding_of_gradients_as_that_of_parameters() -> None:
    found = ledger(
        memory(),
        memory(object="padding", unit="parameters", bytes=4),
        memory(object="gradients", phase="step", bytes=50),
        memory(object="padding", phase="step", unit="gradients", bytes=2),
        memory(object="temporaries", phase="step", bytes=1000),
    )
    assert found.persistent_bytes(MESH.coordinate(0)) == 156


def test_rows_of_one_rank() -> None:
    found = ledger(
        memory(ranks=Ranks.of("dp", 0)),
        memory(ranks=Ranks(("dp",), (((1, 4),),)), bytes=90),
        traffic(ranks=Ranks.of("tp", 1)),
        GRADIENT,
    )
    first, last = found.at(MESH.coordinate(0)), found.at(MESH.coordinate(7))
    assert [r.bytes for r in first.memory] == [100] and first.traffic == ()
    assert [r.bytes for r in last.memory] == [90] and len(last.traffic) == 1
    assert first.gradients == last.gradients == (GRADIENT,)


# Selections


def test_rows_by_the_values_of_their_fields() -> None:
    found = ledger(memory(), memory(phase="step", object="gradients"), traffic(), traffic(axis=("dp", "tp")), GRADIENT)
    assert [r.object for r in found.where(phase="step").memory] == ["gradients"]
    assert len(found.where(phase={"step", "persistent"}).memory) == 2
    assert len(found.where(phase=["step"]).memory) == 1
    assert len(found.where(owner="ddp").traffic) == 2 and found.where(owner="ddp").memory == ()
    assert found.where(axis=("dp",)).traffic == (traffic(),), "an axis is compared whole"
    assert len(found.where(axis={("dp",), ("dp", "tp")}).traffic) == 2


def test_rows_without_the_field_are_left_out() -> None:
    found = ledger(memory(), traffic(), GRADIENT).where(verb="all_reduce")
    assert found.memory == () and found.gradients == () and len(found.traffic) == 1
    assert select([memory()], no_such_field=1) == ()
    assert select([memory()]) == (memory(),)


# Joins


def test_a_join_keeps_what_only_one_witness_has() -> None:
    predicted = [traffic(), traffic(owner="step", count=2), traffic(bytes=5)]
    recorded = [traffic(owner=""), traffic(owner="", count=1), traffic(owner="", bytes=6)]
    found = join(predicted, recorded, lambda r: r.count)
    assert found == {
        ("backward", "all_reduce", ("dp",), "float32", 1000): (3, 2, ("ddp", "step")),
        ("backward", "all_reduce", ("dp",), "float32", 5): (1, 0, ("ddp",)),
        ("backward", "all_reduce", ("dp",), "float32", 6): (0, 1, ()),
    }


def test_a_join_of_memory_adds_bytes_by_phase_object_and_tier() -> None:
    predicted = [memory(), memory(bytes=1, owner="fsdp"), memory(object="padding", bytes=3)]
    recorded = [memory(bytes=101, owner="", why="")]
    assert join(predicted, recorded, lambda r: r.bytes) == {
        ("persistent", "parameters", "device"): (101, 101, ("step", "fsdp")),
        ("persistent", "padding", "device"): (3, 0, ("step",)),
    }


@pytest.mark.parametrize("change", [{"bytes": 7}, {"verb": "broadcast"}, {"axis": ("tp",)}, {"dtype": "int64"}])
def test_calls_that_differ_do_not_join(change: dict[str, object]) -> None:
    assert len(join([traffic()], [traffic(**change)], lambda r: r.count)) == 2


def test_totals_of_a_join_are_the_totals_of_its_sides() -> None:
    chance = random.Random(0)

    def rows() -> list[Traffic]:
        verbs = ("all_reduce", "all_gather")
        return [
            traffic(verb=chance.choice(verbs), bytes=chance.randint(1, 3), count=chance.randint(1, 9))
            for _ in range(chance.randint(0, 30))
        ]

    for _ in range(30):
        one, two = rows(), rows()
        found = join(one, two, lambda r: r.count).values()
        assert sum(p for p, _, _ in found) == sum(r.count for r in one)
        assert sum(r for _, r, _ in found) == sum(r.count for r in two)


# The worst rank


def test_the_worst_rank_is_found_among_the_corners() -> None:
    found = ledger(
        memory(ranks=Ranks.of("dp", 0)),
        memory(ranks=Ranks(("dp",), (((1, 3),),)), bytes=300),
        memory(ranks=Ranks(("dp", "tp"), (((3, 4), (1, 2)),)), bytes=500),
        traffic(ranks=Ranks.of("tp", 1)),
    )
    corners = found.corners()
    assert {(c["dp"], c["tp"]) for c in corners} == {(d, t) for d in (0, 1, 3) for t in (0, 1)}

    def total(rows: Ledger) -> int:
        return sum(r.bytes for r in rows.memory)

    assert found.worst(corners, total) == ({"pp": 0, "dp": 3, "cp": 0, "tp": 1}, 500)
    every = [MESH.coordinate(r) for r in range(MESH.world)]
    assert found.worst(every, total)[1] == 500


def test_a_rank_that_no_row_names_is_a_corner_too() -> None:
    found = ledger(memory(ranks=Ranks(("dp",), (((0, 3),),))))
    assert {c["dp"] for c in found.corners()} == {0, 3}
    assert {sum(r.bytes for r in found.at(c).memory) for c in found.corners()} == {0, 100}


@pytest.mark.parametrize("layout", ["dp=4 full_shard", "dp=6 shard=3 full_shard", "dp=7 shard_grad_op"])
def test_corners_meet_every_set_of_rows(layout: str) -> None:
    read = Layout.parse(layout)
    found = account(tiny_model(), read, Training(read.dp, 8)).ledger

    def rows(c: dict[str, int]) -> tuple[object, ...]:
        at = found.at(c)
        return at.memory, at.traffic

    corners = found.corners()
    met = {rows(c) for c in corners}
    assert met == {rows(found.mesh.coordinate(r)) for r in range(found.mesh.world)}
    assert len(corners) <= found.mesh.world


# JSON


def test_rows_survive_json() -> None:
    read = Layout.parse("dp=6 shard=3 full_shard")
    found = account(tiny_model(), read, Training(6, 8)).ledger
    text = json.dumps(found.json())
    assert Ledger.from_json(json.loads(text), found.mesh) == found
    empty = ledger()
    assert Ledger.from_json(json.loads(json.dumps(empty.json())), MESH) == empty


def test_json_has_the_fields_and_link_bytes() -> None:
    found = ledger(memory(ranks=Ranks(("dp",), (((0, 3),),))), traffic(axis=("dp", "tp")), GRADIENT).json()
    assert found["memory"][0]["ranks"] == "dp=0..2" and found["memory"][0]["bytes"] == 100
    assert found["traffic"][0]["axis"] == ["dp", "tp"] and found["traffic"][0]["link_bytes"] == 1750
    assert found["gradients"][0]["relation"] == "partial"
    assert row_json(traffic())["hidden_by"] is None
