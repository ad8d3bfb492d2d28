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


def largest(sizes: Iterable[int], limit: int = CHUNK_BYTES) -> int:
    """Bytes of the largest chunk."""
    listed = list(sizes)
    return max((sum(listed[i] for i in run) for run in chunks(listed, limit)), default=0)
