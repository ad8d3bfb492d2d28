"""What both the dry run and the real run look at: persistent bytes and the peak of each phase."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import TracebackType

import torch

from partita.facts.ledger import Memory
from partita.observe.memory import state_bytes
from partita.observe.peak import PeakTracker
from partita.strategies.parallelize import Step
from partita.strategies.step.optimizer import MasterOptimizer


def masters_of(step: Step) -> list[torch.Tensor]:
    """The wider copies that the optimizer updates, if there are any."""
    return list(step.optimizer.masters.values()) if isinstance(step.optimizer, MasterOptimizer) else []


def state_rows(step: Step) -> tuple[Memory, ...]:
    """Persistent bytes by object, to be read after the optimizer's step and before gradients are cleared."""
    owned = ((o.name, o.tensor) for o in step.pieces())  # beside the parameters, whose storage it may share
    return state_bytes([*step.named(), *owned], step.optimizer, masters_of(step))


def held(step: Step) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """What stands before a step begins; gradients too, whose buckets outlive them."""
    yield "parameters", [p for _, p in step.named()]
    yield "master", masters_of(step)
    yield "gradients", [p.grad for _, p in step.named() if p.grad is not None]
    values = [v for state in step.optimizer.state.values() for v in state.values()]
    yield "optimizer state", [v for v in values if isinstance(v, torch.Tensor)]


class Tracked:
    """The tracker of peaks as a watch of ``train_step``, whose phases it takes over."""

    def __init__(self) -> None:
        self.tracker = PeakTracker()

    def __enter__(self) -> Tracked:
        self.tracker.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.tracker.__exit__(kind, error, trace)

    def hold(self, step: Step) -> None:
        """Names what stands now."""
        for name, tensors in held(step):
            self.tracker.hold(name, tensors)

    def step(self, index: int) -> None:
        self.tracker.step(index)

    def phase(self, name: str) -> AbstractContextManager[None]:
        return self.tracker.phases.mark(name)

    def peaks(self, step: int) -> dict[str, int]:
        """Bytes by phase of one step."""
        return {p.phase: p.bytes for p in self.tracker.peaks(step) if p.phase in ("forward", "backward", "step")}
