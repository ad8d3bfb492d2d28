"""Peaks of memory, by phase, with what was alive at the peak.

A tracker is a mode of the dispatcher: every storage that comes out of an operation, be it a view, is counted from then
until it is freed (a weak reference to the storage says when).  It works on CPUs, where torch counts nothing, and on
fake tensors.  What it cannot see: memory that an operation allocates and frees inside, allocators' rounding and
fragmentation, and tensors that never came out of an operation (``hold`` registers those).  On CUDA the allocator's own
peaks stand beside; that half has never run where this project is built.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from partita.facts.ledger import Memory
from partita.facts.mesh import EVERY, Ranks
from partita.observe import private
from partita.observe.memory import local
from partita.observe.phases import Phases

REST = "activations and temporaries"
GATHERED = "gathered parameters"
PRUNE = 100_000  # ended lives that are kept before those that matter to no peak are dropped


@dataclass(frozen=True)
class Peak:
    """The most bytes that were alive in one phase of one step, when, and what they were.

    ``op`` is the operation after which the peak stood, ``seconds`` the time since the tracker was entered.
    ``allocated`` and ``reserved`` are the CUDA allocator's own peaks, None elsewhere.
    """

    step: int
    phase: str
    bytes: int
    op: str
    seconds: float
    by: dict[str, int]
    allocated: int | None = None
    reserved: int | None = None


@dataclass(eq=False, slots=True)
class _Held:
    """One storage that is alive."""

    size: int
    category: str
    life: _Life | None = None
    ref: Any = None


@dataclass(eq=False, slots=True)
class _Life:
    """A span of operations over which a storage had one size; ``died`` is 0 while it lasts."""

    size: int
    born: int
    held: _Held
    died: int = 0


@dataclass(eq=False)
class _Top:
    """The peak of a phase so far."""

    bytes: int = -1
    moment: int = 0
    op: Any = ""
    seconds: float = 0.0
    allocated: int | None = None
    reserved: int | None = None


class PeakTracker(TorchDispatchMode):
    """Counts the bytes that are alive on one type of device, for the thread that enters it.

    ``phases`` may be shared with a ``Recorder``; ``step(i)`` marks steps.  Parameters, gradients and optimizer state
    are known from the optimizer when it steps; ``hold`` names anything else, and what existed before.
    """

    def __init__(self, device: str = "cpu", phases: Phases | None = None) -> None:
        super().__init__()
        self.device = device
        self.phases = phases or Phases()
        self.current = 0
        self._held: dict[int, _Held] = {}
        self._lives: list[_Life] = []
        self._limit = PRUNE
        self._moment = 0
        self._tops: dict[tuple[int, str], _Top] = {}
        self._where: tuple[int, str] = (-1, "")
        self._shows: dict[Any, bool] = {}
        self._began_s = time.perf_counter()
        self._resize: Callable[..., Any] | None = None

    def __enter__(self) -> PeakTracker:
        self.phases.changed.append(self._look)
        self.phases.began.append(self._optimizer_begins)
        self.phases.ended.append(self._optimizer_ended)
        self.phases.__enter__()
        # FSDP frees and refills its gathered parameters through the storage, which no operation shows.
        original = self._resize = torch.UntypedStorage.resize_
        tracker = self

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            out = original(storage, size)
            tracker._resized(storage, sys._getframe(1))
            return out

        torch.UntypedStorage.resize_ = resize_  # type: ignore[assignment, method-assign]
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        assert self._resize is not None
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        self.phases.__exit__()
        self.phases.changed.remove(self._look)
        self.phases.began.remove(self._optimizer_begins)
        self.phases.ended.remove(self._optimizer_ended)
        self._close_allocator()

    def step(self, index: int) -> None:
        """Everything from here on belongs to this step."""
        self.phases.step = index

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Everything inside belongs to this phase, whatever the tracker would say by itself."""
        return self.phases.mark(name)

    def hold(self, category: str, tensors: Iterable[torch.Tensor]) -> None:
        """Names tensors.  Those not seen so far count as if they had been there all along in this step."""
        for tensor in tensors:
            part = local(tensor)
            if part.device.type != self.device:
                continue
            held = self._held.get(private.storage_key(part))
            if held is None:
                held = self._register(part.untyped_storage(), 0)
                for (step, _), top in self._tops.items():
                    if step == self.phases.step:
                        top.bytes += held.size
            held.category = category

    def peaks(self, step: int | None = None) -> tuple[Peak, ...]:
        """The peak of every phase of one step, or of all steps."""
        return tuple(
            Peak(s, phase, top.bytes, str(top.op), top.seconds, self._alive(top.moment), top.allocated, top.reserved)
            for (s, phase), top in self._tops.items()
            if step is None or s == step
        )

    def rows(self, step: int, ranks: Ranks = EVERY) -> tuple[Memory, ...]:
        """What was alive at each phase's peak, as ledger rows."""
        return tuple(
            Memory("-", name, peak.phase, "device", ranks, "-", size, f"alive at the peak, after {peak.op}")
            for peak in self.peaks(step)
            for name, size in peak.by.items()
            if size
        )

    # The dispatcher

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and any(private.takes_over(t) for t in types):
            return NotImplemented  # it runs on local tensors, and those operations come back here
        out = func(*args, **kwargs) if kwargs else func(*args)
        self._moment += 1
        shows = self._shows.get(func)
        if shows is None:
            shows = self._shows[func] = private.may_show(func)
        if shows:
            before = self.current
            for tensor in (out,) if isinstance(out, torch.Tensor) else _tensors(args if out is None else out):
                self._see(tensor)
            if self.current > before:
                self._top(func)
        return out

    def _see(self, tensor: torch.Tensor) -> None:
        if tensor.layout is not torch.strided or tensor.device.type != self.device:
            return
        storage = tensor.untyped_storage()
        held = self._held.get(storage._cdata)
        if held is None:
            self._register(storage, self._moment)
        elif held.size != storage.nbytes():
            self._change(held, storage.nbytes())

    def _register(self, storage: torch.UntypedStorage, born: int) -> _Held:
        key, size = storage._cdata, storage.nbytes()
        held = self._held[key] = _Held(size, REST)
        held.life = _Life(size, born, held)
        held.ref = weakref.ref(storage, lambda _: self._freed(key, held))
        self._lives.append(held.life)
        self.current += size
        if len(self._lives) > self._limit:
            self._prune()
        return held

    def _freed(self, key: int, held: _Held) -> None:
        assert held.life is not None
        held.life.died = self._moment + 1  # it stood just after the operation ``_moment``
        self.current -= held.size
        if self._held.get(key) is held:
            del self._held[key]

    def _change(self, held: _Held, size: int) -> None:
        """A storage grew or shrank: one life ends and another begins."""
        assert held.life is not None
        held.life.died = self._moment
        self.current += size - held.size
        held.size, held.life = size, _Life(size, self._moment, held)
        self._lives.append(held.life)

    def _resized(self, storage: torch.UntypedStorage, caller: Any) -> None:
        held = self._held.get(storage._cdata)
        if held is None:
            if storage.device.type != self.device:
                return
            held = self._register(storage, self._moment)
        if private.is_gather(caller.f_code):
            held.category = GATHERED
        before = self.current
        self._moment += 1
        if held.size != storage.nbytes():
            self._change(held, storage.nbytes())
        if self.current > before:
            self._top("resize of a storage")

    # Peaks

    def _look(self) -> None:
        """A phase begins with the first operation that adds to memory, with an optimizer, or where it is marked."""
        where = (self.phases.step, self.phases.now())
        if where != self._where:
            self._enter_phase(where)

    def _enter_phase(self, where: tuple[int, str]) -> None:
        self._close_allocator()
        self._moment += 1  # what was freed since the last operation is no part of this phase
        self._where = where
        top = self._tops.setdefault(where, _Top())
        if self.current > top.bytes:
            self._raise(top, "what was there before")
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def _close_allocator(self) -> None:
        """On CUDA: the allocator's peaks of the phase that ends."""
        top = self._tops.get(self._where)
        if self.device == "cuda" and top is not None:
            top.allocated = max(top.allocated or 0, torch.cuda.max_memory_allocated())
            top.reserved = max(top.reserved or 0, torch.cuda.max_memory_reserved())

    def _top(self, func: Any) -> None:
        self._look()
        top = self._tops[self._where]
        if self.current > top.bytes:
            self._raise(top, func)

    def _raise(self, top: _Top, func: Any) -> None:
        top.bytes, top.moment, top.op, top.seconds = self.current, self._moment, func, self._now_s()

    def _now_s(self) -> float:
        return time.perf_counter() - self._began_s

    def _alive(self, moment: int) -> dict[str, int]:
        """Bytes by category of what was alive just after the operation ``moment``."""
        out: dict[str, int] = defaultdict(int)
        for life in self._lives:
            if life.born <= moment and (not life.died or life.died > moment):
                out[life.held.category] += life.size
        return dict(out)

    def _prune(self) -> None:
        """Drops lives that were over before, or began after, the moment of every peak."""
        moments = sorted({top.moment for top in self._tops.values()})
        self._lives = [x for x in self._lives if not x.died or any(x.born <= m < x.died for m in moments)]
        self._limit = 2 * len(self._lives) + PRUNE

    # What the optimizer tells

    def _optimizer_begins(self, optimizer: Any) -> None:
        self._look()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.hold("parameters", parameters)
        self.hold("gradients", [p.grad for p in parameters if p.grad is not None])

    def _optimizer_ended(self, optimizer: Any) -> None:
        values = [v for state in optimizer.state.values() for v in state.values()]
        self.hold("optimizer state", [v for v in values if isinstance(v, torch.Tensor)])


def _tensors(out: Any) -> Iterator[torch.Tensor]:
    if isinstance(out, torch.Tensor):
        yield out
    elif isinstance(out, (tuple, list)):
        for part in out:
            yield from _tensors(part)
