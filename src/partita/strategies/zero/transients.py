"""What is alive in backward beside the gradients that the step's own rows count: buckets, and a gradient on its way."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from partita.facts.case import LAST_BACKWARD, Alive, Case, Flat, Moment, Unit
from partita.strategies.zero.buckets import fill

Parts = tuple[int, int, int]
"""Elements of a gradient that was just made, of buckets of whole gradients, and of gloo's copy of a bucket."""


def alive(case: Case, lies: Flat) -> Iterator[Alive]:
    """Rows for the two units at either end of a run of alike ones: that is where peaks are looked for."""
    dtype, item = case.precision.gradients, case.precision.bytes("gradients")
    whys = (
        ("temporaries", "a gradient before it is copied into its bucket"),
        ("gradient buckets", _why(case)),
        ("communicator buffers", "gloo's copy of the bucket that is being reduced"),
    )
    sizes = [b.elements for b in fill(case.spans, case.precision.bytes("weights"), case.layout.bucket_mb)]
    ends = list(accumulate(sizes))
    at = made = 0
    for unit in reversed(case.units):
        each = sum(h.parameter.elements for h in unit.held if h.trained)
        for i in sorted({0, min(1, unit.count - 1), max(0, unit.count - 2), unit.count - 1}) if each else ():
            when = Moment("loss", 1 + at + i)
            most = max(_moments(case, unit, made + i * each, sizes, ends), key=sum)
            for (name, why), elements in zip(whys, most, strict=True):
                if elements:
                    yield Alive("zero", name, "", when, when, dtype, elements * item, why)
        at, made = at + unit.count, made + unit.count * each
    if case.layout.state == "zero2" and case.micro_batches > 1:
        why = "a reduced shard before it is added to those of earlier micro-batches"
        size = item * max(lies.chunk(b) for b, _ in lies.buckets)
        yield Alive("zero", "gradient buckets", "", Moment("loss", 1), LAST_BACKWARD, dtype, size, why)


def _why(case: Case) -> str:
    if case.layout.state == "zero2":
        return "the bucket that backward fills, and the one that is being reduced"
    return "the rest of a bucket that backward has begun to fill"


def _moments(case: Case, unit: Unit, made: int, sizes: list[int], ends: list[int]) -> Iterator[Parts]:
    """What is alive as each gradient of one unit is made; ``made`` elements were before."""
    copies = case.kernels == "cpu" and case.layout.zero_sync == "reduce_scatter"
    trained = [h for h in unit.held if h.trained]
    unit_end = made + sum(h.parameter.elements for h in trained)
    for h in reversed(trained):
        made += h.parameter.elements
        b = bisect_left(ends, made)
        before = sizes[b - 1] if b else 0
        if case.layout.state == "zero2":
            whole = sizes[b] + before
        elif case.micro_batches == 1:
            whole = max(0, ends[b] - unit_end)  # the step counts the whole unit's gradients
        else:
            whole = 0  # gradients stand from the first micro-batch on
        yield h.parameter.elements, whole, before if copies else 0
