"""JSON lines, TensorBoard and wandb get each step once."""

import json
import sys
import types

import numpy as np
import pytest
import torch

from partita.facts.errors import BadInput, NotInstalled
from partita.train import metrics
from partita.train.metrics import Metrics, read


def steps_of(folder):
    return [record["step"] for record in read(folder / "metrics.jsonl")]


def test_every_step_is_on_disk_at_once(tmp_path):
    log = Metrics(tmp_path / "run", tensorboard=False)
    log.log(0, {"loss": 2.5, "times_s": {"data": 0.1}, "norm": torch.tensor(1.5), "n": np.int64(3), "ranks": (1, 2)})
    log.log(1, {"loss": 2.25})
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(x) for x in lines] == [
        {"step": 0, "loss": 2.5, "times_s": {"data": 0.1}, "norm": 1.5, "n": 3, "ranks": [1, 2]},
        {"step": 1, "loss": 2.25},
    ]
    log.close()
    log.close()


def test_numbers_that_json_lacks(tmp_path):
    with Metrics(tmp_path, tensorboard=False) as log:
        log.log(0, {"loss": float("nan"), "norm": float("inf"), "more": [-float("inf")]})
    assert read(tmp_path / "metrics.jsonl") == [{"step": 0, "loss": "NaN", "norm": "Infinity", "more": ["-Infinity"]}]


def test_a_resumed_run_takes_back_what_it_repeats(tmp_path):
    with Metrics(tmp_path, tensorboard=False) as log:
        for step in range(6):
            log.log(step, {"loss": 0.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # killed in the middle of a line
    with Metrics(tmp_path, 4, tensorboard=False) as log:
        assert steps_of(tmp_path) == [0, 1, 2, 3]
        log.log(4, {"loss": 1.0})
    assert steps_of(tmp_path) == [0, 1, 2, 3, 4]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_last_line_without_its_end_is_kept_whole(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}')
    with Metrics(tmp_path, 2, tensorboard=False) as log:
        log.log(2, {})
    assert steps_of(tmp_path) == [0, 1, 2]


def test_a_new_run_moves_an_older_file_aside(tmp_path):
    for value in (1.0, 2.0, 3.0):
        with Metrics(tmp_path, tensorboard=False) as log:
            log.log(0, {"loss": value})
    losses = [read(tmp_path / f"metrics{n}.jsonl")[0]["loss"] for n in (".1", ".2", "")]
    assert losses == [1.0, 2.0, 3.0]


def test_a_foreign_file_is_refused(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('hello\n{"step": 1}\n')
    with pytest.raises(BadInput, match="line 1 is not an object"):
        Metrics(tmp_path, 1, tensorboard=False)


def test_tensorboard_holds_the_scalars(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Metrics(tmp_path) as log:
        for step in range(4):
            log.log(step, {"loss": 4.0 - step, "share": {"data": 0.5}, "verdict": "fine", "ok": True})
    with Metrics(tmp_path, 2) as log:
        log.log(2, {"loss": 9.0})
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert sorted(events.Tags()["scalars"]) == ["loss", "share/data"]
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(0, 4.0), (1, 3.0), (2, 9.0)]


def test_tensorboard_is_written_only_where_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "find_spec", lambda name: None)
    with Metrics(tmp_path) as log:
        log.log(0, {"loss": 1.0})
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]
    with pytest.raises(NotInstalled, match="tensorboard was asked for"):
        Metrics(tmp_path, tensorboard=True)


def test_wandb_asked_for_and_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "find_spec", lambda name: None)
    with pytest.raises(NotInstalled, match=r"wandb was asked for and it is not installed; pip install wandb"):
        Metrics(tmp_path / "run", wandb="project")
    assert not (tmp_path / "run").exists()


class FakeWandb(types.ModuleType):
    """Records what a run is given; starts as the real one does, or fails as it does."""

    class Error(Exception):
        pass

    def __init__(self, fails=False):
        super().__init__("wandb")
        self.__spec__ = types.SimpleNamespace()
        self.calls, self.fails = [], fails

    def init(self, **options):
        if self.fails:
            raise self.Error("api_key not configured (no-tty)\nmore")
        self.calls.append(("init", options))
        return self

    def define_metric(self, name, step_metric):
        self.calls.append(("define", name, step_metric))

    def log(self, values):
        self.calls.append(("log", values))

    def finish(self):
        self.calls.append(("finish",))


def test_wandb_only_when_asked_and_under_one_id(tmp_path, monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with Metrics(tmp_path, tensorboard=False) as log:
        log.log(0, {"loss": 1.0})
    assert fake.calls == []
    for first in (0, 1):
        with Metrics(tmp_path, first, tensorboard=False, wandb="etudes", config={"layout": "ddp"}) as log:
            log.log(first, {"loss": 1.0, "share": {"data": 0.5}, "note": "x"})
    inits = [c[1] for c in fake.calls if c[0] == "init"]
    assert inits[0] == inits[1] and inits[0]["project"] == "etudes" and inits[0]["config"] == {"layout": "ddp"}
    assert "mode" not in inits[0], "WANDB_MODE decides"
    assert ("log", {"step": 1, "loss": 1.0, "share/data": 0.5}) in fake.calls
    assert fake.calls[-1] == ("finish",)


def test_wandb_that_does_not_start(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb(fails=True))
    with pytest.raises(BadInput, match=r"wandb does not start \(api_key not configured \(no-tty\)\); log in, or set"):
        Metrics(tmp_path, tensorboard=False, wandb="etudes")
