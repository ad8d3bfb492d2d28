"""Local shards against the slices of one device's tensors that they stand for, in float64.

The difference of two tensors is ||a - b|| / ||b||, and the worst tensor is what counts; a shard contributes its part of
both sums, so ranks send a few numbers and nobody gathers a tensor.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

CHUNK_BYTES = 64 * 2**20

Runs = tuple[tuple[int, int], ...]
Box = tuple[Runs, ...]


@dataclass(frozen=True)
class Piece:
    """One rank's part of a tensor: which elements (runs of indices for each dim), and its sums of squares.

    ``shape`` is the local tensor's.  ``missing``: there was nothing here to compare (no gradient).
    """

    name: str
    box: Box
    difference: float = 0.0
    reference: float = 0.0
    missing: bool = False


@dataclass(frozen=True)
class Difference:
    """The worst tensor's difference from one device, and the most that it may be (None: reported only)."""

    value: float
    worst: str
    limit: float | None

    @property
    def holds(self) -> bool:
        return math.isfinite(self.value) and (self.limit is None or self.value <= self.limit)

    def json(self) -> dict[str, Any]:
        value = self.value if math.isfinite(self.value) else str(self.value)
        return {"value": value, "limit": self.limit, "worst": self.worst}


def pieces(named: Iterable[tuple[str, Tensor | None]], path: Path) -> list[Piece]:
    """Each local tensor beside its slice in a safetensors file (raises KeyError for a name that is not there)."""
    import torch

    from partita.model import shards

    with torch.no_grad():
        return boxed(((n, None, ()) if t is None else (n, *shards.local(t)) for n, t in named), path)


def boxed(held: Iterable[tuple[str, Tensor | None, Box]], path: Path) -> list[Piece]:
    """As ``pieces``, for tensors that say themselves which elements they are."""
    import torch
    from safetensors import safe_open

    with torch.no_grad(), safe_open(path, "pt") as file:
        return [
            Piece(name, (), missing=True) if mine is None else _piece(name, mine, box, file.get_slice(name))
            for name, mine, box in held
        ]


def _piece(name: str, mine: Tensor, box: Box, source: Any) -> Piece:
    """Sums over the product of the box's runs, some rows at a time."""
    import itertools

    difference = reference = 0.0
    starts = [_places(runs) for runs in box]
    width = max(1, math.prod(mine.shape[1:])) * 8
    rows = max(1, CHUNK_BYTES // width)
    for (at, start, end), *rest in itertools.product(*starts):
        into = tuple(slice(o, o + b - a) for o, a, b in rest)
        across = tuple(slice(a, b) for _, a, b in rest)
        for row in range(start, end, rows):
            stop = min(row + rows, end)
            want = source[(slice(row, stop), *across)].double()
            have = mine[(slice(at + row - start, at + stop - start), *into)].double()
            difference += float((have - want).square().sum())
            reference += float(want.square().sum())
    return Piece(name, box, difference, reference)


def _places(runs: Runs) -> list[tuple[int, int, int]]:
    """(place in the local tensor, start, end) of each run."""
    out, at = [], 0
    for start, end in runs:
        out.append((at, start, end))
        at += end - start
    return out


def worst(ranks: Sequence[Sequence[Piece]], limit: float | None) -> Difference:
    """The worst tensor over all ranks: parts are added, copies of one part count once, at their worst."""
    parts: dict[str, dict[Box, tuple[float, float]]] = defaultdict(dict)
    for found in ranks:
        for p in found:
            if p.missing:
                return Difference(math.inf, f"{p.name} (missing)", limit)
            have = parts[p.name].get(p.box, (0.0, 0.0))
            bad = p.difference if not p.difference <= have[0] else have[0]  # a NaN stays
            parts[p.name][p.box] = (bad, p.reference)
    values = {name: _relative(held.values()) for name, held in parts.items()}
    if not values:
        return Difference(0.0, "", limit)
    name = max(values, key=lambda n: math.inf if math.isnan(values[n]) else values[n])
    return Difference(values[name], name, limit)


def _relative(sums: Iterable[tuple[float, float]]) -> float:
    pairs = list(sums)
    over, under = sum(a for a, _ in pairs), sum(b for _, b in pairs)
    if over == 0:
        return 0.0
    return math.sqrt(over / under) if under else math.inf


def relative(have: float, want: float) -> float:
    """|a - b| / |b| of two numbers."""
    if have == want:
        return 0.0
    return abs(have - want) / abs(want) if want else math.inf


@dataclass(frozen=True)
class Limits:
    """The most that a run may differ from one device (see ``limits``)."""

    loss: float | None
    norm: float | None
    gradients: float | None
    parameters: float | None


def limits(dtype: str, optimizer: str) -> Limits:
    """By what the numbers are kept in.

    Float64 decides: 1e-9.  Float32 with SGD 1e-5 throughout.  Adam divides by a root of squares and so amplifies
    rounding: its loss and the gradients of the first step stay within 1e-5, norms within 1e-4, parameters within
    1e-3.  In 16 bits only the loss has a limit, 2e-2.
    """
    if dtype == "float64":
        return Limits(1e-9, 1e-9, 1e-9, 1e-9)
    if dtype == "float32":
        return Limits(1e-5, 1e-5, 1e-5, 1e-5) if optimizer == "sgd" else Limits(1e-5, 1e-4, 1e-5, 1e-3)
    return Limits(2e-2, None, None, None)
