"""Reconcile: the three witnesses side by side, line by line.  A join, not an interpretation.

A witness that was not asked leaves its cells empty and takes no part in the verdict; what any witness names and another
does not is a line of its own, with a zero.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from partita.facts.case import Case
from partita.facts.ledger import LINK_SHARE, Ledger, Memory
from partita.facts.mesh import Mesh
from partita.plan.peak import peaks as predicted_peaks
from partita.prove.witness import TrafficKey, Witness, key

PHASE_ORDER = ("forward", "backward", "step", "init", "early")
PEAK_TOLERANCE = 0.10
K = TypeVar("K")


@dataclass(frozen=True)
class Counts:
    """What each witness says of one line; None where it was not asked."""

    predicted: int
    dry: int | None
    recorded: int | None

    @property
    def agrees(self) -> bool:
        return len({v for v in (self.predicted, self.dry, self.recorded) if v is not None}) == 1

    def json(self) -> dict[str, int | None]:
        return {"predicted": self.predicted, "dry": self.dry, "recorded": self.recorded}


@dataclass(frozen=True)
class TrafficLine:
    """Calls a step (init and early: in all) of one verb with one payload, on ``ranks``."""

    phase: str
    verb: str
    axis: tuple[str, ...]
    dtype: str
    bytes: int
    kind: str
    counts: Counts
    group_size: int
    owners: tuple[str, ...]
    ranks: tuple[int, ...]
    why: str

    @property
    def agrees(self) -> bool:
        return self.counts.agrees

    def link_bytes(self, count: int | None) -> int | None:
        """What one rank sends in so many calls."""
        return None if count is None else round(self.bytes * count * LINK_SHARE[self.verb](self.group_size))

    def json(self) -> dict[str, Any]:
        shown = self.counts.recorded if self.counts.recorded is not None else self.counts.predicted
        return {
            "phase": self.phase, "verb": self.verb, "axis": list(self.axis), "dtype": self.dtype, "bytes": self.bytes,
            "kind": self.kind, **self.counts.json(), "link_bytes": self.link_bytes(shown), "agrees": self.agrees,
            "owners": list(self.owners), "ranks": list(self.ranks), "why": self.why,
        }  # fmt: skip


@dataclass(frozen=True)
class MemoryLine:
    """Persistent bytes of one object on ``ranks``; gradients as they stand when the optimizer steps."""

    object: str
    tier: str
    dtype: str
    counts: Counts
    ranks: tuple[int, ...]

    @property
    def agrees(self) -> bool:
        return self.counts.agrees

    def json(self) -> dict[str, Any]:
        return {
            "object": self.object, "tier": self.tier, "dtype": self.dtype, **self.counts.json(), "agrees": self.agrees,
            "ranks": list(self.ranks),
        }  # fmt: skip


@dataclass(frozen=True)
class PeakLine:
    """The most bytes alive in a phase; the prediction is a model of what lives when, not an identity."""

    phase: str
    counts: Counts
    moment: str

    @property
    def off(self) -> float | None:
        """How far the prediction is from the run, or from the dry run; None where neither was asked."""
        seen = self.counts.recorded if self.counts.recorded is not None else self.counts.dry
        return None if not seen else self.counts.predicted / seen - 1

    @property
    def within(self) -> bool:
        return self.off is None or abs(self.off) <= PEAK_TOLERANCE

    def json(self) -> dict[str, Any]:
        c = self.counts
        return {
            "phase": self.phase, "predicted": c.predicted, "dry": c.dry, "tracked": c.recorded, "off": self.off,
            "within": self.within, "moment": self.moment,
        }  # fmt: skip


@dataclass(frozen=True)
class Table:
    """All lines of one layout."""

    traffic: tuple[TrafficLine, ...]
    memory: tuple[MemoryLine, ...]
    peaks: tuple[PeakLine, ...]

    @property
    def clashes(self) -> tuple[TrafficLine | MemoryLine, ...]:
        lines: list[TrafficLine | MemoryLine] = [*self.traffic, *self.memory]
        return tuple(x for x in lines if not x.agrees)


def reconcile(case: Case, ledger: Ledger, dry: Sequence[Witness], recorded: Sequence[Witness]) -> Table:
    """Join the ledger's rows with every witness, rank by rank; ranks that say the same share a line."""
    witnesses = {"dry": {w.rank: w for w in dry}, "recorded": {w.rank: w for w in recorded}}
    ranks = sorted(set(witnesses["dry"]) | set(witnesses["recorded"])) or [0]
    here = {r: ledger.at(case.mesh.coordinate(r)) for r in ranks}
    owners: dict[TrafficKey, dict[str, str]] = defaultdict(dict)
    for rows in here.values():
        for t in rows.traffic:
            owners[key(t)].setdefault(t.owner, t.why)
    traffic = _joined(ranks, {r: _count(here[r].traffic, key, lambda t: t.count) for r in ranks}, witnesses, calls)
    memory = _joined(
        ranks, {r: _count(_persistent(here[r].memory), _named, lambda m: m.bytes) for r in ranks}, witnesses, state
    )
    return Table(
        tuple(_traffic_line(case.mesh, k, c, who, owners.get(k, {})) for k, c, who in sorted(traffic, key=_by_phase)),
        tuple(MemoryLine(*k, c, who) for k, c, who in memory),
        tuple(_peaks(case, ledger, ranks, dry, recorded)),
    )


