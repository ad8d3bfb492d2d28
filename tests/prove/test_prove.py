"""Real ranks beside one device: the three witnesses agree, and a planted fault is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from partita.plan.account import account
from partita.prove.dryrun import dry_ranks, dry_runs
from partita.prove.proof import Proof
from partita.prove.prove import Report, judge
from partita.prove.reference import Reference
from partita.prove.report import as_json
from tests.pool import Pool
from tests.prove import jobs
from tests.tiny import tiny_model

STATES = ("ddp bucket_mb=0.05", "full_shard", "shard_grad_op")
Alone = Callable[[Proof], Reference]


@pytest.fixture(scope="module")
def alone(ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """The run on one device of a proof, made once for every model and work."""
    made: dict[object, Reference] = {}

    def run(proof: Proof) -> Reference:
        key = (proof.model, proof.work)
        if key not in made:
            made[key] = ranks(1).run(jobs.alone, proof, str(tmp_path_factory.mktemp("reference")))[0]
        return made[key]

    return run


def proven(ranks: Pool, alone: Alone, proof: Proof, fault: str = "", dry: bool = False) -> Report:
    world = proof.layout.world
    reference = alone(proof)
    seen = ranks(world).run(jobs.together, proof, reference, fault)
    accounted = account(proof.model, proof.layout, proof.work)
    rehearsed = list(dry_runs(proof.model, proof.layout, proof.work, dry_ranks(accounted), world)) if dry else []
    return judge(proof, reference, seen, rehearsed)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("each", [1, 3])
@pytest.mark.parametrize("text", STATES)
def test_witnesses_and_one_device_agree(
    ranks: Pool, alone: Alone, text: str, each: int, tied: bool, optimizer: str
) -> None:
    proof = jobs.proof(text, 2, tiny_model(tied=tied), optimizer=optimizer, each=each)
    report = proven(ranks, alone, proof, dry=optimizer == "adamw" and tied != (each == 1))
    assert report.reasons == ()
    assert max(d.value for d in report.differences.values()) < 1e-13
    assert all(line.counts.recorded is not None for line in report.table.traffic)
    assert {f.law for f in report.laws} == ({1, 3, 5, 6, 8} if tied else {1, 3, 6, 8})
    assert [p.phase for p in report.table.peaks if not p.within] == []


@pytest.mark.parametrize("text", STATES)
def test_float32_agrees_within_its_limits(ranks: Pool, alone: Alone, text: str) -> None:
    report = proven(ranks, alone, jobs.proof(text, 2, precision="fp32", optimizer="sgd"))
    assert report.reasons == ()
    assert 0 < report.differences["gradients"].value <= 1e-5
    assert report.differences["parameters"].limit == 1e-5


def test_uneven_shards_and_copies_of_shards_on_four_ranks(ranks: Pool, alone: Alone) -> None:
    for text in ("full_shard", "full_shard shard=2"):
        report = proven(ranks, alone, jobs.proof(text, 4, each=1))
        assert report.reasons == ()
        assert any(m.object == "padding of gradients" for m in report.table.memory)


CAUGHT = {
    # fault: layout, tied, what is said, what must stay right
    "local_count": ("full_shard", False, "gradients in ", "traffic"),
    "averaging": ("ddp", False, "gradients in ", "traffic"),
    "tie_not_summed": ("ddp", True, "gradients in embed.weight", "traffic"),
    "dropped_sample": ("ddp", False, "(data)", "traffic"),
    "local_norm": ("full_shard", False, "(norm)", "gradients"),
    "other_values": ("full_shard", False, "(initial values)", "traffic"),
    "extra_collective": ("ddp", False, "1 traffic row: all_reduce over dp in step", "gradients"),
}


@pytest.mark.parametrize("fault", CAUGHT)
def test_a_planted_fault_is_named(ranks: Pool, alone: Alone, fault: str) -> None:
    text, tied, says, right = CAUGHT[fault]
    report = proven(ranks, alone, jobs.proof(text, 2, tiny_model(tied=tied)), fault)
    assert report.verdict == "disagrees"
    assert any(says in reason for reason in report.reasons), report.reasons
    assert not any(reason.startswith((right, f"1 {right}")) for reason in report.reasons), report.reasons


def test_the_document_has_what_it_promises(ranks: Pool, alone: Alone) -> None:
    report = proven(ranks, alone, jobs.proof("full_shard", 2))
    document = json.loads(json.dumps(as_json([report])))
    assert set(document) >= {"verdict", "layouts"}
    assert document["verdict"] == "agrees"
    layout = document["layouts"][0]
    assert set(layout) >= {"layout", "verdict", "traffic", "memory", "differences", "step_time_s", "peaks", "laws"}
    assert layout["layout"] == "dp=2 full_shard"
    assert layout["witnesses"] == ["arithmetic", "recording"]
    gather = next(t for t in layout["traffic"] if t["verb"] == "all_gather" and t["phase"] == "backward")
    assert (gather["predicted"], gather["dry"], gather["recorded"], gather["axis"]) == (6, None, 6, ["dp"])
    assert isinstance(gather["bytes"], int) and gather["link_bytes"] == gather["bytes"] * 3
    for row in layout["memory"]:
        assert set(row) >= {"object", "predicted", "dry", "recorded"} and isinstance(row["recorded"], int)
    for name in ("loss", "gradients", "parameters"):
        assert set(layout["differences"][name]) == {"value", "limit", "worst"}
    times = layout["step_time_s"]
    assert 0 < times["min"] <= times["median"] <= times["max"] and {times["min_rank"], times["max_rank"]} <= {0, 1}
    assert 0.5 < sum(times["shares"].values()) <= 1.05
    assert set(times["shares"]) == {"data", "forward", "backward", "optimizer", "exposed communication"}


def test_the_files_of_one_device_are_gradients_before_clipping(ranks: Pool, alone: Alone) -> None:
    from safetensors.torch import load_file

    reference = alone(jobs.proof("ddp", 2))
    gradients = load_file(Path(reference.file("gradients")))
    norm = sum(float(g.double().square().sum()) for g in gradients.values()) ** 0.5
    assert reference.norms[0] is not None and norm > 0.5
    assert norm == pytest.approx(reference.norms[0], rel=1e-12)
