"""Applies the rooms of a layout to a model, in their order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from partita.facts.case import Case
from partita.facts.frozen import is_frozen
from partita.strategies.groups import Groups
from partita.strategies.order import appliers


@dataclass(frozen=True)
class Slice:
    """Elements ``begin`` <= i < ``end`` of a parameter laid flat; they lie at ``offset`` of an ``Owned`` tensor."""

    name: str
    begin: int
    end: int
    offset: int


@dataclass(frozen=True)
class Owned:
    """What this rank's optimizer updates as one tensor: a parameter, or elements of several that lie flat.

    ``name`` is a global name whose norm axes are those of the whole; ``decays``: whether weight decay applies.
    ``slices`` is empty for a whole parameter (or its DTensor).
    """

    name: str
    tensor: nn.Parameter
    decays: bool
    slices: tuple[Slice, ...] = ()


@dataclass
class Step:
    """A training step in parts, and what a room's ``apply`` may change of it.

    ``module`` keeps the global names.  ``parts`` is what runs as one call (the whole model; later, one a stage),
    which FSDP shards and DDP wraps in place.  ``calls`` makes the decoder's calls for a batch.  ``prepare`` changes
    batches before they run; ``around`` are contexts round the whole step, ``contexts`` round micro-batch i of n,
    ``forward_contexts`` round its forward alone; ``after_backward`` runs once before the norm is measured;
    ``execute`` runs the micro-batches in another way than one after another.
    ``owned`` is what the optimizer updates, where it is not each parameter; ``after_step`` runs after it has;
    ``settling`` waits for what ``after_step`` left under way.  ``scaling`` scales the loss, for float16.
    ``device`` is where the model runs; ``host`` keeps masters and updates them, where that is not the device's work.
    ``materialise`` gives a model that was built without storage its values, once: a room that shards calls it
    after, one that copies before.
    """

    module: nn.Module
    calls: Callable[[Any], Any]
    parts: list[nn.Module] = field(default_factory=list)
    prepare: list[Callable[[Any], Any]] = field(default_factory=list)
    execute: Callable[..., Tensor] | None = None
    around: list[Callable[[], AbstractContextManager[Any]]] = field(default_factory=list)
    contexts: list[Callable[[int, int], AbstractContextManager[Any]]] = field(default_factory=list)
    forward_contexts: list[Callable[[], AbstractContextManager[Any]]] = field(default_factory=list)
    after_backward: list[Callable[[], None]] = field(default_factory=list)
    after_step: list[Callable[[], None]] = field(default_factory=list)
    settling: list[Callable[[], None]] = field(default_factory=list)
    owned: list[Owned] = field(default_factory=list)
    materialise: Callable[[], None] = field(default=lambda: None)
    device: torch.device = field(default=torch.device("cpu"))
    host: Any = None
    aliases: dict[str, str] = field(default_factory=dict)
    optimizer: Any = None
    scaling: Any = None
    timeline: Any = None

    def __post_init__(self) -> None:
        self.parts = self.parts or [self.module]

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters under their global names, settled."""
        self.settle()
        for name, p in self.module.named_parameters():
            yield self.aliases.get(name, name), p

    def pieces(self) -> list[Owned]:
        """What the optimizer updates, whose gradients are measured and clipped: each element once over the ranks that
        hold it in shards."""
        return self.owned or [Owned(name, p, p.dim() >= 2) for name, p in self.named() if p.requires_grad]

    def settle(self) -> None:
        """Wait until parameters are what the last step made them; before anything but a forward reads them."""
        for wait in self.settling:
            wait()


def parallelize(
    module: nn.Module,
    calls: Callable[[Any], Any],
    groups: Groups | None,
    case: Case,
    materialise: Callable[[], None] = lambda: None,
    device: str | torch.device = "cpu",
) -> Step:
    """The step of ``case``: every room's second door, in order; what is frozen gets no gradient from the start."""
    for name, p in module.named_parameters():
        if is_frozen(name, case.work.frozen):
            p.requires_grad_(False)
    step = Step(module, calls, materialise=materialise, device=torch.device(device))
    for _, room in appliers(case.layout):
        room.apply(step, groups, case)
    return step
