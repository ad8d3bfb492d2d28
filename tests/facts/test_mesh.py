"""Rank order, the names of groups, sets of ranks, and folding against an enumeration of every rank."""

from __future__ import annotations

import itertools
import math
import random
import time

import pytest

from partita.facts.case import Case, Held, Split, Unit
from partita.facts.layout import Layout
from partita.facts.mesh import EVERY, Mesh, Ranks
from partita.facts.model import Parameter
from partita.facts.precision import PRESETS
from partita.facts.work import Training
from tests import seed
from tests.tiny import tiny_model

SEEDS = [0, 1, 2, 3, seed.value()]


def mesh(text: str) -> Mesh:
    return Mesh.of(Layout.parse(text))


def random_mesh(chance: random.Random) -> Mesh:
    """At most 96 ranks, with axes of size one, and now and then with dp in two parts."""
    while True:
        sizes = {a: chance.choice((1, 1, 2, 3, 4, 5)) for a in ("pp", "dp.r", "dp.s", "cp", "tp")}
        if math.prod(sizes.values()) <= 96:
            break
    if chance.random() < 0.5:
        sizes = {"pp": sizes["pp"], "dp": sizes["dp.s"], "cp": sizes["cp"], "tp": sizes["tp"]}
    return Mesh(tuple(sizes.items()))


# Rank order and coordinates


def test_tp_is_fastest_then_cp_then_dp_then_pp() -> None:
    found = mesh("pp=2 dp=3 cp=5 tp=7")
    assert found.names == ("pp", "dp", "cp", "tp") and found.world == 210
    assert {a: found.stride(a) for a in found.names} == {"tp": 1, "cp": 7, "dp": 35, "pp": 105}
    assert found.coordinate(1) == {"pp": 0, "dp": 0, "cp": 0, "tp": 1}
    assert found.coordinate(209) == {"pp": 1, "dp": 2, "cp": 4, "tp": 6}
    assert found.rank({"pp": 1, "dp": 0, "cp": 2, "tp": 3}) == 105 + 2 * 7 + 3


@pytest.mark.parametrize("case", SEEDS)
def test_ranks_and_coordinates_are_a_bijection(case: int) -> None:
    found = random_mesh(random.Random(case))
    coordinates = [found.coordinate(r) for r in range(found.world)]
    assert [found.rank(c) for c in coordinates] == list(range(found.world))
    assert len({tuple(c.items()) for c in coordinates}) == found.world
    assert all(0 <= c[a] < n for c in coordinates for a, n in found.sizes)


def test_index_flattens_axes_in_mesh_order_whatever_order_they_are_named_in() -> None:
    found = mesh("dp=3 cp=5 tp=2")
    at = {"pp": 0, "dp": 2, "cp": 1, "tp": 1}
    assert found.index(at, "dp", "cp") == found.index(at, "cp", "dp") == 2 * 5 + 1
    assert found.index(at, "pp") == 0 and found.index(at) == 0


def test_groups() -> None:
    found = mesh("pp=2 dp=2 tp=2")
    at = found.coordinate(5)
    assert found.group(at, "tp") == [4, 5]
    assert found.group(at, "dp") == [5, 7]
    assert found.group(at, "pp") == [1, 5]
    assert found.group(at, "dp", "tp") == [4, 5, 6, 7]
    assert found.group(at, "cp") == [5] and found.group(at) == [5]


@pytest.mark.parametrize("case", SEEDS)
def test_a_group_holds_its_own_rank_at_its_index_and_groups_part_the_world(case: int) -> None:
    chance = random.Random(case)
    found = random_mesh(chance)
    axes = chance.sample(found.names, chance.randint(1, len(found.names)))
    groups = set()
    for rank in range(found.world):
        at = found.coordinate(rank)
        group = found.group(at, *axes)
        assert group[found.index(at, *axes)] == rank
        groups.add(tuple(group))
    assert sorted(r for g in groups for r in g) == list(range(found.world))
    assert {len(g) for g in groups} == {found.size(*axes)}


