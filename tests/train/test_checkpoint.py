"""Checkpoints: a resumed run goes on bit for bit, and nothing that is damaged or of another run is opened."""

from __future__ import annotations

import json
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from partita.train import checkpoint
from partita.train.checkpoint import BadRun
from partita.train.metrics import read
from partita.train.options import Saving
from tests.pool import RanksFailed
from tests.train import jobs
from tests.train.runs import tiny_run

KINDS = (
    {"layout": "ddp"},
    {"layout": "full_shard"},
    {"layout": "shard_grad_op", "precision": "bf16-master"},
    {"layout": "full_shard", "optimizer": "sgd", "precision": "fp64"},
    {"layout": "zero1", "optimizer": "sgd"},
    {"layout": "zero2 bucket_mb=0.02", "precision": "fp16-master"},
)


def whole_and_resumed(rank, world, runs):
    """For each run: its losses without a stop, and those of a run that is stopped after step 6 and goes on."""

    import torch.distributed as dist

    out = []
    for options in runs:
        whole = jobs.trained(rank, world, options)
        part = replace(options, out=options.out + "-part", saving=Saving(every=3))
        first = jobs.trained(rank, world, part)
        if rank == 0:  # as if it had been interrupted after step 6, while it saved step 9
            run = Path(part.out)
            for name in ("step-00000009", "step-00000010"):
                shutil.rmtree(run / name)
            (run / "step-00000009.tmp").mkdir()
        dist.barrier()
        rest = jobs.trained(rank, world, replace(part, saving=Saving(every=3, resume=True)))
        out.append((whole["losses"], first["losses"], rest["losses"], rest["held_out"], whole["held_out"]))
    return out


def test_a_resumed_run_is_bit_equal_to_one_that_never_stopped(ranks, tmp_path):
    runs = [
        tiny_run(tmp_path / str(i), ranks=2, steps=10, saving=Saving(every=0), **kind) for i, kind in enumerate(KINDS)
    ]
    # Four checkpoints are written (3, 6, 9, 10) and step 6 must survive until it is resumed from.
    runs = [replace(r, saving=Saving(every=0, keep=9)) for r in runs]
    for kind, told in zip(KINDS, ranks(2).run(kept_all, runs)[0], strict=True):
        whole, first, rest, rest_held, whole_held = told
        assert first == whole, kind
        assert rest == whole[6:], kind
        assert rest_held == [h for h in whole_held if h["step"] > 6], kind
    for i in range(len(KINDS)):
        lines = read(tmp_path / f"{i}-part" / "metrics.jsonl")
        assert [line["step"] for line in lines] == list(range(10))
        names = sorted(p.name for p in (tmp_path / f"{i}-part").glob("step-*"))
        assert names == ["step-00000003", "step-00000006", "step-00000009", "step-00000010"]


def kept_all(rank, world, runs):
    """``whole_and_resumed`` with every checkpoint kept."""
    from unittest.mock import patch

    real = checkpoint.save
    with patch.object(checkpoint, "save", lambda step, meta, run, keep: real(step, meta, run, 9)):
        return whole_and_resumed(rank, world, runs)


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """A run of two ranks with one checkpoint, after step 2."""
    out = tmp_path_factory.mktemp("saved") / "run"
    options = tiny_run(out, "full_shard", 2, steps=3, saving=Saving(every=2, keep=1))
    ranks(2).run(jobs.trained, options)
    assert [p.name for p in checkpoint.complete(out)] == ["step-00000003"]
    return options


@pytest.fixture
def copy(saved, tmp_path):
    """A copy of it that a test may damage, with the options that would go on."""
    shutil.copytree(saved.out, tmp_path / "run")
    schedule = replace(saved.schedule, steps=5)
    return replace(saved, out=str(tmp_path / "run"), schedule=schedule, saving=Saving(every=2, resume=True))


def folder_of(options):
    return checkpoint.latest(Path(options.out))


def refused(ranks, options, world=2):
    with pytest.raises(RanksFailed) as failed:
        ranks(world).run(jobs.trained, options)
    lines = [t.strip().splitlines()[-1] for t in failed.value.tracebacks.values()]
    return next(line for line in lines if "checkpoint.BadRun" in line)


