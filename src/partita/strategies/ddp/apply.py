"""Wraps the model in ``DistributedDataParallel``, with a hook that sums each bucket and notes its times.

Annotations are evaluated here: torch compares the hook's with the class itself.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from partita.facts.case import Case
from partita.facts.layout import DEFAULT_BUCKET_MB
from partita.strategies.groups import Groups
from partita.strategies.parallelize import Step
from partita.strategies.timeline import BucketTimes, Timeline


def summing(group: dist.ProcessGroup, timeline: Timeline) -> Callable[[Any, Any], torch.futures.Future[torch.Tensor]]:
    """A communication hook that sums (the loss is already divided by counted tokens) and keeps times."""

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        times = BucketTimes(
            bucket.index(), buffer.numel() * buffer.element_size(), len(bucket.parameters()), time.perf_counter()
        )
        timeline.buckets.append(times)
        future = dist.all_reduce(buffer, group=group, async_op=True).get_future()
        times.launch_s = time.perf_counter()

        def done(_: Any) -> torch.Tensor:
            times.done_s = time.perf_counter()
            return buffer  # not the future's value: a fake group's future carries none

        return future.then(done)

    return hook


def apply(step: Step, groups: Groups, case: Case) -> None:
    group = groups["dp", "cp"].get_group()
    step.materialise()
    timeline = Timeline()
    mb = case.layout.bucket_mb
    for i, part in enumerate(step.parts):
        wrapped = groups.replicate(
            part,
            process_group=group,
            bucket_cap_mb=None if mb == DEFAULT_BUCKET_MB else mb,
            gradient_as_bucket_view=True,
        )
        wrapped.register_comm_hook(None, summing(group, timeline))
        step.parts[i] = wrapped
    step.timeline = timeline
    whole: Any = step.parts[0]

    def synchronise(i: int, n: int) -> AbstractContextManager[Any]:
        return nullcontext() if i == n - 1 else whole.no_sync()

    step.contexts.append(synchronise)
