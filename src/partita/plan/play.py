"""Play: one training step on two streams, from the ledger's rows.

A row that names a unit is called at that unit: what a unit needs (an all-gather) is called one unit ahead and waited
for before the unit computes; what a unit made (a reduction) is called when its backward is done.  A room that
launches buckets says so (``bucketing``), and its calls start when the bucket's last gradient is complete, in one fixed
order.  A row that nothing may hide stops the computation where it stands.

Sources of the rules: FSDP2's implicit prefetch gathers one unit ahead (torch.distributed.fsdp, notes of
``fully_shard``); DDP launches buckets in order (Li et al. 2020, section 3.2.3).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from partita.facts.bucketing import Bucketing
from partita.facts.case import Case, Unit
from partita.facts.cluster import Cluster
from partita.facts.ledger import Traffic
from partita.plan.account import Account
from partita.plan.collectives import Path, path
from partita.plan.kernels import Rates, rates
from partita.plan.operations import UnitWork, units
from partita.plan.streams import Call, Streams
from partita.strategies.order import predictors

STEADY = ("forward", "backward", "step")
NEEDED = ("all_gather", "broadcast", "recv")  # verbs that bring what a unit needs; the others take what it made


@dataclass(frozen=True)
class BucketCall:
    """A bucket of one backward: its gradient bytes are complete, and then its call; seconds from the step's begin."""

    index: int
    bucketing: Bucketing
    ready_s: float
    call: Call


@dataclass
class Played:
    """A step that was played: its streams, and where backward of the last micro-batch lies in it."""

    streams: Streams
    rates: Rates
    rows: tuple[Traffic, ...]
    paths: dict[tuple[str, ...], Path]
    units: dict[str, UnitWork]
    accumulate_s: dict[str, float]
    backward_begin_s: float = 0.0
    backward_end_s: float = 0.0
    buckets: list[BucketCall] = field(default_factory=list)
    spans: list[tuple[str, float, float]] = field(default_factory=list)  # units in the last backward


def bucketings(case: Case) -> tuple[Bucketing, ...]:
    """What the layout's rooms launch bucket by bucket."""
    found = ((room, getattr(room, "bucketing", None)) for _, room in predictors(case.layout))
    return tuple(b for _, offers in found if offers is not None for b in offers(case))


def play(account: Account, cluster: Cluster) -> Played:
    """Play one steady step of rank 0.

    Raises:
        Unmeasured: a rate that the step needs is not known.
    """
    return _Player.of(account, cluster).step(account)


@dataclass(frozen=True)
class _Sends:
    """The rows of one steady step, by where they are called."""

    start: tuple[int, ...]  # before the first micro-batch, nothing may hide them
    ahead: tuple[int, ...]  # launched by the step before, and hidden by forward
    needed: dict[tuple[str, str], list[int]]  # (phase, unit)
    made: dict[tuple[str, str], list[int]]
    spread: tuple[int, ...]  # over the last backward, where no room says when
    end: tuple[int, ...]  # around the optimizer


def _sends(rows: tuple[Traffic, ...], bucketed: set[tuple[str, str]]) -> _Sends:
    start, ahead, spread, end = [], [], [], []
    needed: dict[tuple[str, str], list[int]] = {}
    made: dict[tuple[str, str], list[int]] = {}
    for i, r in enumerate(rows):
        if (r.owner, r.verb) in bucketed and r.hidden_by == "backward" and not r.unit:
            continue
        if r.hidden_by == "forward" and not r.unit:
            ahead.append(i)
        elif r.phase == "step":
            end.append(i)
        elif r.unit:
            (needed if r.verb in NEEDED else made).setdefault((r.phase, r.unit), []).append(i)
        elif r.phase == "backward":
            spread.append(i)
        else:
            start.append(i)
    return _Sends(tuple(start), tuple(ahead), needed, made, tuple(spread), tuple(end))


