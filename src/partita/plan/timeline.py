"""Timeline: each bucket of gradients against the backward pass, predicted or recorded.

A bucket is *ready* when its last gradient is complete, *launched* when it and every bucket before it are ready (one
fixed order on every rank), and *done* when its collective is.  What runs before backward ends is hidden; what comes
after is the tail, which the optimizer waits for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Protocol

from partita.facts.bucketing import Bucketing
from partita.facts.cluster import Cluster
from partita.plan.account import Account, account
from partita.plan.play import Played, bucketings, play, with_bucket_mb

BUCKET_MB = (1.0, 5.0, 10.0, 25.0, 50.0, 100.0, 200.0)


class Recorded(Protocol):
    """One bucket of one backward as a room notes it, in seconds of one clock; ``done_s`` is None until it is done."""

    @property
    def index(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def ready_s(self) -> float: ...
    @property
    def launch_s(self) -> float: ...
    @property
    def done_s(self) -> float | None: ...


@dataclass(frozen=True)
class Bucket:
    """One bucket; seconds after backward began.  ``start_s`` is when its link was free for it."""

    index: int
    bytes: int
    ready_s: float
    launch_s: float
    start_s: float
    done_s: float


@dataclass(frozen=True)
class Span:
    """A unit's backward, in seconds after backward began."""

    name: str
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """The buckets of one backward of ``backward_s`` seconds, in launch order."""

    witness: str
    owner: str
    verb: str
    axis: tuple[str, ...]
    backward_s: float
    buckets: tuple[Bucket, ...]
    units: tuple[Span, ...] = ()

    @cached_property
    def busy(self) -> tuple[tuple[float, float], ...]:
        """When some bucket was on its way: disjoint (begin, end), in order."""
        out: list[tuple[float, float]] = []
        for begin, end in sorted((b.start_s, b.done_s) for b in self.buckets):
            if out and begin <= out[-1][1]:
                out[-1] = (out[-1][0], max(out[-1][1], end))
            else:
                out.append((begin, end))
        return tuple(out)

    @property
    def busy_s(self) -> float:
        """Seconds in which some bucket was on its way."""
        return sum(end - begin for begin, end in self.busy)

    @property
    def hidden_s(self) -> float:
        """The part of them before backward ended."""
        return sum(max(0.0, min(end, self.backward_s) - begin) for begin, end in self.busy)

    @property
    def tail_s(self) -> float:
        """From the end of backward until the last bucket is done."""
        return max(0.0, max((b.done_s for b in self.buckets), default=0.0) - self.backward_s)


def predicted(played: Played) -> tuple[Timeline, ...]:
    """The timeline of each room that launches buckets, in the last micro-batch's backward."""
    zero, out = played.backward_begin_s, []
    units = tuple(Span(name, begin - zero, end - zero) for name, begin, end in played.spans)
    for b in dict.fromkeys(each.bucketing for each in played.buckets):
        buckets, launched = [], 0.0
        for each in played.buckets:
            if each.bucketing is b and each.ready_s >= zero:
                launched = max(launched, each.call.ready_s - zero)
                times = (each.ready_s - zero, launched, each.call.begin_s - zero, each.call.done_s - zero)
                buckets.append(Bucket(each.index, b.payloads[each.index], *times))
        length = played.backward_end_s - zero
        out.append(Timeline("arithmetic", b.owner, b.verb, b.axis, length, tuple(buckets), units))
    return tuple(out)


def recorded(
    buckets: Iterable[Recorded],
    backward_begin_s: float,
    backward_end_s: float,
    owner: str = "",
    verb: str = "",
    axis: tuple[str, ...] = (),
) -> Timeline:
    """The timeline of a real backward, from what a room noted and the begin and end of backward on the same clock.

    Calls of one group run in launch order, so a bucket starts when it was launched and the one before it was done.
    A bucket that was never done is left out.
    """
    out: list[Bucket] = []
    for b in sorted((b for b in buckets if b.done_s is not None), key=lambda b: b.launch_s):
        assert b.done_s is not None
        before = out[-1].done_s if out else 0.0
        ready, launch, done = (t - backward_begin_s for t in (b.ready_s, b.launch_s, b.done_s))
        out.append(Bucket(b.index, b.bytes, ready, launch, min(done, max(launch, before)), done))
    return Timeline("profile", owner, verb, axis, backward_end_s - backward_begin_s, tuple(out))


@dataclass(frozen=True)
class Choice:
    """What another size of buckets would do.  Times are None where a rate is not known."""

    bucket_mb: float
    buckets: int
    first_bytes: int
    largest_bytes: int
    last_bytes: int
    busy_s: float | None = None
    hidden_s: float | None = None
    tail_s: float | None = None


def choices(found: Account, cluster: Cluster | None = None, sizes: Sequence[float] = BUCKET_MB) -> tuple[Choice, ...]:
    """The buckets that every size would make, and with a cluster whose rates are known their hidden part and tail.

    The layout's own size is always among them.  Empty where no room launches buckets.

    Raises:
        Unmeasured: the cluster has a rate that is not known.
    """
    case = found.case
    if not bucketings(case):
        return ()
    out = []
    for mb in sorted({*sizes, case.layout.bucket_mb}):
        other = with_bucket_mb(case, mb)
        if cluster is None:
            out.append(_choice(mb, bucketings(other)))
            continue
        priced = account(other.model, other.layout, other.work, other.kernels)
        lines = predicted(play(priced, cluster))
        sums = [sum(getattr(t, name) for t in lines) for name in ("busy_s", "hidden_s")]
        tail = max((t.tail_s for t in lines), default=0.0)
        out.append(_choice(mb, bucketings(priced.case), *sums, tail))
    return tuple(out)


def _choice(mb: float, found: tuple[Bucketing, ...], *times: float) -> Choice:
    sizes = [size for b in found for size in b.payloads]
    return Choice(mb, len(sizes), sizes[0], max(sizes), sizes[-1], *times)


def as_json(timeline: Timeline) -> dict[str, Any]:
    """A timeline as plain data, seconds after backward began."""
    return {
        "witness": timeline.witness,
        "owner": timeline.owner,
        "verb": timeline.verb,
        "axis": list(timeline.axis),
        "backward_s": timeline.backward_s,
        "busy_s": timeline.busy_s,
        "hidden_s": timeline.hidden_s,
        "tail_s": timeline.tail_s,
        "buckets": [asdict(b) for b in timeline.buckets],
        "units": [asdict(u) for u in timeline.units],
    }


def choices_json(found: Iterable[Choice]) -> list[dict[str, Any]]:
    return [asdict(c) for c in found]