# Names of groups


@pytest.mark.parametrize("case", SEEDS)
def test_a_group_along_axes_is_named_by_those_of_more_than_one_rank(case: int) -> None:
    chance = random.Random(case)
    found = random_mesh(chance)
    for length in range(1, len(found.names) + 1):
        for axes in itertools.combinations(found.names, length):
            at = found.coordinate(chance.randrange(found.world))
            group = found.group(at, *axes)
            name = found.axes_of(group)
            assert name == found.live(*axes)
            assert found.group_size(name) == len(group)


def test_the_name_of_an_axis_stands_for_its_parts() -> None:
    found = mesh("dp=6 shard=3 tp=2 full_shard")
    assert found.sizes == (("pp", 1), ("dp.r", 2), ("dp.s", 3), ("cp", 1), ("tp", 2))
    assert found.world == 12
    assert found.live("dp") == ("dp.r", "dp.s") and found.live("dp.s") == ("dp.s",) and found.live("cp") == ()
    assert found.size("dp") == 6
    copies = found.group(found.coordinate(0), "dp.r")
    assert copies == [0, 6] and found.axes_of(copies) == ("dp.r",)
    assert found.axes_of(found.group(found.coordinate(0), "dp")) == ("dp.r", "dp.s")


def test_shards_are_neighbours_and_include_cp() -> None:
    found = mesh("dp=4 cp=2 shard=4 full_shard")
    assert dict(found.sizes) == {"pp": 1, "dp.r": 2, "dp.s": 2, "cp": 2, "tp": 1}
    assert found.group(found.coordinate(0), "dp.s", "cp") == [0, 1, 2, 3]
    assert found.group(found.coordinate(1), "dp.r") == [1, 5]


def test_sharding_over_all_data_ranks_has_no_parts() -> None:
    assert mesh("dp=4 shard=4 full_shard").names == mesh("dp=4 full_shard").names == ("pp", "dp", "cp", "tp")


def test_a_group_over_some_indices_of_an_axis_is_named_with_them() -> None:
    found = mesh("pp=4 dp=2 tp=2")
    ends = [found.rank({"pp": p, "dp": 0, "cp": 0, "tp": 1}) for p in (0, 3)]
    assert found.axes_of(ends) == ("pp{0,3}",)
    assert found.group_size(("pp{0,3}",)) == 2
    both = [found.rank({"pp": p, "dp": d, "cp": 0, "tp": 1}) for p in (3, 0) for d in (0, 1)]
    assert found.axes_of(both) == ("pp{0,3}", "dp") and found.group_size(("pp{0,3}", "dp")) == 4


def test_a_group_that_is_no_grid_is_named_by_its_ranks() -> None:
    found = mesh("dp=2 tp=4")
    assert found.axes_of([5, 0, 3]) == ("{0,3,5}",)
    assert found.group_size(("{0,3,5}",)) == 3
    assert found.axes_of([0, 5]) == ("{0,5}",)  # a diagonal of dp x tp
    assert found.axes_of([6]) == ()
    assert found.axes_of(range(8)) == ("dp", "tp")


# Sets of ranks


def random_ranks(chance: random.Random, found: Mesh) -> Ranks:
    axes = tuple(chance.sample(found.names, chance.randint(0, 3)))
    if not axes:
        return EVERY
    boxes = []
    for _ in range(chance.randint(1, 3)):
        box = []
        for a in axes:
            lo = chance.randrange(found.size(a))
            box.append((lo, chance.randint(lo + 1, found.size(a))))
        boxes.append(tuple(box))
    return Ranks(axes, tuple(boxes))


