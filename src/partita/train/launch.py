"""Launch: one function on N ranks of this machine, or on this process where ``torchrun`` has already made it a rank.

The launcher is a plain supervisor and imports no torch.  ``torch.distributed.launcher`` was tried first: it imports
torch in the launcher too, takes about 4 s to give up after a rank was killed, prints its own log lines before the
error, and cannot be given a socket.  Here the launcher binds the rendezvous socket itself (on the loopback address
alone) and hands it to rank 0, so a port in use is known before any process starts and a free port stays free.

Each rank is a session of its own, tied to the launcher three times: the kernel kills it when the launcher dies
(``PR_SET_PDEATHSIG``, where there is one), a closed pipe ends it, and the launcher kills whole sessions on its way out.
What ranks write on file descriptor 2 goes to files: when a rank dies its peers' libraries complain about closed
connections, and that must not bury the one error that matters.
"""

from __future__ import annotations

import errno
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from partita.facts import errors
from partita.facts.errors import BadInput, RunFailed

T = TypeVar("T")

LOOPBACK = "127.0.0.1"
GRACE_S = 1.5
"""How long a rank that only lost its peers is believed to be a victim while the cause is looked for."""
SOCKET_VARIABLE = "PARTITA_RENDEZVOUS_SOCKET"
TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR")
# What gloo, NCCL and the store say when it is a peer that went away.
_ECHO = re.compile(
    r"[Cc]onnection (was )?(closed|reset|refused)|[Bb]roken pipe|\[.*gloo/transport|NCCL|remote (process|peer)|"
    r"[Tt]imed out waiting|failed to recv|DistNetworkError|DistStoreError|DistBackendError"
)


class RankFailed(RunFailed):
    """A rank raised, died or did not end; the message is one sentence.

    ``rank`` of ``ranks`` is the first cause, not an echo at a peer; ``code`` its exit code (negative: the signal,
    None: it still ran); ``traceback`` what it had to say, for ``--debug``.
    """

    def __init__(self, sentence: str, rank: int, ranks: int, code: int | None = None, traceback: str = "") -> None:
        super().__init__(sentence, traceback)
        self.rank, self.ranks, self.code = rank, ranks, code


@dataclass(frozen=True)
class Heard:
    """What is known of a rank that failed: ``kind`` is error, input, missing (not installed) or died."""

    rank: int
    kind: str
    text: str
    trace: str
    at_s: float

    @property
    def echo(self) -> bool:
        """Whether this looks like the loss of a peer and not like a cause (gloo's threads abort the process)."""
        if self.kind == "died":
            return self.text == str(-signal.SIGABRT) and bool(_ECHO.search(self.trace))
        return self.kind == "error" and bool(_ECHO.search(self.text))


@dataclass
class Child:
    """One rank's process, the launcher's end of its pipe, and the file that takes its standard error."""

    rank: int
    process: subprocess.Popen[bytes]
    pipe: Connection
    log: Path
    result: bytes | None = None

    def kill(self) -> None:
        """End the whole session of the rank."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.pipe.close()

    def said(self, most: int = 4000) -> str:
        """The end of what it wrote on its standard error."""
        try:
            return self.log.read_bytes()[-most:].decode(errors="replace").strip()
        except OSError:
            return ""


@dataclass
class Job:
    """The processes of one launch."""

    function: str
    children: list[Child] = field(default_factory=list)

    def end(self) -> None:
        for child in self.children:
            child.kill()


def inside_torchrun(environment: Mapping[str, str] | None = None) -> bool:
    """Whether this process has been made a rank by somebody else (torchrun, or a script that sets its variables)."""
    found = os.environ if environment is None else environment
    return all(found.get(name) for name in TORCHRUN) and SOCKET_VARIABLE not in found


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_of_this_machine() -> int:
    """Bytes of main memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def oversubscribed(ranks: int, threads: int) -> str | None:
    """A sentence where ranks x threads is more than the cores; None where it is not."""
    if ranks * threads <= cores():
        return None
    return (
        f"{ranks} ranks of {threads} thread{'s' * (threads > 1)} share {cores()} core{'s' * (cores() > 1)}: "
        "it works, and step times say little"
    )