class _Player:
    """Plays a step; ``out`` collects."""

    def __init__(self, case: Case, out: Played, found: tuple[Bucketing, ...]) -> None:
        self.case, self.out, self.streams = case, out, out.streams
        self.found = found
        self.sends = _sends(out.rows, {(b.owner, b.verb) for b in found})
        self.order = [(u, i) for u in case.units for i in range(u.count)]
        self.passes = case.units[0].forward
        self.known = {u.name for u in case.units}
        self.row_of = {(r.owner, r.verb, r.bytes): i for i, r in enumerate(out.rows)}
        self.ahead: list[Call] = []
        ways = [out.paths[r.axis] for r in out.rows]
        self.sizes = [
            (f"{r.verb} {r.unit}".rstrip(), way.name, way.seconds(r.verb, r.bytes))
            for r, way in zip(out.rows, ways, strict=True)
        ]

    @staticmethod
    def of(account: Account, cluster: Cluster) -> _Player:
        case = account.case
        origin = dict.fromkeys(case.mesh.names, 0)
        here = account.ledger.at(origin).traffic
        rows = tuple(r for r in here if r.phase in STEADY and r.kind == "data")
        speed = rates(cluster.device, case.precision.compute)
        work = units(case, speed)
        found = bucketings(case)
        axes = {r.axis for r in rows} | {b.axis for b in found}
        paths = {axis: path(cluster, case.mesh, axis) for axis in axes}
        item = case.precision.bytes("gradients")
        adding = {
            u.name: speed.memory_s(3 * item * sum(h.parameter.elements for h in u.held if h.trained))
            for u in case.units
        }
        return _Player(case, Played(Streams(), speed, rows, paths, work, adding), found)

    def step(self, account: Account) -> Played:
        """Micro-batches, then the optimizer.  Equal micro-batches in the middle are played once."""
        streams = self.streams
        for i in self.sends.start:
            self._now(i)
        done = 0
        while done < self.passes:
            first, last = done == 0, done == self.passes - 1
            mark, quiet = streams.mark(), streams.quiet
            self._micro_batch(first, last)
            done += 1
            left = self.passes - 1 - done
            if not first and not last and quiet and streams.quiet and left > 0:
                streams.repeat(mark, left + 1)
                done += left
        streams.finish()
        self._optimizer(account)
        return self.out

    def _micro_batch(self, first: bool, last: bool) -> None:
        ahead = self._launched_ahead() if first else []
        pending = self._pass("forward", first)
        for index, (unit, i) in enumerate(self.order):
            for call in self._due(ahead, index):
                self.streams.wait(call)
            self._needs(pending, index, self.order, "forward", first)
            self.streams.work(_name(unit, i), self.out.units[unit.name].forward_s)
        self._backward(first, last)

    def _backward(self, first: bool, last: bool) -> None:
        streams, begin = self.streams, self.streams.now
        backward = self.order[::-1]
        pending = self._pass("backward", last)
        filling = [_Filling(b) for b in self.found if last or b.every_pass]
        for index, (unit, i) in enumerate(backward):
            self._needs(pending, index, backward, "backward", last)
            start, work = streams.now, self.out.units[unit.name]
            again = work.forward_s * unit.replay / max(1, unit.backward)
            adding = 0.0 if first else self.out.accumulate_s[unit.name]
            if unit.backward:  # else all is frozen from the input on
                streams.work(_name(unit, i), again + work.backward_s + adding)
            # Adding to earlier micro-batches' gradients comes before a gradient is complete, parameter by parameter.
            stretch = 1.0 + adding / work.backward_s if work.backward_s else 1.0
            for f in filling:
                self._launch(f, unit, start + again, {name: stretch * s for name, s in work.ready_s.items()})
            self._made(unit, index == len(backward) - 1, last)
            if last:
                self.out.spans.append((_name(unit, i), start, streams.now))
        if last:
            self.out.backward_begin_s, self.out.backward_end_s = begin, streams.now
            for i in self.sends.spread:
                self._spread(i, begin, streams.now)

    # What a unit needs

    def _pass(self, phase: str, once: bool) -> dict[str, list[int]]:
        """The rows needed in this pass by unit: those called in every pass, and in one of them those called once."""
        out: dict[str, list[int]] = {}
        for (when, unit), rows in self.sends.needed.items():
            if when == phase:
                out[unit] = [i for i in rows if once or self._per_pass(i)]
        return out

    def _per_pass(self, i: int) -> bool:
        """Whether a row is called in every micro-batch (its count says), and not in one alone."""
        row = self.out.rows[i]
        units_ = next((u.count for u in self.case.units if u.name == row.unit), 1)
        return row.count >= units_ * self.passes

    def _needs(
        self, pending: dict[str, list[int]], index: int, order: list[tuple[Unit, int]], phase: str, once: bool
    ) -> None:
        """Wait for what this unit needs, and call what the next one needs."""
        if index == 0:
            self.ahead = [self._issue(i) for name in self._outside(pending) for i in pending[name]]
            self.ahead += self._gather(pending, order[0][0])
        for call in self.ahead:
            self.streams.wait(call)
        following = order[index + 1][0] if index + 1 < len(order) else None
        self.ahead = self._gather(pending, following) if following else []

    def _gather(self, pending: dict[str, list[int]], unit: Unit) -> list[Call]:
        return [self._issue(i) for i in pending.get(unit.name, ())]

    def _outside(self, pending: dict[str, list[int]]) -> Iterator[str]:
        """Rows of units that are no unit of the model's (the root): needed before everything."""
        return (name for name in pending if name not in self.known)

    # What a unit made

    def _made(self, unit: Unit, at_end: bool, last: bool) -> None:
        for (_, name), rows in self.sends.made.items():
            if name == unit.name or (at_end and name not in self.known):
                behind: Call | None = None
                for i in rows:
                    if last or self._per_pass(i):
                        behind = self._issue(i, behind)

    def _launch(self, filling: _Filling, unit: Unit, start: float, ready: dict[str, float]) -> None:
        b = filling.bucketing
        way = self.out.paths[b.axis]
        for index, at in filling.complete(unit, start, ready):
            row = self.row_of[b.owner, b.verb, b.payloads[index]]
            call = self.streams.call(f"{b.verb} bucket {index}", way.name, self.sizes[row][2], at, row=row)
            self.out.buckets.append(BucketCall(index, b, at, call))

    def _spread(self, i: int, begin: float, end: float) -> None:
        """Calls of which nobody says when they are ready: evenly over the last backward, or after it if unhidden."""
        row = self.out.rows[i]
        for k in range(row.count):
            ready = begin + (k + 1) / row.count * (end - begin) if row.hidden_by else self.streams.now
            self._issue(i, ready=ready)

    # Around the micro-batches

    def _launched_ahead(self) -> list[tuple[float, Call]]:
        """Calls that the step before left to this forward, in its order, each with its share of the parameters."""
        calls = [(i, self._issue(i)) for i in self.sends.ahead for _ in range(self.out.rows[i].count)]
        total, so_far, out = sum(self.out.rows[i].bytes for i, _ in calls), 0, []
        for i, call in calls:
            out.append((so_far / total, call))
            so_far += self.out.rows[i].bytes
        return out

    def _due(self, ahead: list[tuple[float, Call]], index: int) -> Iterator[Call]:
        """What must have arrived before a unit computes: everything that begins before its parameters end."""
        sizes = [sum(h.parameter.elements for h in u.held) for u, _ in self.order] if ahead else []
        share = sum(sizes[: index + 1]) / sum(sizes) if ahead else 0.0
        return (call for begins, call in ahead if begins < share)

    def _optimizer(self, account: Account) -> None:
        clip, update = optimizer_s(account, self.out.rates)
        for i in self.sends.end:
            if "norm" in self.out.rows[i].why:
                continue
            self._now(i)
        if account.case.work.clip is not None:
            self.streams.work("norm and clipping", clip)
            for i in self.sends.end:
                if "norm" in self.out.rows[i].why:
                    self._now(i)
        self.streams.work("optimizer", update)

    def _now(self, i: int) -> None:
        for _ in range(self.out.rows[i].count):
            self.streams.wait(self._issue(i))

    def _issue(self, i: int, behind: Call | None = None, ready: float | None = None) -> Call:
        at = self.streams.now if ready is None else ready
        name, lane, seconds = self.sizes[i]
        return self.streams.call(name, lane, seconds, at, behind, i)


