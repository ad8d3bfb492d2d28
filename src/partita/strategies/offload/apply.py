"""Gives the step a host for its optimizer; FSDP's own policy does the rest."""

from __future__ import annotations

from partita.facts.case import Case
from partita.strategies.groups import Groups
from partita.strategies.offload.host import Host
from partita.strategies.parallelize import Step


def apply(step: Step, groups: Groups | None, case: Case) -> None:
    layout = case.layout
    if layout.offload == "parameters":
        return
    delayed = layout.offload == "optimizer_delayed"
    step.host = Host(layout.delay_after if delayed else None, pin=step.device.type == "cuda")
    step.settling.append(step.host.wait)
