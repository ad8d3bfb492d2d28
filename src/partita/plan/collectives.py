"""Collectives: how long one call takes on the links that its group crosses.

Inside a node: a ring, latency for each hop and what one rank sends over its link's rate (Thakur et al. 2005, section
4).  Across nodes two levels work at once: every node reduces or gathers over its own links while each of its members
exchanges its share with its peers in other nodes.  The levels pipeline, so the slower one is the time, and the
latencies of both add.  A small all-reduce goes over a tree, whose latency grows with the logarithm of the ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from partita.facts.cluster import Cluster
from partita.facts.device import Link
from partita.facts.ledger import LINK_SHARE
from partita.facts.mesh import Mesh
from partita.facts.topology import Crossing
from partita.plan.kernels import Unmeasured

ROUND_TRIPS = {"all_reduce": 2, "barrier": 2}  # a ring's passes; every other verb has one


@dataclass(frozen=True)
class Level:
    """One level of links: ranks of a group on it, rate of one port (of one group, out of one node), seconds a hop."""

    ranks: int
    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True)
class Path:
    """What a group's calls cross: the links inside a node, and those between nodes where it spans several."""

    name: str  # node or network: what is busy meanwhile
    link: str
    inside: Level
    between: Level
    basis: str

    def seconds(self, verb: str, payload: float) -> float:
        """Time of one call; payload as the ledger counts it."""
        passes, hops = ROUND_TRIPS.get(verb, 1), self._hops
        lanes = zip(self._shares(verb), (self.inside, self.between), strict=True)
        ring = passes * hops + max(share * payload / level.bytes_per_s for share, level in lanes)
        if verb != "all_reduce":
            return ring
        # A tree sends the whole payload up and down again, in few hops.
        tree = [2 * payload / level.bytes_per_s for level in (self.inside, self.between) if level.ranks > 1]
        return min(ring, passes * self._tree_hops + max(tree, default=0.0))

    def _shares(self, verb: str) -> tuple[float, float]:
        """What leaves one port of each level, in payloads: one rank's link inside, one node's NICs between."""
        near, far = self.inside.ranks, self.between.ranks
        if verb == "all_to_all":  # each rank sends every other its part
            return (near - 1) / (near * far), near * (far - 1) / far
        return _sent(verb, near), _sent(verb, far)

    @cached_property
    def _hops(self) -> float:
        return sum((level.ranks - 1) * level.latency_s for level in (self.inside, self.between))

    @cached_property
    def _tree_hops(self) -> float:
        return sum(math.ceil(math.log2(level.ranks)) * level.latency_s for level in (self.inside, self.between))


def _sent(verb: str, ranks: int) -> float:
    """The share of the payload that leaves one port of a level of ``ranks``."""
    return LINK_SHARE[verb](ranks) if ranks > 1 else 0.0


def path(cluster: Cluster, mesh: Mesh, axis: tuple[str, ...]) -> Path:
    """The path of the groups along an axis of the mesh.

    Raises:
        Unmeasured: the rate of a link on it is not known.
    """
    crossing = cluster.crossing(*((mesh.stride(a), mesh.size(a)) for a in mesh.atoms(*axis)))
    return _path(cluster, crossing)


def _path(cluster: Cluster, crossing: Crossing) -> Path:
    if crossing.link is None:
        return Path("none", "", Level(1, math.inf, 0.0), Level(1, math.inf, 0.0), "one rank: nothing is crossed")
    inside = Level(1, math.inf, 0.0)
    says: list[str] = []
    if crossing.ranks_per_node > 1:
        rate = _rate(cluster.link, cluster.link.rate(crossing.ranks_per_node), says)
        inside = Level(crossing.ranks_per_node, rate, cluster.link.latency_s or 0.0)
    between = Level(1, math.inf, 0.0)
    if crossing.level == "network":
        rate = _rate(crossing.link, crossing.bytes_per_s, says)
        between = Level(crossing.nodes, rate, crossing.link.latency_s or 0.0)
    return Path(crossing.level, crossing.link.name, inside, between, "; ".join(says))


def _rate(link: Link, bytes_per_s: float | None, says: list[str]) -> float:
    """A link's rate in a group, lowered to its measured share where there is one; ``says`` collects the basis."""
    title = link.title or link.name
    if bytes_per_s is None or link.bytes_per_s is None:
        if link.sustained_bytes_per_s is None:
            raise Unmeasured(f"the rate of {title} is unknown until `partita calibrate` measures it")
        says.append(f"{title}: {link.sustained_bytes_per_s / 1e9:.4g} GB/s measured")
        return link.sustained_bytes_per_s
    if link.sustained_bytes_per_s is None:
        says.append(f"{title}: {bytes_per_s / 1e9:.4g} GB/s of the line rate, as no measured ceiling is known")
        return bytes_per_s
    share = link.sustained_bytes_per_s / link.bytes_per_s
    says.append(f"{title}: {share * bytes_per_s / 1e9:.4g} GB/s ({share:.0%} of the line rate, as measured)")
    return share * bytes_per_s