@pytest.mark.parametrize("case", SEEDS)
def test_sets_of_ranks_intersect_as_sets_and_their_text_reads_back(case: int) -> None:
    chance = random.Random(case)
    for _ in range(60):
        found = random_mesh(chance)
        coordinates = [found.coordinate(r) for r in range(found.world)]
        one, two = random_ranks(chance, found), random_ranks(chance, found)
        both = one & two
        for c in coordinates:
            assert (c in both) == (c in one and c in two)
        for each in (one, two, both):
            assert Ranks.parse(str(each)) == each


def test_text_of_ranks() -> None:
    assert str(EVERY) == "all" and {"dp": 3} in EVERY
    assert str(Ranks(("dp", "tp"), (((0, 127), (0, 7)),))) == "dp=0..126,tp=0..6"
    assert str(Ranks.of("pp", 3, 0)) == "pp=0 | pp=3"
    assert Ranks.of("pp", 3, 0, 3) == Ranks.of("pp", 0, 3)
    assert {"pp": 3} in Ranks.of("pp", 0, 3) and {"pp": 1} not in Ranks.of("pp", 0, 3)


def test_no_ranks_at_all_is_a_set_too() -> None:
    nobody = Ranks.of("tp", 0) & Ranks.of("tp", 1)
    assert {"tp": 0} not in nobody and {"tp": 1} not in nobody
    assert nobody != EVERY and str(nobody) != str(EVERY)
    assert Ranks.parse(str(nobody)) == nobody
    assert nobody & EVERY == nobody == EVERY & nobody


# Folding


def case_of(found: Mesh, *held: Held) -> Case:
    layout, work = Layout(), Training(1, 1)
    return Case(tiny_model(), layout, found, work, PRESETS["fp32"], units=(Unit("first", 1, held, 1, 1),))


def random_held(chance: random.Random, number: int) -> Held:
    """One to three splits of one tensor, of the same dim or of others, over axes that do not repeat."""
    shape = tuple(chance.choice((1, 2, 3, 5, 7, 10, 16, 17, 101)) for _ in range(chance.choice((1, 2, 2))))
    axes = ["pp", "dp", "cp", "tp"]
    chance.shuffle(axes)
    splits = []
    while axes and len(splits) < 3 and chance.random() < 0.75:
        several = tuple(axes.pop() for _ in range(min(len(axes), chance.choice((1, 1, 2)))))
        splits.append(Split("room", several, chance.randrange(len(shape)), store_padded=False))
    if splits:
        last = splits[-1]
        splits[-1] = Split(last.owner, last.axis, last.dim, store_padded=chance.random() < 0.5)
    return Held(Parameter(f"p{number}", shape, "test", "first"), 1, tuple(splits))


