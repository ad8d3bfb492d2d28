"""Optimizer state and gradients under global names: which elements of which parameter this rank holds.

A name, a key of the state and a range of the parameter's elements laid flat mean the same under every degree, so state
that one number of ranks wrote opens under another.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from partita.facts.errors import BadInput
from partita.model.shards import Box, box, local
from partita.strategies.parallelize import Owned, Slice, Step
from partita.strategies.step.optimizer import MasterOptimizer

MASTER = "master"


class BadState(BadInput):
    """Optimizer state that does not cover what this rank owns; the message is one sentence."""


@dataclass(frozen=True)
class StateShard:
    """Elements ``begin`` <= i < ``end`` of one tensor of state, laid flat (``tensor`` is 1-D and shares storage).

    ``key`` is ``master`` or torch's word (``exp_avg``, ``momentum_buffer``).  A scalar (``step``) has an empty range.
    """

    name: str
    key: str
    begin: int
    end: int
    tensor: Tensor


def named_state_shards(step: Step) -> Iterator[StateShard]:
    """This rank's optimizer state and master, by global name; state that is not there yet is made.

    Raises BadState for a parameter that is a DTensor: its state lies as it does, and is named by its own shards.
    """
    for o in step.pieces():
        for key, value in state_of(step, o).items():
            for s in slices_of(o):
                if value.dim():
                    flat = value.detach().view(-1)[s.offset : s.offset + s.end - s.begin]
                    yield StateShard(s.name, key, s.begin, s.end, flat)
                else:
                    yield StateShard(s.name, key, 0, 0, value)


@torch.no_grad()
def load_named_state(step: Step, shards: Iterable[StateShard]) -> None:
    """Give this rank's optimizer the state that ``shards`` (all ranks' of whoever wrote them) hold, in place.

    16-bit parameters keep their values; ``master`` is loaded beside them.  Raises BadState where a tensor of state is
    not covered exactly once.
    """
    given: dict[tuple[str, str], list[StateShard]] = defaultdict(list)
    for shard in shards:
        given[shard.name, shard.key].append(shard)
    for o in step.pieces():
        for key, value in state_of(step, o).items():
            for s in slices_of(o):
                found = given.get((s.name, key), [])
                if value.dim():
                    _copy(value.view(-1)[s.offset : s.offset + s.end - s.begin], s, key, found)
                elif not found:
                    raise BadState(
                        f"the state gives no {key} of {s.name}; give every rank's shards, of the same optimizer"
                    )
                else:
                    value.copy_(found[0].tensor)


def _copy(into: Tensor, s: Slice, key: str, found: list[StateShard]) -> None:
    """Fill a slice from the shards that overlap it."""
    filled = 0
    for shard in found:
        lo, hi = max(s.begin, shard.begin), min(s.end, shard.end)
        if lo < hi:
            into[lo - s.begin : hi - s.begin].copy_(shard.tensor[lo - shard.begin : hi - shard.begin])
            filled += hi - lo
    if filled != s.end - s.begin:
        raise BadState(
            f"the state gives {filled} of elements {s.begin}..{s.end - 1} of {key} of {s.name}, which has"
            f" {s.end - s.begin}; give every rank's shards, each once"
        )


def state_of(step: Step, o: Owned) -> dict[str, Tensor]:
    """Tensors of state of what the optimizer updates as one; before its first step, what that would start from."""
    if isinstance(o.tensor, DTensor):
        raise BadState(f"{o.name} is sharded as a DTensor, whose state is named by its own shards")
    optimizer, holder, out = step.optimizer, o.tensor, {}
    if isinstance(optimizer, MasterOptimizer):
        holder = optimizer.masters[o.tensor]
        out[MASTER] = holder.detach()
        optimizer = optimizer.inner
    state: dict[str, Any] = optimizer.state[holder]
    if not state and isinstance(optimizer, torch.optim.AdamW):
        state["step"] = torch.zeros((), dtype=torch.float32, device=holder.device)
        state |= {key: torch.zeros_like(holder) for key in ("exp_avg", "exp_avg_sq")}
    elif not state and any(g["momentum"] for g in optimizer.param_groups):
        state["momentum_buffer"] = torch.zeros_like(holder)
    return out | {key: value for key, value in state.items() if isinstance(value, Tensor)}


def slices_of(o: Owned) -> tuple[Slice, ...]:
    """Which elements of which parameters a tensor holds; a whole parameter is one slice."""
    return o.slices or (Slice(o.name, 0, o.tensor.numel(), 0),)


def gradient_boxes(step: Step) -> Iterator[tuple[str, Tensor | None, Box]]:
    """What the optimizer is given: (global name, local gradient, which elements of the global one it is).

    The gradient is None where there is none.  What lies flat comes in boxes: a part of a row, whole rows, a part.
    """
    shapes = {name: tuple(p.shape) for name, p in step.named()}
    for o in step.pieces():
        if o.tensor.grad is None:
            yield o.name, None, ()
        elif not o.slices:
            yield o.name, *local(o.tensor.grad)
        else:
            for s in o.slices:
                for at, part in boxes(shapes[s.name], s.begin, s.end):
                    sizes = [hi - lo for ((lo, hi),) in part]
                    begin = s.offset + at
                    yield s.name, o.tensor.grad[begin : begin + math.prod(sizes)].view(sizes), part


def boxes(shape: tuple[int, ...], begin: int, end: int) -> Iterator[tuple[int, Box]]:
    """Boxes of a tensor of one or two dims that together are its flat elements ``begin`` <= i < ``end``, each with its
    place in that range."""
    if len(shape) == 1:
        if begin < end:
            yield 0, box((begin, end))
        return
    _, width = shape
    at = begin
    while at < end:
        row, column = divmod(at, width)
        stop = (end // width) * width if not column and end - at >= width else min(end, (row + 1) * width)
        last = row + max(1, (stop - at) // width)
        columns = (0, width) if stop - at >= width else (column, column + stop - at)
        yield at - begin, box((row, last), columns)
        at = stop
