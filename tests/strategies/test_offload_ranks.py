"""Offload on real ranks, where device and host are one memory: rows by tier, one device's training, and the delay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from partita.facts.layout import Layout
from partita.facts.model import Model
from partita.facts.precision import PRESETS
from partita.facts.work import Training
from tests.strategies.proving import Prover, proof
from tests.tiny import ZOO

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def prove(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Prover:
    return Prover(ranks, tmp_path_factory)


CASES = [
    ("full_shard offload=parameters", "plain", 2, 2, {}),
    ("full_shard offload=parameters reshard=2", "tied", 4, 1, {"optimizer": "sgd"}),
    ("shard_grad_op offload=parameters wrap=2", "tied", 2, 3, {}),
    ("full_shard offload=parameters", "plain", 2, 2, {"precision": "bf16-master"}),
    ("ddp offload=optimizer", "plain", 2, 2, {}),
    ("ddp offload=optimizer", "tied", 1, 2, {}),
    ("zero1 offload=optimizer bucket_mb=0.02", "tied", 2, 2, {"precision": "bf16-master"}),
    ("zero2 offload=optimizer", "qk_norm", 4, 2, {"optimizer": "sgd", "frozen": ("embed.*", "blocks.1.*")}),
    ("zero2 offload=optimizer_delayed", "plain", 2, 2, {}),
]


@pytest.mark.parametrize("layout, name, world, each, more", CASES, ids=[f"{c[0]} {c[1]} on {c[2]}" for c in CASES])
def test_host_and_device_rows_are_exact(
    prove: Prover, layout: str, name: str, world: int, each: int, more: dict[str, Any]
) -> None:
    """Worked example: the optimizer runs on the host, and what it keeps is no row of the device."""
    report = prove(proof(layout, world, ZOO[name], each=each, **more))
    assert report.verdict == "agrees", report.reasons
    tiers = {m.object: m.tier for m in report.table.memory if m.counts.recorded}
    assert tiers["optimizer state"] == "host"
    assert tiers["parameters"] == ("host" if "parameters" in layout else "device")
    assert ("pinned buffers" in tiers) == ("parameters" not in layout)


LR = 0.05


def gradients(rank: int, world: int, layout: str, model: Model, work: Training, steps: int) -> list[dict[str, Any]]:
    """Parameters before each step and the gradients of it, whole, by name; and parameters after the last."""
    import torch.distributed as dist

    from partita.model.init import fill
    from partita.plan.account import account
    from partita.strategies.groups import Groups
    from partita.train.build import build
    from partita.train.data import SyntheticDataset, micro_batches
    from partita.train.step import train_step

    case = account(model, Layout.parse(layout, world), work).case
    groups = Groups(case.mesh) if world > 1 else None
    step = build(case, groups, lambda named: fill(named, model, 0))
    data, out = SyntheticDataset(model.vocab, 8), []
    for s in range(steps):
        before = {n: p.detach().clone() for n, p in step.named()}
        mine = micro_batches(data, s, work.global_batch, case.layout.mb, rank, world)
        train_step(step, mine, case, groups)
        made = {n: torch.zeros(p.numel(), dtype=p.dtype) for n, p in step.named()}
        for piece in step.pieces():
            for part in piece.slices:
                n = part.end - part.begin
                made[part.name][part.begin : part.end] = piece.tensor.grad[part.offset : part.offset + n]
            if not piece.slices:
                made[piece.name] += piece.tensor.grad.flatten()
        if step.owned:
            for g in made.values():
                dist.all_reduce(g)
        out.append({"before": before, "gradients": {n: made[n].view(p.shape) for n, p in before.items()}})
        step.optimizer.zero_grad()
    return [*out, {"before": {n: p.detach().clone() for n, p in step.named()}, "gradients": {}}]


@pytest.mark.parametrize("layout, world", [("ddp", 1), ("ddp", 2), ("zero1", 2), ("zero2 bucket_mb=0.02", 2)])
def test_a_delayed_update_uses_the_gradients_of_the_step_before(ranks: Any, layout: str, world: int) -> None:
    """Plain SGD: p' = p - lr g.  Steps 0 and 1 are not delayed; step 2 leaves its gradients to step 3, and so on."""
    work = Training(2 * world, 8, PRESETS["fp64"], "sgd", lr=LR, momentum=0.0, weight_decay=0.0, clip=None)
    text = f"{layout} offload=optimizer_delayed delay_after=2"
    for seen in ranks(world).run(gradients, text, ZOO["two_layers"], work, 6):
        for s in range(6):
            used = {0: 0, 1: 1, 2: None, 3: 2, 4: 3, 5: 4}[s]
            for name, p in seen[s]["before"].items():
                want = p if used is None else p - LR * seen[used]["gradients"][name]
                torch.testing.assert_close(seen[s + 1]["before"][name], want, rtol=1e-12, atol=1e-14)
        moved = [name for name, p in seen[2]["before"].items() if not torch.equal(p, seen[4]["before"][name])]
        assert len(moved) == len(seen[2]["before"])


