"""Timing: how long a collective held its caller up.

On the host (gloo) the caller stands still while the call is dispatched and while it waits for the ``Work``; both are
seen.  DDP waits in C++ at the end of backward: there only the whole tail is seen (``calls.Tail``).  On CUDA nothing
waits on the host; events on the caller's stream before and after the call, and before and after the wait, say how long
the stream stood still.  The CUDA half has never run where this project is built: no GPU is there.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from partita.observe import private


@dataclass(eq=False)
class Span:
    """Times of one call while it is being recorded, host seconds (``time.perf_counter``)."""

    begin_s: float
    returned_s: float = 0.0
    blocks: bool = False
    waited: bool = False
    waited_s: float = 0.0
    done_s: float | None = None
    events: list[Any] = field(default_factory=list)

    def exposed_s(self) -> float | None:
        """Time the caller stood still; None when the wait was out of sight (or has not happened)."""
        if self.events:
            return _stood_still_s(self.events) if self.waited or self.blocks else None
        if self.waited or self.blocks:
            return self.returned_s - self.begin_s + self.waited_s
        return None

    def end_s(self) -> float | None:
        return None if self.events else self.done_s


def _stood_still_s(events: list[Any]) -> float:
    """Seconds between the events of each pair on the stream."""
    pairs = list(zip(events[::2], events[1::2], strict=False))
    for _, last in pairs:
        last.synchronize()
    return sum(first.elapsed_time(last) for first, last in pairs) / 1e3


class Waits:
    """Watches ``Work.wait`` and tells the span of the call that made the work.

    ``Work`` is one class of the process, so the watch is put on it on entry and taken off on exit; it looks only at
    works that this recording has seen.
    """

    def __init__(self) -> None:
        self._spans: weakref.WeakKeyDictionary[Any, Span] = weakref.WeakKeyDictionary()
        self._functional: dict[int, Span] = {}
        self._fresh: Any = None
        self._thread = 0
        self._original: Callable[..., Any] | None = None

    def __enter__(self) -> Waits:
        original = self._original = dist.Work.wait
        watch = self

        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            span = watch._spans.get(work)
            if span is None:
                return original(work, *args, **kwargs)
            return watch.during(span, lambda: original(work, *args, **kwargs), work.is_completed())

        dist.Work.wait = wait  # type: ignore[assignment, method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        assert self._original is not None
        dist.Work.wait = self._original  # type: ignore[method-assign]
        self._fresh = None

    def follow(self, result: Any, span: Span, cuda: bool) -> None:
        """Connects the result of an operation with its span."""
        work = private.work_of(result)
        if work is not None:
            self._spans[work] = span
            # A caller in Python gets this very object once the operation has returned.  Until the next operation it
            # is kept here; after that only a caller that will wait keeps it, and nothing is held longer than without.
            self._fresh, self._thread = work, threading.get_ident()
        else:
            for leaf in result if isinstance(result, (list, tuple)) else (result,):
                if isinstance(leaf, torch.Tensor):
                    self._functional[private.storage_key(leaf)] = span
        if cuda:
            span.events += [_event()]

    def let_go(self) -> None:
        """The next operation of this thread has come: who has not taken the last work never will."""
        if self._fresh is not None and self._thread == threading.get_ident():
            self._fresh = None

    def functional(self, tensor: torch.Tensor) -> Span | None:
        """The span of the functional collective whose result this tensor is, once."""
        return self._functional.pop(private.storage_key(tensor), None)

    def during(self, span: Span, wait: Callable[[], Any], completed: bool) -> Any:
        """Runs a wait and adds its time to the span; work that was still under way is done when the wait returns."""
        if span.events:
            span.events += [_event()]
        begin = time.perf_counter()
        out = wait()
        now = time.perf_counter()
        if span.events:
            span.events += [_event()]
        if not completed and not span.waited:
            span.done_s = now
        span.waited, span.waited_s = True, span.waited_s + now - begin
        return out


def started(cuda: bool) -> Span:
    """A span that begins now."""
    span = Span(time.perf_counter())
    if cuda:
        span.events = [_event()]
    return span


def _event() -> Any:
    """A timed event on the current stream."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
