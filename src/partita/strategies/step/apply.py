"""Gives the step its optimizer, and its autocast or loss scaling where the precision asks for one."""

from __future__ import annotations

import torch

from partita.facts.case import Case
from partita.strategies.groups import Groups
from partita.strategies.parallelize import Step
from partita.strategies.step.optimizer import build
from partita.strategies.step.predict import scaled
from partita.strategies.step.scaling import LossScale, prepare


def apply(step: Step, groups: Groups | None, case: Case) -> None:
    step.materialise()
    step.optimizer = build(step.pieces(), case.work, case.precision, step.host)
    step.optimizer.on_host = case.host
    if scaled(case.precision):
        group = groups.group(*case.mesh.names) if groups else None
        step.scaling = LossScale(step.device, group)
        prepare(step.optimizer)
    if case.precision.autocast:
        device = step.device.type
        dtype = getattr(torch, case.precision.compute)
        step.forward_contexts.append(lambda: torch.autocast(device, dtype))
