"""What one rank of a proof does: the steps, watched, and everything that can be told of them in a few numbers."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from partita.facts.case import Case
from partita.plan.account import account
from partita.prove.compare import Piece, boxed, pieces
from partita.prove.proof import Proof
from partita.prove.reference import Captured, Reference, names
from partita.prove.witness import STEADY, Witness

if TYPE_CHECKING:
    from partita.observe.record import Recorder
    from partita.strategies.groups import Groups
    from partita.strategies.parallelize import Step

SETTLE_ROUNDS = 8
SETTLE_S = 0.1

Issued = tuple[str, tuple[str, ...], str, int, tuple[int, ...], int | None]
"""A collective as its group's members must all issue it: verb, axis, dtype, bytes, ranks, peer."""


@dataclass(frozen=True)
class Times:
    """Seconds of one rank.  ``step_s``: of each step without a recorder, where there is one, else of the steady one.

    ``shares`` are of the steady step: data, forward, backward, optimizer, each without the communication that the rank
    stood still for, which is ``exposed communication``.
    """

    step_s: tuple[float, ...]
    plain: bool
    shares: dict[str, float]


@dataclass(frozen=True)
class Seen:
    """All that one rank tells."""

    witness: Witness
    losses: tuple[float, ...]
    norms: tuple[float | None, ...]
    samples: tuple[tuple[str, ...], ...]
    initial: list[Piece]
    gradients: list[Piece]
    parameters: list[Piece]
    misplaced: tuple[str, ...]
    issued: tuple[Issued, ...]
    tied: bool | None
    times: Times
    notes: dict[str, Any] = field(default_factory=dict)


class Clock:
    """A watch of ``train_step``: seconds in each phase, as the host sees them."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began


class Settle:
    """A watch of ``train_step`` that lets gloo finish before a phase.

    Gloo's own threads let go of a collective's tensors a little after they have said that it is done: without the wait,
    the root unit's gradients are sometimes still there when the optimizer steps.  A thread that takes up another
    collective has let go of the one before, so a few small ones are sent round, and a moment is waited.
    """

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        import torch
        import torch.distributed as dist

        if name == "step" and dist.is_initialized():
            for _ in range(SETTLE_ROUNDS):
                small = [dist.all_reduce(torch.zeros(1), async_op=True) for _ in range(SETTLE_ROUNDS)]
                for work in small:
                    work.wait()
            time.sleep(SETTLE_S)
        yield


def on_rank(proof: Proof, reference: Reference) -> Seen:
    """Entry of a launched rank."""
    from partita.train.ranks import process_group

    with process_group():
        return observe(proof, reference)


def observe(proof: Proof, reference: Reference) -> Seen:
    """Run the proof's layout as this rank of the process group that stands.

    Steps up to the steady one are recorded, the others run plain; one more step, after everything is compared, runs
    under the tracker of peaks.
    """
    from partita.observe.record import Recorder
    from partita.strategies.groups import Groups

    case = account(proof.model, proof.layout, proof.work).case
    groups = Groups(case.mesh) if case.mesh.world > 1 else None
    recorder = Recorder(case.mesh)
    with recorder, recorder.phase("init"):
        step = _build(case, groups, proof)
    return _Run(proof, reference, case, groups, step).all(recorder)


def _build(case: Case, groups: Groups | None, proof: Proof) -> Step:
    from partita.train.build import build

    return build(case, groups, proof.values)


@dataclass(eq=False)
class _Run:
    """One rank's steps, one after another."""

    proof: Proof
    reference: Reference
    case: Case
    groups: Groups | None
    step: Step

    def __post_init__(self) -> None:
        from partita.prove.observed import Tracked

        self.tracked = Tracked()
        self.data = self.proof.source.open(self.proof.model, self.proof.work.sequence)
        self.losses: list[float] = []
        self.norms: list[float | None] = []
        self.samples: list[tuple[str, ...]] = []
        self.plain: list[float] = []
        self.recorders: list[Recorder] = []
        self.gradients: list[Piece] = []
        self.misplaced: list[str] = []
        self.memory: tuple[Any, ...] = ()
        self.steady: tuple[float, Clock, float] = (0.0, Clock(), 0.0)

    def all(self, built: Recorder) -> Seen:
        from partita.observe.calls import rows_of

        initial = pieces(self.step.named(), self.reference.file("initial"))
        self.misplaced += list(placements(self.step, self.case))
        for i in range(self.proof.steps):
            self.one(i)
        parameters = pieces(self.step.named(), self.reference.file("parameters"))
        tied = still_tied(self.step) if self.case.model.tied else None
        peaks = self.peak()
        rank = self.groups.rank if self.groups else 0
        rows = tuple(rows_of(r.calls) for r in self.recorders)
        witness = Witness("recorded", rank, self.case.mesh.world, rows_of(built.calls), rows, self.memory, peaks)
        return Seen(
            witness,
            tuple(self.losses),
            tuple(self.norms),
            tuple(self.samples),
            initial,
            self.gradients,
            parameters,
            tuple(self.misplaced),
            tuple((c.verb, c.axis, c.dtype, c.bytes, c.ranks, c.peer) for c in self.recorders[-1].calls),
            tied,
            self.times(),
        )

    def batches(self, i: int) -> Any:
        from partita.train.data import micro_batches

        index = self.case.mesh.index(self.groups.coordinate, "dp") if self.groups else 0
        layout = self.case.layout
        return micro_batches(self.data, i, self.proof.work.global_batch, layout.mb, index, layout.dp)

    def one(self, i: int) -> None:
        """Step ``i``: recorded up to the steady one, timed after it."""
        from partita.observe.record import Recorder
        from partita.prove.observed import state_rows
        from partita.train.step import train_step

        began = time.perf_counter()
        batches = self.batches(i)
        fetched = time.perf_counter() - began
        recorded = i <= STEADY
        recorder, clock = Recorder(self.case.mesh), Clock()
        watches: list[Any] = [recorder, clock] if recorded else []
        if i == 0:
            watches.append(Captured(self.first_gradients))
        context: AbstractContextManager[Any] = recorder if recorded else nullcontext()
        with context:
            result = train_step(self.step, batches, self.case, self.groups, watches)
        loss = float(result.loss)
        took = time.perf_counter() - began
        self.losses.append(loss)
        self.norms.append(None if result.norm is None else float(result.norm))
        self.samples.append(names(batches))
        if recorded:
            self.recorders.append(recorder)
            self.steady = (took, clock, fetched)
        else:
            self.plain.append(took)
        if i == STEADY:
            self.memory = state_rows(self.step)
            self.misplaced += list(gradient_placements(self.step))
        if i == self.proof.steps - 1:
            self.tracked.hold(self.step)  # with gradients: where they are views of buckets, those stay
        self.step.optimizer.zero_grad()
        if self.step.timeline is not None:
            self.step.timeline.buckets.clear()

    def first_gradients(self) -> None:
        from partita.strategies.step.state import gradient_boxes

        self.misplaced += list(gradient_placements(self.step))
        self.gradients = boxed(gradient_boxes(self.step), self.reference.file("gradients"))

    def peak(self) -> dict[str, int]:
        """One more step, whose numbers nobody reads, under the tracker."""
        from partita.train.step import train_step

        batches = self.batches(self.proof.steps)
        gc.collect()  # what earlier steps left in reference cycles is no part of this one
        with self.tracked:
            train_step(self.step, batches, self.case, self.groups, [Settle(), self.tracked])
        self.step.optimizer.zero_grad()
        return self.tracked.peaks(0)

    def times(self) -> Times:
        took, clock, fetched = self.steady
        recorder = self.recorders[-1]
        exposed = dict.fromkeys(clock.seconds, 0.0)
        for c in recorder.calls:
            if c.phase in exposed and c.exposed_s:
                exposed[c.phase] += c.exposed_s
        if "backward" in exposed and self.case.layout.state == "ddp":
            exposed["backward"] += sum(t.exposed_s for t in recorder.tails)
        shares = {"data": fetched / took}
        for phase, name in (("forward", "forward"), ("backward", "backward"), ("step", "optimizer")):
            shares[name] = max(0.0, clock.seconds.get(phase, 0.0) - exposed.get(phase, 0.0)) / took
        shares["exposed communication"] = sum(exposed.values()) / took
        return Times(tuple(self.plain) or (took,), bool(self.plain), shares)


