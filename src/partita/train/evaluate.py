"""The held-out loss: the mean over the counted tokens of fixed samples, the same under every layout."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from partita.facts.case import Case
from partita.strategies.groups import Groups
from partita.strategies.parallelize import Step
from partita.train.data import Batch
from partita.train.step import forward


@torch.no_grad()
def evaluate(step: Step, batches: Iterable[Batch], case: Case, groups: Groups | None) -> float:
    """Mean loss per counted token of ``batches`` over all data ranks; every rank gives as many batches.

    The sums of all ranks are added before they are divided, so a rank may have no token that counts.
    """
    device = step.device
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    one = torch.ones((), dtype=torch.int64, device=device)
    for batch in batches:
        ready = batch
        for change in step.prepare:
            ready = change(ready)
        totals[0] += forward(step, ready, one)
        totals[1] += batch.counted
    group = groups.group("pp", "dp", "cp") if groups else None
    if group:
        dist.all_reduce(totals, group=group)
    release(step)
    return float(totals[0] / totals[1].clamp(min=1))


def release(step: Step) -> None:
    """Let go of the parameters that a forward without backward left gathered: what names them finds shards again."""
    for module in step.module.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
