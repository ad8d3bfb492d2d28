"""Builds a step: the decoder without storage, the rooms of the layout, then values for what this rank owns."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from partita.facts.case import Case
from partita.facts.model import Model
from partita.model.decoder import Calls, Decoder, plain
from partita.strategies.groups import Groups
from partita.strategies.parallelize import Step, parallelize
from partita.train.data import Batch

Values = Callable[[Iterable[tuple[str, Tensor]]], None]


def build(case: Case, groups: Groups | None, values: Values, device: str | torch.device = "cpu") -> Step:
    """A step of ``case`` on this rank; ``values`` fills named parameters in place (whole ones, or DTensor shards).

    No tensor is ever larger than what the rank owns: the model is divided before it has storage.
    """
    with torch.device("meta"):
        module = Decoder(case.model).to(getattr(torch, case.precision.weights))
    where = "cpu" if case.tier("parameters") == "host" else device
    once = Once(module, values, where)
    return parallelize(module, calls_of(case.model), groups, case, once, device)


def calls_of(model: Model) -> Callable[[Batch], Calls]:
    """What the decoder is called with for a batch on one device."""
    return lambda batch: plain(model, batch.documents)


class Once:
    """Gives a module on the meta device storage and values, the first time it is called."""

    def __init__(self, module: nn.Module, values: Values, device: str | torch.device) -> None:
        self.module, self.values, self.device, self.done = module, values, device, False

    def __call__(self) -> None:
        if self.done:
            return
        self.done = True
        materialise(self.module, self.device)
        self.values(self.module.named_parameters())


def materialise(module: nn.Module, device: str | torch.device) -> None:
    """Replace parameters on the meta device by empty ones, keeping ties (``to_empty`` would cut them)."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for part in module.modules():
        for name, p in list(part._parameters.items()):
            if p is not None and p.is_meta:
                if p not in made:
                    made[p] = nn.Parameter(torch.empty_like(p, device=device), requires_grad=p.requires_grad)
                part._parameters[name] = made[p]
