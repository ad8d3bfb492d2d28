"""Which parameters share a bucket: the order of the model reversed, cut where a bucket has reached its size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from partita.facts.case import Bucket
from partita.facts.layout import DEFAULT_BUCKET_MB
from partita.facts.model import Span

MIB = 2**20
FIRST_BYTES = MIB  # with the default size, a first bucket that is soon full: reductions begin early, as DDP's do


def caps(bucket_mb: float) -> tuple[int, int]:
    """Bytes at which the first bucket, and any other, closes."""
    cap = int(bucket_mb * MIB)
    return (FIRST_BYTES if bucket_mb == DEFAULT_BUCKET_MB else cap), cap


def fill(spans: Sequence[Span], item: int, bucket_mb: float) -> Iterator[Bucket]:
    """A model's buckets in their order, for elements of ``item`` bytes; what is frozen lies in none.

    Backward makes gradients in about the reverse of the order in which the model uses its parameters, so the last
    parameter is the first in.  A block that begins where another of its run began (a bucket as full) closes the same
    buckets, so that the cost hardly grows with the number of blocks.
    """
    limit, cap = caps(bucket_mb)
    elements = matrices = 0
    for span in reversed(spans):
        known: dict[tuple[int, int, int], tuple[list[Bucket], int, int, int]] = {}
        for _ in range(span.count):
            begin = (elements, matrices, limit)
            if begin not in known:
                closed = []
                for p in (p for p in reversed(span.parameters) if not p.frozen):
                    elements += p.elements
                    matrices += p.elements if len(p.shape) >= 2 else 0
                    if elements * item >= limit:
                        closed.append(Bucket(elements, matrices))
                        elements = matrices = 0
                        limit = cap
                known[begin] = closed, elements, matrices, limit
            closed, elements, matrices, limit = known[begin]
            yield from closed
    if elements:
        yield Bucket(elements, matrices)


def kinds(spans: Sequence[Span], item: int, bucket_mb: float) -> tuple[tuple[Bucket, int], ...]:
    """Alike buckets, and how many there are of each, in the order in which the first of each kind comes."""
    return tuple(Counter(fill(spans, item, bucket_mb)).items())
