"""Loss scaling for float16 (mixed precision training, arXiv 1710.03740, section 3.2), without a read on the host.

The loss is multiplied before backward, so that small gradients survive float16; the optimizer's fused kernel divides
the widened gradients again.  A gradient that overflowed anywhere makes every rank skip the update and halve the scale;
after ``interval`` good steps the scale doubles.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

INITIAL = 2.0**16
INTERVAL = 2000  # torch's GradScaler begins and grows in the same way


class LossScale:
    """``scale`` float32 [], ``skipped`` and ``good`` int64 []: steps that were skipped, and good ones since the scale
    last changed.  ``overflowed`` float32 []: 1 where this step is skipped.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None, initial: float = INITIAL) -> None:
        self.group, self.interval = group, INTERVAL
        self.scale = torch.full((), initial, dtype=torch.float32, device=device)
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)
        self.good = torch.zeros((), dtype=torch.int64, device=device)
        self.overflowed = torch.zeros((), dtype=torch.float32, device=device)

    def state(self) -> dict[str, Tensor]:
        """What a run goes on from, to be saved and loaded in place."""
        return {"scale": self.scale, "skipped": self.skipped, "good": self.good}

    def agree(self, gradients: Iterable[Tensor]) -> None:
        """Look for infinities and NaNs in this rank's gradients, and then in everybody's."""
        largest = [torch.linalg.vector_norm(g, torch.inf, dtype=torch.float32) for g in gradients if g.numel()]
        found = torch.stack(largest).sum() if largest else torch.zeros_like(self.scale)
        self.overflowed = (~torch.isfinite(found)).float()
        if self.group is not None:
            dist.all_reduce(self.overflowed, op=dist.ReduceOp.MAX, group=self.group)

    def update(self, optimizer: Any, factor: Tensor | None) -> None:
        """Step with gradients divided by the scale and multiplied by ``factor`` (clipping), or skip; then adapt."""
        inner: Any = getattr(optimizer, "inner", optimizer)
        # What the fused kernels of torch take from its own GradScaler; they skip on the device.
        inner.grad_scale = self.scale if factor is None else self.scale / factor
        inner.found_inf = self.overflowed
        optimizer.step()
        skip = self.overflowed > 0
        self.skipped.add_(skip)
        good = torch.where(skip, 0, self.good + 1)
        grows = good >= self.interval
        self.scale.copy_(torch.where(skip, self.scale / 2, torch.where(grows, self.scale * 2, self.scale)))
        self.good.copy_(torch.where(grows, 0, good))


def prepare(optimizer: Any) -> None:
    """Make SGD's momentum now: its fused kernel leaves it without values if the first step is skipped."""
    inner: Any = getattr(optimizer, "inner", optimizer)
    if isinstance(inner, torch.optim.SGD):
        for group in inner.param_groups:
            for p in group["params"] if group["momentum"] else ():
                inner.state[p]["momentum_buffer"] = torch.zeros_like(p)
