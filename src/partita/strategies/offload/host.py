"""The host's side of an optimizer: master copies in host memory, and when they are updated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from partita.observe.private import is_fake

Run = Sequence[tuple[nn.Parameter, nn.Parameter]]
"""Parameters on the device with their masters on the host, few enough to be updated together."""


class Host:
    """Updates masters on the host.

    ``after``: the number of steps before the update is delayed by one (None: never).  Delayed, ``step`` gives the
    device what the host made of the last step's gradients and leaves this step's with the host, which works on them
    while the device goes on.  ``numbers`` are the steps done, and whether an update has not reached the device yet:
    outside torch, so that they have values in a dry run too.
    """

    def __init__(self, after: int | None, pin: bool) -> None:
        self.after, self.pin = after, pin
        self.numbers = np.zeros(2, dtype=np.int64)
        self.buffers: dict[nn.Parameter, Tensor] = {}
        self.worker: ThreadPoolExecutor | None = None
        self.working: Future[None] | None = None

    def state(self) -> dict[str, Tensor]:
        """What a run goes on from, beside masters and optimizer state; loaded in place."""
        return {"numbers": torch.from_numpy(self.numbers)}

    @property
    def owed(self) -> bool:
        return bool(self.numbers[1])

    def copy(self, p: nn.Parameter, dtype: torch.dtype) -> Tensor:
        """A master copy of a parameter, which also gets its buffer."""
        self.buffers[p] = torch.empty_like(p, device="cpu", pin_memory=self.pin, requires_grad=False)
        return p.detach().to("cpu", dtype, copy=True)

    @torch.no_grad()
    def step(self, runs: Sequence[Run], inner: Any) -> None:
        """One optimizer step; ``wait`` must have been called, so that nothing else works on the masters."""
        if self.owed:
            self.give(runs)
        present = self.take(runs)
        if self.after is None or self.numbers[0] < self.after:
            self.update(runs, inner, present)
            self.give(runs)
        else:
            self.numbers[1] = 1
            self.launch(runs, inner, present)
        self.numbers[0] += 1

    def launch(self, runs: Sequence[Run], inner: Any, present: set[nn.Parameter]) -> None:
        """Let the host work on its own; on tensors without data there is nothing to overlap."""
        if any(is_fake(buffer) for buffer in self.buffers.values()):
            self.update(runs, inner, present)
            return
        self.worker = self.worker or ThreadPoolExecutor(1, "host optimizer")
        self.working = self.worker.submit(self.update, runs, inner, present)

    def take(self, runs: Iterable[Run]) -> set[nn.Parameter]:
        """Gradients from the device into the buffers; returns the parameters that have one."""
        present = set()
        for p, _ in (pair for run in runs for pair in run):
            if p.grad is not None:
                self.buffers[p].copy_(p.grad)
                present.add(p)
        return present

    @torch.no_grad()
    def update(self, runs: Iterable[Run], inner: Any, present: set[nn.Parameter]) -> None:
        """Masters, from the gradients in the buffers; widened run by run."""
        for run in runs:
            for p, master in run:
                master.grad = self.buffers[p].to(master.dtype) if p in present else None
            inner.step()
            for _, master in run:
                master.grad = None

    def give(self, runs: Iterable[Run]) -> None:
        """Updated parameters to the device, through the buffers."""
        for p, master in (pair for run in runs for pair in run):
            self.buffers[p].copy_(master)
            p.copy_(self.buffers[p])
        self.numbers[1] = 0

    def wait(self) -> None:
        """Until the host's work is done; raises what it raised.  Parameters on the device stay as they are."""
        if self.working is not None:
            working, self.working = self.working, None
            working.result()
