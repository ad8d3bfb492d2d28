"""One training step, written once, for every layout.

Count the tokens that count; run every micro-batch forward and backward; measure one norm; clip; update.  Nothing here
reads a value on the host: the caller does, when it wants to show one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from partita.facts.case import Case
from partita.model.loss import IGNORE, vocabulary_loss
from partita.strategies.groups import Groups
from partita.strategies.parallelize import Step
from partita.strategies.step.predict import norm_axes, norm_dtype
from partita.train.data import Batch


class Watch(Protocol):
    """Something that wants to know which phase runs: a recorder, a timer, a memory tracker."""

    def phase(self, name: str) -> AbstractContextManager[object]: ...


ROW = 1024
"""Elements whose squares are added in the gradients' own width before they are added in float64."""

Mark = Callable[[str], AbstractContextManager[object]]


@dataclass(frozen=True)
class Result:
    """Of the global batch, the same on every rank: mean loss per counted token, gradient norm before clipping (None
    where it is not measured), the number of counted tokens, and, where the loss is scaled, 1.0 if a gradient
    overflowed and the update was skipped.  Tensors, unread."""

    loss: Tensor
    norm: Tensor | None
    counted: Tensor
    skipped: Tensor | None = None


def local(t: Tensor) -> Tensor:
    """The part of a tensor that lies on this rank."""
    return t.to_local() if isinstance(t, DTensor) else t


def train_step(
    step: Step, batches: Sequence[Batch], case: Case, groups: Groups | None, watches: Sequence[Watch] = ()
) -> Result:
    """Run one step on this rank's micro-batches and update the parameters; gradients stand until the caller clears
    them.
    """

    def mark(phase: str) -> AbstractContextManager[object]:
        stack = ExitStack()
        for w in watches:
            stack.enter_context(w.phase(phase))
        return stack

    with ExitStack() as whole:
        for context in step.around:
            whole.enter_context(context())
        with mark("forward"):
            counted = count(batches, case, groups)
        loss = micro_batches(step, batches, counted, mark)
        with mark("backward"):
            for finish in step.after_backward:
                finish()
        with mark("step"):
            group = groups.group("pp", "dp", "cp") if groups else None
            if group:
                dist.all_reduce(loss, group=group)
            norm = update(step, case, groups)
            for start in step.after_step:
                start()
    return Result(loss, norm, counted, step.scaling.overflowed if step.scaling else None)


def update(step: Step, case: Case, groups: Groups | None) -> Tensor | None:
    """Clip, and let the optimizer update what this rank owns; returns the norm before clipping, if it is measured."""
    if step.scaling is None:
        norm = clip(step, case, groups)
        step.optimizer.step()
        return norm
    with torch.no_grad():
        step.scaling.agree(local(o.tensor.grad) for o in step.pieces() if o.tensor.grad is not None)
        norm = factor = None
        if case.work.clip is not None:
            norm = squared_norm(step, case, groups).sqrt() / step.scaling.scale
            factor = clipping(norm, case.work.clip)
        step.scaling.update(step.optimizer, factor)
    return norm


def count(batches: Sequence[Batch], case: Case, groups: Groups | None) -> Tensor:
    """Tokens that count in the global batch, int64 [], at least 1; whole samples, before anything cuts them."""
    counted = torch.stack([(b.targets != IGNORE).sum() for b in batches]).sum()
    group = groups.group("dp") if groups else None
    if group:
        dist.all_reduce(counted, group=group)
    return counted.clamp_(min=1)  # a batch in which nothing counts has loss 0, not 0/0


def micro_batches(step: Step, batches: Sequence[Batch], counted: Tensor, mark: Mark) -> Tensor:
    """Forward and backward of each micro-batch; returns this rank's share of the loss, float64 []."""
    ready = list(batches)
    for change in step.prepare:
        ready = [change(b) for b in ready]
    shown = torch.zeros((), dtype=torch.float64, device=counted.device)
    for i, batch in enumerate(ready):
        with ExitStack() as stack:
            for context in step.contexts:
                stack.enter_context(context(i, len(ready)))
            with mark("forward"):
                loss = forward(step, batch, counted)
            with mark("backward"):
                (loss if step.scaling is None else loss * step.scaling.scale).backward()
        shown += loss.detach()
    return shown


def forward(step: Step, batch: Batch, counted: Tensor) -> Tensor:
    """This micro-batch's share of the loss: the sum over its tokens, divided by the global count."""
    with ExitStack() as stack:
        for context in step.forward_contexts:
            stack.enter_context(context())
        logits = step.parts[0](batch.ids, batch.positions, step.calls(batch))
    return vocabulary_loss(logits, batch.targets) / counted


@torch.no_grad()
def squared_norm(step: Step, case: Case, groups: Groups | None) -> Tensor:
    """Squared global norm of the gradients, each element once, in at least float32.

    Local squares first, then one axis after another with one number for each set of axes still to sum.  The sets come
    from the case, not from the parameters at hand, so that every rank stacks the same ones.
    """
    device = step.device  # of the groups; gradients may lie on the host
    dtype = getattr(torch, norm_dtype(case.precision))
    sums = {norm_axes(case, h): torch.zeros((), dtype=dtype, device=device) for h in case.trained}
    for o in step.pieces():
        if o.tensor.grad is not None:
            key = norm_axes(case, case.by_name[o.name])
            sums[key] = sums[key] + squares(local(o.tensor.grad), dtype).to(device)
    for axis in case.mesh.names:
        here = [k for k in sums if axis in k]
        if not here or groups is None:
            continue
        left: dict[frozenset[str], Tensor] = {}
        for k in here:
            part = sums.pop(k)
            left[k - {axis}] = left[k - {axis}] + part if k - {axis} in left else part
        keys = sorted(left, key=sorted)
        stacked = torch.stack([left[k] for k in keys])
        dist.all_reduce(stacked, group=groups.group(axis))
        for k, total in zip(keys, stacked, strict=True):
            sums[k] = sums[k] + total if k in sums else total
    return torch.stack(list(sums.values())).sum()


def squares(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum of squares of all elements, [] of ``dtype``.

    In rows whose sums are added in float64: torch adds a whole tensor's squares one after another, and 28 million of
    them in float32 (the embedding of a 135M model) are off by 3e-3.  It makes no copy and costs the same.
    """
    flat = t.reshape(-1)
    whole = flat.numel() // ROW * ROW
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, ROW), dim=1, dtype=dtype)
    rest = torch.linalg.vector_norm(flat[whole:], dtype=dtype)
    return (rows.square().sum(dtype=torch.float64) + rest.square()).to(dtype)


@torch.no_grad()
def clip(step: Step, case: Case, groups: Groups | None) -> Tensor | None:
    """Scale gradients so that the global norm is at most ``work.clip``; returns the norm before, as every rank has
    it.
    """
    if case.work.clip is None:
        return None
    norm = squared_norm(step, case, groups).sqrt()
    scale = clipping(norm, case.work.clip)
    for o in step.pieces():
        if o.tensor.grad is not None:
            local(o.tensor.grad).mul_(scale.to(o.tensor.grad.device, o.tensor.grad.dtype))
    return norm


def clipping(norm: Tensor, limit: float) -> Tensor:
    """What gradients of this norm are multiplied by."""
    return (limit / (norm + 1e-12)).clamp(max=1.0)
