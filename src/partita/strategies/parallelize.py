"""Applies the rooms of a layout to a model, in their order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from partita.facts.case import Case
from partita.strategies.groups import Groups
from partita.strategies.order import appliers


@dataclass
class Step:
    """A training step in parts, and what a room's ``apply`` may change of it.

    ``module`` keeps the global names.  ``parts`` is what runs as one call (the whole model; later, one a stage),
    which FSDP shards and DDP wraps in place.  ``calls`` makes the decoder's calls for a batch.  ``prepare`` changes
    batches before they run; ``around`` are contexts round the whole step, ``contexts`` round micro-batch i of n,
    ``forward_contexts`` round its forward alone; ``after_backward`` runs once before the norm is measured;
    ``execute`` runs the micro-batches in another way than one after another.
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
    materialise: Callable[[], None] = field(default=lambda: None)
    aliases: dict[str, str] = field(default_factory=dict)
    optimizer: Any = None
    timeline: Any = None

    def __post_init__(self) -> None:
        self.parts = self.parts or [self.module]

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters under their global names."""
        for name, p in self.module.named_parameters():
            yield self.aliases.get(name, name), p


def parallelize(
    module: nn.Module,
    calls: Callable[[Any], Any],
    groups: Groups | None,
    case: Case,
    materialise: Callable[[], None] = lambda: None,
) -> Step:
    """The step of ``case``: every room's second door, in order."""
    step = Step(module, calls, materialise=materialise)
    for _, room in appliers(case.layout):
        room.apply(step, groups, case)
    return step
