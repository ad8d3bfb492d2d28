"""Each unit's parameters lie in shards over the data axes; gathered before use, gradients reduce-scattered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from partita.facts.case import Alive, Case, Division, Held, Split, Unit
from partita.facts.layout import Layout
from partita.facts.ledger import Gradient, Memory, Traffic
from partita.facts.mesh import Coordinate, Ranks
from partita.facts.precision import ITEM_BYTES, Precision

AFTER: tuple[str, ...] = ()
WORDS = ("state", "shard")
STATES = ("full_shard", "shard_grad_op")


def wanted(layout: Layout) -> bool:
    return layout.state in STATES and layout.dp * layout.cp > 1


def refuse(case: Case) -> Iterator[str]:
    """``shard`` must be a group of data ranks."""
    shard, cp, ranks = case.layout.shard, case.layout.cp, case.layout.dp * case.layout.cp
    if shard and (shard > ranks or shard % cp or ranks % shard):
        works = [d for d in range(1, ranks + 1) if d % cp == 0 and ranks % d == 0]
        nearest = min(works, key=lambda d: abs(d - shard))
        yield f"shard={shard} is no group of the {ranks} data ranks; the nearest that works is shard={nearest}"


def store(precision: Precision) -> Precision:
    """FSDP2 keeps one float32 shard instead of a 16-bit parameter and its master: 4 + 4 + 8 bytes, the same sum."""
    if precision.master is None:
        return precision
    wide = precision.master
    return replace(precision, weights=wide, gradients=wide, reduction=wide, master=None)


def over(case: Case) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(axes that shard, axes that hold copies)."""
    return (("dp.s", "cp"), ("dp.r",)) if "dp.s" in case.mesh.names else (("dp", "cp"), ())


def divide(case: Case) -> Division:
    axes = over(case)[0]
    if case.mesh.size(*axes) == 1:
        return Division()
    split = Split("fsdp", axes, 0, store_padded=True)
    return Division({p.name: split for s in case.model.spans for p in s.parameters})


@dataclass(frozen=True)
class Wrapped:
    """What one ``fully_shard`` call makes: its parameters, how many such units there are, and its gathers a step."""

    name: str
    count: int
    held: tuple[Held, ...]
    forward_gathers: int
    backward_gathers: int


def wrapped(case: Case) -> tuple[Wrapped, ...]:
    """The root unit (what lies outside the blocks), then the blocks."""
    keep = case.layout.state == "shard_grad_op"
    outside = [u for u in case.units if not u.is_blocks]
    blocks = [u for u in case.units if u.is_blocks]
    passes = outside[0].forward
    root = tuple(h for u in outside for h in u.held)

    def unit(u: Unit) -> Wrapped:
        gathers = (1, 0) if keep else (u.forward, u.backward)
        return Wrapped(u.name, u.count, u.held, *gathers)

    return (Wrapped("root", 1, root, 1 if keep else passes, 0), *(unit(u) for u in blocks))


def gathered_elements(case: Case, unit: Wrapped, coordinate: Coordinate) -> int:
    """Elements of one gathered unit, padding included."""
    ranks = case.mesh.size(*over(case)[0])
    return ranks * sum(h.count // unit.count * h.elements(case.mesh, coordinate, padded=True) for h in unit.held)


def memory(case: Case) -> Iterator[Memory]:
    """Shards are stored at the whole chunk, where the last rank's share is short."""

    def short(c: Coordinate) -> int:
        return sum(h.count * (h.elements(case.mesh, c, padded=True) - h.elements(case.mesh, c)) for h in case.held)

    p = case.precision
    for ranks, elements in case.mesh.fold(short, case.cuts, *case.mesh.names):
        if elements:
            why = "parameter shards are stored at the whole chunk"
            size = elements * ITEM_BYTES[p.weights]
            yield Memory("fsdp", "padding", "persistent", "device", ranks, p.weights, size, why, "parameters")
            why = "gradient shards come out of reduce-scatter at the whole chunk"
            size = elements * ITEM_BYTES[p.gradients]
            yield Memory("fsdp", "padding", "step", "device", ranks, p.gradients, size, why, "gradients")


def alive(case: Case) -> Iterator[Alive]:
    from partita.strategies.fsdp import transients

    yield from transients.alive(case)


def traffic(case: Case) -> Iterator[Traffic]:
    p, n = case.precision, case.mesh.size(*over(case)[0])
    for unit in wrapped(case):
        sizes = case.mesh.fold(partial(gathered_elements, case, unit), case.cuts, "tp")
        for ranks, elements in sizes:
            whole, reduced = elements * ITEM_BYTES[p.gathered], elements * ITEM_BYTES[p.reduction]
            yield from _unit_traffic(case, unit, ranks, whole, reduced, reduced // n)


def _unit_traffic(case: Case, unit: Wrapped, ranks: Ranks, whole: int, reduced: int, shard: int) -> Iterator[Traffic]:
    """Rows of one unit; ``whole``, ``reduced`` and ``shard`` in bytes of one call."""
    p = case.precision
    shards, copies = (case.mesh.live(*a) for a in over(case))
    rows = (
        ("all_gather", shards, p.gathered, whole, unit.forward_gathers, "forward", "parameters before use"),
        ("all_gather", shards, p.gathered, whole, unit.backward_gathers, "backward", "parameters again, for backward"),
        ("reduce_scatter", shards, p.reduction, reduced, 1, "backward", "gradients, summed to their owners"),
        ("all_reduce", copies, p.reduction, shard, 1, "backward", "gradient shards, summed over the copies"),
    )
    for verb, axis, dtype, size, calls, phase, why in rows:
        hidden = None if unit.name == "root" and phase == "forward" else phase
        yield Traffic("fsdp", verb, axis, ranks, dtype, size, calls * unit.count, phase, hidden, why, unit.name)


def gradients(case: Case) -> Iterator[Gradient]:
    axes = case.mesh.live(*over(case)[0], *over(case)[1])
    reduction = "reduce_scatter, sum" + (", then all_reduce over the copies" if case.mesh.live(*over(case)[1]) else "")
    for h in case.held:
        yield Gradient("fsdp", h.parameter.name, axes, "partial", reduction, "counted tokens of the global batch")
