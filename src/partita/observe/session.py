"""The recording of one process of a program that knows nothing of it: begun and ended by ``hook/sitecustomize.py``."""

from __future__ import annotations

import atexit
import json
import os
from multiprocessing import util
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from partita.observe.record import Recorder


class Session:
    """What one process records until it leaves the world, or ends."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.process = os.getpid()
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.backend = dist.get_backend()
        self.recorder = Recorder(split=True)
        self.done = False
        # A process may leave one world and join another; then each has its own record.
        before = len(list(self.folder.glob(f"*-{self.process}-*.begun")))
        self.name = f"rank-{self.rank}-{self.process}-{before}"
        (self.folder / f"{self.name}.begun").touch()
        # A process that multiprocessing forked leaves without the exit functions of Python, but with its own.
        util.Finalize(self, self.finish, exitpriority=0)
        atexit.register(self.finish)
        self.recorder.__enter__()

    def finish(self) -> None:
        """Writes what was recorded, once, under a name that appears when the file is whole."""
        if self.done or os.getpid() != self.process:
            return
        self.done = True
        self.recorder.__exit__(None, None, None)
        target = self.folder / f"{self.name}.json"
        unfinished = target.with_suffix(".part")
        unfinished.write_text(json.dumps(self.json()))
        unfinished.rename(target)

    def json(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "world": self.world,
            "backend": self.backend,
            "torch": torch.__version__,
            "steps": self.recorder.steps,
            "calls": [c.json() for c in self.recorder.calls],
            "tails": [[t.step, t.begin_s, t.end_s] for t in self.recorder.tails],
        }
