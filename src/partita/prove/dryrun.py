"""Dry run: the real build and the real training step, on fake tensors and a fake process group, as any rank.

A fake tensor has a shape, a dtype and a device and no data, and a fake group answers at once; so one process on any
machine can be rank 1,000 of a 70B model.  Collectives and tensor bytes are exact, because the code that issues them is
the code that trains.  Every rank has a process of its own: torch's caches would keep another rank's uneven shapes.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from partita.facts.case import Case
from partita.facts.errors import BadInput, RunFailed
from partita.facts.layout import Layout
from partita.facts.model import Model
from partita.facts.work import Training
from partita.plan.account import Account, account
from partita.prove.wire import pack, unpack
from partita.prove.witness import STEADY, Witness

STEPS = STEADY + 1
PARALLEL = 2
PRELOAD = "partita.prove.preload"


class DryRunFailed(RunFailed):
    """A dry run's process ended with an error; the sentence is its last word."""


def dry_run(model: Model, layout: Layout, work: Training, rank: int, world: int, steps: int = STEPS) -> Witness:
    """Run ``steps`` steps as ``rank`` of ``world``, in a process of its own.

    Raises ``BadInput`` for a rank outside the world or a layout that does not fit it, ``DryRunFailed`` otherwise.
    """
    return next(iter(dry_runs(model, layout, work, [rank], world, steps)))


def dry_runs(
    model: Model, layout: Layout, work: Training, ranks: Iterable[int], world: int, steps: int = STEPS
) -> Iterator[Witness]:
    """As several ranks, in their order, a few processes at a time."""
    wanted = list(ranks)
    check(model, layout, work, wanted, world)
    waiting = list(wanted)
    running: list[_Running] = []
    try:
        while waiting or running:
            while waiting and len(running) < PARALLEL:
                running.append(_start({**pack(model, layout, work), "rank": waiting.pop(0), "steps": steps}))
            yield _finish(running.pop(0))
    finally:
        for process in running:
            process.end()


def dry_ranks(accounted: Account) -> list[int]:
    """Ranks that are run dry by default: the first, and the last where its rows differ (a short last shard)."""
    mesh, ledger = accounted.case.mesh, accounted.ledger
    first, last = ledger.at(mesh.coordinate(0)), ledger.at(mesh.coordinate(mesh.world - 1))
    same = (first.memory, first.traffic) == (last.memory, last.traffic)
    return [0] if same else [0, mesh.world - 1]


def check(model: Model, layout: Layout, work: Training, ranks: Iterable[int], world: int) -> None:
    """Refuse, in one sentence, what no dry run can do."""
    from partita.model.decoder import refuse

    if layout.world != world:
        raise BadInput(f"layout '{layout}' has {layout.world} ranks, and the world has {world}; make them equal")
    for rank in ranks:
        if not 0 <= rank < world:
            raise BadInput(f"rank {rank} does not exist in a world of {world}; ranks are 0 to {world - 1}")
    refuse(model)
    account(model, layout, work)


@dataclass
class _Running:
    """A process that runs dry, the end of the pipe on which its witness comes, and the file that takes its errors."""

    process: Any
    answer: Connection
    log: Path

    def end(self) -> str:
        """End it, and return what it said on its standard error."""
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.answer.close()
        said = self.log.read_text(errors="replace")
        self.log.unlink()
        return said.strip()


def _start(job: dict[str, Any]) -> _Running:
    """A fork of a server that has imported torch and has done nothing else with it: a dry run costs no import."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOAD])
    here, there = context.Pipe(duplex=False)
    handle, log = tempfile.mkstemp(prefix="partita-dry-")
    os.close(handle)
    process = context.Process(target=_child, args=(job, there, log), daemon=True)
    process.start()
    there.close()
    return _Running(process, here, Path(log))


def _finish(running: _Running) -> Witness:
    try:
        answer = running.answer.recv_bytes()
    except EOFError:
        answer = None
    if answer is not None:
        running.process.join()
    said = running.end()
    if answer is None:
        last = (said.splitlines() or ["it said nothing"])[-1]
        raise DryRunFailed(f"a dry run ended with exit code {running.process.exitcode}: {last}", said)
    return Witness.from_json(json.loads(answer))


# Inside the process


def run(model: Model, layout: Layout, work: Training, rank: int, steps: int = STEPS) -> Witness:
    """The dry run itself.  It makes the default process group, so a process can do it once."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from partita.prove.stand_in import NAME, Replicated
    from partita.strategies.groups import Groups

    began = time.perf_counter()
    case = account(model, layout, work).case
    groups = None
    if case.mesh.world > 1:
        dist.init_process_group("fake", rank=rank, world_size=case.mesh.world, store=FakeStore())
        groups = Groups(case.mesh, replicate=Replicated)
        for axes in (("dp",), ("dp", "cp"), ("pp", "dp", "cp"), *((name,) for name in case.mesh.names)):
            groups.group(*axes)  # a group made under fake tensors would have fake ranks
    try:
        with _meshes_stay_real():
            witness = _rehearse(case, groups, rank, steps)
    finally:
        if groups is not None:
            dist.destroy_process_group()
    stand_ins = (NAME,) if layout.state == "ddp" and groups is not None else ()
    return replace(witness, stand_ins=stand_ins, seconds=time.perf_counter() - began)


