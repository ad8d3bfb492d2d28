"""``partita train`` as a user types it: what it prints, and one sentence for everything that cannot be."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from partita.commands.train import command
from partita.train.launch import LOOPBACK
from tests.tiny import tiny_model

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {
    **{k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")},
    "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
}
PLAIN = ["--samples", "0", "--no-tensorboard", "--steps", "3", "--sequence", "16"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model's folder, for the byte tokenizer."""
    from partita.model import hf, init
    from partita.model.decoder import Decoder

    folder = tmp_path_factory.mktemp("model") / "tiny"
    facts = tiny_model(vocab=257, layers=2)
    decoder = Decoder(facts)
    init.fill(decoder.named_parameters(), facts, 0)
    hf.save(dict(decoder.named_parameters()), facts, folder)
    return folder


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("It is a truth universally acknowledged, that a single man in possession of a good fortune, " * 9)
    return str(file)


@pytest.fixture
def here(monkeypatch, tmp_path):
    """Inside a torchrun of one process: the command then runs in this one, and starts nothing."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": LOOPBACK}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def invoke(*words):
    return CliRunner().invoke(command, [*map(str, words)], catch_exceptions=False)


def typed(*words, prefix=(), **more):
    line = [sys.executable, *(prefix or ("-m", "partita")), "train", *map(str, words)]
    return subprocess.run(line, capture_output=True, text=True, timeout=120, env=ENVIRONMENT, **more)


def refused(result, code=2):
    """The one sentence of a refusal."""
    error = result.stderr if hasattr(result, "stderr") else result.output
    assert (result.exit_code if hasattr(result, "exit_code") else result.returncode) == code, error
    assert "Traceback" not in error
    lines = [line for line in error.splitlines() if line.startswith("partita: ")]
    assert len(lines) == 1 and lines[0] == error.splitlines()[-1], error
    return lines[0].removeprefix("partita: ")


def test_two_ranks_train_on_text(model, text, tmp_path):
    words = [model, "--ranks", 2, "--layout", "full_shard mb=2", "--data", text, "--tokenizer", "bytes", "--json"]
    words += ["--steps", 6, "--sequence", 16, "--out", tmp_path / "run", "--lr", "1e-2", "--warmup", 1]
    words += ["--eval-every", 3, "--save-every", 3, "--no-tensorboard"]
    result = typed(*words, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout)
    assert told["layout"] == "dp=2 full_shard mb=2" and told["ranks"] == 2 and told["precision"] == "fp32"
    assert told["losses"][-1] < told["losses"][0] and len(told["held_out"]) == 2
    assert "sample 0 ([...] is read and does not count): " in result.stderr
    assert "step 6/6  loss" in result.stderr and "gloo" not in result.stderr
    assert (tmp_path / "run" / "step-00000006" / "meta.json").is_file()


def test_the_same_command_inside_torchrun(model, text, tmp_path):
    words = [model, "--layout", "ddp", "--data", text, "--tokenizer", "bytes", "--out", tmp_path / "run", *PLAIN]
    prefix = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "partita")
    with socket.socket() as free:
        free.bind((LOOPBACK, 0))
        port = free.getsockname()[1]
    prefix = (*prefix[:2], "--master-addr", LOOPBACK, "--master-port", str(port), *prefix[2:])
    result = typed(*words, prefix=prefix, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("Step time by rank") == 1 and "layout dp=2 ddp, 2 ranks" in result.stdout
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3


def test_what_is_printed_for_people(here, model, text):
    result = invoke(model, "--data", text, "--tokenizer", "bytes", "--out", "run", *PLAIN)
    assert result.exit_code == 0, result.output
    for words in ("1 rank, fp32: loss", "Step time by rank", "Where it went", "exposed communication", "tokens/s over"):
        assert words in result.output
    assert "metrics in run/metrics.jsonl" in result.output


def test_layouts_models_and_options_that_cannot_be(here, model, text):
    data = ["--data", text, "--tokenizer", "bytes", *PLAIN]
    assert refused(invoke(model, "--ranks", 1, "--layout", "dp=3", *data)) == (
        "layout 'dp=3' needs 3 ranks, there are 1; dp=1 fits 1 ranks"
    )
    assert "unknown word 'full_shart'; did you mean 'full_shard'?" in refused(
        invoke(model, "--layout", "full_shart", *data)
    )
    assert "a global batch of 3 is no multiple of dp x mb" in refused(
        invoke(model, "--layout", "mb=2", "--global-batch", 3, *data)
    )
    assert "the decoder runs RMSNorm" in refused(invoke("gpt2", "--from-scratch", *data))
    assert "--from-scratch trains from initial values" in refused(invoke("llama-3.1-8b", *data))
    assert "'no-such-model' is not a known model" in refused(invoke("no-such-model", *data))
    assert refused(invoke(model, *PLAIN)).startswith("no data is named; --data FILE works")
    assert "--data synthetic stands alone" in refused(invoke(model, "--data", "synthetic", *data))
    assert "has no tokenizer.json" in refused(invoke(model, "--data", text, *PLAIN))
    assert "--resume does not say which run" in refused(invoke(model, "--resume", *data))
    assert "--profile-step x is no step" in refused(invoke(model, "--profile-step", "x", *data))
    assert "precision 'fp12' is not known" in refused(invoke(model, "--precision", "fp12", *data))
    assert "a warm-up of 3 steps does not fit into 3" in refused(invoke(model, "--warmup", 3, *data))
    assert "a weight decay of -1.0 does not train" in refused(invoke(model, "--weight-decay", -1, *data))


def test_family_that_is_not_known(here, text, tmp_path):
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text(json.dumps({"model_type": "mamba9", "hidden_size": 8}))
    told = refused(invoke("./odd", "--from-scratch", "--data", text, "--tokenizer", "bytes", *PLAIN))
    assert "mamba9" in told


def test_data_that_cannot_be_trained_on(here, model, tmp_path):
    def told(content, name="data.txt"):
        (tmp_path / name).write_bytes(content)
        return refused(invoke(model, "--data", tmp_path / name, "--tokenizer", "bytes", *PLAIN))

    assert "data.txt is empty (0 bytes)" in told(b"")
    assert "data.txt" in told(bytes(range(256)) * 9)
    assert "has 6 tokens, fewer than the 17 of one sample of sequence 16; use a sequence of 5 or less" in told(b"Hello")
    assert "is not read" in told(b"x", "data.exe")
    assert "there is no data file absent.txt" in refused(
        invoke(model, "--data", "absent.txt", "--tokenizer", "bytes", *PLAIN)
    )


def test_weights_that_cannot_be_loaded(here, model, text, tmp_path):
    shutil.copytree(model, tmp_path / "cut")
    file = tmp_path / "cut" / "model.safetensors"
    data = file.read_bytes()
    words = ["./cut", "--data", text, "--tokenizer", "bytes", *PLAIN]
    file.write_bytes(data[:-100])
    assert f"cut/model.safetensors is truncated: its header describes {len(data)} bytes" in refused(invoke(*words))
    file.write_bytes(data)
    config = json.loads((tmp_path / "cut" / "config.json").read_text())
    (tmp_path / "cut" / "config.json").write_text(json.dumps(config | {"intermediate_size": 55}))
    assert "has shape (54, 40), but cut needs (55, 40)" in refused(invoke(*words))


@pytest.mark.parametrize("who", ["rank", "launcher"])
def test_a_run_that_is_killed_or_interrupted_in_the_middle(model, text, tmp_path, who):
    """A killed rank: exit code 1 and its name, within 10 s; Ctrl-C: exit code 130.  Nobody is left behind."""
    line = [sys.executable, "-m", "partita", "train", model, "--ranks", "2", "--data", text, "--tokenizer", "bytes"]
    line += [*PLAIN, "--steps", "1000000", "--out", tmp_path / "run"]
    metrics = tmp_path / "run" / "metrics.jsonl"
    process = subprocess.Popen(map(str, line), stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, cwd=tmp_path)
    try:
        until = time.monotonic() + 60
        while not (metrics.exists() and metrics.stat().st_size > 1000):
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.05)
        ranks = psutil.Process(process.pid).children()
        assert len(ranks) == 2
        began = time.monotonic()
        ranks[1].kill() if who == "rank" else process.send_signal(signal.SIGINT)
        error = process.communicate(timeout=10)[1]
        assert time.monotonic() - began < 10
        assert process.returncode == (1 if who == "rank" else 130)
        _, alive = psutil.wait_procs(ranks, timeout=5)
        assert not alive and "Traceback" not in error
        if who == "rank":
            assert "partita: rank 1 of 2 was killed by SIGKILL" in error.splitlines()[-1]
    finally:
        process.kill()


def test_a_port_in_use_and_a_fault_on_a_rank_are_one_sentence(model, text, tmp_path):
    words = [model, "--ranks", 2, "--data", text, "--tokenizer", "bytes", *PLAIN]
    with socket.socket() as taken:
        taken.bind((LOOPBACK, 0))
        taken.listen()
        port = taken.getsockname()[1]
        told = refused(typed(*words, "--port", port, cwd=tmp_path))
    assert told.startswith(f"port {port} is in use; another --port works")
    (tmp_path / "short.txt").write_text("Hello")
    told = refused(typed(model, "--ranks", 2, "--data", "short.txt", "--tokenizer", "bytes", *PLAIN, cwd=tmp_path))
    assert told.startswith("short.txt (5 bytes) has 6 tokens")
