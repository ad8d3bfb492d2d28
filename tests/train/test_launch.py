"""Launching: results come back, the first cause is told, and no process is ever left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from partita.facts.errors import BadInput, NotInstalled
from partita.train.launch import LOOPBACK, RankFailed, inside_torchrun, launch, oversubscribed
from tests.train import jobs

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)


def noted(folder, expected=2, limit_s=20.0):
    """The process ids that ranks left behind."""
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        files = [f for f in Path(folder).glob("pid-*") if f.read_text()]
        if len(files) >= expected:
            return [int(f.read_text()) for f in files]
        time.sleep(0.02)
    raise AssertionError(f"only {len(files)} ranks started")


def gone(pids, limit_s=5.0):
    """Whether all of these processes end in time."""
    until = time.monotonic() + limit_s

    def alive(pid):
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    while any(map(alive, pids)):
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def test_results_come_back_in_rank_order_and_the_launcher_needs_no_torch():
    assert launch(jobs.hello, "a", ranks=3, threads=2) == [("a", r, 3, "2") for r in range(3)]
    code = "import sys; import partita.train.launch; sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT / "src")}).returncode
        == 0
    )


def test_one_rank_takes_the_same_path():
    assert launch(jobs.hello, "b", ranks=1) == [("b", 0, 1, "1")]


def test_a_process_group_over_the_launchers_socket_on_a_given_port():
    with socket.socket() as free:
        free.bind((LOOPBACK, 0))
        port = free.getsockname()[1]
    assert launch(jobs.summed, 1, ranks=2, port=port) == [3.0, 3.0]


def test_a_port_in_use_is_named_before_anything_starts():
    with socket.socket() as taken:
        taken.bind((LOOPBACK, 0))
        taken.listen()
        port = taken.getsockname()[1]
        began = time.monotonic()
        with pytest.raises(BadInput, match=f"^port {port} is in use; another --port works, and without --port a free"):
            launch(jobs.hello, "a", ranks=2, port=port)
        assert time.monotonic() - began < 1
    with pytest.raises(BadInput, match="port 70000 does not exist"):
        launch(jobs.hello, "a", ranks=1, port=70000)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_raises_is_told_in_one_sentence(rank, tmp_path):
    with pytest.raises(RankFailed) as failed:
        launch(jobs.fail_on, rank, "raise", str(tmp_path), ranks=2)
    told = failed.value
    assert str(told) == f"rank {rank} of 2 failed: ValueError: rows do not match at all; the other rank was ended"
    assert (told.rank, told.ranks, told.code) == (rank, 2, 1)
    assert "in fail_on" in told.traceback and "ValueError: rows do not match\nat all" in told.traceback
    assert gone(noted(tmp_path, 1))


def test_a_rank_that_leaves_without_a_word(tmp_path):
    with pytest.raises(RankFailed, match="rank 1 of 2 ended with exit code 7 in the middle of its work"):
        launch(jobs.fail_on, 1, "exit", str(tmp_path), ranks=2)


def test_bad_input_and_missing_packages_stay_what_they_are(tmp_path):
    with pytest.raises(BadInput, match="^the file is of another kind$"):
        launch(jobs.fail_on, 1, "input", str(tmp_path), ranks=2)
    with pytest.raises(NotInstalled, match="^it is not there$"):
        launch(jobs.fail_on, 0, "missing", str(tmp_path), ranks=2)


@pytest.mark.parametrize(("rank", "how"), [(0, "kill"), (1, "kill"), (1, "raise")])
def test_a_rank_lost_in_the_middle_of_a_step_takes_the_job_down(rank, how, tmp_path):
    """Its peer, which loses the connection at the same moment, is not blamed."""
    with pytest.raises(RankFailed) as failed:
        launch(jobs.killed_in_a_step, rank, str(tmp_path), how, ranks=2)
    assert time.time() - float((tmp_path / "when").read_text()) < 10
    assert failed.value.rank == rank
    if how == "kill":
        assert f"rank {rank} of 2 was killed by SIGKILL" in str(failed.value)
        assert failed.value.code == -signal.SIGKILL
    else:
        assert str(failed.value).startswith(f"rank {rank} of 2 failed: RuntimeError: this rank's own fault")
    assert gone(noted(tmp_path))


def test_a_job_that_takes_too_long_is_ended(tmp_path):
    with pytest.raises(RankFailed, match=r"wait_forever was still running on ranks 0, 1 of 2 after 1 s"):
        launch(jobs.wait_forever, str(tmp_path), ranks=2, timeout_s=1)
    assert gone(noted(tmp_path, 1))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_the_end_of_the_launcher_is_the_end_of_its_ranks(number, code, tmp_path):
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "tests.train.jobs", "wait_forever", str(tmp_path)]
    launcher = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, start_new_session=True)
    try:
        pids = noted(tmp_path, 3)
        launcher.send_signal(number)
        assert launcher.wait(10) == code
        # Nothing can run for a launcher that was killed, so children of ranks outlive it; ranks do not.
        mine = pids if number != signal.SIGKILL else [int((tmp_path / f"pid-{r}").read_text()) for r in range(2)]
        assert gone(mine)
        assert b"Traceback" not in launcher.stderr.read()
    finally:
        launcher.kill()
        for file in tmp_path.glob("pid-child"):
            if psutil.pid_exists(int(file.read_text())):
                os.kill(int(file.read_text()), signal.SIGKILL)


def test_inside_torchrun_this_process_is_its_rank(monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    assert inside_torchrun()
    assert launch(jobs.hello, "c", ranks=2) == [("c", 1, 2, "1")]
    with pytest.raises(BadInput, match=r"rank 1 of 2 \(torchrun\), and 4 ranks were asked for"):
        launch(jobs.hello, "c", ranks=4)


def test_what_cannot_be_launched():
    with pytest.raises(ValueError, match="must be a top-level function"):
        launch(lambda: None, ranks=2)
    with pytest.raises(BadInput, match="0 ranks"):
        launch(jobs.hello, "a", ranks=0)
    with pytest.raises(BadInput, match="0 threads"):
        launch(jobs.hello, "a", ranks=1, threads=0)


def test_more_threads_than_cores_are_named(monkeypatch):
    monkeypatch.setattr("partita.train.launch.cores", lambda: 2)
    assert oversubscribed(2, 1) is None
    assert oversubscribed(2, 2) == "2 ranks of 2 threads share 2 cores: it works, and step times say little"
