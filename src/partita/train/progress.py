"""What a user sees of a run as it goes: a live line in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Shown:
    """The figures of one step; None is left out.

    ``step`` counts from 0 and is shown from 1.  ``mfu`` is 0 to 1, and ``convention`` names how its FLOPs are
    counted.  ``memory_bytes`` is the peak of this rank's device.
    """

    step: int
    loss: float
    rate: float | None = None
    grad_norm: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    convention: str = "full"
    memory_bytes: int | None = None
    held_out: float | None = None


def line(shown: Shown, steps: int) -> str:
    """``step 3/20  loss 2.3456  ...``"""
    width = len(str(steps))
    parts = [f"step {shown.step + 1:>{width}}/{steps}", f"loss {shown.loss:.4f}"]
    if shown.held_out is not None:
        parts.append(f"held out {shown.held_out:.4f}")
    if shown.rate is not None:
        parts.append(f"rate {shown.rate:.2e}")
    if shown.grad_norm is not None:
        parts.append(f"norm {shown.grad_norm:.3g}")
    if shown.tokens_per_s is not None:
        parts.append(f"{shown.tokens_per_s:,.0f} tokens/s")
    if shown.mfu is not None:
        parts.append(f"MFU {100 * shown.mfu:.1f} % ({shown.convention} attention)")
    if shown.memory_bytes is not None:
        parts.append(f"memory {shown.memory_bytes / 2**30:.2f} GiB")
    return "  ".join(parts)


class Progress:
    """A context in which a run of ``steps`` steps shows itself.

    In a terminal, a bar and the line of the latest step are redrawn in place (colours as ``NO_COLOR`` says).
    Elsewhere a line is printed at the first and the last step, at every held-out loss, and between these at most
    every ``every_s`` seconds.  Only one rank should show: the others pass ``enabled=False``.
    """

    def __init__(
        self,
        steps: int,
        first_step: int = 0,
        *,
        enabled: bool = True,
        stream: TextIO | None = None,
        every_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._steps, self._first = steps, first_step
        self._out = (stream or sys.stdout) if enabled else None
        self._every_s, self._clock = every_s, clock
        self._last_s: float | None = None
        self._live: _Live | None = None

    def __enter__(self) -> Progress:
        if self._out is not None:
            console = _console(self._out)
            if console is not None:
                self._live = _Live(console, self._steps, self._first)
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def update(self, shown: Shown) -> None:
        """A step is done."""
        if self._out is None:
            return
        text = line(shown, self._steps)
        if self._live is not None:
            self._live.update(shown.step + 1, text)
            if shown.held_out is not None:
                self._live.say(text)
            return
        now = self._clock()
        due = self._last_s is None or now - self._last_s >= self._every_s
        if due or shown.step + 1 == self._steps or shown.held_out is not None:
            self._last_s = now
            print(text, file=self._out, flush=True)

    def say(self, text: str) -> None:
        """A message that stays, above the live line."""
        if self._live is not None:
            self._live.say(text)
        elif self._out is not None:
            print(text, file=self._out, flush=True)


def _console(stream: TextIO) -> Console | None:
    """A console that can redraw, or None where there is no terminal (pipes, CI, TERM=dumb)."""
    if not stream.isatty():
        return None
    from rich.console import Console

    console = Console(file=stream, highlight=False)
    return None if console.is_dumb_terminal or not console.is_terminal else console


class _Live:
    """A bar over the line of the latest step, redrawn in place by rich."""

    def __init__(self, console: Console, steps: int, first_step: int) -> None:
        from rich.console import Group
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar
        from rich.text import Text

        self._bar = Bar(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            auto_refresh=False,
        )
        self._task = self._bar.add_task("", total=steps, completed=first_step)
        self._text = Text("")
        self._live = Live(Group(self._bar, self._text), console=console, refresh_per_second=4)
        self._live.start()

    def update(self, done: int, text: str) -> None:
        self._text.plain = text
        self._bar.update(self._task, completed=done)

    def say(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False)

    def stop(self) -> None:
        self._live.stop()
