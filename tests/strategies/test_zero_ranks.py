"""ZeRO on real ranks: recorded rows and bytes are the predicted ones, and the training is one device's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from partita.facts.layout import Layout
from partita.facts.model import Model
from partita.facts.precision import PRESETS
from partita.facts.work import Training
from tests.tiny import ZOO

torch = pytest.importorskip("torch")

STEPS = 4


@dataclass
class Seen:
    """What one rank saw: worst relative differences from one device, and rows that two witnesses do not share."""

    worst: dict[str, float] = field(default_factory=dict)
    rows: int = 0
    traffic: dict[Any, Any] = field(default_factory=dict)
    init: dict[Any, Any] = field(default_factory=dict)
    memory: dict[Any, Any] = field(default_factory=dict)

    def note(self, name: str, mine: Any, want: Any) -> None:
        a, b = (torch.as_tensor(t).detach().double() for t in (mine, want))
        off = float(torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(b).clamp_min(1e-300))
        self.worst[name] = max(self.worst.get(name, 0.0), off if off == off else float("inf"))

    @property
    def agrees(self) -> bool:
        return not (self.traffic or self.init or self.memory) and self.rows > 0


def whole_gradients(step: Any, group: Any) -> dict[str, Any]:
    """Every gradient, put together from all ranks' shards."""
    import torch.distributed as dist

    out = {name: torch.zeros(p.numel(), dtype=torch.float64) for name, p in step.named()}
    for piece in step.owned:
        for s in piece.slices:
            n = s.end - s.begin
            out[s.name][s.begin : s.end] = piece.tensor.grad[s.offset : s.offset + n].double()
    for grad in out.values():
        dist.all_reduce(grad, group=group)
    return {name: out[name].view(p.shape) for name, p in step.named()}


def clashes(found: Any, at: dict[str, int], held: Any) -> dict[Any, tuple[int, int]]:
    """Objects whose persistent bytes differ: (predicted, on this rank)."""
    persists = [
        r
        for r in found.ledger.memory
        if at in r.ranks and (r.phase == "persistent" or (r.phase == "step" and "gradients" in (r.object, r.unit)))
    ]
    sums: list[dict[Any, int]] = [{}, {}]
    for rows, into in zip((persists, held), sums, strict=True):
        for r in rows:
            key = (r.object, r.unit if r.object == "padding" else "", r.phase)
            into[key] = into.get(key, 0) + r.bytes
    want, got = sums
    return {k: (want.get(k, 0), got.get(k, 0)) for k in want.keys() | got.keys() if want.get(k, 0) != got.get(k, 0)}


def compare(
    rank: int, world: int, layout: str, model: Model, precision: str, batch: int, clip: float | None, optimizer: str
) -> Seen:
    """Train beside one device that holds the whole batch; record the last step."""
    from partita.facts.ledger import join, select
    from partita.model.init import fill
    from partita.observe.record import Recorder
    from partita.plan.account import account
    from partita.prove.observed import state_rows
    from partita.strategies.groups import Groups
    from partita.train.build import build
    from partita.train.data import SyntheticDataset, micro_batches
    from partita.train.step import train_step

    work = Training(batch, 8, PRESETS[precision], optimizer, clip=clip)
    found = account(model, Layout.parse(layout, world), work)
    case, alone = found.case, account(model, Layout(mb=batch), work).case
    groups, seen = Groups(case.mesh), Seen()
    at = groups.coordinate
    start = Recorder(case.mesh)
    with start, start.phase("init"):
        step = build(case, groups, lambda named: fill(named, model, 0))
    one = build(alone, None, lambda named: fill(named, model, 0))
    data = SyntheticDataset(model.vocab, 8)
    for s in range(STEPS):
        want = train_step(one, micro_batches(data, s, batch, batch), alone, None)
        recorder = Recorder(case.mesh)
        mine = micro_batches(data, s, batch, case.layout.mb, case.mesh.index(at, "dp"), case.layout.dp)
        with recorder:
            got = train_step(step, mine, case, groups, [recorder])
        seen.note("loss", got.loss, want.loss)
        if want.norm is not None:
            seen.note("norm", got.norm, want.norm)
        whole = whole_gradients(step, groups.group("dp"))
        for name, p in one.named():
            if step.scaling is None:
                seen.note("gradient", whole[name], p.grad)
        if s < STEPS - 1:
            step.optimizer.zero_grad()
            one.optimizer.zero_grad()
    for (name, p), (other, q) in zip(step.named(), one.named(), strict=True):
        assert name == other
        seen.note("parameter", p, q)
    steady = [r for r in found.ledger.traffic if at in r.ranks and r.phase != "init"]
    joined = join(steady, recorder.rows(), lambda r: r.count)
    seen.rows = len(joined)
    seen.traffic = {k: v for k, v in joined.items() if v[0] != v[1]}
    joined = join(select(found.ledger.traffic, phase="init"), start.rows(), lambda r: r.count)
    seen.init = {k: v for k, v in joined.items() if v[0] != v[1]}
    seen.memory = clashes(found, at, state_rows(step))
    return seen


