"""``partita record``: exit codes, the table, JSON.  What is recorded is tested beside the recorder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
import torch, torch.distributed as dist
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
w = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([w], lr=0.1)
for _ in range(4):
    w.sum().backward()
    dist.all_reduce(w.grad)
    optimizer.step()
dist.destroy_process_group()
print("the program's own words")
sys.exit(int(sys.argv[2]))
"""


def partita(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from partita.cli import main; main()", "record", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT / "src", timeout=100)


def test_a_program_is_recorded_and_its_exit_code_passed_on(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    program = ("--", sys.executable, str(tmp_path / "program.py"), str(tmp_path / "store"))
    done = partita("--out", str(tmp_path / "out"), *program, "5")
    assert done.returncode == 5, done.stderr
    assert "1 ranks, 4 steps" in done.stdout
    assert "all_reduce" in done.stdout
    assert "A steady step" in done.stdout
    done = partita("--json", "--out", str(tmp_path / "out"), *program[:-1], str(tmp_path / "other"), "0")
    assert done.returncode == 0, done.stderr
    assert "the program's own words" in done.stderr
    shown = json.loads(done.stdout)
    assert [(r["verb"], r["bytes"], r["count"]) for r in shown["steady"]] == [("all_reduce", 12, 1)]
    assert shown == json.loads((tmp_path / "out/recording.json").read_text())


def test_sentences_and_exit_codes(tmp_path: Path) -> None:
    out = ("--out", str(tmp_path / "out"))
    done = partita(*out, "--", "no-such-program")
    assert (done.returncode, done.stdout) == (2, "")
    assert "'no-such-program' was not found" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    done = partita(*out, "--", sys.executable, "-c", "raise SystemExit(7)")
    assert done.returncode == 7
    assert "no process of it initialised torch.distributed" in done.stderr
    assert partita(*out, "--", sys.executable, "-c", "pass").returncode == 2