def placements(step: Step, case: Case) -> Iterator[str]:
    """Sentences about parameters that DTensor places otherwise than the case declares."""
    from torch.distributed.tensor import DTensor

    for name, p in step.named():
        held = case.by_name.get(name)
        if held is None:
            yield f"{name} is no parameter of the case"
            continue
        want = {a: s.dim for s in held.splits for a in case.mesh.live(*s.axis)}
        have: dict[str, int] = {}
        if isinstance(p, DTensor):
            for axis, placement in zip(p.device_mesh.mesh_dim_names or (), p.placements, strict=True):
                if not placement.is_replicate():
                    dim = getattr(placement, "dim", -1)
                    have |= dict.fromkeys(case.mesh.live(*axis.split("_")), dim)
        if want != have:
            yield f"{name} is declared as {want or 'whole'} and lies as {have or 'whole'}"


def gradient_placements(step: Step) -> Iterator[str]:
    """Sentences about gradients that do not lie as their parameter does."""
    from torch.distributed.tensor import DTensor

    whole = {o.name: o.tensor for o in step.pieces()}  # what lies flat is compared by its own ranges of elements
    for name, p in whole.items():
        g = p.grad
        if g is None:
            yield f"{name} has no gradient"
        elif isinstance(p, DTensor) != isinstance(g, DTensor):
            yield f"the gradient of {name} is {type(g).__name__} and the parameter {type(p).__name__}"
        elif isinstance(p, DTensor) and isinstance(g, DTensor) and p.placements != g.placements:
            yield f"the gradient of {name} lies as {g.placements} and the parameter as {p.placements}"


def still_tied(step: Step) -> bool:
    """Whether head and embedding are still one storage."""
    from partita.observe.memory import local
    from partita.observe.private import storage_key

    module: Any = step.module
    head, embed = (local(m.weight.detach()) for m in (module.head, module.embed))
    return storage_key(head) == storage_key(embed)