def _peaks(
    case: Case, ledger: Ledger, ranks: Sequence[int], dry: Sequence[Witness], recorded: Sequence[Witness]
) -> Iterator[PeakLine]:
    """The fullest rank of each phase, by witness."""
    found = [p for r in ranks for p in predicted_peaks(ledger, case.mesh.coordinate(r))]
    for phase in PHASE_ORDER[:3]:
        here = max((p for p in found if p.phase == phase), key=lambda p: p.bytes, default=None)
        if here is not None:
            tracked, rehearsed = (
                max((w.peaks[phase] for w in seen if phase in w.peaks), default=None) for seen in (recorded, dry)
            )
            yield PeakLine(phase, Counts(here.bytes, rehearsed, tracked), here.moment)


def calls(witness: Witness) -> Mapping[TrafficKey, int]:
    """Init, early and steady rows of one rank by key."""
    return _count([*witness.init, *witness.early, *witness.steady], key, lambda t: t.count)


def state(witness: Witness) -> Mapping[tuple[str, str, str], int]:
    """Persistent bytes of one rank by object."""
    return _count(witness.memory, _named, lambda m: m.bytes)


def _persistent(rows: Iterable[Memory]) -> list[Memory]:
    """Rows of what stands after the optimizer's step; what is only alive for a while has no line."""
    return [m for m in rows if m.phase == "persistent" or (m.phase == "step" and "gradients" in (m.object, m.unit))]


def _named(row: Memory) -> tuple[str, str, str]:
    name = f"padding of {row.unit}" if row.object == "padding" else row.object
    return (name, row.tier, row.dtype)


R = TypeVar("R")


def _count(rows: Iterable[R], of: Callable[[R], K], value: Callable[[R], int]) -> dict[K, int]:
    out: dict[K, int] = defaultdict(int)
    for r in rows:
        out[of(r)] += value(r)
    return {k: v for k, v in out.items() if v}


def _joined(
    ranks: Sequence[int],
    predicted: Mapping[int, Mapping[K, int]],
    witnesses: Mapping[str, Mapping[int, Witness]],
    read: Callable[[Witness], Mapping[Any, int]],
) -> list[tuple[K, Counts, tuple[int, ...]]]:
    """Lines with the ranks for which they hold.  A rank without a dry run shares the line of one that says the same."""
    said = {name: {r: read(w) for r, w in found.items()} for name, found in witnesses.items()}
    keys = dict.fromkeys(
        k for rows in (*predicted.values(), *said["dry"].values(), *said["recorded"].values()) for k in rows
    )
    out = []
    for k in keys:
        lines: dict[Counts, list[int]] = {}
        for r in ranks:
            dry, recorded = (said[n][r].get(k, 0) if r in said[n] else None for n in ("dry", "recorded"))
            counts = Counts(predicted[r].get(k, 0), dry, recorded)
            fits = next((c for c in lines if _alike(c, counts)), None)
            if fits is None:
                lines[counts] = [r]
            else:
                merged, who = _merged(fits, counts), lines.pop(fits)
                lines[merged] = [*lines.get(merged, []), *who, r]
        out += [(k, c, tuple(sorted(who))) for c, who in lines.items() if c.predicted or c.dry or c.recorded]
    return out


def _alike(one: Counts, other: Counts) -> bool:
    pairs = ((one.predicted, other.predicted), (one.dry, other.dry), (one.recorded, other.recorded))
    return all(a == b or a is None or b is None for a, b in pairs)


def _merged(one: Counts, other: Counts) -> Counts:
    def known(a: int | None, b: int | None) -> int | None:
        return b if a is None else a

    return Counts(one.predicted, known(one.dry, other.dry), known(one.recorded, other.recorded))


def _by_phase(line: tuple[Any, ...]) -> tuple[int, str]:
    phase = line[0][0]
    return (PHASE_ORDER.index(phase) if phase in PHASE_ORDER else len(PHASE_ORDER), str(line[0][1:]))


def _traffic_line(
    mesh: Mesh, k: TrafficKey, counts: Counts, ranks: tuple[int, ...], owners: Mapping[str, str]
) -> TrafficLine:
    phase, verb, axis, dtype, size, kind = k
    why = "; ".join(dict.fromkeys(owners.values()))
    return TrafficLine(phase, verb, axis, dtype, size, kind, counts, mesh.group_size(axis), tuple(owners), ranks, why)
