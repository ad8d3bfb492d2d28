"""One rank that ``launch`` started: takes a job from a pipe, answers on it, and leaves when it is told to.

    python -m partita.train.worker PIPE LAUNCHER [TERMINAL]

``PIPE`` is a file descriptor, ``LAUNCHER`` the process to which this one is tied, ``TERMINAL`` the descriptor that
rank 0 uses as ``sys.stderr``.  Messages: (kind, value, traceback, seconds of the monotonic clock).
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

from partita.facts.errors import BadInput, NotInstalled

PR_SET_PDEATHSIG = 1


def main() -> None:
    pipe = Connection(int(sys.argv[1]))
    tie(int(sys.argv[2]))
    faulthandler.enable(2)
    if len(sys.argv) > 3:
        sys.stderr = open(int(sys.argv[3]), "w", buffering=1, errors="replace")  # noqa: SIM115
    messages: queue.Queue[bytes] = queue.Queue()
    threading.Thread(target=listen, args=(pipe, messages), daemon=True).start()
    code = work(pipe, *pickle.loads(messages.get()))
    if code == 0:
        messages.get()  # "leave": rank 0 serves the rendezvous until all have answered
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # libraries' exit handlers have nothing to add, and one of them could wait for a lost peer


def tie(launcher: int) -> None:
    """End with the launcher, even if it is killed."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # it died before the tie was made
        os._exit(1)


def listen(pipe: Connection, messages: queue.Queue[bytes]) -> None:
    """Pass messages on; a closed pipe means that the launcher is gone."""
    try:
        while True:
            messages.put(pipe.recv_bytes())
    except (EOFError, OSError):
        os._exit(1)


def work(pipe: Connection, path: list[str], module: str, name: str, args: tuple[Any, ...]) -> int:
    """Run the job and answer; the exit code."""
    answer: tuple[str, Any, str, float]
    try:
        sys.path[:] = path
        answer = ("result", pickle.dumps(getattr(importlib.import_module(module), name)(*args)), "", time.monotonic())
    except BaseException as error:
        at_s = getattr(error, "partita_at_s", time.monotonic())
        answer = (kind_of(error), sentence(error), traceback.format_exc(), at_s)
    pipe.send_bytes(pickle.dumps(answer))
    return 0 if answer[0] == "result" else 1


def kind_of(error: BaseException) -> str:
    return "input" if isinstance(error, BadInput) else "missing" if isinstance(error, NotInstalled) else "error"


def sentence(error: BaseException) -> str:
    """The message as one line; errors that are not ours are named by their class."""
    text = " ".join(str(error).split())
    if isinstance(error, (BadInput, NotInstalled)):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


if __name__ == "__main__":
    main()