def resumed(rank: int, world: int, layout: str, model: Model, work: Training, run: str) -> list[tuple[float, float]]:
    """Losses of steps 3 and 4, gone on with, and of a second process that opens the checkpoint written after step 2."""
    from partita.model.init import fill
    from partita.plan.account import account
    from partita.strategies.groups import Groups
    from partita.train import checkpoint
    from partita.train.build import build
    from partita.train.data import SyntheticDataset, micro_batches
    from partita.train.step import train_step

    case = account(model, Layout.parse(layout, world), work).case
    groups, data, losses = Groups(case.mesh), SyntheticDataset(model.vocab, 8), []
    for seed in (0, 1):  # the second begins from other values, and is given those of the checkpoint
        step = build(case, groups, lambda named, seed=seed: fill(named, model, seed))
        if seed:
            checkpoint.load(step, checkpoint.latest(Path(run)), {"layout": layout})
        found = []
        for s in range(3 if seed else 0, 6):
            found.append(float(train_step(step, micro_batches(data, s, 4, 1, rank, world), case, groups).loss))
            step.optimizer.zero_grad()
            if s == 2 and not seed:
                checkpoint.save(step, checkpoint.Meta(3, {"layout": layout}), Path(run), 1)
        losses.append(found[-3:])
    return list(zip(*losses, strict=True))


@pytest.mark.parametrize("layout", ["ddp", "zero1"])
def test_a_delayed_run_goes_on_from_a_checkpoint(ranks: Any, tmp_path: Path, layout: str) -> None:
    """The update that has not reached the device yet is part of the state."""
    work = Training(4, 8, PRESETS["fp64"], "adamw", lr=1e-2)
    text = f"{layout} offload=optimizer_delayed delay_after=1"
    for losses in ranks(2).run(resumed, text, ZOO["two_layers"], work, str(tmp_path)):
        for went_on, opened in losses:
            assert went_on == pytest.approx(opened, rel=1e-12)
        assert len({a for a, _ in losses}) == 3


def overlapped(rank: int, world: int) -> bool:
    """Whether the device's next forward begins while the host still works."""
    import threading

    from partita.strategies.offload.host import Host

    host, release, began = Host(0, pin=False), threading.Event(), threading.Event()
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    master = torch.nn.Parameter(host.copy(p, torch.float64))

    class Slow:
        def step(self) -> None:
            began.set()
            assert release.wait(10)
            master.data -= master.grad

    host.step([[(p, master)]], Slow())
    assert began.wait(10)
    untouched = torch.equal(p.detach(), torch.ones(3))  # step has come back, and the host is not done
    release.set()
    host.wait()
    return untouched and bool(host.owed) and torch.equal(master.detach(), torch.zeros(3, dtype=torch.float64))


def test_the_host_works_while_the_device_goes_on() -> None:
    assert overlapped(0, 1)


@pytest.mark.parametrize(
    ("layout", "world", "frozen"),
    [
        ("full_shard shard=4 reshard=2 wrap=2", 8, ()),
        ("full_shard offload=parameters prefetch=2", 4, ("embed.*", "blocks.0.*")),
        ("zero1 offload=optimizer_delayed delay_after=1", 4, ("blocks.1.*",)),
    ],
)
def test_a_dry_run_has_the_same_rows(layout: str, world: int, frozen: tuple[str, ...]) -> None:
    """On fake tensors, where nothing has a value: hybrid shards with neighbours, and the host's own count of steps."""
    from partita.plan.account import account
    from partita.prove.dryrun import dry_ranks, dry_runs
    from partita.prove.reconcile import reconcile

    given = proof(layout, world, ZOO["tied"], each=1, frozen=frozen)
    found = account(given.model, given.layout, given.work)
    rehearsed = list(dry_runs(given.model, given.layout, given.work, dry_ranks(found), world))
    assert reconcile(found.case, found.ledger, rehearsed, []).clashes == ()
