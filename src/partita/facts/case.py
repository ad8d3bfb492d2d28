"""Case: what every room of a layout is given.

``account`` folds the rooms' divisions into it: which rank holds what, how long the padded sequence is, and how often
each unit runs.  The type lives here because rooms may not import the plan that fills it in.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from partita.facts import frozen
from partita.facts.layout import Layout
from partita.facts.mesh import EVERY, Coordinate, Mesh, Ranks
from partita.facts.model import Model, Parameter, Span
from partita.facts.precision import Precision
from partita.facts.work import Training


@dataclass(frozen=True)
class Split:
    """One room's division of one tensor: ``dim`` over the flattened ``axis``, in chunks of ceil(n / ranks).

    That is torch.chunk's rule, and DTensor's: the last chunks may be short or empty.  ``store_padded``: the local
    storage holds the whole chunk even where it is short.  ``zigzag``: 2n chunks, of which rank i holds i and 2n-1-i.
    """

    owner: str
    axis: tuple[str, ...]
    dim: int
    zigzag: bool = False
    store_padded: bool = False


@dataclass(frozen=True)
class Held:
    """A parameter (or, by pattern, that of ``count`` alike blocks) as the rooms divide it: splits nest, left to
    right.
    """

    parameter: Parameter
    count: int = 1
    splits: tuple[Split, ...] = ()
    at: Ranks = EVERY

    def local_shape(self, mesh: Mesh, coordinate: Coordinate, padded: bool = False) -> tuple[int, ...]:
        """Shape of the local tensor; ``padded``: of its storage."""
        shape = list(self.parameter.shape)
        for s in self.splits:
            i, n = mesh.index(coordinate, *s.axis), shape[s.dim]
            chunk = math.ceil(n / mesh.size(*s.axis))
            shape[s.dim] = chunk if padded and s.store_padded else min(chunk, max(0, n - i * chunk))
        return tuple(shape)

    def elements(self, mesh: Mesh, coordinate: Coordinate, padded: bool = False) -> int:
        """Local elements of one of the ``count`` parameters."""
        return math.prod(self.local_shape(mesh, coordinate, padded))

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes over which the parameter lies in shards."""
        return tuple(a for s in self.splits for a in s.axis)

    @property
    def trained(self) -> bool:
        """Whether it gets a gradient."""
        return not self.parameter.frozen

    def split_by(self, owner: str) -> Split | None:
        return next((s for s in self.splits if s.owner == owner), None)


@dataclass(frozen=True)
class Bucket:
    """Elements that lie one after another in a flat buffer: ``matrices`` of them first, then those of vectors."""

    elements: int
    matrices: int