def launch(
    function: Callable[..., T],
    *args: Any,
    ranks: int,
    threads: int = 1,
    timeout_s: float | None = None,
    port: int | None = None,
    environment: Mapping[str, str] | None = None,
    debug: bool = False,
) -> list[T]:
    """Call ``function(*args)`` on every rank and return the results in rank order.

    The function must be at the top level of an importable module; arguments and results are pickled and small.  Rank 0
    keeps this process's standard output and Python's ``sys.stderr``; the other ranks' output is discarded.  Inside
    torchrun the function runs here, as this process's rank, and the list holds that one result.

    Args:
        threads: CPU threads of each rank.
        timeout_s: the whole job may take this long; None: as long as it likes.
        port: rendezvous port on the loopback address; None: a free one.
        environment: variables for the ranks, beside this process's own.
        debug: show every rank's standard error as it comes.

    Raises:
        RankFailed: a rank raised, died, or was still busy after ``timeout_s``.
        BadInput, NotInstalled: a rank raised it.
        KeyboardInterrupt: after every rank has been ended.
    """
    if ranks < 1:
        raise BadInput(f"{ranks} ranks cannot run anything; 1 or more works")
    if threads < 1:
        raise BadInput(f"{threads} threads cannot run anything; 1 or more works")
    if inside_torchrun():
        world = int(os.environ["WORLD_SIZE"])
        if world != ranks:
            raise BadInput(
                f"this process is rank {os.environ['RANK']} of {world} (torchrun), and {ranks} ranks were asked for; "
                f"leave the number out, or give {world}"
            )
        return [function(*args)]
    where = importable(function)
    with rendezvous(port) as listening, tempfile.TemporaryDirectory(prefix="partita-") as scratch, _terminable():
        job = Job(f"{where[0]}.{where[1]}")
        try:
            for rank in range(ranks):
                variables = _variables(rank, ranks, threads, listening, environment or {})
                job.children.append(_start(rank, variables, listening, Path(scratch), debug))
            message = pickle.dumps((sys.path, *where, args))
            for child in job.children:
                _hand_over(child, message)
            results = _supervise(job, timeout_s)
            return [pickle.loads(r) for r in results]
        except BaseException:
            if sys.stderr.isatty():
                print("\x1b[?25h", file=sys.stderr)  # a live line, ended by force, would leave the cursor hidden
            raise
        finally:
            job.end()


def importable(function: Callable[..., Any]) -> tuple[str, str]:
    """Module and name by which another process can import the function."""
    module, name = function.__module__, function.__qualname__
    if module == "__main__" or "<" in name or "." in name:
        raise ValueError(f"{module}.{name} cannot run on other ranks: it must be a top-level function of a module")
    return module, name


@contextmanager
def rendezvous(port: int | None) -> Iterator[socket.socket]:
    """A listening socket on the loopback address; refuses a port in use before anything has started."""
    if port is not None and not 0 < port < 65536:
        raise BadInput(f"port {port} does not exist; 1024 to 65535 work, and without --port a free one is chosen")
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((LOOPBACK, port or 0))
        listening.listen(128)
    except OSError as error:
        listening.close()
        why = {errno.EADDRINUSE: "is in use", errno.EACCES: "may only be used by the system"}.get(error.errno or 0)
        raise BadInput(
            f"port {port} {why or f'cannot be used ({error.strerror})'}; another --port works, and without --port a "
            "free one is chosen"
        ) from None
    try:
        yield listening
    finally:
        listening.close()


@contextmanager
def _terminable() -> Iterator[None]:
    """A polite end (SIGTERM, SIGHUP) leaves through the same door as Ctrl-C, so that ranks are ended too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _: Any) -> NoReturn:
        raise SystemExit(128 + number)

    before = {n: signal.signal(n, leave) for n in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _variables(
    rank: int, ranks: int, threads: int, listening: socket.socket, more: Mapping[str, str]
) -> dict[str, str]:
    """torchrun's variables, and what keeps every connection on this machine."""
    loop = "lo0" if sys.platform == "darwin" else "lo"
    source = str(Path(__file__).resolve().parents[2])
    path = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(listening.getsockname()[1]),
        SOCKET_VARIABLE: str(listening.fileno()),
        "GLOO_SOCKET_IFNAME": loop,
        "NCCL_SOCKET_IFNAME": loop,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "PYTHONPATH": source + (os.pathsep + path if path else ""),
        **more,
    }


