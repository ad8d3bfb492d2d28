"""When the most bytes are alive: counted on closed forms, and again by walking every moment of a step."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from partita.facts.case import Alive, Case, Moment, Unit
from partita.facts.layout import Layout
from partita.facts.ledger import Ledger, Memory
from partita.facts.mesh import EVERY, Mesh, Ranks
from partita.facts.precision import PRESETS
from partita.facts.work import Training
from partita.plan.account import account
from partita.plan.peak import Line, highest, peaks, transients
from tests import seed
from tests.tiny import ZOO, tiny_model

SEEDS = [0, 1, 2, 3, seed.value()]


def case_of(*runs: tuple[str, int]) -> Case:
    units = tuple(Unit(name, count, (), 1, 1) for name, count in runs)
    layout, work = Layout(), Training(1, 1)
    return Case(tiny_model(), layout, Mesh.of(layout), work, PRESETS["fp32"], units=units)


def random_case(chance: random.Random) -> Case:
    """One to three runs of alike blocks between the first unit and the last."""
    runs, at = [("first", 1)], 0
    for _ in range(chance.choice((1, 1, 2, 3))):
        count = chance.randint(1, 9)
        runs.append((f"blocks.{at}..{at + count - 1}" if count > 1 else f"blocks.{at}", count))
        at += count
    return case_of(*runs, ("last", 1))


def random_moment(chance: random.Random, of_unit: bool) -> Moment:
    if of_unit and chance.random() < 0.7:
        return Moment(chance.choice(("forward", "backward")), chance.randint(-1, 1))
    kind = chance.choice(("start", "loss", "step", "end"))
    return Moment(kind, chance.choice((0, 0, -1, -2)) if kind == "step" else chance.choice((0, 1)) * (kind == "loss"))


def random_item(chance: random.Random, case: Case) -> Alive:
    unit = chance.choice(["", *(u.name for u in case.units)])
    begin, end = (random_moment(chance, bool(unit)) for _ in range(2))
    return Alive("room", "thing", unit, begin, end, "float32", chance.randint(1, 50), "why")


# A step, walked moment by moment


def steps_of(case: Case) -> list[tuple[str, str, int]]:
    """(phase, kind, unit index) of every moment, in order."""
    units = sum(u.count for u in case.units)
    forward = [("forward", "forward", i) for i in range(units)]
    backward = [("backward", "backward", i) for i in reversed(range(units))]
    return [*forward, ("forward", "loss", -1), *backward, ("step", "step", -1)]


def place(moment: Moment, index: int, steps: list[tuple[str, str, int]]) -> float:
    """Position in the walk of a moment of unit ``index``."""
    if moment.kind == "start":
        return float("-inf")
    if moment.kind == "end":
        return float("inf")
    named = moment.kind in ("forward", "backward")
    found = next(i for i, (_, kind, u) in enumerate(steps) if kind == moment.kind and (not named or u == index))
    return found + moment.offset


def alive_by_walking(case: Case, item: Alive, now: float) -> int:
    steps, at = steps_of(case), 0
    indices = [0]
    for u in case.units:
        if u.name == item.unit:
            indices = list(range(at, at + u.count))
        at += u.count
    return sum(place(item.begin, i, steps) <= now <= place(item.end, i, steps) for i in indices)


@pytest.mark.parametrize("draw", SEEDS)
def test_units_alive_at_any_moment(draw: int) -> None:
    chance = random.Random(draw)
    for _ in range(60):
        case = random_case(chance)
        line = Line.of(case)
        for _ in range(8):
            item = random_item(chance, case)
            for now in range(2 * line.total + 2):
                assert line.alive(item, now) == alive_by_walking(case, item, now), (case.units, item, now)


@pytest.mark.parametrize("draw", SEEDS)
def test_the_moments_looked_at_contain_the_largest_sum_of_every_phase(draw: int) -> None:
    chance = random.Random(draw)
    for _ in range(60):
        case = random_case(chance)
        items = [random_item(chance, case) for _ in range(chance.randint(1, 7))]
        largest: dict[str, int] = {}
        for now, (phase, _, _) in enumerate(steps_of(case)):
            size = sum(i.bytes * alive_by_walking(case, i, now) for i in items)
            largest[phase] = max(largest.get(phase, 0), size)
        found = dict.fromkeys(largest, 0)
        for row in transients(case, items):
            found[row.phase] += row.bytes
        assert found == largest, (case.units, items)


@pytest.mark.parametrize(
    "layout",
    [
        "dp=2",
        "dp=2 full_shard",
        "dp=2 shard_grad_op",
        "dp=4 shard=2 full_shard reshard=all",
        "dp=4 full_shard wrap=2 reshard=2",
        "dp=2 full_shard prefetch=2",
    ],
)
@pytest.mark.parametrize("batches", [1, 3])
@pytest.mark.parametrize("model", ["two_layers", "plain", "tied", "deep"])
def test_peaks_of_the_rooms_are_those_of_a_walk(layout: str, batches: int, model: str) -> None:
    """The rooms' own items: their offsets may reach further than one unit, and lie between two."""
    from partita.strategies.order import predictors

    read = Layout.parse(layout)
    chosen = tiny_model(layers=11) if model == "deep" else ZOO[model]
    found = account(chosen, read, Training(read.dp * batches, 8, PRESETS["autocast-bf16"]))
    items = [i for _, room in predictors(read) for i in room.alive(found.case)]
    largest: dict[str, int] = {}
    for now, (phase, _, _) in enumerate(steps_of(found.case)):
        for moment in (now - 0.5, now):
            size = sum(i.bytes * alive_by_walking(found.case, i, moment) for i in items)
            largest[phase] = max(largest.get(phase, 0), size)
    rows: dict[str, int] = dict.fromkeys(largest, 0)
    for row in transients(found.case, items):
        rows[row.phase] += row.bytes
    assert rows == largest