class _Filling:
    """Which buckets are complete after which gradients."""

    def __init__(self, bucketing: Bucketing) -> None:
        self.bucketing = bucketing
        self.runs = {r.unit: r for r in bucketing.runs}
        self.next, self.filled, self.ready = 0, 0, 0.0
        self.need = bucketing.filled[0] if bucketing.filled else 0

    def complete(self, unit: Unit, start: float, ready: dict[str, float]) -> Iterator[tuple[int, float]]:
        """(index, time) of the buckets that the unit's gradients complete; a bucket waits for those before it."""
        run = self.runs.get(unit.name)
        if run is None:
            return
        for name, size in zip(run.names, run.sizes, strict=True):
            self.filled += size
            self.ready = max(self.ready, start + ready.get(name, max(ready.values(), default=0.0)))
            while self.next < len(self.bucketing.filled) and self.filled >= self.need:
                yield self.next, self.ready
                self.next += 1
                if self.next < len(self.bucketing.filled):
                    self.need += self.bucketing.filled[self.next]


def optimizer_s(account: Account, speed: Rates) -> tuple[float, float]:
    """Seconds of norm and clipping, and of the update, by the bytes that they move on rank 0.

    The norm reads the gradients, clipping reads and writes them.  The update reads gradients, reads and writes moments
    and the widest copy of the parameters, and writes the parameters where the master is another copy; a gradient
    that is widened for the master is written and read once more.
    """
    case, origin = account.case, dict.fromkeys(account.case.mesh.names, 0)
    p = case.precision
    rows = account.ledger.at(origin).where(tier="device").memory
    held: dict[str, int] = {}
    for r in rows:
        if (r.phase, r.object) in (("persistent", "optimizer state"), ("step", "gradients")):
            held[r.object] = held.get(r.object, 0) + r.bytes
    gradients, moments = held.get("gradients", 0), held.get("optimizer state", 0)
    if case.work.moments:  # each element that this rank updates has its moments here, whatever else lies elsewhere
        elements = moments // (case.work.moments * p.bytes("moments"))
    else:
        elements = gradients // p.bytes("gradients")
    each = p.bytes("gradients") + 2 * p.bytes("master" if p.master else "weights")
    if p.master:
        each += p.bytes("weights") + 2 * p.bytes("master")
    moved = elements * each + 2 * moments
    return speed.memory_s(3 * gradients), speed.memory_s(moved)


def with_bucket_mb(case: Case, mb: float) -> Case:
    """The same case with buckets of another size."""
    return replace(case, layout=replace(case.layout, bucket_mb=mb))


def _name(unit: Unit, index: int) -> str:
    if unit.count == 1:
        return unit.name
    first = int(unit.name.partition(".")[2].partition("..")[0])
    return f"blocks.{first + index}"
