"""Cross-entropy over the vocabulary without a second full-size copy of the logits.

The logits are the largest tensor of a step (tokens x vocabulary).  Forward and backward go over them in
chunks of rows; backward writes the gradient over the logits' own storage.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

IGNORE = -100
"""Targets with this value count nothing and have the gradient zero."""

CHUNK_BYTES = 32 * 2**20
"""Most bytes of the float32 copy of one chunk."""


def vocabulary_loss(logits: Tensor, targets: Tensor, ignore_index: int = IGNORE) -> Tensor:
    """The SUM of the tokens' cross-entropies, a scalar in at least float32 (float64 stays float64).

    Backward destroys the values of ``logits`` (they become their gradient), so that it runs once; a leaf,
    or a view of one, is left as it is and gets a gradient of its own.  Anything else that saved the logits
    for its backward is told so by autograd's version check.

    Args:
        logits: [..., V], any strides.
        targets: [...] int64, each in 0 <= t < V or ``ignore_index``.

    Raises:
        ValueError: the shapes do not belong together, or the targets are not int64.
        RuntimeError: a second backward through the same loss.
    """
    if logits.dim() < 1 or logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} need targets of shape {tuple(logits.shape[:-1])}, "
            f"found {tuple(targets.shape)}"
        )
    if targets.dtype != torch.int64:
        raise ValueError(f"targets must be int64 token ids, found {targets.dtype}")
    return _VocabularyLoss.apply(logits, targets, ignore_index)


class _VocabularyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
        wide = torch.promote_types(torch.float32, logits.dtype)
        normalisers = torch.empty(targets.shape, dtype=wide, device=logits.device)
        losses = torch.empty_like(normalisers)
        for chunk, target, normaliser, loss in _chunks(logits, targets, normalisers, losses):
            counts = target != ignore_index
            scores = chunk.to(wide)
            torch.logsumexp(scores, -1, out=normaliser)
            chosen = scores.gather(-1, target.masked_fill(~counts, 0)[:, None])[:, 0]
            loss.copy_((normaliser - chosen).masked_fill_(~counts, 0))
        ctx.save_for_backward(logits, targets, normalisers)
        ctx.ignore_index, ctx.spent = ignore_index, False
        base = logits if logits._base is None else logits._base
        ctx.keep = logits.is_leaf or base.is_leaf
        return losses.sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        if ctx.spent:
            raise RuntimeError(
                "vocabulary_loss wrote its gradient over the logits in the first backward and cannot run backward "
                "again; compute the logits and the loss anew, or add losses before one backward"
            )
        logits, targets, normalisers = ctx.saved_tensors
        repeats = any(step == 0 and size > 1 for step, size in zip(logits.stride(), logits.shape, strict=True))
        if ctx.keep or repeats:
            gradient = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        else:
            gradient, ctx.spent = logits.detach(), True
        for chunk, out, target, normaliser in _chunks(logits.detach(), gradient, targets, normalisers):
            counts = target != ctx.ignore_index
            own = out if out.dtype == normaliser.dtype else torch.empty_like(out, dtype=normaliser.dtype)
            torch.sub(chunk, normaliser[:, None], out=own).exp_()
            chosen = target.masked_fill(~counts, 0)[:, None]
            own.scatter_(-1, chosen, own.gather(-1, chosen) - 1)
            own.mul_(grad).masked_fill_(~counts[:, None], 0)
            if own is not out:
                out.copy_(own)
        return gradient, None, None


def _chunks(first: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of all tensors over the same rows; those with a vocabulary become [rows, V], the others [rows].

    Dims that cannot be flattened without a copy are walked one index at a time.
    """
    lead = first.dim() - 1
    tensors = (first, *others)
    if lead == 0:
        yield from _chunks(*(t[None] for t in tensors))
        return
    try:
        flat = [t.view(-1, *t.shape[lead:]) for t in tensors]
    except RuntimeError:
        for index in range(first.shape[0]):
            yield from _chunks(*(t[index] for t in tensors))
        return
    rows, vocab = flat[0].shape
    size = max(torch.promote_types(torch.float32, first.dtype).itemsize * vocab, 1)
    step = max(CHUNK_BYTES // size, 1)
    for start in range(0, rows, step):
        yield tuple(t[start : start + step] for t in flat)
