"""A pool of worker processes that the tests share: one process a rank, started once a run.

Starting a process and importing torch costs seconds; a process group among processes that are already there costs
milliseconds. So the workers stay, and every job gets a fresh gloo group over the first n of them.

    def total(rank, world, value):
        tensor = torch.tensor([value + rank])
        dist.all_reduce(tensor)
        return tensor.item()

    def test_total(ranks):
        assert ranks(2).run(total, 5) == [11, 11]

The function must live at the top level of an importable module, because a worker imports it by name. Arguments and
results are pickled, so they are plain values, arrays or plain tensors; a DTensor belongs to its group and cannot leave.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LARGEST = 8
START_LIMIT_S = 180.0  # a cold import of torch by eight processes on two cores
JOB_LIMIT_S = 120.0
ECHO = re.compile(r"gloo/transport|[Cc]onnection (was )?(closed|reset)|remote worker crashing")  # said of a lost peer
GRACE_S = 3.0  # how long the peers of a failed rank may take to say what they saw, or to leave their group


class RanksFailed(RuntimeError):
    """A job failed on at least one rank. The text begins with the traceback of the rank that failed first.

    `tracebacks` maps each rank that raised (or died) to what it said, in the order in which they were heard.
    """

    def __init__(self, summary: str, tracebacks: dict[int, str]) -> None:
        self.tracebacks = tracebacks
        parts = [f"--- rank {rank} ---\n{text.rstrip()}" for rank, text in tracebacks.items()]
        super().__init__("\n".join([summary, *parts]))


class RanksTimedOut(RuntimeError):
    """A job did not finish in time; the text names the ranks that were still busy."""


@dataclass
class Worker:
    """One process and the parent's end of the pipe to it."""

    process: subprocess.Popen[bytes]
    pipe: Connection
    ready: bool = False

    def alive(self) -> bool:
        return self.process.poll() is None

    def end(self) -> None:
        """Closes the pipe and ends the process, by force where it does not go by itself."""
        self.pipe.close()
        if self.alive():
            self.process.kill()
        self.process.wait()


@dataclass
class Ranks:
    """The first `world` workers of a pool, as a test sees them."""

    pool: Pool
    world: int

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = JOB_LIMIT_S) -> list[Any]:
        """Calls `function(rank, world, *args)` on every rank and returns the results in rank order.

        Raises RanksFailed when a rank raises or dies, RanksTimedOut when one is still busy after `timeout_s`.
        """
        return self.pool.run(self.world, function, args, timeout_s)


