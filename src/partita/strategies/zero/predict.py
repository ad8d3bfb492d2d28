"""Optimizer state lies in flat shards over the data axes; gradients are summed to their owners, parameters gathered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from partita.facts.bucketing import Bucketing, GradientRun, word_of
from partita.facts.case import Alive, Bucket, Case, Division, Flat
from partita.facts.layout import Layout
from partita.facts.ledger import Gradient, Memory, Traffic
from partita.facts.mesh import EVERY, Coordinate
from partita.facts.precision import Precision
from partita.strategies.zero import transients
from partita.strategies.zero.buckets import fill, kinds

AFTER: tuple[str, ...] = ()
WORDS = ("state", "zero_sync", "bucket_mb")
STATES = ("zero1", "zero2")
SCALES_LOSS = True


def wanted(layout: Layout) -> bool:
    return layout.state in STATES and layout.dp * layout.cp > 1


def refuse(case: Case) -> Iterator[str]:
    """Whole gradients everywhere are what zero2 does away with."""
    if case.layout.state == "zero2" and case.layout.zero_sync != "reduce_scatter":
        yield (
            f"zero2 keeps 1 of {case.layout.dp * case.layout.cp} parts of the gradients, and"
            f" zero_sync={case.layout.zero_sync} leaves all of them; what works: zero1 with it, or"
            " zero_sync=reduce_scatter"
        )


def store(precision: Precision) -> Precision:
    return precision


def divide(case: Case) -> Division:
    """Parameters stay whole; what only their owner needs lies in chunks of the buckets."""
    objects = ("optimizer state", "master") + (("gradients",) if case.layout.state == "zero2" else ())
    axes = case.data_axes
    buckets = kinds(case.spans, case.precision.bytes("weights"), case.layout.bucket_mb)
    return Division(flat=Flat("zero", axes, case.mesh.size(*axes), objects, buckets))


def flat(case: Case) -> Flat:
    assert case.flat is not None
    return case.flat


def all_reduces(case: Case) -> bool:
    return case.layout.zero_sync == "all_reduce"


def memory(case: Case) -> Iterator[Memory]:
    """Padding of the buckets; what lies in them are the step's own rows."""
    lies, p = flat(case), case.precision
    if lies.padding:
        why = "buckets of parameters are padded to a multiple of the ranks"
        size = lies.padding * p.bytes("weights")
        yield Memory("zero", "padding", "persistent", "device", EVERY, p.weights, size, why, "parameters")
    if case.layout.state == "zero1":
        if lies.padding and not all_reduces(case):
            why = "buckets of gradients are padded to a multiple of the ranks"
            size = lies.padding * p.bytes("gradients")
            yield Memory("zero", "padding", "step", "device", EVERY, p.gradients, size, why, "gradients")
        return

    def short(c: Coordinate) -> int:
        return lies.stored - lies.elements(case.mesh.index(c, *lies.axis))

    for ranks, elements in case.mesh.fold(short, case.cuts, *case.mesh.names):
        if elements:
            why = "gradient shards come out of reduce-scatter at the whole chunk"
            size = elements * p.bytes("gradients")
            yield Memory("zero", "padding", "step", "device", ranks, p.gradients, size, why, "gradients")


def alive(case: Case) -> Iterator[Alive]:
    if not case.model.bare:
        yield from transients.alive(case, flat(case))


def bucketing(case: Case) -> Iterator[Bucketing]:
    """The buckets in their one order; under zero2 every micro-batch launches them."""
    item, lies = case.precision.bytes("gradients"), flat(case)
    buckets = list(fill(case.spans, case.precision.bytes("weights"), case.layout.bucket_mb))
    filled = tuple(b.elements * item for b in buckets)
    padded = tuple(lies.chunk(b) * lies.ranks * item for b in buckets)
    runs = []
    for unit in reversed(case.units):
        held = tuple(h for h in reversed(unit.held) if h.trained)
        names = tuple(word_of(h.parameter.name) for h in held)
        runs.append(GradientRun(unit.name, unit.count, names, tuple(h.parameter.elements * item for h in held)))
    verb, sizes = ("all_reduce", filled) if all_reduces(case) else ("reduce_scatter", padded)
    every = case.layout.state == "zero2"
    yield Bucketing("zero", verb, case.data_axes, case.precision.gradients, sizes, filled, tuple(runs), every)


def traffic(case: Case) -> Iterator[Traffic]:
    p, axis = case.precision, case.data_axes
    verb = "all_reduce" if all_reduces(case) else "reduce_scatter"
    times = case.micro_batches if case.layout.state == "zero2" else 1
    why = "gradient bucket, summed " + ("everywhere" if all_reduces(case) else "to its owners")
    why += " in every micro-batch" if times > 1 else " once a step"
    for size, count in _sizes(case, p.bytes("gradients"), not all_reduces(case)):
        yield Traffic("zero", verb, axis, EVERY, p.gradients, size, count * times, "backward", "backward", why)
    why = "parameter bucket, gathered from those who updated it"
    for size, count in _sizes(case, p.bytes("weights"), True):
        yield Traffic("zero", "all_gather", axis, EVERY, p.weights, size, count, "step", "forward", why)


def _sizes(case: Case, item: int, padded: bool) -> list[tuple[int, int]]:
    """(bytes of a bucket, how many there are), smallest first."""

    def size(bucket: Bucket) -> int:
        return item * (flat(case).chunk(bucket) * flat(case).ranks if padded else bucket.elements)

    out: Counter[int] = Counter()
    for bucket, count in flat(case).buckets:
        out[size(bucket)] += count
    return sorted(out.items())


def gradients(case: Case) -> Iterator[Gradient]:
    reduction = "all_reduce, sum" if all_reduces(case) else "reduce_scatter, sum"
    for h in case.trained:
        yield Gradient(
            "zero", h.parameter.name, case.data_axes, "partial", reduction, "counted tokens of the global batch"
        )
