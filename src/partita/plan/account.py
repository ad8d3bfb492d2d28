"""Account: layout -> ledger.

Folds the rooms' divisions, in their order, into one case; says how often every unit runs; asks each room for its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from partita.facts import frozen
from partita.facts.case import Case, Flat, Held, Part, Saving, Split, Unit
from partita.facts.errors import Refused
from partita.facts.layout import Layout
from partita.facts.ledger import Ledger
from partita.facts.mesh import Mesh
from partita.facts.model import Model, Span
from partita.facts.work import Training
from partita.plan.peak import transients
from partita.strategies.order import Predict, predictors, unclaimed

R = TypeVar("R")


@dataclass(frozen=True)
class Account:
    """A layout, divided and priced."""

    case: Case
    ledger: Ledger
    rooms: tuple[str, ...]


def account(model: Model, layout: Layout, work: Training, kernels: str = "cpu") -> Account:
    """Price a layout.  Raises ``Refused`` with every room's reason."""
    rooms = predictors(layout)
    case = case_of(model, layout, work, rooms, kernels)

    def ask(question: Callable[[Predict], Iterable[R]]) -> tuple[R, ...]:
        return tuple(row for _, room in rooms for row in question(room))

    alive = ask(lambda room: room.alive(case))
    ledger = Ledger(
        case.mesh,
        ask(lambda room: room.memory(case)) + tuple(transients(case, alive)),
        tuple(t for t in ask(lambda room: room.traffic(case)) if t.axis and t.count),
        tuple(g for g in ask(lambda room: room.gradients(case)) if g.axis),
    )
    return Account(case, ledger, tuple(name for name, _ in rooms))


def case_of(
    model: Model, layout: Layout, work: Training, rooms: list[tuple[str, Predict]], kernels: str = "cpu"
) -> Case:
    """Divide: what is held where, and how often it runs."""
    scales = all(getattr(room, "SCALES_LOSS", False) for _, room in rooms)
    bare = Case(model, layout, Mesh.of(layout), work, work.precision, kernels, scales_loss=scales)
    reasons = [*unclaimed(layout), *frozen.refuse(model, work.frozen)] + [
        f"layout '{layout}': {why}" for _, room in rooms for why in room.refuse(bare)
    ]
    if reasons:
        raise Refused("; ".join(reasons))
    precision = work.precision
    flat: Flat | None = None
    savings: tuple[tuple[int, int, Saving], ...] = ()
    host: frozenset[str] = frozenset()
    splits: dict[str, tuple[Split, ...]] = {}
    streams: dict[str, tuple[Split, ...]] = {}
    for _, room in rooms:
        precision = room.store(precision)
        division = room.divide(bare)
        flat = division.flat or flat
        savings += division.savings
        host |= frozenset(division.host)
        if division.master and precision.master is None:
            precision = replace(precision, master=precision.weights)
        for name, split in division.parameters.items():
            splits[name] = (*splits.get(name, ()), split)
        for name, split in division.streams.items():
            streams[name] = (*streams.get(name, ()), split)
    units: tuple[Unit, ...] = ()
    backward = 0  # nothing runs backward through what is frozen up to here
    for span in bare.spans:
        backward = backward or bare.micro_batches * any(not p.frozen for p in span.parameters)
        runs = _runs(span, savings)
        units += tuple(_unit(part, saving, bare.micro_batches, backward, splits) for part, saving in runs)
    parts = (Part(0, tuple(u.name for u in units)),)
    return replace(bare, precision=precision, units=units, streams=streams, parts=parts, flat=flat, host=host)


def _runs(span: Span, savings: tuple[tuple[int, int, Saving], ...]) -> Iterator[tuple[Span, Saving | None]]:
    """A span cut where what its blocks keep changes."""
    at = span.first
    for first, end, saving in savings if span.is_blocks else ():
        first, end = max(first, at), min(end, span.end)
        if first >= end:
            continue
        if at < first:
            yield span.cut(at, first), None
        yield span.cut(first, end), saving
        at = end
    if not span.is_blocks or at < span.end:
        yield (span.cut(at, span.end) if at > span.first else span), None


def _unit(span: Span, saving: Saving | None, passes: int, backward: int, splits: dict[str, tuple[Split, ...]]) -> Unit:
    held = tuple(Held(p, span.count, splits.get(p.name, ())) for p in span.parameters)
    return Unit(span.name, span.count, held, passes, backward, backward if saving else 0, saving)