def _start(rank: int, variables: dict[str, str], listening: socket.socket, scratch: Path, debug: bool) -> Child:
    ours, theirs = Pipe()
    log = scratch / f"rank-{rank}.log"
    passed = [theirs.fileno(), *([listening.fileno()] if rank == 0 else [])]
    terminal = None
    if rank == 0:
        terminal = os.dup(2)  # what rank 0 shows the user stays apart from what libraries write on descriptor 2
        passed.append(terminal)
    # -u: what a rank writes before it is killed is not lost; -P: the working folder shadows no module.
    command = [sys.executable, "-u", "-P", "-m", "partita.train.worker", str(theirs.fileno()), str(os.getpid())]
    command += [str(terminal)] if terminal is not None else []
    try:
        with log.open("wb") as written:
            process = subprocess.Popen(
                command,
                env=variables,
                pass_fds=passed,
                stdin=subprocess.DEVNULL,
                stdout=None if rank == 0 else subprocess.DEVNULL,
                stderr=None if debug else written,
                start_new_session=True,  # an interrupt from the keyboard is the launcher's business
            )
    finally:
        theirs.close()
        if terminal is not None:
            os.close(terminal)
    return Child(rank, process, ours, log)


def _hand_over(child: Child, message: bytes) -> None:
    with suppress(OSError):  # where it died at once the supervisor is about to hear of it
        child.pipe.send_bytes(message)


def _supervise(job: Job, timeout_s: float | None) -> list[bytes]:
    """Wait until every rank has answered, then let them go; the first cause of a failure is raised."""
    busy = {child.pipe: child for child in job.children}
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    heard: list[Heard] = []
    while busy:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = wait(list(busy), left)
        if not ready:
            break
        for pipe in ready:
            child = busy[pipe]  # type: ignore[index]
            news = _receive(child)
            del busy[child.pipe]
            if news is not None:
                heard.append(news)
        if heard:
            if any(not h.echo for h in heard):
                break
            deadline = min(h.at_s for h in heard) + GRACE_S
    if heard:
        _raise(min(heard, key=lambda h: (h.echo, h.at_s)), len(job.children))
    if busy:
        ranks = sorted(child.rank for child in busy.values())
        names = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        raise RankFailed(
            f"{job.function} was still running on {names} of {len(job.children)} after {timeout_s:g} s, and was ended",
            ranks[0],
            len(job.children),
            None,
            next(child.said() for child in busy.values()),
        )
    _let_go(job)
    return [child.result for child in job.children if child.result is not None]


def _receive(child: Child) -> Heard | None:
    """One message of a rank; None for a result.  A closed pipe is a message too: the process is gone."""
    now = time.monotonic()
    try:
        kind, value, trace, at_s = pickle.loads(child.pipe.recv_bytes())
    except (EOFError, OSError):
        try:
            code = child.process.wait(2.0)
        except subprocess.TimeoutExpired:
            child.kill()
            code = child.process.returncode
        return Heard(child.rank, "died", str(code), child.said(), now)
    if kind == "result":
        child.result = value
        return None
    return Heard(child.rank, kind, value, trace + _log(child), at_s)


def _log(child: Child) -> str:
    said = child.said()
    return f"\nstandard error of rank {child.rank}:\n{said}" if said else ""


def _let_go(job: Job) -> None:
    """Results are in: every rank may leave (rank 0 serves the rendezvous until now)."""
    for child in job.children:
        _hand_over(child, b"leave")
    until = time.monotonic() + 2.0
    for child in job.children:
        try:
            child.process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            continue  # ended by force on the way out


def _raise(cause: Heard, ranks: int) -> NoReturn:
    if cause.kind == "input":
        raise BadInput(cause.text)
    if cause.kind == "missing":
        raise errors.NotInstalled(cause.text)
    who = f"rank {cause.rank} of {ranks}"
    rest = "" if ranks == 1 else "; the other ranks were ended" if ranks > 2 else "; the other rank was ended"
    if cause.kind == "error":
        raise RankFailed(f"{who} failed: {cause.text}{rest}", cause.rank, ranks, 1, cause.trace)
    code = int(cause.text)
    how = f"was killed by {_signal(-code)}" if code < 0 else f"ended with exit code {code} in the middle of its work"
    memory = " (the system does that when memory runs out)" if code == -signal.SIGKILL else ""
    raise RankFailed(f"{who} {how}{memory}{rest}", cause.rank, ranks, code, cause.trace)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
