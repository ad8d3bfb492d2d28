"""Streams: what runs when, and what waits for what.

One stream computes; one lane for each level of links communicates.  Items are given in the order in which a program
issues them.  A call starts when the point of the computation that makes it ready is reached, what it comes behind is
done, and its lane is free; computation stops where it needs a call that is not done.  That idle time is the call's
exposed part (with a queue, that of the calls before it); the rest of the call is hidden.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Work:
    """A stretch of computation, and when it ran."""

    name: str
    seconds: float
    begin_s: float = 0.0
    times: int = 1  # how often it happens, where equal micro-batches are played once

    @property
    def end_s(self) -> float:
        return self.begin_s + self.seconds


@dataclass
class Call:
    """One call of a collective: when it could start, when its lane took it, when it was done, and how much of it
    computation waited for."""

    name: str
    lane: str
    seconds: float
    ready_s: float
    before: Call | None  # what it waited for, in its lane or behind which it comes
    row: int  # of the ledger
    begin_s: float = 0.0
    exposed_s: float = 0.0
    times: int = 1

    @property
    def done_s(self) -> float:
        return self.begin_s + self.seconds


class Streams:
    """Plays items one after another.  ``now`` is the time on the computing stream."""

    def __init__(self) -> None:
        self.now = 0.0
        self.works: list[Work] = []
        self.calls: list[Call] = []
        self._last: dict[str, Call] = {}

    def work(self, name: str, seconds: float) -> Work:
        """Compute for ``seconds``."""
        item = Work(name, seconds, self.now)
        self.works.append(item)
        self.now += seconds
        return item

    def call(
        self, name: str, lane: str, seconds: float, ready_s: float, behind: Call | None = None, row: int = -1
    ) -> Call:
        """Issue a call that may start at ``ready_s``, and after the call ``behind``."""
        last = self._last.get(lane)
        item = Call(name, lane, seconds, ready_s, None, row, ready_s)
        for other in (last, behind):
            if other is not None and other.done_s > item.begin_s:
                item.begin_s, item.before = other.done_s, other
        self._last[lane] = item
        self.calls.append(item)
        return item

    def wait(self, call: Call) -> None:
        """Stop computing until a call is done.  The idle time is charged to it and to what it queued behind."""
        end, begin = call.done_s, self.now
        if end <= begin:
            return
        self.now = end
        at: Call | None = call
        while at is not None and end > begin:
            start = max(begin, at.begin_s)
            at.exposed_s += max(0.0, end - start)
            end, at = start, at.before

    def finish(self) -> None:
        """Wait for everything that is still on its way."""
        for call in sorted(self._last.values(), key=lambda c: c.done_s):
            self.wait(call)

    @property
    def quiet(self) -> bool:
        """Whether no call is on its way."""
        return all(c.done_s <= self.now for c in self._last.values())

    def repeat(self, since: tuple[int, int, float], times: int) -> None:
        """Let what was played since a mark happen ``times`` times in a row; no call crosses its ends."""
        works, calls, began = since
        for work in self.works[works:]:
            work.times *= times
        for call in self.calls[calls:]:
            call.times *= times
        self.now += (times - 1) * (self.now - began)

    def mark(self) -> tuple[int, int, float]:
        """A point to repeat from."""
        return len(self.works), len(self.calls), self.now
