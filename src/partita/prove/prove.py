"""Prove: run layouts on real ranks beside one device, and say whether plan, dry run and recording are one.

The run on one device comes once, in a process of its own; each layout follows, from the same initial values on the
same samples; dry runs come last.  Nothing here imports torch: processes that do are started, and end.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from partita.facts.errors import BadInput
from partita.facts.layout import Layout
from partita.plan.account import Account, account
from partita.plan.fit import refuse_machine
from partita.plan.laws import Finding
from partita.prove import laws
from partita.prove.compare import Difference, limits, relative, worst
from partita.prove.dryrun import dry_ranks, dry_runs
from partita.prove.proof import Proof
from partita.prove.ranks import Seen, on_rank
from partita.prove.reconcile import Table, reconcile
from partita.prove.reference import Reference, micro_batch, one_device
from partita.prove.witness import STEADY, Witness
from partita.train.launch import cores, inside_torchrun, launch, memory_of_this_machine

Busy = Callable[[str], AbstractContextManager[Any]]
"""Shows that something runs, for as long as the context lasts."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step over all ranks and timed steps, which rank was fastest and slowest, and where time went."""

    least: float
    median: float
    most: float
    fastest: int
    slowest: int
    by_rank: tuple[float, ...]
    plain: bool
    shares: dict[str, float]

    def json(self) -> dict[str, Any]:
        return {
            "min": self.least, "median": self.median, "max": self.most, "min_rank": self.fastest,
            "max_rank": self.slowest, "by_rank": list(self.by_rank), "recorded": not self.plain, "shares": self.shares,
        }  # fmt: skip


