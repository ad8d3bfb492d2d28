"""Ledger: the rows of a layout, each with the room that owns it and a sentence saying why.

The same rows come from arithmetic, from a dry run and from a recording (without owners).  ``key`` is what two
witnesses join on: reconciling is a join, not an interpretation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from partita.facts.mesh import EVERY, Coordinate, Mesh, Ranks

MEMORY_PHASES = ("persistent", "init", "load", "forward", "backward", "step", "save")
TRAFFIC_PHASES = ("init", "early", "forward", "backward", "step", "save")

# What one rank of r sends for a payload of one byte (Thakur et al. 2005, section 4: ring and pairwise algorithms).
LINK_SHARE: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda r: 2 * (r - 1) / r,
    "all_gather": lambda r: (r - 1) / r,
    "reduce_scatter": lambda r: (r - 1) / r,
    "all_to_all": lambda r: (r - 1) / r,
    "broadcast": lambda r: (r - 1) / r,
    "reduce": lambda r: (r - 1) / r,
    "gather": lambda r: (r - 1) / r,
    "scatter": lambda r: (r - 1) / r,
    "send": lambda r: 1.0,
    "recv": lambda r: 0.0,
    "barrier": lambda r: 0.0,
}


@dataclass(frozen=True)
class Memory:
    """Bytes of one object on each of ``ranks`` in one phase, in one tier (device, host or disk).

    ``unit`` names the part of the model that it belongs to (of a run of alike blocks, ``bytes`` is the sum of those
    alive together), or the object that a row of padding belongs to.
    """

    owner: str
    object: str
    phase: str
    tier: str
    ranks: Ranks
    dtype: str
    bytes: int
    why: str
    unit: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        return (self.phase, self.object, self.tier)


@dataclass(frozen=True)
class Traffic:
    """``count`` calls a step of one collective over ``axis``, each with a payload of ``bytes``.

    Payload: the full tensor of an all-reduce or broadcast, the gathered output of an all-gather, the full input of a
    reduce-scatter, the local input of an all-to-all, the message of a send; padding included.  ``hidden_by`` names what
    may run meanwhile.  Rows of kind ``control`` are listed and counted, and take no part in volume.
    """

    owner: str
    verb: str
    axis: tuple[str, ...]
    ranks: Ranks
    dtype: str
    bytes: int
    count: int
    phase: str
    hidden_by: str | None
    why: str
    unit: str = ""
    kind: str = "data"

    @property
    def key(self) -> tuple[str, str, tuple[str, ...], str, int]:
        return (self.phase, self.verb, self.axis, self.dtype, self.bytes)

    def link_bytes(self, mesh: Mesh) -> int:
        """What one rank sends in all its calls."""
        return round(self.bytes * self.count * LINK_SHARE[self.verb](mesh.group_size(self.axis)))


@dataclass(frozen=True)
class Gradient:
    """How the ranks along ``axis`` relate for the parameters that match a pattern.

    ``relation``: ``shards`` (each holds another part), ``copies`` (identical without a sum), ``partial`` (summed by the
    owner).  ``reduction``: what sums them; ``divisor``: what divides the sum.
    """

    owner: str
    parameters: str
    axis: tuple[str, ...]
    relation: str
    reduction: str
    divisor: str


Row = TypeVar("Row", Memory, Traffic, Gradient)
Keyed = TypeVar("Keyed", Memory, Traffic)


@dataclass(frozen=True)
class Ledger:
    """All rows of one layout on one mesh."""

    mesh: Mesh
    memory: tuple[Memory, ...]
    traffic: tuple[Traffic, ...]
    gradients: tuple[Gradient, ...]

    def at(self, coordinate: Coordinate) -> Ledger:
        """The rows that concern one rank."""
        return replace(
            self,
            memory=tuple(r for r in self.memory if coordinate in r.ranks),
            traffic=tuple(r for r in self.traffic if coordinate in r.ranks),
        )

    def where(self, **values: object) -> Ledger:
        """Rows whose named fields have these values (or one of a set); rows without such a field are dropped."""
        return replace(
            self,
            memory=select(self.memory, **values),
            traffic=select(self.traffic, **values),
            gradients=select(self.gradients, **values),
        )

    def memory_by(self, *names: str) -> dict[tuple[object, ...], int]:
        """Bytes summed by fields, e.g. ``memory_by("phase", "object")``; meant for the rows of one rank."""
        out: dict[tuple[object, ...], int] = defaultdict(int)
        for r in self.memory:
            out[tuple(getattr(r, n) for n in names)] += r.bytes
        return dict(out)

    def payload_bytes(self) -> int:
        return sum(r.bytes * r.count for r in self.traffic if r.kind == "data")

    def link_bytes(self) -> int:
        """What one rank sends in one step, control rows aside; meant for the rows of one rank."""
        return sum(r.link_bytes(self.mesh) for r in self.traffic if r.kind == "data")

    def persistent_bytes(self, coordinate: Coordinate, tier: str = "device") -> int:
        """Model state on one rank: persistent rows, and the gradients that stand when the optimizer steps, with their
        padding.
        """

        def state(row: Memory) -> bool:
            of_gradients = "gradients" in (row.object, row.unit if row.object == "padding" else "")
            return row.phase == "persistent" or (row.phase == "step" and of_gradients)

        return sum(r.bytes for r in self.memory if r.tier == tier and state(r) and coordinate in r.ranks)

    def worst(self, coordinates: Iterable[Coordinate], value: Callable[[Ledger], int]) -> tuple[Coordinate, int]:
        """The coordinate at which ``value`` of the rows is largest, and that value."""
        found = [(value(self.at(c)), c) for c in coordinates]
        largest = max(v for v, _ in found)
        return next(c for v, c in found if v == largest), largest

    def corners(self) -> list[dict[str, int]]:
        """Coordinates enough to meet every distinct set of rows: the first index of every range that a row names."""
        starts: dict[str, set[int]] = {a: {0} for a in self.mesh.names}
        rows: tuple[Memory | Traffic, ...] = (*self.memory, *self.traffic)
        for r in rows:
            for box in r.ranks.boxes:
                for a, (lo, hi) in zip(r.ranks.axes, box, strict=True):
                    starts[a] |= {lo} | ({hi} if hi < self.mesh.size(a) else set())
        out: list[dict[str, int]] = [{}]
        for a in self.mesh.names:
            out = [{**c, a: i} for c in out for i in sorted(starts[a])]
        return out

    def json(self) -> dict[str, list[dict[str, Any]]]:
        """Rows as plain dictionaries: the field names of the classes, bytes as integers, link bytes beside them."""
        return {
            "memory": [row_json(r) for r in self.memory],
            "traffic": [row_json(r) | {"link_bytes": r.link_bytes(self.mesh)} for r in self.traffic],
            "gradients": [row_json(r) for r in self.gradients],
        }

    @staticmethod
    def from_json(data: dict[str, Any], mesh: Mesh) -> Ledger:
        """The inverse of ``json``."""
        return Ledger(
            mesh,
            tuple(_row(Memory, r) for r in data["memory"]),
            tuple(_row(Traffic, r) for r in data["traffic"]),
            tuple(_row(Gradient, r) for r in data["gradients"]),
        )


def select(rows: Iterable[Row], **values: object) -> tuple[Row, ...]:
    """Rows whose fields have these values; a set or list means any of them (an axis, a tuple, is compared whole)."""

    def fits(row: Row) -> bool:
        for name, want in values.items():
            if not hasattr(row, name):
                return False
            have = getattr(row, name)
            if have != want and not (isinstance(want, (set, frozenset, list)) and have in want):
                return False
        return True

    return tuple(r for r in rows if fits(r))


def join(
    predicted: Iterable[Keyed], recorded: Iterable[Keyed], value: Callable[[Keyed], int]
) -> dict[tuple[Any, ...], tuple[int, int, tuple[str, ...]]]:
    """Outer join of two witnesses on ``key``: (predicted, recorded, owners).  Nothing is dropped on either side."""
    want: dict[tuple[Any, ...], int] = defaultdict(int)
    got: dict[tuple[Any, ...], int] = defaultdict(int)
    owners: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    for r in predicted:
        want[r.key] += value(r)
        owners[r.key].append(r.owner)
    for r in recorded:
        got[r.key] += value(r)
    keys = sorted(want.keys() | got.keys(), key=str)
    return {k: (want.get(k, 0), got.get(k, 0), tuple(dict.fromkeys(owners.get(k, ())))) for k in keys}


def row_json(row: Memory | Traffic | Gradient) -> dict[str, Any]:
    """A row's fields; an axis is a list, ranks are their text."""
    out: dict[str, Any] = {}
    for f in fields(row):
        v = getattr(row, f.name)
        out[f.name] = str(v) if isinstance(v, Ranks) else list(v) if isinstance(v, tuple) else v
    return out


def _row(kind: type[Row], data: dict[str, Any]) -> Row:
    names = {f.name for f in fields(kind)}
    values = {k: v for k, v in data.items() if k in names}
    if "ranks" in values:
        values["ranks"] = Ranks.parse(values["ranks"]) if values["ranks"] != "all" else EVERY
    if "axis" in values:
        values["axis"] = tuple(values["axis"])
    return kind(**values)
