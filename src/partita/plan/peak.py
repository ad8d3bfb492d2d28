"""Peak: when in a step the most bytes are alive, and what they are.

A step of one micro-batch is a line of moments: forward of every unit, the loss, backward of every unit in reverse, the
optimizer.  Rooms say what is alive between which of them; sums are linear along a run of alike blocks, so only its ends
need to be looked at (and as far from them as something is moved), and the cost does not grow with the number of layers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, floor, inf

from partita.facts.case import Alive, Case, Moment
from partita.facts.ledger import Ledger, Memory
from partita.facts.mesh import EVERY, Coordinate


@dataclass(frozen=True)
class Line:
    """The moments of a step as numbers: forward of unit u is u, the loss U, backward of u is 2U - u, the optimizer 2U
    + 1.
    """

    units: tuple[tuple[str, int, int], ...]  # name, first index, count
    total: int

    @staticmethod
    def of(case: Case) -> Line:
        rows, at = [], 0
        for u in case.units:
            rows.append((u.name, at, u.count))
            at += u.count
        return Line(tuple(rows), at)

    @cached_property
    def _runs(self) -> dict[str, tuple[int, int]]:
        return {name: (at, count) for name, at, count in self.units}

    def candidates(self, items: Sequence[Alive] = ()) -> set[float]:
        """Moments at which the sum may be largest: both ends of every run in both directions, the loss, the optimizer,
        and where an item begins that is moved by more than one unit."""
        moments = {m for item in items for m in (item.begin, item.end)}
        moved = {m.offset for m in moments if m.kind in ("forward", "backward")}
        far = {int(abs(o)) for o in moved if abs(o) > 1}
        between = [0.0, -0.5] if any(o % 1 for o in moved) else [0.0]
        out = {float(self.total), 2.0 * self.total + 1}
        for _, at, count in self.units:
            ends = {0, 1, *far} if count > 1 else {0}
            places = {at + j for e in ends for j in (e, count - 1 - e) if 0 <= j < count}
            out |= {p + b for p in places for b in between} | {2.0 * self.total - p for p in places}
        inner = {self.fixed(item.begin) for item in items if item.begin.kind == "loss"}
        return out | {m for m in inner if 0 <= m <= 2 * self.total}

    def phase(self, now: float) -> str:
        return "forward" if now <= self.total else "step" if now > 2 * self.total else "backward"

    def label(self, now: float) -> str:
        """What happens at a moment."""
        if now == self.total or now > 2 * self.total:
            return "the loss" if now == self.total else "the optimizer's step"
        index = ceil(now) if now < self.total else int(2 * self.total - now)
        name, at, count = next(u for u in self.units if u[1] <= index < u[1] + u[2])
        block = name if count == 1 else f"blocks.{int(name.partition('.')[2].partition('..')[0]) + index - at}"
        return f"{self.phase(now)} of {block}"

    def fixed(self, moment: Moment) -> float:
        """The number of a moment that names no unit."""
        return self._ends[moment.kind] + moment.offset

    @cached_property
    def _ends(self) -> dict[str, float]:
        return {"start": -inf, "loss": self.total, "step": 2 * self.total + 1, "end": inf}

    def alive(self, item: Alive, now: float) -> int:
        """How many of the item's units are alive at a moment."""
        if not item.unit:
            return int(self.fixed(item.begin) <= now <= self.fixed(item.end))
        first, count = self._runs.get(item.unit, (0, 1))
        lo, hi = 0.0, float(count - 1)  # the indices i for which begin(i) <= now <= end(i)
        for moment, sign in ((item.begin, 1), (item.end, -1)):
            if moment.kind == "forward":  # number is first + i + offset: grows with i
                edge = now - first - moment.offset
                lo, hi = (lo, min(hi, edge)) if sign > 0 else (max(lo, edge), hi)
            elif moment.kind == "backward":  # number is 2U - first - i + offset: falls with i
                edge = 2 * self.total - first + moment.offset - now
                lo, hi = (max(lo, edge), hi) if sign > 0 else (lo, min(hi, edge))
            elif sign * (now - self.fixed(moment)) < 0:
                return 0
        return max(0, floor(hi) - ceil(lo) + 1) if hi >= lo else 0


@dataclass(frozen=True)
class Peak:
    """The largest sum of live bytes of one phase on one rank."""

    phase: str
    moment: str
    bytes: int


def transients(case: Case, items: Iterable[Alive]) -> Iterator[Memory]:
    """Rows of what is alive, beside the persistent rows, at the peak of each phase."""
    line, items = Line.of(case), tuple(item for item in items if item.bytes)
    together: dict[tuple[str, Moment, Moment], list[Alive]] = defaultdict(list)
    for item in items:
        together[item.unit, item.begin, item.end].append(item)
    spans = [(same[0], sum(item.bytes for item in same)) for same in together.values()]
    moving = [(item, total) for item, total in spans if item.unit]
    fixed = [(line.fixed(item.begin), line.fixed(item.end), total) for item, total in spans if not item.unit]
    best: dict[str, tuple[int, float]] = {}
    for now in sorted(line.candidates(items)):
        phase, size = line.phase(now), sum(total for lo, hi, total in fixed if lo <= now <= hi)
        size += sum(total * line.alive(item, now) for item, total in moving)
        if phase not in best or size > best[phase][0]:
            best[phase] = (size, now)
    for phase, (_, now) in best.items():
        label = line.label(now)
        for item in items:
            number = line.alive(item, now)
            if number:
                why = f"{item.why} (at {label})"
                size = item.bytes * number
                yield Memory(item.owner, item.object, phase, "device", EVERY, item.dtype, size, why, item.unit)


def peaks(ledger: Ledger, coordinate: Coordinate, tier: str = "device") -> tuple[Peak, ...]:
    """Peak bytes of each phase on one rank: what persists, and what is alive in that phase."""
    rows = [r for r in ledger.memory if coordinate in r.ranks and r.tier == tier]
    always = sum(r.bytes for r in rows if r.phase == "persistent")
    sums: dict[str, int] = defaultdict(int)
    moment: dict[str, str] = {}
    for r in rows:
        if r.phase != "persistent":
            sums[r.phase] += r.bytes
            if "(at " in r.why:
                moment[r.phase] = r.why.rpartition("(at ")[2].rstrip(")")
    return tuple(Peak(phase, moment.get(phase, phase), always + extra) for phase, extra in sums.items())


def highest(ledger: Ledger, coordinate: Coordinate, tier: str = "device") -> Peak:
    """The phase with the highest peak."""
    found = peaks(ledger, coordinate, tier)
    return (
        max(found, key=lambda p: p.bytes)
        if found
        else Peak("persistent", "always", ledger.persistent_bytes(coordinate, tier))
    )