EXACT = [
    ("zero1", "plain", 2, {}),
    ("zero1 zero_sync=all_reduce", "plain", 2, {}),
    ("zero2", "plain", 2, {}),
    ("zero1 bucket_mb=0.02", "all_biases", 6, {}),
    ("zero1 zero_sync=all_reduce bucket_mb=0.02", "tied", 6, {}),
    ("zero2 bucket_mb=0.02", "tied", 6, {}),
    ("zero2 bucket_mb=0.02 mb=2", "qk_norm", 4, {"optimizer": "sgd", "clip": None}),
    ("zero1 bucket_mb=0.001", "qk_norm", 2, {"optimizer": "sgd"}),
]


def run(ranks: Any, world: int, layout: str, model: Model, precision: str, batch: int, **more: Any) -> list[Seen]:
    terms = {"clip": 0.5, "optimizer": "adamw"} | more
    return ranks(world).run(compare, layout, model, precision, batch, terms["clip"], terms["optimizer"])


@pytest.mark.parametrize("layout, name, batch, more", EXACT, ids=[f"{e[0]} {e[1]} x{e[2] // 2}" for e in EXACT])
def test_two_ranks_train_as_one_device(ranks: Any, layout: str, name: str, batch: int, more: dict[str, Any]) -> None:
    for seen in run(ranks, 2, layout, ZOO[name], "fp64", batch, **more):
        assert seen.agrees, seen
        assert max(seen.worst.values()) < 1e-9, seen.worst


@pytest.mark.parametrize("layout", ["zero1", "zero1 zero_sync=all_reduce", "zero2 bucket_mb=0.02"])
@pytest.mark.parametrize("precision", ["fp32", "autocast-bf16", "bf16-master", "pure-bf16", "fp16-master"])
def test_rows_and_bytes_in_every_precision(ranks: Any, layout: str, precision: str) -> None:
    limit = {"fp32": 1e-5}.get(precision, 2e-2)
    for seen in run(ranks, 2, layout, ZOO["tied"], precision, 4):
        assert seen.agrees, seen
        assert seen.worst["loss"] < limit and seen.worst["norm"] < 5 * limit, seen.worst


@pytest.mark.parametrize("layout", ["zero1 bucket_mb=0.001", "zero2 bucket_mb=0.02"])
def test_four_ranks_of_which_some_own_nothing_of_a_small_bucket(ranks: Any, layout: str) -> None:
    """Of a bucket with one norm of 40 (or of 10) elements the last rank owns few, or none."""
    for seen in run(ranks, 4, layout, ZOO["qk_norm"], "fp64", 12):
        assert seen.agrees, seen
        assert max(seen.worst.values()) < 1e-9, seen.worst
