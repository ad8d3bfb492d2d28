"""Programs that know nothing of the recorder, recorded from outside: the two example scripts, and awkward ones."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from partita.facts.errors import BadInput
from partita.observe.recording import Recording
from partita.observe.runner import NothingRecorded, run_recorded

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

pytest.importorskip("torch")


def test_a_ddp_script(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Each step reduces every gradient once, and the loss that is shown; the script says how many parameters it has."""
    found = run_recorded([*TORCHRUN, str(ROOT / "examples/third_party_ddp.py")], tmp_path)
    words = capfd.readouterr().out.split()
    gradients = 4 * int(words[words.index("parameters") + 1])
    assert (found.exit_code, found.world, found.steps) == (0, 2, 5)
    assert {(r.phase, r.verb, r.bytes, r.count, str(r.ranks)) for r in found.steady} == {
        ("backward", "all_reduce", gradients, 1, "all"),
        ("forward", "all_reduce", 4, 1, "all"),
    }
    assert found.varying == found.disagreements == ()
    assert [(r.verb, r.kind) for r in found.init] == [
        ("all_gather", "control"),
        ("broadcast", "control"),
        ("broadcast", "data"),
    ]
    assert all(r.tails[2].exposed_s > 0 for r in found.ranks)
    assert [p.name for p in tmp_path.iterdir()] == ["recording.json"]
    assert Recording.load(tmp_path / "recording.json") == found


def test_an_fsdp2_script(tmp_path: Path) -> None:
    """Three blocks and a root on two ranks; the norm's all-reduce happens inside DTensor operations."""
    block, root = 4 * (2 * 32 + 2 * 32 * 64 + 64 + 32), 4 * (102 * 32 + 102 * 32 + 102)
    found = run_recorded([*TORCHRUN, str(ROOT / "examples/third_party_fsdp2.py")], tmp_path)
    assert {(r.phase, r.verb, r.bytes, r.count) for r in found.steady} == {
        ("forward", "all_gather", root, 1),
        ("forward", "all_gather", block, 3),
        ("backward", "all_gather", block, 3),
        ("backward", "reduce_scatter", block, 3),
        ("backward", "reduce_scatter", root, 1),
        ("step", "all_reduce", 4 * (3 * 6 + 3), 1),  # one norm for each of 21 parameters
    }
    assert found.varying == found.disagreements == ()
    assert found.exit_code == 0


SPAWNED = """
import sys
import torch, torch.distributed as dist, torch.multiprocessing as mp

def work(rank, store):
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
    pair = dist.new_group([0, 1])
    if rank == 0:
        dist.send(torch.ones(3), 1)
    else:
        dist.recv(torch.ones(3), 0)
    dist.all_to_all_single(torch.ones(4), torch.ones(4), group=pair)
    # No destroy_process_group: the process just ends.

if __name__ == "__main__":
    mp.start_processes(work, (sys.argv[1],), nprocs=2, start_method=sys.argv[2])
    sys.exit(3)
"""


@pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.slow), "fork"])
def test_ranks_that_multiprocessing_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Such ranks end in their own ways.  The exit code is passed on, and a ``sitecustomize`` of the user still runs."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "sitecustomize.py").write_text(f"open({str(theirs / 'ran')!r}, 'w').close()\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(theirs), str(ROOT / "src")]))
    script = tmp_path / "program.py"
    script.write_text(SPAWNED)
    found = run_recorded([sys.executable, str(script), str(tmp_path / "store"), method], tmp_path / "out")
    assert found.exit_code == 3
    assert (theirs / "ran").exists()
    assert [[(c.verb, c.bytes) for c in r.calls if c.kind == "data"] for r in found.ranks] == [
        [("send", 12), ("all_to_all", 16)],
        [("recv", 12), ("all_to_all", 16)],
    ]
    assert found.disagreements == ()
    assert found.steps == 0
    assert found.steady == ()


def test_a_program_without_a_process_group(tmp_path: Path) -> None:
    with pytest.raises(NothingRecorded, match="no process of it initialised torch.distributed") as caught:
        run_recorded([sys.executable, "-c", "raise SystemExit(7)"], tmp_path)
    assert caught.value.exit_code == 7
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_is_killed_leaves_no_half_recording(tmp_path: Path) -> None:
    program = (
        "import os, torch.distributed as d;"
        f"d.init_process_group('gloo', init_method='file://{tmp_path}/store', rank=0, world_size=1); os._exit(9)"
    )
    with pytest.raises(NothingRecorded, match="1 of 1 processes that began .* were ended before") as caught:
        run_recorded([sys.executable, "-c", program], tmp_path / "out")
    assert caught.value.exit_code == 9
    assert list((tmp_path / "out").iterdir()) == []


def test_commands_that_cannot_run(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="'no-such-program' was not found"):
        run_recorded(["no-such-program"], tmp_path)
    with pytest.raises(BadInput, match="no command"):
        run_recorded([], tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match="cannot be a folder"):
        run_recorded([sys.executable], tmp_path / "file")
