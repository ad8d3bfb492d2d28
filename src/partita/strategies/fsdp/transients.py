"""What full sharding gathers and reduces, and when it is alive.

The order of events is that of torch's ``FSDPParamGroup``: before a unit runs its shards arrive in one flat buffer and
are copied out to its parameters; after its backward the parameters go first, then the gradients are copied to one flat
buffer for the reduce-scatter, which stays until the next unit's is needed.
"""

from __future__ import annotations

from collections.abc import Iterator

from partita.facts.case import BACKWARD, FORWARD, LAST_BACKWARD, START, Alive, Case, Moment
from partita.facts.precision import ITEM_BYTES
from partita.strategies.fsdp.predict import Wrapped, gathered_elements, wrapped

PREFETCHED, NEXT = Moment("backward", -1), Moment("backward", 1)
AFTER_LOSS = Moment("loss", 1)


def alive(case: Case) -> Iterator[Alive]:
    """Gathered parameters, the buffers of gathers and reductions, and gradients before they are sharded."""
    for unit in wrapped(case):
        yield from _root(case, unit) if unit.name == "root" else _blocks(case, unit)


def _sizes(case: Case, unit: Wrapped) -> tuple[int, int]:
    """(bytes of one gathered unit, bytes of its gradients as they are reduced), padding included."""
    elements = gathered_elements(case, unit, dict.fromkeys(case.mesh.names, 0))
    return elements * case.precision.bytes("gathered"), elements * case.precision.bytes("reduction")


def _gathered(unit: str, begin: Moment, end: Moment, case: Case, size: int, why: str) -> Alive:
    return Alive("fsdp", "gathered parameters", unit, begin, end, case.precision.gathered, size, why)


def _gradients(unit: str, begin: Moment, end: Moment, dtype: str, size: int, why: str) -> Alive:
    return Alive("fsdp", "gradients", unit, begin, end, dtype, size, why)


def _blocks(case: Case, unit: Wrapped) -> Iterator[Alive]:
    """Each block of a run of them."""
    keep, p, several = case.layout.state == "shard_grad_op", case.precision, case.micro_batches > 1
    gathered, reduced = _sizes(case, unit)
    if keep:
        begin = START if several else FORWARD
        yield _gathered(unit.name, begin, BACKWARD, case, gathered, "kept until its backward is done")
    else:
        yield _gathered(unit.name, FORWARD, FORWARD, case, gathered, "the block in use")
        why = "the block in use, and the next one gathered ahead"
        yield _gathered(unit.name, PREFETCHED, BACKWARD, case, gathered, why)
    if not (keep and several):
        why = "the flat buffer in which parameters arrive, kept until the next unit's has come"
        yield _gathered(unit.name, FORWARD, FORWARD, case, gathered, why)
        yield _gathered("last", FORWARD, FORWARD, case, gathered, "the last block's flat buffer")
    if several:
        why = "unsharded while micro-batches accumulate"
        yield _gradients(unit.name, START, BACKWARD, p.reduction, reduced, why)
        yield _gradients(unit.name, BACKWARD, BACKWARD, p.gathered, _new(case, unit, gathered), "of this micro-batch")
    else:
        yield _gradients(unit.name, BACKWARD, BACKWARD, p.gathered, gathered, "a block's, before they are sharded")
    why = "the flat buffer of the last reduce-scatter, kept until the next"
    yield Alive("fsdp", "gradient buckets", unit.name, NEXT, NEXT, p.reduction, reduced, why)


def _new(case: Case, unit: Wrapped, gathered: int) -> int:
    """Bytes of a block's gradients of one micro-batch beside those that accumulate.

    In one dtype each is added as soon as it is made; where sums are kept wider, all are added at the block's end.
    """
    if case.precision.reduction != case.precision.gathered:
        return gathered
    return max(h.parameter.elements for h in unit.held) * case.precision.bytes("gathered")


def _root(case: Case, unit: Wrapped) -> Iterator[Alive]:
    """Embedding, final norm and head: gathered all the time; all of its gradients are reduced at the very end."""
    p, several = case.precision, case.micro_batches > 1
    gathered, reduced = _sizes(case, unit)
    keep = case.layout.state == "shard_grad_op"
    yield _gathered("", START, LAST_BACKWARD, case, gathered, "the root unit keeps its gather until backward is done")
    if not (keep and several):
        why = "the flat buffer in which the root unit's parameters arrive"
        yield _gathered("first", FORWARD, FORWARD, case, gathered, why)
    item = ITEM_BYTES[p.gathered]
    embedding = sum(h.parameter.elements for h in unit.held if h.parameter.unit == "first") * item
    if several:
        yield _gradients("", START, LAST_BACKWARD, p.reduction, reduced, "unsharded while micro-batches accumulate")
    wide = p.reduction != p.gathered
    if not several or wide:
        why = "of the final norm and head, which wait for the embedding's"
        yield _gradients("", AFTER_LOSS, LAST_BACKWARD, p.gathered, gathered - embedding, why)
    elif not case.model.tied:
        yield _gradients("last", BACKWARD, BACKWARD, p.gathered, gathered - embedding, "of this micro-batch")
    yield _gradients("", LAST_BACKWARD, LAST_BACKWARD, p.gathered, embedding, "of the embedding")
    # The parameters are dropped before the gradients are copied for the reduce-scatter.
    why = "the root unit's gradients, copied for the reduce-scatter, where they are wider than its parameters"
    yield Alive(
        "fsdp", "gradient buckets", "", LAST_BACKWARD, LAST_BACKWARD, p.reduction, max(0, reduced - gathered), why
    )
