"""Wraps the forward of the chosen blocks in torch's non-reentrant checkpoint."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from partita.facts.case import Case
from partita.strategies.groups import Groups
from partita.strategies.parallelize import Step
from partita.strategies.recompute.policy import Policy, read

PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
KEPT_NAMESPACES = ("c10d", "_c10d_functional")
ATTENTION = "_scaled_dot_product"


def apply(step: Step, groups: Groups | None, case: Case) -> None:
    policy = read(case.layout)
    assert isinstance(policy, Policy)
    if policy.name == "selective":
        step.calls = attention_again(step.calls, policy)
        return
    for part in step.parts:
        blocks: Any = part.blocks
        for i, block in enumerate(blocks):
            if policy.covers(i):
                block.forward = again(block.forward, by_operation if policy.name == "ops" else None)


def again(forward: Callable[..., Any], contexts: Callable[[], Any] | None = None) -> Callable[..., Any]:
    """``forward`` under a checkpoint; nothing in a block is random, so no generator's state is kept."""
    options: dict[str, Any] = {"context_fn": contexts} if contexts else {}

    @functools.wraps(forward)
    def run(*args: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **options)

    return run


def by_operation() -> Any:
    """Contexts that keep every second matrix product, attention outputs and collectives of one block."""
    products: Counter[bool] = Counter()

    def decide(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in PRODUCTS:
            products[context.is_recompute] += 1
            keep = products[context.is_recompute] % 2 == 1
        else:
            keep = ATTENTION in op.__name__ or op.namespace in KEPT_NAMESPACES
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(decide)


class Again:
    """An attention callable that keeps its inputs and runs once more in backward, in the policy's blocks."""

    def __init__(self, attend: Callable[..., Tensor], policy: Policy) -> None:
        self.attend, self.policy = attend, policy

    @property
    def window(self) -> int | None:
        return getattr(self.attend, "window", None)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not self.policy.covers(layer):
            return self.attend(layer, q, k, v)
        out: Tensor = again(self.attend)(layer, q, k, v)
        return out


def attention_again(calls: Callable[[Any], Any], policy: Policy) -> Callable[[Any], Any]:
    """The decoder's calls with their attention under a checkpoint."""

    def made(batch: Any) -> Any:
        plain = calls(batch)
        return replace(plain, attend=Again(plain.attend, policy))

    return made
