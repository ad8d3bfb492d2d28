"""What ``fully_shard`` makes units of: the root (what lies outside the blocks), and blocks, ``wrap`` at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from partita.facts.case import Case, Held, Unit
from partita.facts.layout import Layout
from partita.facts.model import span_name


@dataclass(frozen=True)
class Wrapped:
    """``count`` alike units: each with its parameters (and how many there are of each), and its gathers a step.

    ``first`` is the first block of the first of them, ``blocks`` how many blocks lie in each (0: the root).
    """

    name: str
    count: int
    held: tuple[tuple[Held, int], ...]
    forward_gathers: int
    backward_gathers: int
    first: int = 0
    blocks: int = 0


def small(layout: Layout) -> int:
    """Ranks that keep a copy of a unit between forward and backward; 0 where ``reshard`` is no number."""
    return int(layout.reshard) if layout.reshard.isdecimal() else 0


def wrapped(case: Case) -> tuple[Wrapped, ...]:
    """The root unit, then the blocks."""
    layout = case.layout
    keep = layout.state == "shard_grad_op"
    outside = [u for u in case.units if not u.is_blocks]
    passes = outside[0].forward
    root = tuple((h, h.count) for u in outside for h in u.held)
    again = passes if layout.reshard != "default" else 0
    return (Wrapped("root", 1, root, 1 if keep else passes, again), *_blocks(case, keep))


def _blocks(case: Case, keep: bool) -> Iterator[Wrapped]:
    for first, count, members in groups(case):
        units, size = [u for u, _ in members], sum(n for _, n in members)
        held = tuple((h, n) for u, n in members for h in u.held)
        gathers = (1, 0) if keep else (units[0].forward, max(u.backward for u in units))
        yield Wrapped(span_name(first, first + count * size), count, held, *gathers, first, size)


def groups(case: Case) -> Iterator[tuple[int, int, tuple[tuple[Unit, int], ...]]]:
    """Runs of alike groups of ``wrap`` blocks: (first block, number of groups, (unit, its blocks in one group)).

    The last group may be short, and one may hold blocks of two runs.
    """
    size, at, filled = case.layout.wrap, 0, 0
    part: list[tuple[Unit, int]] = []
    for u in case.units:
        left = u.count if u.is_blocks else 0
        if filled and left:
            take = min(size - filled, left)
            part, filled, left = [*part, (u, take)], filled + take, left - take
            if filled == size:
                yield at, 1, tuple(part)
                at, part, filled = at + size, [], 0
        if left >= size:
            yield at, left // size, ((u, size),)
            at += left // size * size
        if left % size:
            part, filled = [(u, left % size)], left % size
    if part:
        yield at, 1, tuple(part)
