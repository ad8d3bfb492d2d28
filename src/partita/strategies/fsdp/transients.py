"""What full sharding gathers and reduces, and when it is alive.

The order of events is that of torch's ``FSDPParamGroup``: before a unit runs its shards arrive in one flat buffer and
are copied out to its parameters; after its backward the parameters go first, then the gradients are copied to one flat
buffer for the reduce-scatter, which stays until the next unit's is needed.  A unit gathered ahead waits in its flat
buffer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from partita.facts.case import BACKWARD, FORWARD, LAST_BACKWARD, LOSS, START, Alive, Case, Moment, Unit
from partita.facts.precision import ITEM_BYTES
from partita.strategies.fsdp.predict import gathered_elements
from partita.strategies.fsdp.wrapping import Wrapped, small, wrapped

AFTER_LOSS, LAST_FORWARD = Moment("loss", 1), Moment("loss", -1)


@dataclass(frozen=True)
class Place:
    """When a unit's blocks run: the first and the last of its forwards and backwards.

    ``unit`` is a run of blocks whose own moments these are, or empty where they are moments of the step.
    """

    unit: str
    forward: Moment
    forward_end: Moment
    backward: Moment
    backward_end: Moment


def alive(case: Case) -> Iterator[Alive]:
    """Gathered parameters, the buffers of gathers and reductions, and gradients before they are sharded."""
    root, *blocks = wrapped(case)
    yield from _root(case, root)
    for unit in case.units:
        if unit.is_blocks:
            yield from _kept(case, unit)
    for i, group in enumerate(blocks):
        for place in places(case, group):
            yield from _passing(case, group, place)
        if i == len(blocks) - 1 and not (keeps(case) and case.micro_batches > 1):
            yield _gathered("last", FORWARD, FORWARD, case, _sizes(case, group)[0], "the last block's flat buffer")


def places(case: Case, group: Wrapped) -> Iterator[Place]:
    """When each of some alike units runs.  Of units of several blocks, those near the ends of the run are named, which
    is where peaks are looked for."""
    if case.layout.wrap == 1:
        yield Place(group.name, FORWARD, FORWARD, BACKWARD, BACKWARD)
        return
    units = sum(u.count for u in case.units)
    before = next(i for i, u in enumerate(case.units) if u.is_blocks)
    near = case.layout.prefetch + 1
    for k in sorted({*range(min(near, group.count)), *range(max(0, group.count - near), group.count)}):
        first = before + group.first + k * group.blocks - units  # counted back from the loss
        last = first + group.blocks - 1
        yield Place("", Moment("loss", first), Moment("loss", last), Moment("loss", -last), Moment("loss", -first))


def moved(moment: Moment, by: float) -> Moment:
    """Some units later; half a one: between them."""
    return replace(moment, offset=moment.offset + by)


def keeps(case: Case) -> bool:
    return case.layout.state == "shard_grad_op"


def _sizes(case: Case, unit: Wrapped) -> tuple[int, int]:
    """(bytes of one gathered unit, bytes of its gradients as they are reduced), padding included."""
    origin = dict.fromkeys(case.mesh.names, 0)
    whole, trained = (gathered_elements(case, unit, origin, t) for t in (False, True))
    return whole * case.precision.bytes("gathered"), trained * case.precision.bytes("reduction")


def _gathered(unit: str, begin: Moment, end: Moment, case: Case, size: int, why: str) -> Alive:
    return Alive("fsdp", "gathered parameters", unit, begin, end, case.precision.gathered, size, why)


def _gradients(unit: str, begin: Moment, end: Moment, dtype: str, size: int, why: str) -> Alive:
    return Alive("fsdp", "gradients", unit, begin, end, dtype, size, why)


def _kept(case: Case, unit: Unit) -> Iterator[Alive]:
    """What stays of each block from forward to backward, or from one micro-batch to the next."""
    p, several = case.precision, case.micro_batches > 1
    one = Wrapped(unit.name, unit.count, tuple((h, 1) for h in unit.held), 0, 0)
    gathered, reduced = _sizes(case, one)
    if keeps(case):
        begin = START if several else FORWARD
        yield _gathered(unit.name, begin, BACKWARD, case, gathered, "kept until its backward is done")
    elif small(case.layout) and unit.backward:
        why = f"1 of {small(case.layout)} parts, kept for backward"
        begin, end = moved(FORWARD, 1), moved(BACKWARD, -1)
        yield _gathered(unit.name, begin, end, case, gathered // small(case.layout), why)
    if several:
        yield _gradients(unit.name, START, BACKWARD, p.reduction, reduced, "unsharded while micro-batches accumulate")


def _passing(case: Case, unit: Wrapped, at: Place) -> Iterator[Alive]:
    """What a unit has only around its own passes."""
    p, several, depth = case.precision, case.micro_batches > 1, case.layout.prefetch * unit.blocks
    gathered, reduced = _sizes(case, unit)
    if not keeps(case):
        yield _gathered(at.unit, moved(at.forward, -0.5), at.forward_end, case, gathered, "the unit in use")
        if unit.backward_gathers:
            why = "the unit in use, and those gathered ahead"
            yield _gathered(at.unit, moved(at.backward, -depth), at.backward_end, case, gathered, why)
    if not (keeps(case) and several):
        why = "the flat buffer in which parameters arrive, kept until the next unit's has come"
        begin = moved(at.forward, -depth if case.layout.prefetch > 1 else -0.5)
        # While micro-batches accumulate it was seen to last until the next unit is copied out of its own (torch 2.13).
        yield _gathered(at.unit, begin, moved(at.forward_end, 0.5 * several), case, gathered, why)
    if not reduced:
        return
    made = reduced // p.bytes("reduction") * p.bytes("gathered")
    if several:
        new, why = _new(case, unit, made), "of this micro-batch"
        yield _gradients(at.unit, at.backward, at.backward_end, p.gathered, new, why)
    else:
        why = "a unit's, before they are sharded"
        yield _gradients(at.unit, at.backward, at.backward_end, p.gathered, made, why)
    why = "the flat buffer of the last reduce-scatter, kept until the next"
    begin, end = moved(at.backward_end, 1), moved(at.backward_end, unit.blocks)
    if end.kind == "loss":  # the root's reduction is the next one of the first blocks
        end = replace(end, offset=min(end.offset, sum(u.count for u in case.units)))
    yield Alive("fsdp", "gradient buckets", at.unit, begin, end, p.reduction, reduced, why)


def _new(case: Case, unit: Wrapped, made: int) -> int:
    """Bytes of a unit's gradients of one micro-batch beside those that accumulate.

    In one dtype each is added as soon as it is made; where sums are kept wider, all are added at the unit's end.
    """
    if case.precision.reduction != case.precision.gathered:
        return made
    return max(h.parameter.elements for h, _ in unit.held if h.trained) * case.precision.bytes("gathered")


def _root(case: Case, unit: Wrapped) -> Iterator[Alive]:
    """Embedding, final norm and head; all of its gradients are reduced at the very end."""
    p, several = case.precision, case.micro_batches > 1
    gathered, reduced = _sizes(case, unit)
    made = reduced // p.bytes("reduction") * p.bytes("gathered")
    embedding = sum(h.parameter.elements for h, _ in unit.held if h.trained and h.parameter.unit == "first")
    embedding *= ITEM_BYTES[p.gathered]
    if unit.backward_gathers:
        yield _gathered("", START, LAST_FORWARD, case, gathered, "the root unit, dropped after forward")
        yield _gathered("", AFTER_LOSS, LAST_BACKWARD, case, gathered, "the root unit, gathered again")
        more, why = max(0, gathered - (made - embedding)), "the flat buffer in which the root unit arrives again"
        yield _gathered("", AFTER_LOSS, AFTER_LOSS, case, more, why)
        if small(case.layout):
            part = gathered // small(case.layout)
            yield _gathered("", LOSS, LOSS, case, part, f"1 of {small(case.layout)} parts of the root unit, kept")
    else:
        why = "the root unit keeps its gather until backward is done"
        yield _gathered("", START, LAST_BACKWARD, case, gathered, why)
    if not (keeps(case) and several):
        why = "the flat buffer in which the root unit's parameters arrive"
        yield _gathered("first", FORWARD, FORWARD, case, gathered, why)
    if several:
        yield _gradients("", START, LAST_BACKWARD, p.reduction, reduced, "unsharded while micro-batches accumulate")
    wide = p.reduction != p.gathered
    if not several or wide:
        why = "of the final norm and head, which wait for the embedding's"
        yield _gradients("", AFTER_LOSS, LAST_BACKWARD, p.gathered, made - embedding, why)
    elif not case.model.tied:
        yield _gradients("last", BACKWARD, BACKWARD, p.gathered, made - embedding, "of this micro-batch")
    yield _gradients("", LAST_BACKWARD, LAST_BACKWARD, p.gathered, embedding, "of the embedding")
    # The parameters are dropped before the gradients are copied for the reduce-scatter.
    why = "the root unit's gradients, copied for the reduce-scatter, where they are wider than its parameters"
    more = max(0, reduced - gathered)
    yield Alive("fsdp", "gradient buckets", "", LAST_BACKWARD, LAST_BACKWARD, p.reduction, more, why)
