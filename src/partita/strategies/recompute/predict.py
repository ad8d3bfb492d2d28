"""Which blocks keep what, and the forward that is run again for the rest."""

from __future__ import annotations

from collections.abc import Iterator

from partita.facts.case import Alive, Case, Division
from partita.facts.layout import Layout
from partita.facts.ledger import Gradient, Memory, Traffic
from partita.facts.precision import Precision
from partita.strategies.recompute.policy import Policy, read, saving

AFTER: tuple[str, ...] = ()
WORDS = ("recompute",)


def wanted(layout: Layout) -> bool:
    return layout.recompute != "none"


def refuse(case: Case) -> Iterator[str]:
    policy = read(case.layout)
    if isinstance(policy, str):
        yield policy
        return
    layers = case.model.layers
    if case.model.bare:
        yield f"recompute={case.layout.recompute} needs to know the blocks of {case.model.name}; give its config.json"
    elif policy.blocks and policy.blocks[-1][1] > layers:
        yield (
            f"recompute={case.layout.recompute} names block {policy.blocks[-1][1] - 1}, and {case.model.name} has"
            f" {layers}; what works: blocks 0-{layers - 1}"
        )


def store(precision: Precision) -> Precision:
    return precision


def divide(case: Case) -> Division:
    """The blocks under the policy, as runs."""
    policy = read(case.layout)
    assert isinstance(policy, Policy)
    kept = saving(policy, case.model)
    return Division(savings=tuple((lo, hi, kept) for lo, hi, chosen in policy.runs(case.model.layers) if chosen))


def memory(case: Case) -> Iterator[Memory]:
    return iter(())


def alive(case: Case) -> Iterator[Alive]:
    """What is kept and made again belongs to the step, whose inventory it is."""
    return iter(())


def traffic(case: Case) -> Iterator[Traffic]:
    """Collectives inside a block are priced by their own rooms, which see how often it is replayed."""
    return iter(())


def gradients(case: Case) -> Iterator[Gradient]:
    return iter(())