@dataclass(frozen=True)
class Flat:
    """A division of objects that lie flat: each bucket in equal chunks over the flattened ``axis``.

    ``objects`` are what is divided (``optimizer state``, ``master``, ``gradients``); parameters stay whole.
    ``buckets`` are kinds of buckets and their numbers.  A bucket is padded once to a multiple of the ranks.
    """

    owner: str
    axis: tuple[str, ...]
    ranks: int
    objects: tuple[str, ...]
    buckets: tuple[tuple[Bucket, int], ...]

    def chunk(self, bucket: Bucket) -> int:
        """Elements of one rank's chunk, padding included."""
        return math.ceil(bucket.elements / self.ranks)

    def elements(self, index: int) -> int:
        """Elements, without padding, that the rank at ``index`` along the axis owns."""
        return sum(n * self._inside(b, index, 0, b.elements) for b, n in self.buckets)

    @property
    def stored(self) -> int:
        """Elements of one rank's chunks of all buckets, padding included."""
        return sum(n * self.chunk(b) for b, n in self.buckets)

    @property
    def padding(self) -> int:
        """Elements by which all buckets, whole, are longer than what lies in them."""
        return sum(n * (self.chunk(b) * self.ranks - b.elements) for b, n in self.buckets)

    def pieces(self, index: int) -> Iterator[int]:
        """Elements of each tensor that the rank's optimizer updates: of a bucket, its matrices and its vectors."""
        for b, n in self.buckets:
            for size in (self._inside(b, index, 0, b.matrices), self._inside(b, index, b.matrices, b.elements)):
                if size:
                    yield from itertools.repeat(size, n)

    def _inside(self, bucket: Bucket, index: int, begin: int, end: int) -> int:
        """Elements of the rank's chunk that lie in ``begin`` <= i < ``end`` of the bucket."""
        chunk = self.chunk(bucket)
        return max(0, min(end, (index + 1) * chunk) - max(begin, index * chunk))

    def cuts(self) -> set[int]:
        """Indices along the axis at which the number of elements or of pieces may change."""
        ends = {(end, self.chunk(b)) for b, _ in self.buckets for end in (b.matrices, b.elements)}
        return {i for end, chunk in ends if chunk for i in (end // chunk, end // chunk + 1) if 0 < i < self.ranks}


@dataclass(frozen=True)
class Saving:
    """What a replayed block keeps from forward to backward, by names of saved tensors.

    It keeps ``only`` these, or (None) everything but ``dropped``.  ``again``: what its replay makes, where that is not
    simply all that is not kept.
    """

    only: tuple[str, ...] | None = None
    dropped: tuple[str, ...] = ()
    again: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Division:
    """What one room divides: parameters by pattern, named activations (``residual``, ``logits``), what lies
    flat; what blocks ``first`` <= i < ``end`` keep for backward, where that is not everything; which objects lie on
    the host; and whether a ``master`` is kept in any case."""

    parameters: dict[str, Split] = field(default_factory=dict)
    streams: dict[str, Split] = field(default_factory=dict)
    flat: Flat | None = None
    savings: tuple[tuple[int, int, Saving], ...] = ()
    host: tuple[str, ...] = ()
    master: bool = False


@dataclass(frozen=True)
class Unit:
    """A run of alike units on the same ranks: its name (``blocks.0..31``), its parameters, and how often each of its
    passes runs in a step, per unit (no backward where all is frozen up to here).  ``saving``: what it keeps for
    backward, where that is not everything."""

    name: str
    count: int
    held: tuple[Held, ...]
    forward: int
    backward: int
    replay: int = 0
    saving: Saving | None = None
    at: Ranks = EVERY

    @property
    def is_blocks(self) -> bool:
        return self.name.startswith("blocks")


@dataclass(frozen=True)
class Part:
    """What runs as one call, the whole model or one stage: its units, and the ranks that hold them."""

    index: int
    units: tuple[str, ...]
    at: Ranks = EVERY


@dataclass(frozen=True)
class Moment:
    """A point of a step: ``start``, ``forward`` or ``backward`` of a unit, ``loss``, ``step`` (the optimizer), ``end``.

    ``offset`` moves it by units, in the order in which they run: ``Moment("forward", -1)`` is the forward of the unit
    before, ``Moment("forward", -0.5)`` what comes between the two.
    """

    kind: str
    offset: float = 0


START, LOSS, STEP, END = (Moment(kind) for kind in ("start", "loss", "step", "end"))
FORWARD, BACKWARD, LAST_BACKWARD = Moment("forward"), Moment("backward"), Moment("step", -1)


@dataclass(frozen=True)
class Alive:
    """Bytes of an object that are alive from one moment of a step to another (both included).

    With a ``unit`` that is a run of blocks, each block has these bytes between its own moments.  Without one, the
    bytes are there once, and the moments must not name a unit.  ``plan.peak`` finds where the sum is largest.
    """

    owner: str
    object: str
    unit: str
    begin: Moment
    end: Moment
    dtype: str
    bytes: int
    why: str


@dataclass(frozen=True)
class Case:
    """A layout of a model for a piece of work, divided.  ``precision`` is as the rooms store it.

    ``kernels`` is the kernel set that decides which activations are saved: ``cpu`` (eager) or ``cuda`` (fused).
    ``flat`` is the division of what lies flat, if a room has one; ``host`` the objects that lie on the host;
    ``scales_loss`` says that every room works with a scaled loss.
    """

    model: Model
    layout: Layout
    mesh: Mesh
    work: Training
    precision: Precision
    kernels: str = "cpu"
    units: tuple[Unit, ...] = ()
    streams: dict[str, tuple[Split, ...]] = field(default_factory=dict, hash=False)
    parts: tuple[Part, ...] = ()
    actions: dict[int, tuple[str, ...]] | None = field(default=None, hash=False)
    flat: Flat | None = None
    host: frozenset[str] = frozenset()
    scales_loss: bool = False

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """The model's spans, cut where what is frozen changes."""
        return frozen.spans(self.model, self.work.frozen)

    @property
    def held(self) -> Iterator[Held]:
        return (h for u in self.units for h in u.held)

    @property
    def trained(self) -> Iterator[Held]:
        """What gets a gradient."""
        return (h for u in self.units for h in u.held if h.trained)

    def tier(self, thing: str) -> str:
        """Where an object lies: ``device`` or ``host``."""
        return "host" if thing in self.host else "device"

    @cached_property
    def by_name(self) -> dict[str, Held]:
        """Held parameters under their own global names (patterns resolved)."""
        out = {}
        for unit in self.units:
            for h in unit.held:
                for name in names_of(unit.name, h.parameter.name):
                    out[name] = h
        return out

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one data rank in a step."""
        return max(1, self.work.global_batch // (self.layout.dp * self.layout.mb))

    @property
    def data_axes(self) -> tuple[str, ...]:
        """Axes over which gradients sum and state shards."""
        return self.mesh.live("dp", "cp")

    @property
    def sequence(self) -> int:
        """Positions that really run: the batch is padded at the input to what every split of the sequence divides."""
        multiple, ranks = 1, 1
        for s in self.streams.get("residual", ()):
            if s.dim == 1:
                size = self.mesh.size(*s.axis)
                multiple = math.lcm(multiple, ranks * size * (2 if s.zigzag else 1))
                ranks *= size
        return math.ceil(self.work.sequence / multiple) * multiple

    @property
    def tokens(self) -> int:
        """Positions of one micro-batch on one rank, before sequence parallelism cuts them."""
        return self.layout.mb * self.sequence // self.layout.cp

    @cached_property
    def cuts(self) -> dict[str, set[int]]:
        """Indices along each axis at which some parameter's local length changes (for ``Mesh.fold``)."""
        out: dict[str, set[int]] = {}
        for shape, splits in {(h.parameter.shape, h.splits) for h in self.held}:
            lengths = {dim: {n} for dim, n in enumerate(shape)}
            for s in splits:
                lengths[s.dim] = self._cut(s, lengths[s.dim], out)
        if self.flat:
            for i in self.flat.cuts():
                self._mark(self.mesh.live(*self.flat.axis), i, out)
        if len(self.parts) > 1:
            out["pp"] = set(range(self.mesh.size("pp")))
        return out

    def _cut(self, split: Split, lengths: set[int], out: dict[str, set[int]]) -> set[int]:
        """Note where chunks of ``lengths`` change along the split's axes; return the chunk lengths that occur."""
        axes, size = self.mesh.live(*split.axis), self.mesh.size(*split.axis)
        left: set[int] = set()
        for n in lengths:
            chunk = math.ceil(n / size)
            whole = n // chunk if chunk else 0
            rest = n - whole * chunk
            left |= {x for x in (chunk if whole else 0, rest) if x}
            for i in (whole, whole + 1) if rest else (whole,):
                if 0 < i < size:
                    self._mark(axes, i, out)
        return left

    def _mark(self, axes: tuple[str, ...], i: int, out: dict[str, set[int]]) -> None:
        """Note the flattened index ``i`` of ``axes``."""
        if len(axes) == 1:
            out.setdefault(axes[0], set()).add(i)
            return
        # The flattened index falls inside a row of the slower axis: every index may matter.
        for a in axes:
            out.setdefault(a, set()).update(self._edges(axes, a, i))

    def _edges(self, axes: tuple[str, ...], axis: str, flat: int) -> set[int]:
        """Indices along ``axis`` next to the flattened index ``flat`` of ``axes``."""
        inner = math.prod(self.mesh.size(a) for a in axes[axes.index(axis) + 1 :])
        i = flat // inner % self.mesh.size(axis)
        return {i, i + 1}


def names_of(unit: str, pattern: str) -> Iterator[str]:
    """The global names that a pattern stands for in a unit such as ``blocks.4..7``."""
    if "*" not in pattern:
        yield pattern
        return
    lo, _, hi = unit.partition(".")[2].partition("..")
    for i in range(int(lo), int(hi or lo) + 1):
        yield pattern.replace("*", str(i), 1)