@dataclass(frozen=True)
class Report:
    """What came out for one layout."""

    proof: Proof
    account: Account
    table: Table
    differences: dict[str, Difference]
    laws: tuple[Finding, ...]
    step_time: StepTime | None
    losses: tuple[float, ...]
    witnesses: tuple[str, ...]
    stand_ins: tuple[str, ...]
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why witnesses, one device or the laws disagree; empty where they agree."""
        out = []
        traffic = [t for t in self.table.traffic if not t.agrees]
        memory = [m for m in self.table.memory if not m.agrees]
        if traffic:
            t = traffic[0]
            out.append(f"{_count(len(traffic), 'traffic row')}: {t.verb} over {' x '.join(t.axis)} in {t.phase}")
        if memory:
            out.append(f"{_count(len(memory), 'memory row')}: {memory[0].object}")
        for name, d in self.differences.items():
            if not d.holds:
                where = f" in {d.worst}" if d.worst else ""
                out.append(
                    f"{name}{where} {d.value:.2g} from one device, limit {d.limit:.0e}"
                    if d.limit is not None
                    else f"{name}{where} is {d.value}"
                )
        out += [f"law {f.law} ({f.name}): {f.says}" for f in self.laws if f.holds is False]
        return tuple(out)

    @property
    def verdict(self) -> str:
        return "disagrees" if self.reasons else "agrees"


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n > 1)}"


def prove(
    proof: Proof,
    layouts: Sequence[Layout],
    *,
    dry: bool = True,
    threads: int = 1,
    busy: Busy = lambda text: nullcontext(),
    done: Callable[[Report], None] = lambda report: None,
) -> list[Report]:
    """Prove every layout; ``proof.layout`` is not looked at.

    ``threads`` of each rank; the run on one device has as many as all ranks together.  ``done`` is called with each
    report as it comes.  Raises ``BadInput`` before anything runs where a layout cannot, ``RankFailed`` where one died.
    """
    proofs = [replace(proof, layout=layout) for layout in layouts]
    for each in proofs:
        check(each)
    most = max(p.layout.world for p in proofs)
    reports = []
    with tempfile.TemporaryDirectory(prefix="partita-proof-") as folder:
        with busy("one device"):
            alone = min(cores(), most * threads)
            reference = launch(one_device, proofs[0], folder, ranks=1, threads=alone)[0]
        for each in proofs:
            world = each.layout.world
            with busy(f"{each.layout} on {_count(world, 'rank')}"):
                seen = launch(on_rank, each, reference, ranks=world, threads=threads)
            rehearsed: list[Witness] = []
            accounted = account(each.model, each.layout, each.work)
            if dry:
                with busy(f"{each.layout}, dry run"):
                    rehearsed = list(dry_runs(each.model, each.layout, each.work, dry_ranks(accounted), world))
            reports.append(judge(each, reference, seen, rehearsed))
            done(reports[-1])
    return reports


def check(proof: Proof) -> None:
    """Everything that can be refused before a process starts."""
    from partita.model.decoder import refuse

    if inside_torchrun():
        raise BadInput("prove starts its own ranks and cannot run inside torchrun; run it by itself with --ranks N")
    if proof.steps <= STEADY:
        raise BadInput(f"{proof.steps} steps have no steady one, which is the third; {STEADY + 1} or more work")
    accounted = account(proof.model, proof.layout, proof.work)
    refuse(proof.model)
    have = memory_of_this_machine()
    refuse_machine(account(proof.model, Layout(mb=micro_batch(proof.work)), proof.work), 1, have)
    refuse_machine(accounted, proof.layout.world, have)
    proof.source.open(proof.model, proof.work.sequence)


def judge(proof: Proof, reference: Reference, seen: Sequence[Seen], dry: Sequence[Witness]) -> Report:
    """Join what everybody told."""
    found = account(proof.model, proof.layout, proof.work)
    table = reconcile(found.case, found.ledger, dry, [s.witness for s in seen])
    most = limits(_kept_in(found), proof.work.optimizer)
    differences = {
        "loss": _numbers("step", reference.losses, [s.losses for s in seen], most.loss),
        "norm": _numbers("step", reference.norms, [s.norms for s in seen], most.norm),
        "gradients": worst([s.gradients for s in seen], most.gradients),
        "parameters": worst([s.parameters for s in seen], most.parameters),
    }
    if proof.work.clip is None:
        del differences["norm"]
    seconds = {"one device": reference.seconds} | ({"dry run": max(w.seconds for w in dry)} if dry else {})
    return Report(
        proof,
        found,
        table,
        differences,
        laws.check(found.case, reference, seen),
        step_time(seen),
        seen[0].losses,
        ("arithmetic", *(["dry run"] if dry else []), *(["recording"] if seen else [])),
        tuple(dict.fromkeys(n for w in dry for n in w.stand_ins)),
        seconds,
    )


def _kept_in(found: Account) -> str:
    """The narrowest dtype that numbers pass through."""
    p = found.case.precision
    names = (p.weights, p.compute, p.gathered, p.gradients, p.reduction)
    return next((n for n in names if n in ("bfloat16", "float16")), p.weights)


def _numbers(
    what: str, want: Sequence[float | None], ranks: Sequence[Sequence[float | None]], limit: float | None
) -> Difference:
    """The worst relative difference of numbers that every rank has for every step."""
    found = [
        (relative(a, b), f"{what} {i}")
        for have in ranks
        for i, (a, b) in enumerate(zip(have, want, strict=True))
        if a is not None and b is not None
    ]
    value, where = max(found, key=lambda x: float("inf") if x[0] != x[0] else x[0], default=(0.0, ""))
    return Difference(value, where, limit)


def step_time(seen: Sequence[Seen]) -> StepTime | None:
    """Over ranks and their timed steps; shares are the mean over ranks."""
    if not seen:
        return None
    every = [(t, s.witness.rank) for s in seen for t in s.times.step_s]
    least, most = min(every), max(every)
    shares = {k: statistics.fmean(s.times.shares.get(k, 0.0) for s in seen) for k in seen[0].times.shares}
    by_rank = tuple(statistics.median(s.times.step_s) for s in seen)
    median = statistics.median(t for t, _ in every)
    return StepTime(least[0], median, most[0], least[1], most[1], by_rank, all(s.times.plain for s in seen), shares)
