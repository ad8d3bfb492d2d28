"""Calls: what a recording holds, and how calls become ledger rows.  No torch: a recording is read anywhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from partita.facts.ledger import Traffic
from partita.facts.mesh import EVERY, Ranks


@dataclass(frozen=True)
class Call:
    """One collective or message as one rank issued it.

    ``bytes`` is the payload as ``facts.ledger.Traffic`` counts it.  ``begin_s`` and ``end_s`` are seconds since the
    recording began; ``end_s`` is None where nothing told when the operation was done.  ``exposed_s`` is how long the
    caller stood still for it, None where that is not known.  ``clock`` says who measured: ``host`` (time of the
    calling thread) or ``stream`` (CUDA events on the caller's stream).  ``peer`` is the other rank of a message, a
    global rank, None for one that takes whatever comes.
    """

    step: int
    phase: str
    verb: str
    axis: tuple[str, ...]
    dtype: str
    bytes: int
    kind: str
    reason: str
    ranks: tuple[int, ...]
    group: str
    peer: int | None
    op: str
    caller: str
    begin_s: float
    end_s: float | None
    exposed_s: float | None
    clock: str = "host"

    @property
    def hidden_s(self) -> float | None:
        """Time in which the operation ran and its caller worked; None where either is not known."""
        if self.end_s is None or self.exposed_s is None:
            return None
        return max(0.0, self.end_s - self.begin_s - self.exposed_s)

    @property
    def key(self) -> tuple[str, str, tuple[str, ...], str, int, str]:
        """What calls of one row share: the key of ``Traffic``, and the kind."""
        return (self.phase, self.verb, self.axis, self.dtype, self.bytes, self.kind)

    def json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Call:
        known = {f.name: data[f.name] for f in fields(Call) if f.name in data}
        return Call(**{**known, "axis": tuple(known["axis"]), "ranks": tuple(known["ranks"])})


@dataclass(frozen=True)
class Tail:
    """How long one backward stood still at its end for collectives that were still under way.

    From the end of the last gradient's computation to the end of backward, seconds since the recording began.  DDP
    waits there, out of sight, for all of its buckets; the time includes copying the results back.
    """

    step: int
    begin_s: float
    end_s: float

    @property
    def exposed_s(self) -> float:
        return self.end_s - self.begin_s


def rows_of(calls: Iterable[Call], ranks: Ranks = EVERY) -> tuple[Traffic, ...]:
    """Calls with one key as one row with their count, in the order in which they first came."""
    counts = Counter(call.key for call in calls)
    return tuple(
        Traffic("-", verb, axis, ranks, dtype, size, n, phase, None, "recorded", kind=kind)
        for (phase, verb, axis, dtype, size, kind), n in counts.items()
    )


def split_steps(calls: int, ends: Sequence[tuple[int, int]]) -> list[int]:
    """The step of each of ``calls`` calls, told from where optimizers finished.

    ``ends`` holds (number of calls so far, which optimizer) for every outermost optimizer step, in order.  One
    training step may use several optimizers, each once: a step ends with the last of them, that is before the first
    one that steps again.  Calls after the last end belong to a step that never finished.
    """
    borders: list[int] = []
    met: set[int] = set()
    for i, (_, who) in enumerate(ends):
        if who in met:
            borders.append(ends[i - 1][0])
            met.clear()
        met.add(who)
    if ends:
        borders.append(ends[-1][0])
    out: list[int] = []
    for step, border in enumerate(borders):
        out += [step] * (border - len(out))
    return out + [len(borders)] * (calls - len(out))


def finished_steps(ends: Sequence[tuple[int, int]]) -> int:
    """How many steps ``split_steps`` finds that ended with an optimizer."""
    # One call after the last end would lie in the step that never finished; its number is the count of the others.
    return split_steps(ends[-1][0] + 1, ends)[-1] if ends else 0
