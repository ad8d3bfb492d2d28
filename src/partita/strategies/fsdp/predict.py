"""Each unit's parameters lie in shards over the data axes; gathered before use, gradients reduce-scattered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from partita.facts.case import Alive, Case, Division, Split
from partita.facts.layout import Layout
from partita.facts.ledger import Gradient, Memory, Traffic
from partita.facts.mesh import Coordinate, Ranks
from partita.facts.precision import ITEM_BYTES, Precision
from partita.strategies.fsdp.wrapping import Wrapped, small, wrapped

AFTER: tuple[str, ...] = ()
WORDS = ("state", "shard", "reshard", "wrap", "prefetch")
STATES = ("full_shard", "shard_grad_op")


def wanted(layout: Layout) -> bool:
    return layout.state in STATES and layout.dp * layout.cp > 1


def refuse(case: Case) -> Iterator[str]:
    """``shard`` must be a group of data ranks, ``reshard`` one of the shards, ``wrap`` no more than the blocks."""
    shard, cp, ranks = case.layout.shard, case.layout.cp, case.layout.dp * case.layout.cp
    shards = shard or ranks
    if shard and (shard > ranks or shard % cp or ranks % shard):
        works = [d for d in range(1, ranks + 1) if d % cp == 0 and ranks % d == 0]
        nearest = min(works, key=lambda d: abs(d - shard))
        yield f"shard={shard} is no group of the {ranks} data ranks; the nearest that works is shard={nearest}"
    elif case.layout.reshard not in ("default", "all"):
        yield from _refuse_reshard(case.layout, shards)
    if case.layout.reshard != "default" and case.layout.state == "shard_grad_op":
        yield (
            f"shard_grad_op keeps parameters after forward and reshard={case.layout.reshard} drops them;"
            f" what works: full_shard reshard={case.layout.reshard}"
        )
    blocks = max(1, case.model.layers)
    for word in ("wrap", "prefetch"):
        given = getattr(case.layout, word)
        if given > blocks:
            yield f"{word}={given} is more than the {blocks} blocks of {case.model.name}; at most {word}={blocks} works"


def _refuse_reshard(layout: Layout, shards: int) -> Iterator[str]:
    works = [k for k in range(2, shards) if shards % k == 0 and k % layout.cp == 0]
    if not layout.reshard.isdecimal():
        groups = f" or one of {', '.join(map(str, works))} ranks" if works else ""
        yield f"reshard={layout.reshard} is not known; what works: default, all{groups}"
    elif int(layout.reshard) not in works:
        nearest = min(works, key=lambda k: abs(k - int(layout.reshard)), default=None)
        near = (
            f"the nearest that works is reshard={nearest}" if nearest else "what works: reshard=default or reshard=all"
        )
        yield f"reshard={layout.reshard} does not cut the {shards} ranks of a shard group into smaller ones; {near}"


def store(precision: Precision) -> Precision:
    """FSDP2 keeps one float32 shard instead of a 16-bit parameter and its master: 4 + 4 + 8 bytes, the same sum."""
    if precision.master is None:
        return precision
    wide = precision.master
    return replace(precision, weights=wide, gradients=wide, reduction=wide, master=None)


def over(case: Case) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(axes that shard, axes that hold copies)."""
    parts = case.mesh.atoms("dp")
    copies = tuple(a for a in parts if a == "dp.r")
    return (*(a for a in parts if a not in copies), "cp"), copies


def divide(case: Case) -> Division:
    axes = over(case)[0]
    if case.mesh.size(*axes) == 1:
        return Division()
    split = Split("fsdp", axes, 0, store_padded=True)
    return Division({p.name: split for s in case.model.spans for p in s.parameters})


def gathered_elements(case: Case, unit: Wrapped, coordinate: Coordinate, trained: bool = False) -> int:
    """Elements of one gathered unit, padding included; ``trained``: of those that get gradients."""
    ranks = case.mesh.size(*over(case)[0])
    return ranks * sum(
        times * h.elements(case.mesh, coordinate, padded=True) for h, times in unit.held if h.trained or not trained
    )


