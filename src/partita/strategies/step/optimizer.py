"""The optimizer of a step: torch's AdamW or SGD, over the parameters or over a float32 master copy of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from partita.facts.precision import Precision
from partita.facts.work import Training
from partita.strategies.parallelize import Owned
from partita.strategies.step.chunks import chunks
from partita.strategies.step.predict import scaled


def build(owned: list[Owned], work: Training, precision: Precision, host: Any = None) -> Any:
    """An optimizer over what this rank owns; weight decay on matrices alone.  ``host`` keeps masters elsewhere."""
    if precision.master is None:
        return _plain([(o.tensor, o.decays) for o in owned], work)
    return MasterOptimizer(owned, work, getattr(torch, precision.master), scaled(precision), host)


def _plain(tensors: list[tuple[nn.Parameter, bool]], work: Training, fused: bool = False) -> torch.optim.Optimizer:
    decayed = [p for p, decays in tensors if decays]
    rest = [p for p, decays in tensors if not decays]
    groups = [{"params": decayed, "weight_decay": work.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    groups = [g for g in groups if g["params"]]
    if work.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=work.lr, momentum=work.momentum, fused=fused)
    # The fused kernel makes no temporaries, and takes the same step on a shard as on the whole.
    return torch.optim.AdamW(groups, lr=work.lr, betas=work.betas, eps=work.eps, fused=True)


def local_bytes(p: torch.Tensor) -> int:
    """Bytes of the part of a tensor that lies on this rank."""
    here = p.to_local() if isinstance(p, DTensor) else p
    return here.numel() * here.element_size()


class MasterOptimizer:
    """Updates a wider copy of each 16-bit parameter and rounds the result back (mixed precision training, arXiv
    1710.03740, section 3.1).

    ``state`` and ``param_groups`` are the inner optimizer's, over the master copies; ``masters`` maps each parameter
    to its copy.  A ``host`` makes the copies and updates them, perhaps while the device goes on: then ``param_groups``
    are what the next step will be told.
    """

    def __init__(
        self, owned: list[Owned], work: Training, dtype: torch.dtype, fused: bool = False, host: Any = None
    ) -> None:
        self.owned, self.host = owned, host
        copy = host.copy if host is not None else lambda p, dtype: p.detach().to(dtype, copy=True)
        self.masters = {o.tensor: nn.Parameter(copy(o.tensor, dtype)) for o in owned}
        self.inner = _plain([(self.masters[o.tensor], o.decays) for o in owned], work, fused)
        self.told = [dict(g) for g in self.inner.param_groups]

    @property
    def state(self) -> Any:
        return self.inner.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups if self.host is None else self.told

    @property
    def pinned(self) -> list[torch.Tensor]:
        """Buffers on the host through which gradients come and parameters go."""
        return [] if self.host is None else list(self.host.buffers.values())

    @torch.no_grad()
    def step(self) -> None:
        """Widen gradients, step, round back; some parameters at a time, so that few wide gradients live together."""
        pairs = list(self.masters.items())
        runs = [pairs[run.start : run.stop] for run in chunks(local_bytes(master) for _, master in pairs)]
        if self.host is not None:
            self.host.wait()
            for group, told in zip(self.inner.param_groups, self.told, strict=True):
                group["lr"] = told["lr"]
            self.host.step(runs, self.inner)
            return
        for run in runs:
            for p, master in run:
                master.grad = None if p.grad is None else p.grad.to(master.dtype)
            self.inner.step()
            for p, master in run:
                master.grad = None
                p.copy_(master)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for p in self.masters:
            if set_to_none:
                p.grad = None
            elif p.grad is not None:
                p.grad.zero_()

    def state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Optimizer state that belongs to a parameter."""
        return self.inner.state[self.masters[parameter]]

    def refresh(self) -> None:
        """Take the parameters' values anew, after they were loaded."""
        for p, master in self.masters.items():
            master.data.copy_(p.detach())

    def each(self) -> Iterator[tuple[str, nn.Parameter, nn.Parameter]]:
        """(global name, parameter, master)."""
        return ((o.name, o.tensor, self.masters[o.tensor]) for o in self.owned)
