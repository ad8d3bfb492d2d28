"""Runs at the start of every Python process of a recorded program, before the program itself.

Python imports ``sitecustomize`` by itself; this folder is on ``PYTHONPATH`` only under ``run_recorded``.  Nothing heavy
is imported here: the program decides whether and when torch is loaded.  When it loads ``torch.distributed``, the two
functions by which a process joins and leaves the world are wrapped, so that a recording begins and ends with it.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
TARGET = "torch.distributed.distributed_c10d"
FOLDER = "PARTITA_RECORD_FOLDER"
HOME = "PARTITA_RECORD_HOME"


def chain() -> None:
    """Runs the ``sitecustomize`` that would have run without this one."""
    elsewhere = [p for p in sys.path if os.path.abspath(p) != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


class Finder:
    """Waits for the module that makes process groups, and wraps it once it is loaded."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != TARGET:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            wrap(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def wrap(module: ModuleType) -> None:
    """Joining the world begins a recording, leaving it ends one."""
    join: Callable[..., Any] = module.init_process_group
    leave: Callable[..., Any] = module.destroy_process_group

    running: list[Any] = []

    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        out = join(*args, **kwargs)
        running.append(session_type()(os.environ[FOLDER]))
        return out

    def destroy_process_group(group: Any = None) -> Any:
        if running and (group is None or group is module.GroupMember.WORLD):
            running.pop().finish()
        return leave(group)

    for new, old in ((init_process_group, join), (destroy_process_group, leave)):
        new.__doc__, new.__name__, new.__module__ = old.__doc__, old.__name__, old.__module__
        setattr(module, old.__name__, new)


def session_type() -> Any:
    """The package's part of this; found where the launcher found it when this Python does not have it."""
    try:
        from partita.observe.session import Session
    except ModuleNotFoundError:
        sys.path.append(os.environ[HOME])
        from partita.observe.session import Session
    return Session


chain()
if FOLDER in os.environ:
    sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]