def test_saved_activations_pile_up_until_the_loss() -> None:
    case = case_of(("first", 1), ("blocks.0..7", 8), ("last", 1))
    line = Line.of(case)
    item = Alive("step", "activations", "blocks.0..7", Moment("forward"), Moment("backward"), "float32", 10, "why")
    assert [line.alive(item, now) for now in range(10)] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 8]
    assert line.alive(item, line.total) == 8
    assert [line.alive(item, 2 * line.total - u) for u in (9, 8, 7, 1, 0)] == [8, 8, 7, 1, 0]
    rows = {r.phase: r for r in transients(case, [item])}
    assert rows["forward"].bytes == rows["backward"].bytes == 80 and "step" not in rows
    assert rows["forward"].unit == "blocks.0..7"


def test_the_row_says_at_which_moment() -> None:
    case = case_of(("first", 1), ("blocks.0..7", 8), ("blocks.8", 1), ("last", 1))

    def said(begin: Moment, end: Moment, unit: str) -> dict[str, str]:
        item = Alive("step", "activations", unit, begin, end, "float32", 10, "kept")
        return {r.phase: r.why for r in transients(case, [item])}

    both = Moment("backward"), Moment("backward")
    assert said(*both, "first") == {"backward": "kept (at backward of first)"}
    assert said(*both, "blocks.8") == {"backward": "kept (at backward of blocks.8)"}
    assert said(Moment("step"), Moment("step"), "") == {"step": "kept (at the optimizer's step)"}
    assert said(Moment("loss"), Moment("loss"), "") == {"forward": "kept (at the loss)"}


def test_a_peak_inside_a_run_names_its_block() -> None:
    """What grows by 11 a block meets what shrinks by 12: the first block is where both are alive together."""
    case = case_of(("first", 1), ("blocks.4..11", 8), ("last", 1))
    grows = Alive("step", "activations", "blocks.4..11", Moment("forward"), Moment("loss"), "float32", 11, "grows")
    shrinks = replace(grows, begin=Moment("start"), end=Moment("forward"), bytes=12, why="shrinks")
    rows = {r.why: r.bytes for r in transients(case, [grows, shrinks]) if r.phase == "forward"}
    assert rows == {"grows (at forward of blocks.4)": 11, "shrinks (at forward of blocks.4)": 96}


def test_a_peak_may_be_one_block_before_the_end_of_a_run() -> None:
    """What is made one block ahead is complete there, while what is freed block by block has two left."""
    case = case_of(("first", 1), ("blocks.4..11", 8), ("last", 1))
    ahead = Alive("fsdp", "gathered", "blocks.4..11", Moment("forward", -1), Moment("loss"), "float32", 12, "ahead")
    freed = replace(ahead, begin=Moment("start"), end=Moment("forward"), bytes=11, why="freed")
    rows = {r.why: r.bytes for r in transients(case, [ahead, freed]) if r.phase == "forward"}
    assert rows == {"ahead (at forward of blocks.10)": 96, "freed (at forward of blocks.10)": 22}


# Peaks of a ledger


def ledger(*rows: Memory) -> Ledger:
    return Ledger(Mesh.of(Layout(dp=2)), rows, (), ())


ROW = Memory("step", "parameters", "persistent", "device", EVERY, "float32", 100, "why")
AT = {"pp": 0, "dp": 0, "cp": 0, "tp": 0}


def test_a_peak_is_what_persists_and_what_its_phase_adds() -> None:
    found = ledger(
        ROW,
        replace(ROW, object="activations", phase="forward", bytes=30, why="kept (at the loss)"),
        replace(ROW, object="logits", phase="forward", bytes=5, why="kept (at the loss)"),
        replace(ROW, object="gradients", phase="step", bytes=20),
        replace(ROW, object="activations", phase="backward", bytes=900, ranks=Ranks.of("dp", 1)),
        replace(ROW, object="optimizer state", tier="host", bytes=7000),
    )
    assert {(p.phase, p.moment, p.bytes) for p in peaks(found, AT)} == {
        ("forward", "the loss", 135),
        ("step", "step", 120),
    }
    assert highest(found, AT).phase == "forward"
    assert highest(found, {**AT, "dp": 1}).bytes == 1000
    assert highest(found, AT, "host").bytes == 7000


def test_without_transients_the_peak_is_what_persists() -> None:
    assert highest(ledger(ROW), AT).bytes == 100


@pytest.mark.parametrize("layout", ["dp=2", "dp=2 full_shard"])
def test_the_peak_is_at_least_the_model_state(layout: str) -> None:
    read = Layout.parse(layout)
    for model in ZOO.values():
        found = account(model, read, Training(2, 8)).ledger
        assert highest(found, AT).bytes >= found.persistent_bytes(AT)
        assert {p.phase for p in peaks(found, AT)} == {"forward", "backward", "step"}
