"""Losses do not depend on the layout: whole runs on one and two ranks, against one batch on one device."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from partita.facts.errors import BadInput
from partita.model import hf
from partita.train.metrics import read
from partita.train.options import Evaluation, Saving
from partita.train.rates import catalog_names
from partita.train.trainer import check
from tests.tiny import tiny_model
from tests.train import jobs
from tests.train.runs import tiny_run

SHARDED = ("full_shard", "shard_grad_op")


def worst(a, b):
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="module")
def reference(ranks, tmp_path_factory):
    """One device, one batch: {(precision, global batch): summary}."""
    out = tmp_path_factory.mktemp("reference")
    kinds = [(p, g) for p in ("fp32", "fp64") for g in (2, 4)]
    runs = [tiny_run(out / f"{p}-{g}", f"mb={g}", precision=p, global_batch=g) for p, g in kinds]
    return dict(zip(kinds, ranks(1).run(jobs.all_trained, runs)[0], strict=True))


def layouts(ranks):
    """(layout, global batch): accumulation 1 and 2; in a global batch of 2 on 2 ranks, rank 0 counts nothing."""
    states = ("ddp",) if ranks == 1 else ("ddp", *SHARDED)
    batches = ((4, 4), (4, 2)) if ranks == 1 else ((4, 2), (4, 1), (2, 1))
    return [(f"{state} mb={mb}", g) for state in states for g, mb in batches]


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.parametrize("world", [1, 2])
def test_losses_of_20_steps_are_those_of_one_device(ranks, reference, tmp_path, world, precision):
    kinds = layouts(world)
    runs = [
        tiny_run(tmp_path / f"run-{i}", layout, world, precision=precision, global_batch=g)
        for i, (layout, g) in enumerate(kinds)
    ]
    for (layout, g), found in zip(kinds, ranks(world).run(jobs.all_trained, runs)[0], strict=True):
        wanted = reference[precision, g]
        first, rest = (1e-9, 1e-9) if precision == "fp64" else (1e-5, 1e-4)
        assert len(found["losses"]) == 20 and found["losses"][-1] < found["losses"][0], layout
        assert worst(found["losses"][:5], wanted["losses"][:5]) < first, layout
        assert worst(found["losses"], wanted["losses"]) < rest, layout
        held, wanted_held = ([h["loss"] for h in run["held_out"]] for run in (found, wanted))
        assert len(held) == 4 and worst(held, wanted_held) < rest, layout


def test_the_losses_can_differ(ranks, reference, tmp_path):
    """The comparison above notices another seed, and a rate that is a twentieth higher."""
    plain = tiny_run(tmp_path / "a", "mb=4")
    others = [replace(plain, seed=1), replace(plain, schedule=replace(plain.schedule, peak=3.15e-3))]
    for run in ranks(1).run(jobs.all_trained, others)[0]:
        assert worst(run["losses"], reference["fp32", 4]["losses"]) > 1e-4


def test_sgd_stays_within_a_tighter_limit(ranks, tmp_path):
    """AdamW hides a gradient of the wrong scale; SGD does not, and clipping by another norm shows."""
    kinds = {"one": 0.7, "other": 0.6}
    runs = [tiny_run(tmp_path / name, "mb=4", optimizer="sgd", clip=clip) for name, clip in kinds.items()]
    one, other = ranks(1).run(jobs.all_trained, runs)[0]
    assert worst(other["losses"], one["losses"]) > 1e-5
    two = ranks(2).run(
        jobs.all_trained, [tiny_run(tmp_path / s, f"{s} mb=1", 2, optimizer="sgd") for s in ("ddp", *SHARDED)]
    )[0]
    for found in two:
        assert worst(found["losses"], one["losses"]) < 1e-5


def test_what_a_run_tells(ranks, tmp_path):
    options = tiny_run(tmp_path / "run", "full_shard", 2, steps=8, cluster="h100:2")
    summaries = ranks(2).run(jobs.trained, options)
    told = summaries[0]
    assert summaries[1]["losses"] == told["losses"]
    lines = read(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(8))
    assert [line["loss"] for line in lines] == told["losses"]
    assert [line["step"] for line in lines if "held_out_loss" in line] == [4, 7]
    assert all(line["tokens_per_s"] > 0 and line["mfu"] > 0 and line["memory_bytes"] > 1e6 for line in lines)
    assert lines[0]["counted_tokens"] == 36 - 9 - 2 - 3 - 1
    assert lines[2]["rate"] == pytest.approx(3e-3) and lines[-1]["rate"] < lines[2]["rate"]
    assert told["profile_step"] == 4 and [t["rank"] for t in told["shares"]] == [0, 1]
    for rank in told["shares"]:
        assert 0 < rank["min_s"] <= rank["median_s"] <= rank["max_s"]
        assert set(rank["shares"]) == {"data", "forward", "backward", "exposed communication", "optimizer", "other"}
        assert sum(rank["shares"].values()) == pytest.approx(1, abs=0.02)
        assert rank["shares"]["exposed communication"] > 0
    slowest = max(told["shares"], key=lambda t: t["max_s"])
    assert told["step_time_s"]["max_rank"] == slowest["rank"]
    json.dumps(told, allow_nan=False)


def test_the_trained_model_is_exported_whole(ranks, tmp_path):
    import torch

    from partita.model.decoder import Decoder, plain
    from partita.train.data import SyntheticDataset
    from partita.train.inputs import find
    from partita.train.step import vocabulary_loss

    runs = [
        tiny_run(tmp_path / s, s, 2, steps=5, saving=Saving(export=str(tmp_path / f"hf-{s}")))
        for s in ("ddp", *SHARDED)
    ]
    told = ranks(2).run(jobs.all_trained, runs)[0]
    for options, summary in zip(runs, told, strict=True):
        model, weights = find(options.saving.export, from_scratch=False, download=False)
        assert weights.load and replace(model, name="tiny") == replace(options.model, rope=model.rope)
        decoder = Decoder(model)
        hf.load(decoder.named_parameters(), model, options.saving.export)
        batch = SyntheticDataset(model.vocab, 9).held_out(7).source.fixed(range(7)).batch()
        with torch.no_grad():
            loss = vocabulary_loss(decoder(batch.ids, batch.positions, plain(model)), batch.targets) / batch.counted
        assert float(loss) == pytest.approx(summary["held_out"][-1]["loss"], rel=1e-5)


def test_a_loss_that_is_no_number_stops_every_rank(ranks, tmp_path):
    from tests.pool import RanksFailed

    options = tiny_run(tmp_path, "ddp", 2, clip=None, optimizer="sgd")
    options = replace(options, schedule=replace(options.schedule, peak=1e30, kind="constant"))
    with pytest.raises(RanksFailed, match=r"has loss nan .* a smaller --lr \(now 1e\+30\)"):
        ranks(2).run(jobs.trained, options)


def test_what_no_rank_could_run_is_refused_at_once(tmp_path):
    good = tiny_run(tmp_path / "new", "ddp", 2)
    check(good)
    with pytest.raises(BadInput, match=r"global batch of 4 is no multiple of dp x mb"):
        check(tiny_run(tmp_path / "new", "ddp mb=3", 2))
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="is a file; --out needs a folder"):
        check(replace(good, out=str(tmp_path / "file")))
    with pytest.raises(BadInput, match=r"there is no run at .* to resume"):
        check(replace(good, saving=Saving(resume=True)))
    with pytest.raises(BadInput, match="exists and is not empty"):
        check(replace(good, saving=Saving(export=str(tmp_path))))
    with pytest.raises(BadInput, match="there is no data file"):
        check(replace(good, text=replace(good.text, files=(str(tmp_path / "absent.txt"),))))
    with pytest.raises(BadInput, match="cannot be measured"):
        Evaluation(every=-1)
    with pytest.raises(BadInput, match="cannot be kept"):
        Saving(keep=0)


def test_names_of_cuda_devices_in_the_catalog():
    from partita.facts.device import shipped

    for name, known in {
        "NVIDIA H100 80GB HBM3": "h100-80",
        "NVIDIA A100-SXM4-40GB": "a100-40",
        "NVIDIA H200": "h200",
        "NVIDIA H100 PCIe": "h100-pcie",
    }.items():
        assert next(n for n in catalog_names(name) if n in shipped().aliases) == known
    assert catalog_names("") == []
    assert tiny_model().runs
