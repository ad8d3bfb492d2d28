"""Flat buckets of parameters: parameters become views into them, and each rank owns a chunk of every bucket."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from partita.strategies.parallelize import Owned, Slice
from partita.strategies.zero.buckets import caps


@dataclass(frozen=True)
class Place:
    """Where a parameter lies in its bucket: elements ``begin`` <= i < ``end``."""

    name: str
    parameter: nn.Parameter
    begin: int
    end: int

    @property
    def decays(self) -> bool:
        return self.parameter.dim() >= 2

    def view(self, flat: Tensor) -> Tensor:
        """This parameter's part of a buffer laid out as the bucket."""
        return flat[self.begin : self.end].view(self.parameter.shape)


@dataclass(eq=False)
class Bucket:
    """One bucket: the buffer of parameters, and what happens to its gradients in a backward.

    ``chunk`` elements belong to each rank, this one's begin at ``mine``.  ``full`` holds whole gradients while they
    are there (``views``: each parameter's part), ``shard`` the reduced gradients of this rank's chunk (``arriving``:
    those of the reduction under way, ``work``).  ``filled`` are the places whose gradient this backward has made.
    ``gather`` is the gather of parameters under way.
    """

    index: int
    places: tuple[Place, ...]
    flat: Tensor
    chunk: int
    mine: int
    pieces: tuple[Owned, ...] = ()
    full: Tensor | None = None
    views: list[Tensor] = field(default_factory=list)
    shard: Tensor | None = None
    arriving: Tensor | None = None
    filled: set[int] = field(default_factory=set)
    work: dist.Work | None = None
    times: Any = None
    gather: dist.Work | None = None

    @property
    def elements(self) -> int:
        """Elements without padding."""
        return self.places[-1].end

    @property
    def own(self) -> Tensor:
        """This rank's chunk of the parameters."""
        return self.flat[self.mine : self.mine + self.chunk]


def cut(named: Iterable[tuple[str, nn.Parameter]], bucket_mb: float) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Runs of parameters that share a bucket: of one dtype, closed when they have reached the bucket's size."""
    limit, cap = caps(bucket_mb)
    run: list[tuple[str, nn.Parameter]] = []
    size = 0
    for name, p in named:
        if run and p.dtype != run[0][1].dtype:
            yield run
            run, size, limit = [], 0, cap
        run.append((name, p))
        size += p.numel() * p.element_size()
        if size >= limit:
            yield run
            run, size, limit = [], 0, cap
    if run:
        yield run


@torch.no_grad()
def make(index: int, run: list[tuple[str, nn.Parameter]], ranks: int, rank: int) -> Bucket:
    """A bucket with the parameters' values; matrices first, so that weight decay has one run of them in each chunk."""
    ordered = sorted(run, key=lambda item: item[1].dim() < 2)
    total = sum(p.numel() for _, p in run)
    chunk = math.ceil(total / ranks)
    flat = run[0][1].new_empty(chunk * ranks)
    flat[total:].zero_()
    places, at = [], 0
    for name, p in ordered:
        flat[at : at + p.numel()].copy_(p.flatten())
        places.append(Place(name, nn.Parameter(flat[at : at + p.numel()].view(p.shape)), at, at + p.numel()))
        at += p.numel()
    bucket = Bucket(index, tuple(places), flat, chunk, rank * chunk)
    bucket.pieces = tuple(pieces(bucket))
    return bucket


def pieces(bucket: Bucket) -> Iterator[Owned]:
    """What this rank updates of a bucket: its matrices' elements as one tensor, its vectors' as another."""
    lo, hi = bucket.mine, bucket.mine + bucket.chunk
    here = [p for p in bucket.places if p.begin < hi and p.end > lo and p.end > p.begin]
    for decays, group in groupby(here, key=lambda p: p.decays):
        members = list(group)
        first, last = max(lo, members[0].begin), min(hi, members[-1].end)
        slices = tuple(
            Slice(p.name, max(lo, p.begin) - p.begin, min(hi, p.end) - p.begin, max(lo, p.begin) - first)
            for p in members
        )
        yield Owned(members[0].name, nn.Parameter(bucket.flat[first:last]), decays, slices)


def replace(module: nn.Module, new: dict[nn.Parameter, nn.Parameter]) -> None:
    """Put other parameters in place of a module's, ties kept."""
    for part in module.modules():
        for name, p in list(part._parameters.items()):
            if p is not None and p in new:
                part._parameters[name] = new[p]
