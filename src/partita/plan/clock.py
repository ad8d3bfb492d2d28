"""Clock: the time of one training step, line by line, by arithmetic.

Computation is the decoder's operations on a roofline (``kernels``); a collective is a ring or two levels of links
(``collectives``); what hides what is played on two streams (``play``).  Computation and exposed communication add up to
the step.  Nothing is fitted to measured steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from partita.facts.cluster import Cluster
from partita.facts.flops import model_flops_per_step
from partita.plan.account import Account
from partita.plan.play import Played, optimizer_s, play

# What this clock does not know; the sum is too short by it.
LEFT_OUT = (
    "computation slowed by communication beside it",
    "a host that issues kernels more slowly than the device runs them",
    "products slowed by shapes that fill the device badly",
    "copies into and out of communication buffers",
    "waiting for data and for slower ranks",
)


@dataclass(frozen=True)
class TimeLine:
    """Seconds a step of one thing.  Of a collective, ``hidden_s`` runs behind computation and ``exposed_s`` is waited
    for; of computation everything is exposed.
    """

    phase: str
    name: str
    kind: str  # compute or communication
    seconds: float
    hidden_s: float
    exposed_s: float
    calls: int
    link: str
    why: str
    witness: str = "arithmetic"


@dataclass(frozen=True)
class StepTime:
    """The time of one step: its lines, their sum, and what follows from it.

    ``mfu`` counts attention as ``convention`` says (see ``partita.facts.flops``), over the peak in ``dtype``.
    ``basis`` says what each rate rests on, ``left_out`` what is not counted.
    """

    lines: tuple[TimeLine, ...]
    total_s: float
    tokens_per_s: float
    mfu: float
    convention: str
    dtype: str
    basis: tuple[tuple[str, str], ...]
    left_out: tuple[str, ...] = LEFT_OUT
    witness: str = "arithmetic"

    @property
    def compute_s(self) -> float:
        return sum(line.seconds for line in self.lines if line.kind == "compute")

    @property
    def hidden_s(self) -> float:
        return sum(line.hidden_s for line in self.lines if line.kind == "communication")

    @property
    def exposed_s(self) -> float:
        """Communication that computation waits for."""
        return sum(line.exposed_s for line in self.lines if line.kind == "communication")


def step_time(account: Account, cluster: Cluster, convention: str = "full") -> StepTime:
    """The time of one steady step of a layout on a cluster.

    Raises:
        Unmeasured: a rate that the step needs is not known, or the model has no shapes.
    """
    return read(account, cluster, play(account, cluster), convention)


def read(account: Account, cluster: Cluster, played: Played, convention: str = "full") -> StepTime:
    """The lines of a step that was played."""
    work, case = account.case.work, account.case
    lines = (*_compute(account, played), *_communication(played))
    total = played.streams.now
    tokens = work.global_batch * work.sequence
    flops = model_flops_per_step(case.model, tokens, work.sequence, convention)
    mfu = flops / (total * cluster.world * played.rates.peak_flops)
    links = dict.fromkeys(p.basis for p in played.paths.values())
    basis = (*played.rates.basis, *(("link", says) for says in links if says))
    return StepTime(lines, total, tokens / total, mfu, convention, played.rates.dtype, basis)


def _compute(account: Account, played: Played) -> Iterator[TimeLine]:
    """Lines of computation: kinds of operations by phase, recomputation, accumulation, and the optimizer."""
    case, again, adding = account.case, 0.0, 0.0
    for phase, backward in (("forward", False), ("backward", True)):
        sums: dict[str, float] = {}
        for u in case.units:
            for kind, seconds in played.units[u.name].by_kind(backward).items():
                sums[kind] = sums.get(kind, 0.0) + seconds * u.count * (u.backward if backward else u.forward)
        for kind, seconds in sums.items():
            yield _computed(phase, kind, seconds, _WHY[kind])
    for u in case.units:
        again += played.units[u.name].forward_s * u.count * u.replay
        adding += played.accumulate_s[u.name] * u.count * max(0, u.backward - 1)
    if again:
        yield _computed("backward", "recomputation", again, "forward again, for tensors that were not kept")
    if adding:
        why = "gradients of later micro-batches, added to those of the first"
        yield _computed("backward", "accumulation", adding, why)
    clip, update = optimizer_s(account, played.rates)
    if case.work.clip is not None:
        yield _computed("step", "norm and clipping", clip, "gradients are read for the norm, and scaled")
    yield _computed("step", "optimizer", update, "gradients, moments and parameters pass through memory once")


_WHY = {
    "matrix products": "FLOPs over the rate of products",
    "attention": "FLOPs of the pairs under the mask over the rate of fused attention",
    "memory-bound": "bytes of norms, activations, residuals, embedding and loss over the memory's rate",
    "launch gaps": "what each kernel adds beside its own time",
}


def _computed(phase: str, name: str, seconds: float, why: str) -> TimeLine:
    return TimeLine(phase, name, "compute", seconds, 0.0, seconds, 0, "", why)


def _communication(played: Played) -> Iterator[TimeLine]:
    """One line for each kind of call: rows that differ in size alone are one line."""
    found: dict[tuple[str, str, tuple[str, ...], str], list[float]] = {}
    why: dict[tuple[str, str, tuple[str, ...], str], str] = {}
    for call in played.streams.calls:
        row = played.rows[call.row]
        key = (row.phase, row.verb, row.axis, row.unit or row.why)
        sums = found.setdefault(key, [0.0, 0.0, 0.0])
        why[key] = row.why
        sums[0] += call.seconds * call.times
        sums[1] += call.exposed_s * call.times
        sums[2] += call.times
    for key in sorted(found, key=lambda k: ("forward", "backward", "step").index(k[0])):
        phase, verb, axis, unit = key
        seconds, exposed, calls = found[key]
        name = f"{verb} {' x '.join(axis)}" + (f" {unit}" if unit != why[key] else "")
        link = played.paths[axis].link
        hidden = seconds - exposed
        hidden = hidden if hidden > 1e-9 * seconds else 0.0  # sums of floats leave crumbs
        yield TimeLine(phase, name, "communication", seconds, hidden, exposed, int(calls), link, why[key])


def as_json(time: StepTime) -> dict[str, Any]:
    """A step's time as plain data."""
    return {
        "witness": time.witness,
        "total_s": time.total_s,
        "compute_s": time.compute_s,
        "hidden_s": time.hidden_s,
        "exposed_s": time.exposed_s,
        "tokens_per_s": time.tokens_per_s,
        "mfu": time.mfu,
        "mfu_convention": time.convention,
        "mfu_dtype": time.dtype,
        "lines": [vars(line) for line in time.lines],
        "basis": [{"rate": name, "says": says} for name, says in time.basis],
        "left_out": list(time.left_out),
    }
