"""Buckets of gradients that are alive in backward, beside the gradients that the step's own rows count."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import accumulate

from partita.facts.case import BACKWARD, LAST_BACKWARD, Alive, Case, Flat, Moment
from partita.strategies.zero.buckets import fill


def alive(case: Case, lies: Flat) -> Iterator[Alive]:
    """Buckets of gradients, and each gradient before it is copied into its bucket."""
    dtype, item = case.precision.gradients, case.precision.bytes("gradients")
    for unit in case.units:
        largest = max((h.parameter.elements for h in unit.held), default=0) * item
        why = "a gradient before it is copied into its bucket"
        yield Alive("zero", "temporaries", unit.name, BACKWARD, BACKWARD, dtype, largest, why)
    sizes = [b.elements for b in fill(case.model, case.precision.bytes("weights"), case.layout.bucket_mb)]
    ends = list(accumulate(sizes))

    def before(begin: int, made: int) -> int:
        touched = range(bisect_left(ends, begin + 1), bisect_left(ends, made) + 1)
        return max(sizes[b - 1] if b else 0 for b in touched)

    if case.kernels == "cpu" and case.layout.zero_sync == "reduce_scatter":
        why = "gloo's copy of the bucket that is being reduced"
        yield from _rows(case, "communicator buffers", why, before)
    if case.layout.state == "zero1":
        if case.micro_batches == 1:  # else gradients stand from the first micro-batch on
            why = "the rest of a bucket that backward has begun to fill"
            yield from _rows(case, "gradient buckets", why, lambda begin, made: ends[bisect_left(ends, made)] - made)
        return

    def two(begin: int, made: int) -> int:
        touched = range(bisect_left(ends, begin + 1), bisect_left(ends, made) + 1)
        return max(sizes[b] + (sizes[b - 1] if b else 0) for b in touched)

    yield from _rows(case, "gradient buckets", "the bucket that backward fills, and the one that is being reduced", two)
    if case.micro_batches > 1:
        why = "a reduced shard before it is added to those of earlier micro-batches"
        size = item * max(lies.chunk(b) for b, _ in lies.buckets)
        yield Alive("zero", "gradient buckets", "", Moment("loss", 1), LAST_BACKWARD, dtype, size, why)


def _rows(case: Case, name: str, why: str, elements: Callable[[int, int], int]) -> Iterator[Alive]:
    """Rows of ``elements(made before a unit, made after it)`` along backward, unit by unit.

    The two units at either end of a run stand by themselves, where peaks are looked for; those between at their most.
    """
    dtype, item = case.precision.gradients, case.precision.bytes("gradients")
    at = made = 0
    for unit in reversed(case.units):
        each = sum(h.parameter.elements for h in unit.held)
        values = [elements(made + i * each, made + (i + 1) * each) if each else 0 for i in range(unit.count)]
        ends = sorted({0, min(1, unit.count - 1), max(0, unit.count - 2), unit.count - 1})
        runs = [(i, i, values[i]) for i in ends]
        if unit.count > 4:
            runs.append((2, unit.count - 3, max(values[2:-2])))
        for first, last, value in runs:
            begin, end = Moment("loss", 1 + at + first), Moment("loss", 1 + at + last)
            if value:
                yield Alive("zero", name, "", begin, end, dtype, value * item, why)
        at, made = at + unit.count, made + unit.count * each
