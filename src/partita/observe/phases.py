"""Phases and steps of a program that runs: forward, backward, step, or what its author marked.

Shared by the recorder and the tracker of peaks, so that both say the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from partita.observe import private

Listener = Callable[[Any], None]


class Phases:
    """Says which phase it is now.  Hooks on optimizers hold while it is entered (it may be entered by several).

    ``began`` and ``ended`` are called with an optimizer when its step begins and ends, outermost steps only;
    ``changed`` when a marked phase begins.
    """

    def __init__(self) -> None:
        self.step = 0
        self.began: list[Listener] = []
        self.ended: list[Listener] = []
        self.changed: list[Callable[[], None]] = []
        self._marked: str | None = None
        self._running: list[FrameType] = []  # the optimizer steps that run now, outermost first
        self._entered = 0
        self._hooks: list[Any] = []

    def __enter__(self) -> Phases:
        self._entered += 1
        if self._entered == 1:
            self._hooks = [
                register_optimizer_step_pre_hook(self._begins),
                register_optimizer_step_post_hook(self._ends),
            ]
        return self

    def __exit__(self, *_: object) -> None:
        self._entered -= 1
        if not self._entered:
            for hook in self._hooks:
                hook.remove()
            self._running.clear()

    @contextmanager
    def mark(self, name: str) -> Iterator[None]:
        """Everything inside belongs to this phase."""
        before, self._marked = self._marked, name
        for listener in self.changed:
            listener()
        try:
            yield
        finally:
            self._marked = before

    @property
    def marked(self) -> str | None:
        return self._marked

    def now(self) -> str:
        """The marked phase; else backward while autograd runs one, step inside an optimizer, forward elsewhere."""
        if self._marked is not None:
            return self._marked
        if private.backward_task() != private.NO_BACKWARD:
            return "backward"
        return "step" if self._running else "forward"

    def _begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        # An optimizer may call another one, or its own base class.  A step that raised never ends: it is known by
        # its frame, which is no longer below this one.
        frame = sys._getframe(1)
        below = set()
        walk: FrameType | None = frame
        while walk is not None:
            below.add(walk)
            walk = walk.f_back
        self._running = [f for f in self._running if f in below] + [frame]
        if len(self._running) == 1:
            for listener in self.began:
                listener(optimizer)

    def _ends(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._running:
            self._running.pop()
        if not self._running:
            for listener in self.ended:
                listener(optimizer)
