"""Dry runs: any rank of any world, and DDP's stand-in equal to DDP."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from partita.facts.errors import BadInput
from partita.facts.layout import Layout
from partita.facts.model import Model
from partita.facts.precision import PRESETS
from partita.facts.work import Training
from partita.plan.account import account
from partita.prove import wire
from partita.prove.dryrun import dry_ranks, dry_run, dry_runs
from partita.prove.reconcile import reconcile
from partita.prove.reference import Reference
from partita.prove.stand_in import NAME
from partita.prove.witness import Witness, key
from tests.pool import Pool
from tests.prove import jobs
from tests.tiny import tiny_model

LLAMA_8B = Model("llama-8b-shaped", "llama", 32, 4096, 14336, 32, 8, 128, 128256, max_positions=8192)


@pytest.mark.parametrize(("bucket_mb", "each"), [("0.02", 3), ("25", 1)])
def test_the_stand_in_sends_what_ddp_sends(
    ranks: Pool, tmp_path_factory: pytest.TempPathFactory, bucket_mb: str, each: int
) -> None:
    proof = jobs.proof(f"ddp bucket_mb={bucket_mb}", 2, tiny_model(tied=True, qkv_bias=True), "fp32", each=each)
    folder = str(tmp_path_factory.mktemp("reference"))
    reference: Reference = ranks(1).run(jobs.alone, proof, folder)[0]
    real = ranks(2).run(jobs.together, proof, reference)[1].witness
    dry = dry_run(proof.model, proof.layout, proof.work, 1, 2)
    assert dry.stand_ins == (NAME,)
    assert [rows(s) for s in (dry.init, *dry.steps)] == [rows(s) for s in (real.init, *real.steps)]
    assert {(m.object, m.unit, m.bytes) for m in dry.memory} == {(m.object, m.unit, m.bytes) for m in real.memory}
    for phase, peak in real.peaks.items():
        assert dry.peaks[phase] == pytest.approx(peak, rel=0.01)


def rows(found: tuple[object, ...]) -> Counter[object]:
    return Counter({key(r): r.count for r in found})  # type: ignore[attr-defined, arg-type]


def test_an_8b_model_on_64_ranks_is_as_the_arithmetic_says() -> None:
    layout = Layout.parse("full_shard", 64)
    work = Training(64, 1024, PRESETS["bf16-master"])
    found = account(LLAMA_8B, layout, work)
    witness = dry_run(LLAMA_8B, layout, work, 63, 64)
    table = reconcile(found.case, found.ledger, [witness], [])
    assert table.clashes == ()
    assert {t.counts.recorded for t in table.traffic} == {None}
    gathers = {(t.phase, t.counts.predicted, t.counts.dry) for t in table.traffic if t.verb == "all_gather"}
    assert gathers == {("forward", 32, 32), ("forward", 1, 1), ("backward", 32, 32)}
    assert [p.phase for p in table.peaks if not p.within] == []


@pytest.mark.parametrize(
    ("text", "world", "precision", "optimizer", "model"),
    [
        ("full_shard shard=4", 8, "fp32", "sgd", tiny_model(tied=True)),
        ("shard_grad_op", 7, "bf16-master", "adamw", tiny_model(qk_norm=True)),
        ("ddp bucket_mb=0.03", 16, "bf16-master", "adamw", tiny_model(qkv_bias=True)),
        ("ddp", 1, "autocast-bf16", "adamw", tiny_model()),
    ],
)
def test_every_room_precision_and_optimizer(
    text: str, world: int, precision: str, optimizer: str, model: Model
) -> None:
    layout = Layout.parse(text, world)
    work = Training(2 * world, 8, PRESETS[precision], optimizer)
    found = account(model, layout, work)
    table = reconcile(found.case, found.ledger, list(dry_runs(model, layout, work, dry_ranks(found), world)), [])
    assert table.clashes == ()
    assert table.memory and all(m.counts.dry is not None for m in table.memory)
    assert [p for p in table.peaks if not p.within] == []


def test_ranks_that_differ_are_run_both() -> None:
    work = Training(8, 8, PRESETS["fp32"])
    even = account(tiny_model(vocab=104, ffn=56), Layout.parse("full_shard", 4), work)
    uneven = account(tiny_model(), Layout.parse("full_shard", 4), work)
    assert (dry_ranks(even), dry_ranks(uneven)) == ([0], [0, 3])


def test_refusals_come_before_a_process_starts() -> None:
    layout, work = Layout.parse("full_shard", 4), Training(4, 8)
    with pytest.raises(BadInput, match="rank 4 does not exist in a world of 4; ranks are 0 to 3"):
        dry_run(tiny_model(), layout, work, 4, 4)
    with pytest.raises(BadInput, match=r"has 4 ranks, and the world has 8"):
        dry_run(tiny_model(), layout, work, 0, 8)
    with pytest.raises(BadInput, match="can be planned but not run"):
        dry_run(tiny_model(norm="layernorm"), layout, work, 0, 4)


def test_models_work_and_witnesses_travel_as_json() -> None:
    model, layout = tiny_model(qk_norm=True), Layout.parse("dp=2 tp=2 mb=3")
    work = Training(8, 16, PRESETS["bf16-master"], "sgd", betas=(0.8, 0.9), clip=None)
    assert wire.unpack(json.loads(json.dumps(wire.pack(model, layout, work)))) == (model, layout, work)
    ledger = account(tiny_model(), Layout.parse("full_shard", 2), Training(2, 8)).ledger
    witness = Witness("dry", 1, 2, (), (ledger.traffic,), ledger.memory, {"step": 5}, (NAME,), 1.5)
    assert Witness.from_json(json.loads(json.dumps(witness.json()))) == witness