def test_the_undamaged_copy_goes_on(ranks, copy):
    told = ranks(2).run(jobs.trained, copy)[0]
    assert told["first_step"] == 3 and len(told["losses"]) == 2
    meta = checkpoint.read_meta(folder_of(copy))
    assert meta.step == 5 and meta.about["data_position"] == 20 and meta.about["ranks"] == 2


def test_keys_are_global_names(saved):
    index = checkpoint.Reader(folder_of(saved)).read_metadata()
    names = {p.name for p in saved.model.parameters}
    keys = {k for k in index.state_dict_metadata if not k.startswith("random.")}
    assert keys == {f"parameters.{n}" for n in names} | {
        f"optimizer.{n}.{k}" for n in names for k in ("step", "exp_avg", "exp_avg_sq")
    }
    for p in saved.model.parameters:
        assert tuple(index.state_dict_metadata[f"parameters.{p.name}"].size) == p.shape


def test_another_layout_model_or_precision_is_refused(ranks, copy):
    told = refused(ranks, replace(copy, layout=replace(copy.layout, state="ddp")))
    assert "was written under the layout 'dp=2 full_shard' and cannot be resumed under 'dp=2 ddp'" in told
    told = refused(ranks, replace(copy, model=replace(copy.model, layers=3)))
    assert "was written with model" in told
    other = replace(copy.work, precision=tiny_run("x", precision="pure-bf16").work.precision)
    assert "with precision fp32 and cannot be resumed with pure-bf16" in refused(ranks, replace(copy, work=other))
    assert "with seed 0 and cannot be resumed with 1" in refused(ranks, replace(copy, seed=1))


def test_a_truncated_file_is_named(ranks, copy):
    file = folder_of(copy) / "__1_0.distcp"
    size = file.stat().st_size
    with file.open("r+b") as f:
        f.truncate(size - 7)
    told = refused(ranks, copy)
    assert f"{file} is truncated: {size - 7} bytes in place of {size}" in told


def test_a_damaged_file_is_named(ranks, copy):
    file = folder_of(copy) / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert f"{file} is damaged" in refused(ranks, copy)
    file.unlink()
    assert f"{file} is missing" in refused(ranks, copy)


def test_a_damaged_meta_file_is_named(copy):
    folder = folder_of(copy)
    (folder / "meta.json").write_text("{")
    with pytest.raises(BadRun, match=r"meta\.json is damaged"):
        checkpoint.read_meta(folder)
    (folder / "meta.json").write_text(json.dumps({"step": 1, "same": {}, "about": {}, "files": {}, "format": 99}))
    with pytest.raises(BadRun, match="is of format 99, and this version reads format 1"):
        checkpoint.read_meta(folder)


class Evil:
    def __reduce__(self):
        import os

        return os.system, ("touch /tmp/partita-was-here",)


@pytest.mark.parametrize("content", [b"", b"no pickle", pickle.dumps(Evil()), pickle.dumps({"a": 1})])
def test_an_index_that_is_none_is_refused_and_runs_nothing(copy, content):
    folder = folder_of(copy)
    (folder / ".metadata").write_bytes(content)
    with pytest.raises(BadRun, match=r"is damaged|holds no index|names posix\.system, which no index needs"):
        checkpoint.Reader(folder).read_metadata()


def test_half_written_checkpoints_are_no_checkpoints(tmp_path):
    (tmp_path / "step-00000004.tmp").mkdir()
    (tmp_path / "step-00000008").mkdir()  # renamed, but without its meta file: never done by us
    assert checkpoint.complete(tmp_path) == []
    assert [p.name for p in checkpoint.broken(tmp_path)] == ["step-00000004.tmp", "step-00000008"]
    with pytest.raises(BadRun, match=r"no complete checkpoint \(step-00000008 was never finished\); start without"):
        checkpoint.latest(tmp_path)
    assert checkpoint.complete(tmp_path / "absent") == []


def test_a_folder_with_checkpoints_is_not_started_anew(ranks, copy):
    from partita.facts.errors import BadInput

    with pytest.raises(RanksFailed, match="holds the checkpoints of a run; --resume goes on with it"):
        ranks(2).run(jobs.trained, replace(copy, saving=Saving(every=2)))
    assert issubclass(BadRun, BadInput)


def test_a_finished_run_has_nothing_to_resume(ranks, copy):
    with pytest.raises(RanksFailed, match="has 3 steps, and 3 were asked for; use more --steps"):
        ranks(2).run(jobs.trained, replace(copy, schedule=replace(copy.schedule, steps=3)))
