"""Topology: which link the groups of a mesh axis cross, and how many sibling groups share it.

Ranks fill nodes in order: rank r stands in node r // g, where g is the number of devices in a node.  The groups of
an axis are given by the stride and the size of the axis in the mesh, so that nothing is enumerated unless sizes do
not divide each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from partita.facts.device import Link, UnknownCluster

Dim = tuple[int, int]


@dataclass(frozen=True)
class Spread:
    """How equal groups that cover the whole world lie over nodes.

    ``most`` and ``fewest`` are the numbers of members that one group has in one node, ``nodes`` how many nodes one
    group spans at most, ``siblings`` how many groups leave one node at most (0 where none does).
    """

    most: int
    fewest: int
    nodes: int
    siblings: int


def merge(dims: Sequence[Dim]) -> list[Dim]:
    """Sort (stride, size) pairs, drop sizes of one, join neighbours: ((8, 2), (1, 8)) is ((1, 16))."""
    out: list[Dim] = []
    for stride, size in sorted(d for d in dims if d[1] != 1):
        if out and out[-1][0] * out[-1][1] == stride:
            out[-1] = (out[-1][0], out[-1][1] * size)
        else:
            out.append((stride, size))
    return out


def spread(per_node: int, world: int, dims: Sequence[Dim]) -> Spread:
    """How the groups along ``dims`` (stride, size) lie over nodes of ``per_node`` devices.

    Raises ``UnknownCluster`` when the dims do not tile the world.
    """
    end = 1
    for stride, size in sorted(dims):
        if stride < 1 or size < 1 or (size > 1 and stride % end) or world % (stride * size):
            raise UnknownCluster(f"Groups of {size} ranks with stride {stride} do not tile a world of {world} ranks.")
        end = stride * size if size > 1 else end
    inside = outside = 1
    for stride, size in merge(dims):
        if per_node % (stride * size) == 0:
            inside *= size
        elif stride % per_node == 0:
            outside *= size
        elif per_node % stride == 0 and (stride * size) % per_node == 0:
            inside *= per_node // stride
            outside *= stride * size // per_node
        else:
            return _uneven(per_node, world, merge(dims))
    return Spread(inside, inside, outside, per_node // inside if outside > 1 else 0)


def _uneven(per_node: int, world: int, dims: Sequence[Dim]) -> Spread:
    """Sizes that do not divide the node: look at one period of the pattern."""
    stride, size = dims[-1]
    period = min(world, math.lcm(per_node, stride * size))
    groups: dict[int, dict[int, int]] = {}
    for rank in range(period):
        key = rank - sum(s * (rank // s % k) for s, k in dims)
        here = groups.setdefault(key, {})
        here[rank // per_node] = here.get(rank // per_node, 0) + 1
    leaving: dict[int, int] = {}
    for nodes in groups.values():
        for node in nodes if len(nodes) > 1 else ():
            leaving[node] = leaving.get(node, 0) + 1
    return Spread(
        most=max(max(n.values()) for n in groups.values()),
        fewest=min(min(n.values()) for n in groups.values()),
        nodes=max(len(n) for n in groups.values()),
        siblings=max(leaving.values(), default=0),
    )


@dataclass(frozen=True)
class Crossing:
    """What the groups of one axis cross.

    ``level`` is ``none`` (a group of one rank), ``node`` or ``network``; ``link`` is the slowest link they cross.
    ``ranks_per_node`` and ``nodes``: the members that a group has in one node, and the nodes that it spans, at most.
    ``siblings``: how many groups send through the NICs of one node at the same time (0 inside a node), and ``nics``
    how many NICs there are.  ``bytes_per_s``, in one direction and with all siblings sending: inside a node what one
    rank sends, between nodes what one group sends out of one node (``None`` where the rate is not known).
    """

    level: str
    size: int
    link: Link | None = None
    ranks_per_node: int = 1
    nodes: int = 1
    siblings: int = 0
    nics: int = 0
    bytes_per_s: float | None = None

    def describe(self) -> str:
        """One sentence for the law of topology."""
        if self.link is None:
            return "one rank: no link is crossed"
        if self.level == "node":
            return f"{self.size} ranks inside a node, over {self.link.describe()}"
        shared = "alone on" if self.siblings == 1 else f"{self.siblings} sibling groups share"
        each = "" if self.bytes_per_s is None else f", {self.bytes_per_s / 1e9:.4g} GB/s for each group"
        return (
            f"{self.size} ranks over {self.nodes} nodes, {self.ranks_per_node} in each, through {self.link.describe()};"
            f" {shared} a node's {self.nics} NIC{'s' if self.nics != 1 else ''}{each}"
        )


def cross(spread_: Spread, size: int, per_node: int, link: Link, nic: Link | None, nics: int) -> Crossing:
    """The crossing of groups of ``size`` ranks that lie as ``spread_`` says."""
    if size == 1:
        return Crossing("none", 1)
    if spread_.nodes == 1:
        return Crossing("node", size, link, size, 1, 0, 0, link.rate(size))
    assert nic is not None, "a cluster of several nodes has a NIC"
    rate = None
    if nic.bytes_per_s is not None:
        # A device reaches the NICs that stand beside it, at least one, so a group cannot use more than its members do.
        reach = spread_.fewest * max(1, nics // per_node)
        rate = nic.bytes_per_s * min(nics / spread_.siblings, reach)
    return Crossing("network", size, nic, spread_.most, spread_.nodes, spread_.siblings, nics, rate)
