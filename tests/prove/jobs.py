"""What the ranks of these tests run: a proof, and a proof with a fault planted in it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F

from partita.facts.layout import Layout
from partita.facts.model import Model
from partita.facts.precision import PRESETS
from partita.facts.work import Training
from partita.prove import ranks as prove_ranks
from partita.prove.proof import Proof
from partita.prove.ranks import Seen, observe
from partita.prove.reference import Reference, one_device
from partita.train import step as train_step_module
from tests.tiny import tiny_model

SEQUENCE = 8


def proof(
    text: str, world: int, model: Model | None = None, precision: str = "fp64", optimizer: str = "adamw", each: int = 2
) -> Proof:
    """A proof of a tiny model: ``each`` micro-batches a rank, a learning rate that moves parameters visibly."""
    layout = Layout.parse(text, world)
    work = Training(each * layout.dp * layout.mb, SEQUENCE, PRESETS[precision], optimizer, lr=1e-2, clip=0.5)
    return Proof(model or tiny_model(), layout, work)


def alone(rank: int, world: int, given: Proof, folder: str) -> Reference:
    """The run on one device."""
    return one_device(given, folder)


def together(rank: int, world: int, given: Proof, reference: Reference, fault: str = "") -> Seen:
    """One rank of a proof, with a fault if one is named."""
    context: AbstractContextManager[Any] = FAULTS[fault](rank, world) if fault else nullcontext()
    with context:
        return observe(given, reference)


def local_count(rank: int, world: int) -> AbstractContextManager[Any]:
    """The loss is divided by the tokens that count on this rank: the global count is asked for and not used."""
    original = train_step_module.count

    def count(batches: Any, case: Any, groups: Any) -> torch.Tensor:
        original(batches, case, groups)
        return torch.stack([(b.targets != train_step_module.IGNORE).sum() for b in batches]).sum().clamp_(min=1)

    return patch.object(train_step_module, "count", count)


def averaging(rank: int, world: int) -> AbstractContextManager[Any]:
    """Buckets are averaged, as DDP does by default, where sums are meant."""
    from partita.strategies.ddp import apply

    original = apply.summing

    def mean(group: Any, timeline: Any) -> Callable[[Any, Any], Any]:
        inner = original(group, timeline)

        def hook(state: Any, bucket: dist.GradBucket) -> Any:
            return inner(state, bucket).then(lambda f: f.value().div_(world))

        hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}
        return hook

    return patch.object(apply, "summing", mean)


def changed_build(change: Callable[[Any], None]) -> AbstractContextManager[Any]:
    original = prove_ranks._build

    def build(*args: Any) -> Any:
        step = original(*args)
        change(step)
        return step

    return patch.object(prove_ranks, "_build", build)


def tie_not_summed(rank: int, world: int) -> AbstractContextManager[Any]:
    """The head's part of the tied gradient is lost."""

    def cut(step: Any) -> None:
        head = step.module.head
        head.forward = lambda x: F.linear(x, head.weight.detach())

    return changed_build(cut)


def dropped_sample(rank: int, world: int) -> AbstractContextManager[Any]:
    """The last rank computes its first micro-batch in place of its last."""
    original = prove_ranks._Run.batches

    def batches(self: Any, i: int) -> Any:
        found = original(self, i)
        return [*found[:-1], found[0]] if rank == world - 1 else found

    return patch.object(prove_ranks._Run, "batches", batches)


def local_norm(rank: int, world: int) -> AbstractContextManager[Any]:
    """Each rank clips by the norm of its own shards."""
    original = train_step_module.squared_norm

    def squared_norm(step: Any, case: Any, groups: Any) -> torch.Tensor:
        original(step, case, groups)
        local = train_step_module.local
        return torch.stack([local(p.grad).square().sum() for _, p in step.named()]).sum()

    return patch.object(train_step_module, "squared_norm", squared_norm)


def other_values(rank: int, world: int) -> AbstractContextManager[Any]:
    """The last rank starts from another seed."""
    original = prove_ranks._build

    def build(case: Any, groups: Any, given: Proof) -> Any:
        return original(case, groups, replace(given, seed=1) if rank == world - 1 else given)

    return patch.object(prove_ranks, "_build", build)


def extra_collective(rank: int, world: int) -> AbstractContextManager[Any]:
    """Somebody sums something that nobody asked for, in every step."""
    original = train_step_module.clip

    def clip(step: Any, case: Any, groups: Any) -> Any:
        dist.all_reduce(torch.zeros(3))
        return original(step, case, groups)

    return patch.object(train_step_module, "clip", clip)


FAULTS: dict[str, Callable[[int, int], AbstractContextManager[Any]]] = {
    "local_count": local_count,
    "averaging": averaging,
    "tie_not_summed": tie_not_summed,
    "dropped_sample": dropped_sample,
    "local_norm": local_norm,
    "other_values": other_values,
    "extra_collective": extra_collective,
}
