"""A stand-in for ``DistributedDataParallel``'s reducer, for dry runs alone.

The reducer is C++ that touches the data of gradients, which fake tensors do not have.  Everything else of a dry run is
the real code; this part repeats the reducer's rule in Python: one bucket in the first step, buckets in the order in
which gradients became ready from the second step on, each launched as soon as it and all before it are full (Li et al.
2020, "PyTorch Distributed", section 4.2).  Sizes come from torch's own bucket rule.  The check of shapes and the
broadcast of parameters at the start are torch's own functions.  A test holds it equal to recordings of the real one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from partita.observe.private import after_backward

MIB = 2**20
CAP_MIB = 25.0  # torch's unset default, with a first bucket of 1 MiB; a cap that is given caps every bucket
FIRST_BYTES = MIB
BROADCAST_BYTES = 250 * MIB
NAME = "DDP's reducer"


@dataclass(eq=False)
class Bucket:
    """Some parameters and one flat buffer for their gradients; what a communication hook is given."""

    number: int
    members: list[nn.Parameter]
    flat: Tensor
    views: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    waiting: int = 0

    def __post_init__(self) -> None:
        at = 0
        for p in self.members:
            self.views[p] = self.flat[at : at + p.numel()].view(p.shape)
            at += p.numel()

    def buffer(self) -> Tensor:
        return self.flat

    def index(self) -> int:
        return self.number

    def parameters(self) -> list[nn.Parameter]:
        return self.members


class Replicated(nn.Module):
    """What the room ``ddp`` uses of ``DistributedDataParallel``: construction, forward, ``no_sync`` and one hook."""

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup,
        bucket_cap_mb: float | None = None,
        gradient_as_bucket_view: bool = True,
    ) -> None:
        super().__init__()
        if not gradient_as_bucket_view:
            raise ValueError("the stand-in has gradients as views of buckets only; give gradient_as_bucket_view=True")
        self.module = module
        self.group = process_group
        self.synchronises = True
        self.hook: Any = None
        cap = int((CAP_MIB if bucket_cap_mb is None else bucket_cap_mb) * MIB)
        self.caps = [FIRST_BYTES if bucket_cap_mb is None else cap, cap]
        self.parameters_ = [p for p in module.parameters() if p.requires_grad]
        self.ready: list[nn.Parameter] = []
        self.rebuilt = False
        self._start()
        self.buckets = self._buckets(list(reversed(self.parameters_)), [sys.maxsize])
        self.futures: list[Any] = []
        self.launched = 0
        for p in self.parameters_:
            p.register_post_accumulate_grad_hook(self._made)

    def _start(self) -> None:
        """What the constructor sends: torch's own check of shapes and broadcast of rank 0's values."""
        from torch.distributed.utils import _sync_module_states, _verify_param_shape_across_processes

        parameters: list[Tensor] = list(self.parameters_)
        _verify_param_shape_across_processes(self.group, parameters)
        _sync_module_states(self.module, self.group, BROADCAST_BYTES, 0, set(), True)

    def _buckets(self, order: list[nn.Parameter], caps: list[int]) -> list[Bucket]:
        """Buckets of parameters in the order given, closed by torch's rule."""
        tensors: list[Tensor] = list(order)
        indices, _ = dist._compute_bucket_assignment_by_size(tensors, caps, [], list(range(len(order))))
        out = []
        for i, places in enumerate(indices):
            members = [order[k] for k in places]
            flat = torch.empty(sum(p.numel() for p in members), dtype=members[0].dtype, device=members[0].device)
            out.append(Bucket(i, members, flat))
        return out

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        self.state, self.hook = state, hook

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients accumulate and nothing is sent."""
        before, self.synchronises = self.synchronises, False
        try:
            yield
        finally:
            self.synchronises = before

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.ready and not self.rebuilt:
            self.rebuild()
        if self.synchronises:
            self.launched, self.futures = 0, []
            for bucket in self.buckets:
                bucket.waiting = len(bucket.members)
            self.finishing = False
        return self.module(*args, **kwargs)

    def rebuild(self) -> None:
        """Buckets in ready order, after rank 0 has told everybody its order and the buckets' sizes."""
        self.rebuilt = True
        old = self.buckets
        self.buckets = self._buckets(self.ready, self.caps)
        del old
        for numbers in (len(self.ready) + 1, len(self.buckets)):  # the order and the number of buckets; their lengths
            dist.broadcast(
                torch.zeros(numbers, dtype=torch.int32), src=dist.get_global_rank(self.group, 0), group=self.group
            )

    def _made(self, p: nn.Parameter) -> None:
        """A gradient is whole: it goes to its place in its bucket."""
        if not self.synchronises:
            return
        if not self.rebuilt:
            self.ready.append(p)
        if not self.finishing:
            self.finishing = True
            after_backward(self._finish)
        bucket = next(b for b in self.buckets if p in b.views)
        assert p.grad is not None
        bucket.views[p].copy_(p.grad)
        p.grad = bucket.views[p]
        bucket.waiting -= 1
        while self.launched < len(self.buckets) and not self.buckets[self.launched].waiting:
            self.futures.append(self.hook(self.state, self.buckets[self.launched]))
            self.launched += 1

    def _finish(self) -> None:
        for future in self.futures:
            future.wait()