def _rehearse(case: Case, groups: Any, rank: int, steps: int) -> Witness:
    """Build, then steps, under the recorder and the tracker of peaks."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from partita.observe.record import Recorder
    from partita.prove.observed import Tracked, state_rows
    from partita.train.step import train_step

    fake = FakeTensorMode(allow_non_fake_inputs=True)
    tracked, recorder = Tracked(), Recorder(case.mesh)
    with tracked, recorder, recorder.phase("init"), tracked.phase("init"):
        step = _build(case, groups, fake)
    init = _rows(recorder)
    batches = _batches(case, groups, fake)
    rows: list[tuple[Any, ...]] = []
    memory: tuple[Any, ...] = ()
    for i in range(steps):
        recorder = Recorder(case.mesh)
        tracked.step(i)
        # The tracker sees every step: a fake storage that grows before it was met could not be told from a real one.
        with fake, tracked, recorder:
            train_step(step, batches, case, groups, [recorder, tracked])
        rows.append(_rows(recorder))
        memory = state_rows(step)
        step.optimizer.zero_grad()
    return Witness("dry", rank, case.mesh.world, init, tuple(rows), memory, tracked.peaks(steps - 1))


def _build(case: Case, groups: Any, fake: Any) -> Any:
    """As ``train.build``, with storage that is fake."""
    import torch

    from partita.model.decoder import Decoder
    from partita.strategies.parallelize import parallelize
    from partita.train.build import Once, calls_of

    class Hollow(Once):
        def __call__(self) -> None:
            with fake:
                super().__call__()

    with torch.device("meta"):
        module = Decoder(case.model).to(getattr(torch, case.precision.weights))
    # Outside fake tensors: rooms make process groups and read the ranks of meshes.
    return parallelize(module, calls_of(case.model), groups, case, Hollow(module, lambda named: None, "cpu"))


def _batches(case: Case, groups: Any, fake: Any) -> list[Any]:
    """This rank's micro-batches of one step, as fake tensors: their values are never read."""
    from partita.train.data import SyntheticDataset, micro_batches

    data = SyntheticDataset(case.model.vocab, case.work.sequence, ignore="none")
    index = case.mesh.index(groups.coordinate, "dp") if groups else 0
    mine = micro_batches(data, 0, case.work.global_batch, case.layout.mb, index, case.layout.dp)
    return [
        replace(
            b, ids=fake.from_tensor(b.ids), targets=fake.from_tensor(b.targets), positions=fake.from_tensor(b.positions)
        )
        for b in mine
    ]


def _rows(recorder: Any) -> tuple[Any, ...]:
    """What was recorded; the stand-in's rebuild is named as torch's own is."""
    from partita.observe.calls import rows_of

    return rows_of(
        replace(c, kind="control", reason="bucket rebuild")
        if c.caller.startswith("stand_in.py:") and c.caller.endswith(" rebuild")
        else c
        for c in recorder.calls
    )


@contextmanager
def _meshes_stay_real() -> Iterator[None]:
    """Torch computes a mesh's coordinates with tensors at any time; under fake tensors they would have no values."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.distributed.device_mesh import DeviceMesh

    mesh: Any = DeviceMesh
    original = mesh._compute_coordinates_from_mesh

    def compute(*args: Any) -> Any:
        with unset_fake_temporarily():
            return original(*args)

    mesh._compute_coordinates_from_mesh = staticmethod(compute)
    try:
        yield
    finally:
        mesh._compute_coordinates_from_mesh = staticmethod(original)


def _child(job: dict[str, Any], answer: Connection, log: str) -> None:
    """Run the job; the witness goes back as JSON, and what is written to standard error to the log."""
    with open(log, "a") as errors:
        os.dup2(errors.fileno(), 2)
    model, layout, work = unpack(job)
    answer.send_bytes(json.dumps(run(model, layout, work, job["rank"], job["steps"]).json()).encode())