def chunk_by_torch_rule(length: int, parts: int, index: int) -> int:
    """Length of chunk ``index`` of ``length`` elements cut into chunks of ceil(length / parts)."""
    elements = list(range(length))
    size = -(-length // parts)
    return len(elements[index * size : (index + 1) * size]) if size else 0


@pytest.mark.parametrize("case", SEEDS)
def test_folding_at_the_cuts_of_a_case_equals_every_rank(case: int) -> None:
    """The boxes part the world, and the shapes of each box are those of every rank in it."""
    chance = random.Random(case)
    for _ in range(80):
        found = random_mesh(chance)
        held = tuple(random_held(chance, i) for i in range(chance.randint(1, 4)))
        divided = case_of(found, *held)

        def shapes(c: dict[str, int], held: tuple[Held, ...] = held, found: Mesh = found) -> tuple[object, ...]:
            return tuple((h.local_shape(found, c), h.local_shape(found, c, padded=True)) for h in held)

        folded = list(found.fold(shapes, divided.cuts, *found.names))  # type: ignore[arg-type]
        for rank in range(found.world):
            c = found.coordinate(rank)
            at = [value for ranks, value in folded if c in ranks]
            assert at == [shapes(c)], (found, held, c)
        assert len({v for _, v in folded}) == len(folded), "equal values stand in one set of ranks"


@pytest.mark.parametrize("case", SEEDS)
def test_local_shapes_are_nested_chunks_that_cover_every_element_once(case: int) -> None:
    chance = random.Random(case)
    for _ in range(40):
        found = random_mesh(chance)
        h = random_held(chance, 0)
        for rank in range(found.world):
            c = found.coordinate(rank)
            shape = list(h.parameter.shape)
            for s in h.splits:
                shape[s.dim] = chunk_by_torch_rule(shape[s.dim], found.size(*s.axis), found.index(c, *s.axis))
            assert h.local_shape(found, c) == tuple(shape)
        total = sum(h.elements(found, found.coordinate(r)) for r in range(found.world))
        copies = found.world // found.size(*h.axes)
        assert total == copies * h.parameter.elements


def test_two_splits_of_one_dim_nest() -> None:
    """101 rows over tp=4 are 26, 26, 26, 23; those over dp=3 are 9, 9, 8 and 8, 8, 7."""
    found = mesh("dp=3 tp=4")
    h = Held(
        Parameter("p", (101, 2), "test", "first"), 1, (Split("a", ("tp",), 0), Split("b", ("dp",), 0, False, True))
    )

    def rows(dp: int, tp: int, padded: bool = False) -> int:
        return h.local_shape(found, {"pp": 0, "dp": dp, "cp": 0, "tp": tp}, padded)[0]

    assert [[rows(d, t) for d in range(3)] for t in (0, 3)] == [[9, 9, 8], [8, 8, 7]]
    assert [[rows(d, t, True) for d in range(3)] for t in (0, 3)] == [[9, 9, 9], [8, 8, 8]]
    assert case_of(found, h).cuts == {"tp": {3}, "dp": {2}}


def test_the_last_ranks_of_a_short_dim_hold_nothing() -> None:
    found = mesh("dp=4")
    h = Held(Parameter("p", (5,), "test", "first"), 1, (Split("a", ("dp",), 0),))
    assert [h.elements(found, found.coordinate(r)) for r in range(4)] == [2, 2, 1, 0]
    folded = {str(ranks): v for ranks, v in found.fold(lambda c: h.elements(found, c), case_of(found, h).cuts, "dp")}
    assert folded == {"dp=0..1": 2, "dp=2": 1, "dp=3": 0}


def test_what_does_not_change_along_an_axis_does_not_name_it() -> None:
    found = mesh("pp=2 dp=4 tp=2")
    h = Held(Parameter("p", (5, 4), "test", "first"), 1, (Split("a", ("tp",), 1), Split("b", ("dp",), 0)))
    folded = list(found.fold(lambda c: h.elements(found, c), case_of(found, h).cuts, *found.names))
    assert {ranks.axes for ranks, _ in folded} == {("dp",)}
    assert list(found.fold(lambda c: 7, {}, *found.names)) == [(EVERY, 7)]


def test_16384_ranks_fold_without_being_enumerated() -> None:
    found = mesh("pp=4 dp=128 cp=4 tp=8")
    assert found.world == 16384
    model = tiny_model(layers=126, hidden=16384, ffn=53248, heads=128, kv_heads=8, head_dim=128, vocab=128255)
    splits = (Split("tensor", ("tp",), 0), Split("fsdp", ("dp", "cp"), 0, store_padded=True))
    held = tuple(Held(p, s.count, splits) for s in model.spans for p in s.parameters)
    divided = case_of(found, *held)
    calls = 0

    def elements(c: dict[str, int]) -> int:
        nonlocal calls
        calls += 1
        return sum(h.count * h.elements(found, c) for h in held)

    begin = time.perf_counter()
    folded = list(found.fold(elements, divided.cuts, *found.names))  # type: ignore[arg-type]
    assert time.perf_counter() - begin < 0.1
    assert calls < 200
    chance = random.Random(0)
    for rank in [0, 16383, *(chance.randrange(16384) for _ in range(200))]:
        c = found.coordinate(rank)
        assert [v for ranks, v in folded if c in ranks] == [elements(c)]
