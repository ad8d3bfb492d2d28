"""Topology: the slowest link that groups of ranks cross, and how many sibling groups share it."""

from __future__ import annotations

import math
import random
import time

import pytest

from partita.facts.cluster import UnknownCluster, find_cluster
from partita.facts.topology import merge, spread


def test_a_data_axis_crosses_nodes_and_shares_the_nics() -> None:
    c = find_cluster("h100:8x8").crossing((8, 8))
    assert (c.level, c.size, c.ranks_per_node, c.nodes) == ("network", 8, 1, 8)
    assert (c.siblings, c.nics, c.bytes_per_s) == (8, 8, 50e9)
    assert c.link is not None and c.link.name == "infiniband-400"
    assert "8 sibling groups share a node's 8 NICs" in c.describe()


def test_a_tensor_axis_stays_inside_the_node() -> None:
    c = find_cluster("h100:8x8").crossing((1, 8))
    assert (c.level, c.nodes, c.siblings, c.bytes_per_s) == ("node", 1, 0, 450e9)
    assert c.link is not None and c.link.kind == "nvlink"


def test_a_flat_group_uses_all_nics_alone() -> None:
    c = find_cluster("h100:8x8").crossing((1, 64))
    assert (c.level, c.ranks_per_node, c.nodes, c.siblings, c.bytes_per_s) == ("network", 8, 8, 1, 400e9)


def test_one_rank_crosses_nothing() -> None:
    c = find_cluster("h100:8x8").crossing((4, 1))
    assert (c.level, c.link, c.bytes_per_s) == ("none", None, None)
    assert find_cluster("h100:8x8").crossing().level == "none"


def test_several_dims_are_one_group() -> None:
    c = find_cluster("h100:8x8")
    assert c.crossing((8, 8), (1, 8)) == c.crossing((1, 64))
    split = c.crossing((32, 2), (1, 4))  # an axis of 8 ranks, with another of 8 between its two parts
    assert (split.level, split.ranks_per_node, split.nodes, split.siblings) == ("network", 4, 2, 2)


def test_few_nics_are_shared() -> None:
    c = find_cluster("v100:2x8").crossing((8, 2))
    assert (c.siblings, c.nics, c.bytes_per_s) == (8, 4, 12.5e9 * 4 / 8)


def test_one_member_does_not_use_every_nic() -> None:
    c = find_cluster("h100:2x8").crossing_of((0, 8))
    assert (c.level, c.siblings, c.bytes_per_s) == ("network", 1, 50e9)


def test_a_mesh_of_links_is_slower_for_small_groups() -> None:
    c = find_cluster("mi300x:8")
    assert c.crossing((1, 2)).bytes_per_s == 64e9
    assert c.crossing((1, 4)).bytes_per_s == 3 * 64e9
    assert c.crossing((1, 8)).bytes_per_s == 448e9


def test_explicit_ranks() -> None:
    c = find_cluster("h100:2x8")
    assert c.crossing_of(range(8)).level == "node"
    assert c.crossing_of((3,)).level == "none"
    assert c.link_between(0, 7) == c.link and c.link_between(7, 8) == c.nic and c.link_between(3, 3) is None
    assert c.node_of(7) == 0 and c.node_of(8) == 1
    with pytest.raises(UnknownCluster, match="0 to 15"):
        c.node_of(16)


def test_groups_that_do_not_tile_are_refused() -> None:
    c = find_cluster("h100:8x8")
    for dims in (((1, 3),), ((16, 8),), ((0, 2),), ((1, 8), (4, 2))):
        with pytest.raises(UnknownCluster, match="do not tile"):
            c.crossing(*dims)


def counted(per_node: int, world: int, dims: list[tuple[int, int]]) -> tuple[int, int, int, int]:
    """What ``spread`` says, by looking at every rank."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(world):
        offset = rank - sum((rank // s % k) * s for s, k in dims)
        groups.setdefault((offset,), []).append(rank // per_node)
    most = max(max(g.count(n) for n in g) for g in groups.values())
    fewest = min(min(g.count(n) for n in g) for g in groups.values())
    crossing = [set(g) for g in groups.values() if len(set(g)) > 1]
    siblings = max((sum(n in g for g in crossing) for n in range(world // per_node)), default=0)
    return most, fewest, max(len(set(g)) for g in groups.values()), siblings


def test_spread_equals_counting() -> None:
    rng = random.Random(7)
    uneven = 0
    for _ in range(400):
        sizes = [rng.choice([1, 2, 3, 4, 5, 8]) for _ in range(4)]
        world = math.prod(sizes)
        per_node = rng.choice([g for g in range(1, world + 1) if world % g == 0])
        strides = [math.prod(sizes[:i]) for i in range(4)]
        dims = [d for d in zip(strides, sizes, strict=True) if rng.random() < 0.5]
        got = spread(per_node, world, dims)
        assert (got.most, got.fewest, got.nodes, got.siblings) == counted(per_node, world, dims), (per_node, dims)
        uneven += got.most != got.fewest
    assert uneven > 10


def test_large_groups_are_not_enumerated() -> None:
    c = find_cluster("gb200:1000x72")
    start = time.perf_counter()
    for _ in range(100):
        c.crossing((1, 72_000))
        c.crossing((72, 1000))
    assert time.perf_counter() - start < 0.5


def test_merge_joins_neighbours() -> None:
    assert merge([(8, 2), (1, 8), (4, 1)]) == [(1, 16)]
    assert merge([(8, 2), (1, 4)]) == [(1, 4), (8, 2)]