class Pool:
    """Workers that grow to the largest job asked for; a worker that misbehaved is replaced before the next job."""

    def __init__(self) -> None:
        self.workers: list[Worker] = []
        self.jobs = 0
        self.scratch = tempfile.TemporaryDirectory(prefix="ranks-")
        atexit.register(self.close)

    def __call__(self, world: int) -> Ranks:
        if not 1 <= world <= LARGEST:
            raise ValueError(f"{world} ranks were asked for; the pool has 1 to {LARGEST}.")
        return Ranks(self, world)

    def run(self, world: int, function: Callable[..., Any], args: Sequence[Any], timeout_s: float) -> list[Any]:
        module, name = importable(function)
        workers = self._grown(world)
        self.jobs += 1
        store = Path(self.scratch.name) / f"store-{self.jobs}"
        for rank, worker in enumerate(workers):
            job = (rank, world, str(store), timeout_s, module, name, tuple(args))
            worker.pipe.send_bytes(pickle.dumps(job))
        try:
            return self._collect(workers, f"{module}.{name}", timeout_s)
        finally:
            store.unlink(missing_ok=True)

    def close(self) -> None:
        """Ends every worker. Safe to call twice."""
        for worker in self.workers:
            worker.end()
        self.workers.clear()
        self.scratch.cleanup()
        atexit.unregister(self.close)

    def _grown(self, world: int) -> list[Worker]:
        """The first `world` workers, alive and with torch imported; missing ones start side by side."""
        for rank in range(world):
            if rank == len(self.workers):
                self.workers.append(start())
            elif not self.workers[rank].alive():
                self.workers[rank].end()
                self.workers[rank] = start()
        workers = self.workers[:world]
        deadline = time.monotonic() + START_LIMIT_S
        for worker in workers:
            if not worker.ready:
                if not worker.pipe.poll(max(0.0, deadline - time.monotonic())):
                    raise RanksTimedOut(f"A worker was not ready after {START_LIMIT_S:.0f} s.")
                worker.pipe.recv_bytes()  # EOFError here: the worker printed why it could not start
                worker.ready = True
        return workers

    def _collect(self, workers: list[Worker], what: str, timeout_s: float) -> list[Any]:
        """Waits until every worker has answered and left its group; ends those that do neither in time."""
        results: dict[int, bytes] = {}
        tracebacks: dict[int, str] = {}
        busy = {worker.pipe: rank for rank, worker in enumerate(workers)}
        deadline = time.monotonic() + timeout_s
        while busy:
            heard = wait(list(busy), max(0.0, deadline - time.monotonic()))
            if not heard:
                break
            for pipe in heard:
                assert isinstance(pipe, Connection)
                rank = busy[pipe]
                kind, value = receive(pipe, workers[rank])
                if kind == "result":
                    results[rank] = value
                elif kind in ("error", "died"):
                    tracebacks[rank] = value
                    deadline = min(deadline, time.monotonic() + GRACE_S)
                if kind in ("left", "died"):
                    del busy[pipe]
            if len(results) == len(workers):
                deadline = min(deadline, time.monotonic() + GRACE_S)
        for rank in busy.values():
            workers[rank].end()
        silent = sorted(rank for rank in busy.values() if rank not in results and rank not in tracebacks)
        if tracebacks:
            # A rank that only lost a peer may be heard first; the cause comes before its echoes all the same.
            tracebacks = dict(sorted(tracebacks.items(), key=lambda item: bool(ECHO.search(item[1]))))
            first = next(iter(tracebacks))
            waiting = f"; ranks {silent} were still waiting and were ended" if silent else ""
            raise RanksFailed(f"{what} failed on rank {first} of {len(workers)}{waiting}.", tracebacks)
        if silent:
            raise RanksTimedOut(f"{what} was still running on ranks {silent} of {len(workers)} after {timeout_s:g} s.")
        return [pickle.loads(results[rank]) for rank in range(len(workers))]


def importable(function: Callable[..., Any]) -> tuple[str, str]:
    """Module and name by which a worker can import the function; refuses what has none."""
    module, name = function.__module__, function.__qualname__
    if module == "__main__" or "<" in name or "." in name:
        raise ValueError(f"{module}.{name} cannot run on other ranks: it must be a top-level function of a module.")
    return module, name


def receive(pipe: Connection, worker: Worker) -> tuple[str, Any]:
    """One message of a worker; a closed pipe is a message too: the worker died."""
    try:
        kind, value = pickle.loads(pipe.recv_bytes())
        return kind, value
    except (EOFError, ConnectionResetError):
        code = worker.process.wait()
        return "died", f"The process ended with exit code {code}."


def start() -> Worker:
    """Starts one worker. It inherits nothing but its end of the pipe and ends when the parent's end closes."""
    ours, theirs = Pipe()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    }
    # -u: what a worker prints before it is killed still reaches the captured output of the test.
    command = [sys.executable, "-u", "-m", "tests.pool_worker", str(theirs.fileno())]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # an interrupt from the keyboard is the parent's business
    )
    theirs.close()
    return Worker(process, ours)


@contextlib.contextmanager
def opened() -> Iterator[Pool]:
    """A pool that ends with the block."""
    pool = Pool()
    try:
        yield pool
    finally:
        pool.close()
