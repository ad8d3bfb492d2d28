"""Where the time of a step goes: a light watch for every step, a recorder for one of them, and their sums.

The watch costs a few clock reads a step.  What a rank stood still for cannot be seen from outside (DDP waits in C++,
inside backward), so the exposed communication is sampled: one step runs under the recorder.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch

PHASES = ("data", "forward", "backward", "step")
NAMES = {"data": "data", "forward": "forward", "backward": "backward", "step": "optimizer"}
EXPOSED = "exposed communication"
OTHER = "other"
WARM = 2
"""Steps left out of the figures: kernels and buckets settle in them."""


class PhaseTimer:
    """A watch of ``train_step``: seconds in each phase, by CUDA events where there is a CUDA device."""

    def __init__(self, cuda: bool = False) -> None:
        self.cuda = cuda
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self._events: list[tuple[str, Any, Any]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if not self.cuda:
            began = time.perf_counter()
            try:
                yield
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began
            return
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        try:
            yield
        finally:
            last.record()
            self._events.append((name, first, last))

    def taken(self) -> dict[str, float]:
        """Seconds by phase since the last call; on CUDA it waits for the device."""
        for name, first, last in self._events:
            last.synchronize()
            self.seconds[name] = self.seconds.get(name, 0.0) + first.elapsed_time(last) / 1e3
        out, self.seconds = self.seconds, dict.fromkeys(PHASES, 0.0)
        self._events = []
        return out


class Recording(Protocol):
    """What is read of ``observe.record.Recorder``."""

    @property
    def calls(self) -> Sequence[Any]: ...
    @property
    def tails(self) -> Sequence[Any]: ...


def exposed(recorder: Recording, phases_s: dict[str, float], waits_unseen: bool) -> dict[str, float]:
    """Which part (0 to 1) of each phase of a recorded step this rank stood still for collectives.

    ``phases_s``: seconds of that step's phases.  ``waits_unseen``: DDP, whose waits show only as the tail of backward.
    """
    out = dict.fromkeys(PHASES, 0.0)
    for call in recorder.calls:
        if call.exposed_s:
            out[call.phase] = out.get(call.phase, 0.0) + call.exposed_s
    if waits_unseen:
        out["backward"] += sum(tail.exposed_s for tail in recorder.tails)
    return {name: min(1.0, s / phases_s[name]) if phases_s.get(name) else 0.0 for name, s in out.items()}


@dataclass
class Ledger:
    """Times of this rank's steps as they come: seconds of each, and of its phases.

    ``exposed``: which part of each phase was exposed communication in the step that was sampled.
    """

    steps_s: list[float] = field(default_factory=list)
    phases_s: list[dict[str, float]] = field(default_factory=list)
    exposed: dict[str, float] | None = None

    def add(self, seconds: float, phases: dict[str, float]) -> None:
        self.steps_s.append(seconds)
        self.phases_s.append(phases)

    def row(self) -> list[float]:
        """Min, median, max, mean, the mean seconds of each phase, and the part exposed in each (NaN: not sampled)."""
        first = WARM if len(self.steps_s) > WARM else 0
        steps, phases = self.steps_s[first:], self.phases_s[first:]
        if not steps:
            return [float("nan")] * WIDTH
        means = [statistics.fmean(p.get(name, 0.0) for p in phases) for name in PHASES]
        stood = [float("nan") if self.exposed is None else self.exposed.get(name, 0.0) for name in PHASES]
        return [min(steps), statistics.median(steps), max(steps), statistics.fmean(steps), *means, *stood]


WIDTH = 4 + 2 * len(PHASES)


@dataclass(frozen=True)
class RankTimes:
    """One rank's step time in seconds, and the shares (0 to 1) of its mean step.

    ``exposed communication`` is None where no step was sampled; then it is part of the phases it stands in.
    """

    rank: int
    min_s: float
    median_s: float
    max_s: float
    shares: dict[str, float | None]

    def json(self) -> dict[str, Any]:
        return asdict(self)


def times_of(rank: int, row: Sequence[float]) -> RankTimes | None:
    """A row of ``Ledger.row`` as shares; None for a rank that ran no step."""
    low, median, high, mean = row[:4]
    if not mean > 0:  # NaN is not either
        return None
    means = dict(zip(PHASES, row[4:], strict=False))
    parts = dict(zip(PHASES, row[4 + len(PHASES) :], strict=True))
    sampled = all(p == p for p in parts.values())
    waits = {name: means[name] * parts[name] if sampled else 0.0 for name in PHASES}
    shares: dict[str, float | None] = {NAMES[n]: (means[n] - waits[n]) / mean for n in PHASES[:-1]}
    shares[EXPOSED] = sum(waits.values()) / mean if sampled else None
    shares[NAMES["step"]] = (means["step"] - waits["step"]) / mean
    shares[OTHER] = max(0.0, 1 - sum(means.values()) / mean)
    return RankTimes(rank, low, median, high, shares)
