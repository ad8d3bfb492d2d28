"""What happens to the buckets in a step: filled by hooks, reduced in their order, given to the optimizer, gathered."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from partita.observe.private import after_backward
from partita.strategies.timeline import BucketTimes, Timeline
from partita.strategies.zero.flat import Bucket

# Newer versions of torch have new names for these two.
reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class Engine:
    """Buckets in one fixed order on every rank.

    ``keeps``: whole gradients stay until the optimizer has stepped (ZeRO-1), and only the last micro-batch reduces;
    otherwise every micro-batch is reduced into the shard and whole gradients go (ZeRO-2).  ``everywhere``: sum by
    all-reduce instead of to the owners.
    """

    def __init__(
        self, buckets: list[Bucket], group: dist.ProcessGroup, keeps: bool, everywhere: bool, timeline: Timeline
    ) -> None:
        self.buckets, self.group, self.keeps, self.everywhere = buckets, group, keeps, everywhere
        self.timeline = timeline
        self.reduces = True
        self.launched = 0
        self.watching = False
        self.gathering = False
        for bucket in buckets:
            for i, place in enumerate(bucket.places):
                place.parameter.register_post_accumulate_grad_hook(self._hook(bucket, i))

    # A step

    @contextmanager
    def step(self) -> Iterator[None]:
        """Round a whole step: what is left of the last step's gradients and times goes."""
        self.timeline.buckets.clear()
        for bucket in self.buckets:
            bucket.full = bucket.shard = bucket.arriving = bucket.work = None
            bucket.views = []
            for place in bucket.places:
                place.parameter.grad = None
            for piece in bucket.pieces:
                piece.tensor.grad = None
        yield

    @contextmanager
    def micro_batch(self, i: int, n: int) -> Iterator[None]:
        """Round micro-batch ``i`` of ``n``."""
        self.reduces = not self.keeps or i == n - 1
        self.launched, self.watching = 0, False
        for bucket in self.buckets:
            bucket.filled.clear()
        yield

    # Backward

    def _hook(self, bucket: Bucket, i: int) -> Callable[[nn.Parameter], None]:
        return lambda parameter: self._made(bucket, i, parameter)

    def _made(self, bucket: Bucket, i: int, p: nn.Parameter) -> None:
        """A gradient is whole: it goes to its place; a bucket that is full is reduced when its turn has come."""
        assert p.grad is not None
        if not self.watching:
            self.watching = True
            after_backward(self._rest)
        self._full(bucket)
        view = bucket.views[i]
        if p.grad is not view:  # else it was accumulated in its place
            view.copy_(p.grad)
        p.grad = view if self.keeps else None
        bucket.filled.add(i)
        if self.reduces and len(bucket.filled) == len(bucket.places):
            bucket.times = self._ready(bucket)
            self._launch()

    def _full(self, bucket: Bucket) -> Tensor:
        """The bucket's buffer of whole gradients, made when its first gradient is."""
        if bucket.full is None:
            size = bucket.elements if self.everywhere else bucket.flat.numel()
            bucket.full = bucket.flat.new_empty(size)
            bucket.full[bucket.elements :].zero_()
            bucket.views = [place.view(bucket.full) for place in bucket.places]
        return bucket.full

    def _ready(self, bucket: Bucket) -> BucketTimes:
        full = self._full(bucket)
        size = full.numel() * full.element_size()
        return BucketTimes(bucket.index, size, len(bucket.places), time.perf_counter())

    def _launch(self) -> None:
        """Reduce every bucket that is full and whose predecessors are launched."""
        while self.launched < len(self.buckets):
            bucket = self.buckets[self.launched]
            if len(bucket.filled) < len(bucket.places):
                return
            # One reduction at a time, so that what is under way is bounded: it had all of this bucket's backward.
            if self.launched:
                self._finish(self.buckets[self.launched - 1])
            self.timeline.buckets.append(bucket.times)
            bucket.work = self._reduce(bucket)
            bucket.times.launch_s = time.perf_counter()
            self.launched += 1

    def _reduce(self, bucket: Bucket) -> dist.Work:
        full = self._full(bucket)
        if self.everywhere:
            return dist.all_reduce(full, group=self.group, async_op=True)
        if self.keeps:  # in place: the owner's chunk of the whole gradients becomes the sum
            out = full[bucket.mine : bucket.mine + bucket.chunk]
        else:
            out = bucket.arriving = full.new_empty(bucket.chunk)
        return reduce_scatter(out, full, group=self.group, async_op=True)

    @torch.no_grad()
    def _rest(self) -> None:
        """Backward has ended: what got no gradient counts as zero, and nobody waits for it."""
        if not self.reduces:
            return
        for bucket in self.buckets[self.launched :]:
            for i, place in enumerate(bucket.places):
                if i not in bucket.filled and not (self.keeps and place.parameter.grad is not None):
                    self._full(bucket)
                    bucket.views[i].zero_()
                bucket.filled.add(i)
            bucket.times = bucket.times or self._ready(bucket)
        self._launch()
        if not self.keeps:
            for bucket in self.buckets:
                self._finish(bucket)

    def _finish(self, bucket: Bucket) -> None:
        """Wait for a reduction; under ZeRO-2 add it to the shard and let the whole gradients go."""
        if bucket.work is None:
            return
        bucket.work.wait()
        bucket.work = None
        bucket.times.done_s = time.perf_counter()
        bucket.times = None
        if self.keeps:
            return
        bucket.full, bucket.views = None, []
        if bucket.shard is None:
            bucket.shard = bucket.arriving
        else:
            assert bucket.arriving is not None
            bucket.shard.add_(bucket.arriving)
        bucket.arriving = None

    @torch.no_grad()
    def after_backward(self) -> None:
        """Give the optimizer its gradients: this rank's chunk of each bucket."""
        for bucket in self.buckets:
            self._finish(bucket)
            first = 0 if self.keeps else bucket.mine
            whole = bucket.full if self.keeps else bucket.shard
            assert whole is not None
            for piece in bucket.pieces:
                begin = piece.tensor.storage_offset() - first
                piece.tensor.grad = whole[begin : begin + piece.tensor.numel()]

    # Parameters

    def gather(self) -> None:
        """Give every rank the parameters that others updated, the bucket that forward uses first at first."""
        for bucket in reversed(self.buckets):
            bucket.gather = all_gather(bucket.flat, bucket.own, group=self.group, async_op=True)
        self.gathering = True

    def settle(self) -> None:
        """Wait for all gathers."""
        if self.gathering:
            for bucket in reversed(self.buckets):
                self.arrive(bucket)
            self.gathering = False

    def arrive(self, bucket: Bucket) -> None:
        if bucket.gather is not None:
            bucket.gather.wait()
            bucket.gather = None

    def before_use(self, module: nn.Module) -> None:
        """Make every part of a module that has parameters of its own wait for their buckets before it runs."""
        bucket_of = {place.parameter: bucket for bucket in self.buckets for place in bucket.places}
        for part in module.modules():
            own = [p for p in part._parameters.values() if p is not None and p in bucket_of]
            if own:
                part.register_forward_pre_hook(self._waiting(list(dict.fromkeys(bucket_of[p] for p in own))))

    def _waiting(self, wanted: list[Bucket]) -> Callable[[nn.Module, Any], None]:
        def wait(module: nn.Module, inputs: Any) -> None:
            if self.gathering:
                for bucket in wanted:
                    self.arrive(bucket)

        return wait
