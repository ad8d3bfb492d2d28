"""What the tests of this folder run on other processes: they are imported by name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def hello(word: str) -> tuple[str, int, int, str]:
    return word, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ["OMP_NUM_THREADS"]


def note(folder: str) -> None:
    """Leave this process's id behind."""
    Path(folder, f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))


def wait_forever(folder: str) -> None:
    note(folder)
    if os.environ["RANK"] == "1":  # a rank may have children of its own
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(folder, "pid-child").write_text(str(child.pid))
    time.sleep(600)


def fail_on(rank: int, how: str, folder: str) -> None:
    note(folder)
    if os.environ["RANK"] != str(rank):
        time.sleep(600)
    if how == "raise":
        raise ValueError("rows do not match\nat all")
    if how == "input":
        from partita.facts.errors import BadInput

        raise BadInput("the file is of another kind")
    if how == "missing":
        from partita.facts.errors import NotInstalled

        raise NotInstalled("it is not there")
    os._exit(7)


def killed_in_a_step(rank: int, folder: str, how: str) -> None:
    """Steps of two ranks, one of which is killed (or raises) while the other waits for it in a collective."""
    import torch
    import torch.distributed as dist

    from partita.train.ranks import process_group

    note(folder)
    with process_group() as me:
        gradient = torch.zeros(1000)
        for i in range(10**9):
            dist.all_reduce(gradient)
            if i == 5 and me.rank == rank:
                Path(folder, "when").write_text(str(time.time()))
                if how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise RuntimeError("this rank's own fault")


def summed(value: int) -> float:
    import torch
    import torch.distributed as dist

    from partita.train.ranks import process_group

    with process_group() as me:
        total = torch.tensor([float(value + me.rank)])
        dist.all_reduce(total)
    assert not dist.is_initialized()
    return total.item()


def trained(rank: int, world: int, options: Any) -> dict[str, Any]:
    """A run in the pool's process group."""
    import torch

    from partita.train.ranks import Rank
    from partita.train.trainer import in_group

    return in_group(options, Rank(rank, world, rank), torch.device("cpu"))


def all_trained(rank: int, world: int, runs: list[Any]) -> list[dict[str, Any]]:
    return [trained(rank, world, options) for options in runs]


if __name__ == "__main__":
    # A launcher of its own, for the tests that end one: FUNCTION FOLDER.
    from partita.train.launch import launch
    from tests.train import jobs

    try:
        launch(getattr(jobs, sys.argv[1]), sys.argv[2], ranks=2)
    except KeyboardInterrupt:
        sys.exit(130)
