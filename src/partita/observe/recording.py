"""A recording of a whole program: its ranks, whether they agree, and one ledger of a steady step.  No torch."""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from partita.facts.errors import BadInput
from partita.facts.ledger import Ledger, Traffic
from partita.facts.mesh import EVERY, Mesh, Ranks
from partita.observe.calls import Call, Tail, rows_of

STEADY = 2  # the first steady step: DDP rebuilds its buckets in the second one
SYMMETRIC = frozenset({"all_reduce", "broadcast", "all_gather", "reduce_scatter", "gather", "scatter", "reduce"})


@dataclass(frozen=True)
class RankRecord:
    """What one rank did.  ``steps`` is the number of steps that ended with an optimizer."""

    rank: int
    world: int
    backend: str
    torch: str
    steps: int
    calls: tuple[Call, ...]
    tails: tuple[Tail, ...]

    def rows(self, step: int) -> tuple[Traffic, ...]:
        return rows_of(c for c in self.calls if c.step == step and c.phase != "init")

    def json(self) -> dict[str, Any]:
        plain: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        return plain | {
            "calls": [c.json() for c in self.calls],
            "tails": [[t.step, t.begin_s, t.end_s] for t in self.tails],
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> RankRecord:
        calls = tuple(Call.from_json(c) for c in data["calls"])
        return RankRecord(**{**data, "calls": calls, "tails": tuple(Tail(*t) for t in data["tails"])})


@dataclass(frozen=True)
class Times:
    """Mean seconds of some calls: how long the caller stood still, and how long the call ran beside it.

    Each is the mean of the calls that it is known of (``known`` of ``calls``), None where it is known of none.
    """

    calls: int
    known: int
    exposed_s: float | None
    hidden_s: float | None

    @staticmethod
    def of(calls: Sequence[Call]) -> Times:
        exposed = [c.exposed_s for c in calls if c.exposed_s is not None]
        hidden = [c.hidden_s for c in calls if c.hidden_s is not None]
        return Times(len(calls), len(exposed), _mean(exposed), _mean(hidden))


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


@dataclass(frozen=True)
class Recording:
    """What a command did: the exit code of its program, and the record of every rank that ran on this machine."""

    command: tuple[str, ...]
    exit_code: int
    ranks: tuple[RankRecord, ...]

    @property
    def world(self) -> int:
        return self.ranks[0].world

    @property
    def steps(self) -> int:
        """Steps that every rank finished."""
        return min(r.steps for r in self.ranks)

    @property
    def mesh(self) -> Mesh:
        return Mesh((("world", self.world),))

    def rows(self, step: int) -> tuple[Traffic, ...]:
        """Rows of one step over all ranks; ranks that did the same share a row."""
        return self._merged({r.rank: r.rows(step) for r in self.ranks})

    @cached_property
    def init(self) -> tuple[Traffic, ...]:
        """What ran once, before the steps."""
        return self._merged({r.rank: rows_of(c for c in r.calls if c.phase == "init") for r in self.ranks})

    @cached_property
    def steady(self) -> tuple[Traffic, ...]:
        """Rows of a steady step (the third); empty when the program ended before it.  See ``varying``."""
        return self.rows(STEADY) if self.steps > STEADY else ()

    @cached_property
    def times(self) -> dict[tuple[Any, ...], Times]:
        """Times of the calls of each row, over all ranks and steady steps, by key and kind as in ``Call.key``."""
        calls: dict[tuple[Any, ...], list[Call]] = defaultdict(list)
        for record in self.ranks:
            for call in record.calls:
                if STEADY <= call.step < self.steps and call.phase != "init":
                    calls[call.key].append(call)
        return {key: Times.of(some) for key, some in calls.items()}

    @cached_property
    def tail_s(self) -> float | None:
        """Mean time that a steady backward stood still at its end; None where none communicated."""
        seconds = [t.exposed_s for r in self.ranks for t in r.tails if STEADY <= t.step < self.steps]
        return sum(seconds) / len(seconds) if seconds else None

    @cached_property
    def varying(self) -> tuple[str, ...]:
        """A sentence for every row whose count is not the same in all steady steps."""
        counts: dict[tuple[Any, ...], dict[int, int]] = defaultdict(dict)
        for record in self.ranks:
            for step in range(STEADY, self.steps):
                for row in record.rows(step):
                    counts[record.rank, *row.key, row.kind][step] = row.count
        out = []
        for (rank, phase, verb, axis, dtype, size, _), seen in counts.items():
            each = [seen.get(step, 0) for step in range(STEADY, self.steps)]
            if len(set(each)) > 1:
                what = f"{verb} of {size} bytes of {dtype} over {'x'.join(axis) or 'itself'} in {phase}"
                out.append(f"rank {rank}: {what} ran {', '.join(map(str, each))} times in steps {STEADY} on")
        return tuple(out)

    @cached_property
    def disagreements(self) -> tuple[str, ...]:
        """Sentences about groups whose members did not issue the same collectives in the same order, and about
        messages that were sent and not received as sent.  Ranks of other machines are not looked at."""
        return (*_orders(self.ranks), *_messages(self.ranks))

    def ledger(self) -> Ledger:
        """The steady step as a ledger over the axis ``world``."""
        return Ledger(self.mesh, (), self.steady, ())

    def _merged(self, rows: dict[int, tuple[Traffic, ...]]) -> tuple[Traffic, ...]:
        alike: dict[tuple[Any, ...], tuple[Traffic, list[int]]] = {}
        for rank, mine in rows.items():
            for row in mine:
                alike.setdefault((row.key, row.kind, row.count), (row, []))[1].append(rank)
        out = []
        for row, who in alike.values():
            ranks = EVERY if len(who) == self.world else Ranks.of("world", *who)
            out.append(Traffic(**{f.name: getattr(row, f.name) for f in fields(row)} | {"ranks": ranks}))
        return tuple(out)

    def json(self) -> dict[str, Any]:
        return {
            "command": list(self.command),
            "exit_code": self.exit_code,
            "world": self.world,
            "steps": self.steps,
            "steady": Ledger(self.mesh, (), self.steady, ()).json()["traffic"],
            "init": Ledger(self.mesh, (), self.init, ()).json()["traffic"],
            "varying": list(self.varying),
            "disagreements": list(self.disagreements),
            "ranks": [r.json() for r in self.ranks],
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> Recording:
        """The inverse of ``json``; what follows from the ranks is worked out anew."""
        ranks = tuple(RankRecord.from_json(r) for r in data["ranks"])
        return Recording(tuple(data["command"]), data["exit_code"], ranks)

    def save(self, path: Path) -> None:
        unfinished = path.with_name(f"{path.name}.{os.getpid()}.part")
        unfinished.write_text(json.dumps(self.json(), indent=1))
        unfinished.rename(path)

    @staticmethod
    def load(path: Path) -> Recording:
        try:
            return Recording.from_json(json.loads(path.read_text()))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BadInput(
                f"{path} is no recording that can be read ({error}); one is written by run_recorded"
            ) from None


def _orders(ranks: Sequence[RankRecord]) -> Iterable[str]:
    """Compares, group by group, what each member issued with what the first one did."""
    issued: dict[tuple[tuple[int, ...], str], dict[int, list[tuple[Any, ...]]]] = defaultdict(dict)
    for record in ranks:
        for call in record.calls:
            if call.verb in ("send", "recv"):
                continue
            # An all-to-all may be uneven, so only its size may differ between the members of a group.
            size = call.bytes if call.verb in SYMMETRIC else None
            group = issued[call.ranks, call.group].setdefault(record.rank, [])
            group.append((call.verb, call.dtype, size))
    here = {r.rank for r in ranks}
    for (members, _), by_rank in issued.items():
        lists = {rank: by_rank.get(rank, []) for rank in members if rank in here}
        first, *others = sorted(lists)
        for other in others:
            if lists[other] != lists[first]:
                yield _difference(members, first, lists[first], other, lists[other])


def _difference(members: tuple[int, ...], first: int, a: list[Any], other: int, b: list[Any]) -> str:
    where = f"in the group of ranks {list(members)}"
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return f"{where} call {i} is {_say(x)} on rank {first} and {_say(y)} on rank {other}"
    return f"{where} rank {first} issued {len(a)} collectives and rank {other} {len(b)}"


def _say(call: tuple[Any, ...]) -> str:
    verb, dtype, size = call
    return f"{verb} of {dtype}" + ("" if size is None else f" ({size} bytes)")


def _messages(ranks: Sequence[RankRecord]) -> Iterable[str]:
    """Compares what each rank sent another with what that one received; a receiver that takes any sender is skipped."""
    here = {r.rank for r in ranks}
    open_ears = {r.rank for r in ranks for c in r.calls if c.verb == "recv" and c.peer is None}
    sent: Counter[tuple[int, int, int]] = Counter()
    for record in ranks:
        for call in record.calls:
            if call.verb == "send":
                sent[record.rank, call.peer or 0, call.bytes] += 1
            elif call.verb == "recv" and call.peer is not None:
                sent[call.peer, record.rank, call.bytes] -= 1
    for (source, target, size), n in sent.items():
        if n and {source, target} <= here and target not in open_ears:
            which = "sent and not received" if n > 0 else "received and not sent"
            yield f"{abs(n)} messages of {size} bytes from rank {source} to rank {target} were {which}"
