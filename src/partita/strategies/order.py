"""The rooms of a layout, in the order in which they apply.

Each room says when it is wanted, which words of the layout it answers for, and which rooms it comes after.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from typing import Any, Protocol

from partita.facts.case import Alive, Case, Division
from partita.facts.layout import Layout
from partita.facts.ledger import Gradient, Memory, Traffic
from partita.facts.precision import Precision

NAMES = ("recompute", "ddp", "zero", "fsdp", "offload", "step")
NEUTRAL = ("dp", "mb", "sp")  # words that every layout has, whatever rooms are in it


class Predict(Protocol):
    """A room's first door.  One that also works with a scaled loss says ``SCALES_LOSS = True``."""

    AFTER: tuple[str, ...]
    WORDS: tuple[str, ...]

    def wanted(self, layout: Layout) -> bool: ...
    def refuse(self, case: Case) -> Iterator[str]: ...
    def store(self, precision: Precision) -> Precision: ...
    def divide(self, case: Case) -> Division: ...
    def memory(self, case: Case) -> Iterator[Memory]: ...
    def alive(self, case: Case) -> Iterator[Alive]: ...
    def traffic(self, case: Case) -> Iterator[Traffic]: ...
    def gradients(self, case: Case) -> Iterator[Gradient]: ...


def predictors(layout: Layout) -> list[tuple[str, Predict]]:
    """(name, first door) of the layout's rooms."""
    return [(n, _door(n, "predict")) for n in names(layout)]


def appliers(layout: Layout) -> list[tuple[str, Any]]:
    """(name, second door) of the layout's rooms; imports torch."""
    return [(n, _door(n, "apply")) for n in names(layout)]


def names(layout: Layout) -> list[str]:
    """Names of the rooms in a layout, each after those that it says it comes after."""
    wanted = {n: door for n in NAMES if (door := _door(n, "predict")).wanted(layout)}
    out: list[str] = []
    while len(out) < len(wanted):
        ready = next(n for n in wanted if n not in out and not set(wanted[n].AFTER) & (set(wanted) - set(out)))
        out.append(ready)
    return out


def unclaimed(layout: Layout) -> Iterator[str]:
    """A sentence for every word of the layout that says something no room in it would do."""
    default = Layout()
    claimed = {w for n in names(layout) for w in _door(n, "predict").WORDS} | set(NEUTRAL)
    if layout.dp * layout.cp == 1:
        claimed.add("state")
    for f in fields(Layout):
        value = getattr(layout, f.name)
        if f.name in claimed or value == getattr(default, f.name):
            continue
        rooms = [n for n in NAMES if f.name in _door(n, "predict").WORDS and f.name != "state"]
        works = f"it belongs to {' and '.join(rooms)}; leave it out here" if rooms else f"what works: {_known()}"
        yield f"layout '{layout}': nothing in it does {f.name}={value}; {works}"


def _known() -> str:
    return "dp=N with ddp, zero1, zero2, full_shard or shard_grad_op"


def _door(name: str, door: str) -> Any:
    return import_module(f"partita.strategies.{name}.{door}")
