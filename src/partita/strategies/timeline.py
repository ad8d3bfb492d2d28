"""When each bucket of a backward was ready, launched and done."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class BucketTimes:
    """One bucket of one backward: seconds of ``time.perf_counter``; ``done_s`` is None until it is done."""

    index: int
    bytes: int
    parameters: int
    ready_s: float
    launch_s: float = 0.0
    done_s: float | None = None


@dataclass
class Timeline:
    """The buckets of the current step, in launch order; the caller clears it between steps."""

    buckets: list[BucketTimes] = field(default_factory=list)