def memory(case: Case) -> Iterator[Memory]:
    """Shards are stored at the whole chunk, where the last rank's share is short."""
    p = case.precision
    rows = (
        ("parameters", "persistent", p.weights, False, "parameter shards are stored at the whole chunk"),
        ("gradients", "step", p.gradients, True, "gradient shards come out of reduce-scatter at the whole chunk"),
    )
    folded: list[tuple[Ranks, int]] = []
    for name, phase, dtype, trained, why in rows:
        if not trained or case.work.frozen:
            folded = list(case.mesh.fold(partial(_short, case, trained), case.cuts, *case.mesh.names))
        for ranks, elements in folded:
            if elements:
                size = elements * ITEM_BYTES[dtype]
                yield Memory("fsdp", "padding", phase, case.tier(name), ranks, dtype, size, why, name)


def _short(case: Case, trained: bool, c: Coordinate) -> int:
    """Elements by which one rank's storage is longer than its shards."""
    held = (h for h in case.held if h.trained or not trained)
    return sum(h.count * (h.elements(case.mesh, c, padded=True) - h.elements(case.mesh, c)) for h in held)


def alive(case: Case) -> Iterator[Alive]:
    from partita.strategies.fsdp import transients

    yield from transients.alive(case)


def traffic(case: Case) -> Iterator[Traffic]:
    p, n = case.precision, case.mesh.size(*over(case)[0])
    for unit in wrapped(case):
        whole = dict(case.mesh.fold(partial(gathered_elements, case, unit), case.cuts, "tp"))
        trained = whole
        if case.work.frozen:
            trained = dict(case.mesh.fold(partial(gathered_elements, case, unit, trained=True), case.cuts, "tp"))
        for ranks, elements in whole.items():
            yield from _gathers(case, unit, ranks, elements * ITEM_BYTES[p.gathered])
        for ranks, elements in trained.items():
            if elements:
                reduced = elements * ITEM_BYTES[p.reduction]
                yield from _reductions(case, unit, ranks, reduced, reduced // n)


def _gathers(case: Case, unit: Wrapped, ranks: Ranks, size: int) -> Iterator[Traffic]:
    """Parameters of one unit before its forward and before its backward; ``size`` in bytes of one call."""
    shards, dtype = case.mesh.live(*over(case)[0]), case.precision.gathered
    again, where = (case.mesh.live("dp.i", "cp"), " from the nearer ranks") if small(case.layout) else (shards, "")
    rows = (
        (shards, unit.forward_gathers, "forward", "parameters before use"),
        (again, unit.backward_gathers, "backward", f"parameters again{where}, for backward"),
    )
    for axis, calls, phase, why in rows:
        hidden = None if unit.name == "root" else phase
        yield Traffic("fsdp", "all_gather", axis, ranks, dtype, size, calls * unit.count, phase, hidden, why, unit.name)


def _reductions(case: Case, unit: Wrapped, ranks: Ranks, whole: int, shard: int) -> Iterator[Traffic]:
    """Gradients of one unit, once a step; ``whole`` and ``shard`` in bytes of one call."""
    shards, copies = (case.mesh.live(*a) for a in over(case))
    rows = (
        ("reduce_scatter", shards, whole, "gradients, summed to their owners"),
        ("all_reduce", copies, shard, "gradient shards, summed over the copies"),
    )
    for verb, axis, size, why in rows:
        dtype = case.precision.reduction
        yield Traffic("fsdp", verb, axis, ranks, dtype, size, unit.count, "backward", "backward", why, unit.name)


def gradients(case: Case) -> Iterator[Gradient]:
    axes = case.mesh.live(*over(case)[0], *over(case)[1])
    reduction = "reduce_scatter, sum" + (", then all_reduce over the copies" if case.mesh.live(*over(case)[1]) else "")
    for h in case.trained:
        yield Gradient("fsdp", h.parameter.name, axes, "partial", reduction, "counted tokens of the global batch")
