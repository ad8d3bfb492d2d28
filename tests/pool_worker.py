"""One process of the pool in `pool.py`: takes jobs from a pipe until the pipe closes.

Messages to the parent: ("ready", version) once, then for each job ("result", bytes) or ("error", text), then
("left", None) when the process group is gone and the next job may come.
"""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

Job = tuple[int, int, str, float, str, str, tuple[Any, ...]]


def main() -> None:
    pipe = Connection(int(sys.argv[1]))
    gc.freeze()  # torch's own objects need no look at the end of every job
    jobs: queue.Queue[bytes] = queue.Queue()
    threading.Thread(target=listen, args=(pipe, jobs), daemon=True).start()
    send(pipe, "ready", torch.__version__)
    while True:
        work(pipe, pickle.loads(jobs.get()))


def listen(pipe: Connection, jobs: queue.Queue[bytes]) -> None:
    """Passes jobs on. When the parent is gone the process ends at once, even inside a collective."""
    try:
        while True:
            jobs.put(pipe.recv_bytes())
    except (EOFError, OSError):
        os._exit(0)


def send(pipe: Connection, kind: str, value: Any) -> None:
    # Plain pickle, not Connection.send: that one would pass tensors by shared memory, which outlives neither side.
    pipe.send_bytes(pickle.dumps((kind, value)))


def work(pipe: Connection, job: Job) -> None:
    """Runs one job. An error is sent before the group is left, so the parent hears its cause before its echoes."""
    rank, world, store, timeout_s, module, name, args = job
    try:
        reset()
        limit = timedelta(seconds=timeout_s)
        dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=limit)
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        result = pickle.dumps(function(rank, world, *args))
    except BaseException:
        send(pipe, "error", traceback.format_exc())
    else:
        send(pipe, "result", result)
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
    send(pipe, "left", None)


def reset() -> None:
    """Puts back what an earlier job may have changed for the whole process.

    DTensor caches what it decided per mesh, and two meshes of one shape are equal to it although their groups differ;
    a cache of the last job would therefore call groups that are gone.
    """
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.set_num_threads(1)
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import _random
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _random._rng_tracker = None
        _clear_sharding_prop_cache()


if __name__ == "__main__":
    main()
