"""Mesh: rank order, coordinates, and the name of a group by the axes that it spans.

``ORDER`` is the one place where the order of ranks stands: the last axis varies fastest.  An axis may be
cut into parts (``dp`` into ``dp.r`` copies of ``dp.s`` shards); the axis' name stands for all of its parts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from partita.facts.layout import Layout

ORDER = ("pp", "dp", "cp", "tp")

Coordinate = Mapping[str, int]
Box = tuple[tuple[int, int], ...]
V = TypeVar("V")
UNBOUNDED = 1 << 62


@dataclass(frozen=True)
class Ranks:
    """A set of mesh coordinates: boxes of index ranges (first, end) over ``axes``, any index elsewhere.

    ``Ranks()`` is every rank, ``Ranks((), ())`` none.
    """

    axes: tuple[str, ...] = ()
    boxes: tuple[Box, ...] = ((),)

    @staticmethod
    def of(axis: str, *indices: int) -> Ranks:
        return Ranks((axis,), tuple(((i, i + 1),) for i in sorted(set(indices))))

    def __contains__(self, coordinate: object) -> bool:
        if not self.axes:
            return bool(self.boxes)
        assert isinstance(coordinate, Mapping)
        return any(
            all(lo <= coordinate[a] < hi for a, (lo, hi) in zip(self.axes, box, strict=True)) for box in self.boxes
        )

    def __and__(self, other: Ranks) -> Ranks:
        if self == EVERY or other == EVERY:
            return other if self == EVERY else self
        axes = tuple(dict.fromkeys(self.axes + other.axes))
        out = []
        for mine, theirs in itertools.product(self.boxes, other.boxes):
            ranges = dict.fromkeys(axes, (0, UNBOUNDED))
            for names, box in ((self.axes, mine), (other.axes, theirs)):
                for a, (lo, hi) in zip(names, box, strict=True):
                    ranges[a] = (max(ranges[a][0], lo), min(ranges[a][1], hi))
            if all(lo < hi for lo, hi in ranges.values()):
                out.append(tuple(ranges[a] for a in axes))
        return Ranks(axes, tuple(out)) if out else NOBODY

    def __str__(self) -> str:
        if not self.axes:
            return "all" if self.boxes else "none"
        return " | ".join(
            ",".join(
                f"{a}={lo}" + (f"..{hi - 1}" if hi - lo > 1 else "") for a, (lo, hi) in zip(self.axes, b, strict=True)
            )
            for b in self.boxes
        )

    @staticmethod
    def parse(text: str) -> Ranks:
        """The inverse of ``str``."""
        if text in ("all", "none"):
            return EVERY if text == "all" else NOBODY
        boxes: list[Box] = []
        axes: tuple[str, ...] = ()
        for part in text.split(" | "):
            words = [w.partition("=") for w in part.split(",")]
            axes = tuple(a for a, _, _ in words)
            ends = [v.partition("..") for _, _, v in words]
            boxes.append(tuple((int(lo), int(hi or lo) + 1) for lo, _, hi in ends))
        return Ranks(axes, tuple(boxes))


EVERY = Ranks()
NOBODY = Ranks((), ())


@dataclass(frozen=True)
class Mesh:
    """Axes with their sizes, slowest first."""

    sizes: tuple[tuple[str, int], ...]

    @staticmethod
    def of(layout: Layout) -> Mesh:
        """The mesh of a layout.

        ``shard`` smaller than dp x cp cuts dp into copies (``dp.r``) and shards (``dp.s``); a number for ``reshard``
        cuts the shards into groups (``dp.o``) of that many neighbours (``dp.i``); ep cuts dp into data and experts.
        """
        dp = [("dp", layout.dp)]
        if layout.ep > 1:
            dp = [("dp.x", max(1, layout.dp // layout.ep)), ("dp.e", layout.ep)]
        elif 0 < layout.shard < layout.dp * layout.cp and layout.shard % layout.cp == 0:
            shards = layout.shard // layout.cp
            dp = [("dp.r", layout.dp // shards), ("dp.s", shards)]
        small = int(layout.reshard) // layout.cp if layout.reshard.isdecimal() else 0
        shards = dp[-1][1]
        if layout.ep == 1 and 1 < small < shards and shards % small == 0:
            dp[-1:] = [("dp.o", shards // small), ("dp.i", small)]
        plain = {"pp": layout.pp, "cp": layout.cp, "tp": layout.tp}
        return Mesh(tuple(x for a in ORDER for x in (dp if a == "dp" else [(a, plain[a])])))

    @cached_property
    def _size(self) -> dict[str, int]:
        return dict(self.sizes)

    @cached_property
    def _atoms(self) -> dict[tuple[str, ...], tuple[str, ...]]:
        """What ``atoms`` found already."""
        return {}

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(a for a, _ in self.sizes)

    @property
    def world(self) -> int:
        return math.prod(n for _, n in self.sizes)

    def atoms(self, *axes: str) -> tuple[str, ...]:
        """The mesh's own axes that ``axes`` stand for, in mesh order."""
        if axes not in self._atoms:
            self._atoms[axes] = tuple(a for a, _ in self.sizes if a in axes or a.partition(".")[0] in axes)
        return self._atoms[axes]

    def size(self, *axes: str) -> int:
        return math.prod(self._size[a] for a in self.atoms(*axes))

    def live(self, *axes: str) -> tuple[str, ...]:
        """The canonical name of a group: mesh order, axes of size one dropped."""
        return tuple(a for a in self.atoms(*axes) if self._size[a] > 1)

    def stride(self, axis: str) -> int:
        """Distance in ranks between neighbours along one of the mesh's own axes."""
        names = self.names
        return math.prod(n for _, n in self.sizes[names.index(axis) + 1 :])

    def index(self, coordinate: Coordinate, *axes: str) -> int:
        """Position along the flattened ``axes``."""
        i = 0
        for a in self.atoms(*axes):
            i = i * self._size[a] + coordinate[a]
        return i

    def coordinate(self, rank: int) -> dict[str, int]:
        out = {}
        for a, n in reversed(self.sizes):
            rank, out[a] = divmod(rank, n)
        return out

    def rank(self, coordinate: Coordinate) -> int:
        return self.index(coordinate, *self.names)

    def group(self, coordinate: Coordinate, *axes: str) -> list[int]:
        """The ranks of the group along ``axes`` that holds ``coordinate``, in order."""
        atoms = self.atoms(*axes)
        every = itertools.product(*(range(self._size[a]) for a in atoms))
        return [self.rank({**coordinate, **dict(zip(atoms, i, strict=True))}) for i in every]

    def axes_of(self, ranks: Sequence[int]) -> tuple[str, ...]:
        """The axes that a group of global ranks spans.

        A group over some indices of an axis is named with them (``pp{0,3}``); one that is no sub-grid is named
        by its ranks (``{0,3,5}``).
        """
        coordinates = [self.coordinate(r) for r in ranks]
        seen = {a: sorted({c[a] for c in coordinates}) for a in self.names}
        axes = tuple(a for a in self.names if len(seen[a]) > 1)
        if math.prod(len(seen[a]) for a in axes) != len(set(ranks)):
            return ("{" + ",".join(map(str, sorted(ranks))) + "}",)
        return tuple(a if len(seen[a]) == self._size[a] else f"{a}{{{','.join(map(str, seen[a]))}}}" for a in axes)

    def group_size(self, axis: Sequence[str]) -> int:
        """Number of ranks in a group named as ``axes_of`` and ``live`` name it."""
        return math.prod(a.count(",") + 1 if a.endswith("}") else self.size(a) for a in axis)

    def fold(
        self, value: Callable[[Coordinate], V], cuts: Mapping[str, set[int]], *axes: str
    ) -> Iterator[tuple[Ranks, V]]:
        """Yield (ranks, value) with equal values folded into boxes.

        ``cuts`` says at which indices along an axis anything can change, so that nothing else is evaluated:
        the cost does not grow with the number of ranks.
        """
        live = self.live(*axes)
        origin = dict.fromkeys(self.names, 0)
        spans = []
        for a in live:
            starts = sorted({0} | {c for c in cuts.get(a, ()) if 0 < c < self._size[a]})
            spans.append(list(zip(starts, [*starts[1:], self._size[a]], strict=True)))
        table: dict[Box, V] = {
            box: value({**origin, **{a: lo for a, (lo, _) in zip(live, box, strict=True)}})
            for box in itertools.product(*spans)
        }
        for k in range(len(live) - 1, -1, -1):
            slim: dict[Box, list[V]] = {}
            for box, v in table.items():
                slim.setdefault(box[:k] + box[k + 1 :], []).append(v)
            if all(all(v == vs[0] for v in vs) for vs in slim.values()):
                table = {box: vs[0] for box, vs in slim.items()}
                live = live[:k] + live[k + 1 :]
        groups: dict[V, list[Box]] = {}
        for box, v in table.items():
            groups.setdefault(v, []).append(box)
        for v, boxes in groups.items():
            yield Ranks(live, tuple(boxes)), v
