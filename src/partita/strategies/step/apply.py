"""Gives the step its optimizer, and its autocast where the precision asks for one."""

from __future__ import annotations

import torch

from partita.facts.case import Case
from partita.strategies.groups import Groups
from partita.strategies.parallelize import Step
from partita.strategies.step.optimizer import build


def apply(step: Step, groups: Groups | None, case: Case) -> None:
    step.materialise()
    step.optimizer = build(list(step.named()), case.work, case.precision)
    if case.precision.autocast:
        device = next(step.module.parameters()).device.type
        dtype = getattr(torch, case.precision.compute)
        step.forward_contexts.append(lambda: torch.autocast(device, dtype))
