"""Which elements of a global tensor a process holds, as runs of indices for each dim."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

Runs = tuple[tuple[int, int], ...]
"""Index ranges (start, end) in the order in which they lie in the local tensor."""

Box = tuple[Runs, ...]
"""Runs for each dim; the elements are their product."""


def whole(shape: Sequence[int]) -> Box:
    return tuple(((0, size),) for size in shape)


def box(*ranges: tuple[int, int]) -> Box:
    """The box of one (start, end) range per dim."""
    return tuple((r,) for r in ranges)


def box_shape(held: Box) -> tuple[int, ...]:
    return tuple(sum(end - start for start, end in runs) for runs in held)


def held(shape: Sequence[int], mesh: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]) -> Box:
    """What the process at ``coordinate`` of a mesh of sizes ``mesh`` holds of a tensor of ``shape``.

    A split is that of ``torch.chunk``: parts of ceil(n / k), the last ones shorter or empty.  Splits nest
    from the first mesh dim to the last.  A strided shard (FSDP over tensor parallel) first cuts what it has
    into ``split_factor`` parts and takes its share of each.

    Raises:
        ValueError: a placement that is neither replicated nor a shard.
    """
    out = list(whole(shape))
    for parts, index, placement in zip(mesh, coordinate, placements, strict=True):
        if placement.is_replicate():
            continue
        dim = getattr(placement, "dim", None)
        if dim is None:
            raise ValueError(f"a parameter is placed as {placement}; only shards and replicas have values of their own")
        size = sum(end - start for start, end in out[dim])
        pieces = _chunks(0, size, getattr(placement, "split_factor", 1))
        chosen = [_chunks(start, end, parts)[index] for start, end in pieces]
        out[dim] = tuple(run for start, end in chosen for run in _take(out[dim], start, end))
    return tuple(out)


def local(tensor: Tensor) -> tuple[Tensor, Box]:
    """The tensor that this process stores and which elements of the global tensor it is.

    Call it without gradients: the local tensor then shares its storage with the parameter.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach(), whole(tensor.shape)
    mesh = tensor.device_mesh
    mine: Tensor = tensor.to_local().detach()
    coordinate = mesh.get_coordinate()
    if coordinate is None:  # this process is not part of the mesh
        return mine, tuple(() for _ in tensor.shape)
    found = held(tensor.shape, tuple(mesh.shape), coordinate, tensor.placements)
    if math.prod(box_shape(found)) + mine.numel() and box_shape(found) != tuple(mine.shape):
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} placed as {tensor.placements} on a mesh of {tuple(mesh.shape)} "
            f"should leave {box_shape(found)} at {tuple(coordinate)}, but {tuple(mine.shape)} is stored"
        )
    return mine, found


def _chunks(start: int, end: int, parts: int) -> list[tuple[int, int]]:
    step = math.ceil((end - start) / parts)
    return [(min(start + i * step, end), min(start + (i + 1) * step, end)) for i in range(parts)]


def _take(runs: Runs, start: int, end: int) -> list[tuple[int, int]]:
    """The elements ``start`` <= i < ``end`` of the sequence that ``runs`` make."""
    out, passed = [], 0
    for lo, hi in runs:
        a, b = max(start - passed, 0), min(end - passed, hi - lo)
        if a < b:
            out.append((lo + a, lo + b))
        passed += hi - lo
    return out
