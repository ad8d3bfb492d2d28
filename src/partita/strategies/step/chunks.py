"""How the master optimizer takes its parameters: some at a time, so that few wide gradients are alive together."""

from __future__ import annotations

from collections.abc import Iterable

CHUNK_BYTES = 256 * 2**20  # of widened gradients; a single larger parameter is a chunk by itself


def chunks(sizes: Iterable[int], limit: int = CHUNK_BYTES) -> list[range]:
    """Runs of indices whose sizes sum to at most ``limit``, or hold one element."""
    out: list[range] = []
    start = end = total = 0
    for end, n in enumerate(sizes, 1):
        if total and total + n > limit:
            out.append(range(start, end - 1))
            start, total = end - 1, 0
        total += n
    return [*out, range(start, end)] if end > start else out


def largest(runs: Iterable[tuple[list[int], int]], limit: int = CHUNK_BYTES) -> int:
    """Bytes of the largest chunk of runs of alike units: (sizes of one unit's parameters, number of units).

    A unit that begins with a chunk as full as another of its run did ends as that one did: it is not walked again.
    """
    best = total = 0
    for sizes, count in runs:
        known: dict[int, tuple[int, int]] = {}
        for _ in range(count):
            begin, top = total, 0
            if begin not in known:
                for n in sizes:
                    if total and total + n > limit:
                        top, total = max(top, total), 0
                    total += n
                known[begin] = top, total
            top, total = known[begin]
            best = max(best, top)
    return max(best, total)
