"""Recorder: every collective of a torch.distributed program, as ledger rows.

A recorder is a mode of the dispatcher, so it sees what DDP's C++ reducer, FSDP2, pipelining and the inside of DTensor
operations issue, without any of them knowing.  It names the mesh axes of a group by its ranks, counts the payload by
the definition of ``facts.ledger.Traffic``, and notes how long the caller stood still.  An operation that it does not
know is an error, never a gap.

    with record(mesh) as recorder:
        for i, batch in enumerate(batches):
            recorder.step(i)
            ...
    print(recorder.rows(step=2))

The mode holds for the thread that entered it and for autograd's backward on its behalf.  A fake-tensor mode has to be
entered before the recorder, so that the recorder sees an operation first.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from partita.facts.errors import BadInput
from partita.facts.ledger import Ledger, Traffic
from partita.facts.mesh import Mesh
from partita.observe import private, timing
from partita.observe.calls import Call, Tail, finished_steps, rows_of, split_steps
from partita.observe.phases import Phases

FRAMES = 200  # how far up the stack a collective's caller is looked for
HERE = os.path.dirname(os.path.abspath(__file__))
TORCH = os.path.dirname(os.path.abspath(torch.__file__))


class UnknownCollective(BadInput):
    """An operation that communicates and that the recorder has no rule for."""


@dataclass(frozen=True)
class _Group:
    ranks: tuple[int, ...]
    axis: tuple[str, ...]
    description: str


@dataclass(frozen=True)
class _Plan:
    """How one dispatcher operation is read: its verb, and the places of its payload and group among the arguments."""

    op: str
    verb: str
    payload: int
    grows: bool
    group: int
    peer: int
    blocks: int


@dataclass(frozen=True)
class _Place:
    """What the stack says about a collective."""

    kind: str = "data"
    reason: str = ""
    phase: str = ""
    caller: str = ""


@dataclass(eq=False)
class _Noted:
    """A call with what is known when it is issued; its times come later."""

    step: int
    phase: str
    verb: str
    dtype: str
    bytes: int
    peer: int | None
    op: str
    group: _Group
    place: _Place
    span: timing.Span


class Recorder(TorchDispatchMode):
    """Records the collectives of the thread that enters it.

    ``mesh`` names the axes; without one a group over the whole world is ``world`` and any other is named by its ranks.
    ``split`` says that steps are told from the program's optimizers (for a program that does not call ``step``).
    ``phases`` may be shared with a ``PeakTracker``.
    """

    def __init__(self, mesh: Mesh | None = None, split: bool = False, phases: Phases | None = None) -> None:
        super().__init__()
        self.phases = phases or Phases()
        self.mesh = mesh
        self.split = split
        self._tails: list[tuple[int, float, float]] = []  # (step, or the last call where steps are split later)
        self._noted: list[_Noted] = []
        self._ends: list[tuple[int, int]] = []
        self._groups: dict[str, _Group] = {}
        self._seen: dict[Any, bool] = {}
        self._plans: dict[Any, _Plan | None] = {}
        self._codes: dict[CodeType, tuple[str, str, str] | bool] = {}
        self._waits = timing.Waits()
        self._began_s = time.perf_counter()
        self._tail_of = private.NO_BACKWARD

    # Entering and leaving

    def __enter__(self) -> Recorder:
        if self.mesh is not None and dist.is_initialized() and self.mesh.world != dist.get_world_size():
            raise BadInput(
                f"the mesh has {self.mesh.world} ranks and the program has {dist.get_world_size()};"
                " a recorder needs the mesh of the program that runs"
            )
        self._groups.clear()
        self.phases.ended.append(self._optimizer_ended)
        self.phases.__enter__()
        self._waits.__enter__()
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._waits.__exit__()
        self.phases.__exit__()
        self.phases.ended.remove(self._optimizer_ended)

    # What the user says

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Everything inside belongs to this phase, whatever the recorder would say by itself."""
        return self.phases.mark(name)

    def step(self, index: int) -> None:
        """Everything from here on belongs to this step."""
        self.phases.step = index

    # What was recorded

    @property
    def tails(self) -> tuple[Tail, ...]:
        """The end of each backward that communicated."""
        at = split_steps(len(self._noted), self._ends) if self.split else range(sys.maxsize)
        return tuple(Tail(at[i], begin, end) for i, begin, end in self._tails)

    @property
    def calls(self) -> tuple[Call, ...]:
        """Every call in order.  Its times are complete once its ``Work`` has been waited for."""
        if self.split:
            steps = split_steps(len(self._noted), self._ends)
        else:
            steps = [n.step for n in self._noted]
        return tuple(self._call(n, step) for n, step in zip(self._noted, steps, strict=True))

    @property
    def steps(self) -> int:
        """How many steps ended with an optimizer."""
        return finished_steps(self._ends)

    def rows(self, step: int | None = None) -> tuple[Traffic, ...]:
        """Rows with counts: of one step (its ``init`` calls aside), or of everything."""
        if step is None:
            return rows_of(self.calls)
        return rows_of(c for c in self.calls if c.step == step and c.phase != "init")

    def ledger(self, step: int | None = None) -> Ledger:
        """The rows with their mesh: what a prediction is joined with."""
        return Ledger(self.mesh or Mesh((("world", dist.get_world_size()),)), (), self.rows(step), ())

    # The dispatcher

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and any(private.takes_over(t) for t in types):
            return NotImplemented  # it runs on local tensors, and those operations come back here
        self._waits.let_go()
        communicates = self._seen.get(func)
        if communicates is None:
            communicates = self._seen[func] = func.namespace in private.OPS
        if not communicates:
            return func(*args, **kwargs) if kwargs else func(*args)
        return self._collective(func, args, kwargs or {})

    def _collective(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = func._schema.name.split("::")[1]
        if name == "wait_tensor":
            return self._waited(func, args, kwargs)
        if name in private.SILENT:
            return func(*args, **kwargs)
        given = _given(func, args, kwargs)
        if name == private.BATCH:
            return self._batch(func, args, kwargs, given)
        plan = self._plan(func, name)
        group = self._group(given[plan.group])
        tensors = _tensors(given[plan.payload]) if plan.payload >= 0 else []
        size = private.bytes_of(tensors) * (len(group.ranks) if plan.grows else 1)
        peer = group.ranks[given[plan.peer]] if plan.peer >= 0 else None
        cuda = any(t.is_cuda for t in tensors)
        noted = self._note(plan.op, plan.verb, group, tensors, size, peer, cuda)
        noted.span.blocks = cuda and plan.blocks >= 0 and given[plan.blocks] is False
        out = func(*args, **kwargs)
        noted.span.returned_s = time.perf_counter()
        self._waits.follow(out, noted.span, cuda)
        return out

    def _batch(self, func: Any, args: Any, kwargs: dict[str, Any], given: list[Any]) -> Any:
        """Several messages in one operation."""
        verbs, peers, _, tensors, handle = given
        group = self._group(handle)
        for verb, peer, tensor in zip(verbs, peers, tensors, strict=True):
            verb = private.BATCH_VERBS[verb]
            self._note(private.BATCH, verb, group, [tensor], private.bytes_of([tensor]), group.ranks[peer], False)
        return func(*args, **kwargs)

    def _waited(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        span = self._waits.functional(args[0])
        if span is None:
            return func(*args, **kwargs)
        # Nothing tells whether the operation was done before the wait, so its end stays unknown.
        return self._waits.during(span, lambda: func(*args, **kwargs), completed=True)

    def _note(
        self, op: str, verb: str, group: _Group, tensors: list[torch.Tensor], size: int, peer: int | None, cuda: bool
    ) -> _Noted:
        place = self._place()
        if verb == "barrier":
            place = _Place("control", "barrier", place.phase, place.caller)
        elif group.description.startswith("control"):
            place = _Place("control", group.description, place.phase, place.caller)
        dtypes = dict.fromkeys(str(t.dtype).removeprefix("torch.") for t in tensors)
        phase = self.phases.marked or place.phase or self.phases.now()
        if phase == "backward":
            self._watch_tail()
        noted = _Noted(
            self.phases.step, phase, verb, "+".join(dtypes) or "-", size, peer, op, group, place, timing.started(cuda)
        )
        self._noted.append(noted)
        return noted

    def _plan(self, func: Any, name: str) -> _Plan:
        plan = self._plans.get(func)
        if plan is None:
            known = private.OPS[func.namespace]
            if name not in known:
                raise UnknownCollective(
                    f"the recorder does not know the operation {func._schema.name}; it knows of this kind:"
                    f" {', '.join(sorted(known)) or 'none'}"
                )
            verb, payload, grows = known[name]
            names = [a.name for a in func._schema.arguments]
            group = next(names.index(n) for n in ("process_group", "group_name") if n in names)
            peer = next((names.index(n) for n in ("dst", "src") if n in names and verb in ("send", "recv")), -1)
            blocks = names.index("async_op") if "async_op" in names else -1
            plan = _Plan(name, verb, names.index(payload) if payload else -1, grows, group, peer, blocks)
            self._plans[func] = plan
        return plan

    def _group(self, handle: Any) -> _Group:
        group = private.process_group(handle)
        known = self._groups.get(group.group_name)
        if known is None:
            ranks = tuple(dist.get_process_group_ranks(group))
            known = self._groups[group.group_name] = _Group(ranks, self._axis(ranks), group.group_desc)
        return known

    def _axis(self, ranks: tuple[int, ...]) -> tuple[str, ...]:
        if len(ranks) == 1:
            return ()
        if self.mesh is not None:
            return self.mesh.axes_of(ranks)
        if len(ranks) == dist.get_world_size():
            return ("world",)
        return ("{" + ",".join(map(str, sorted(ranks))) + "}",)

    # Steps, and the end of backward

    def _optimizer_ended(self, optimizer: Any) -> None:
        self._ends.append((len(self._noted), id(optimizer)))

    def _watch_tail(self) -> None:
        """On the first collective of a backward: note when its computation ends, and when it ends for good.

        DDP queues its wait when its last bucket is ready, so after the first of these callbacks; the second one is
        queued by the first and comes last.  (FSDP's waits are seen one by one, in ``timing.Waits``.)
        """
        task = private.backward_task()
        if task in (private.NO_BACKWARD, self._tail_of):
            return
        self._tail_of = task
        step = self.phases.step

        def computed() -> None:
            begin = time.perf_counter()

            def ended() -> None:
                now = len(self._noted) - 1 if self.split else step
                self._tails.append((now, begin - self._began_s, time.perf_counter() - self._began_s))

            private.after_backward(ended)

        private.after_backward(computed)

    # The stack

    def _place(self) -> _Place:
        """Kind, phase and caller of the collective that is being dispatched, from the functions it came through."""
        kind, reason, phase, caller = "", "", "", ""
        frame: FrameType | None = sys._getframe(3)
        for _ in range(FRAMES):
            if frame is None:
                break
            known = self._codes.get(frame.f_code)
            if known is None:
                known = self._codes[frame.f_code] = _meaning(frame.f_code)
            if isinstance(known, tuple):
                if not kind:
                    kind, reason = known[:2]
                phase = phase or known[2]
            elif known and not caller:
                caller = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} {frame.f_code.co_name}"
            frame = frame.f_back
        return _Place(kind or "data", reason, phase, caller)

    def _call(self, n: _Noted, step: int) -> Call:
        end = n.span.end_s()
        return Call(
            step=step,
            phase=n.phase,
            verb=n.verb,
            axis=n.group.axis,
            dtype=n.dtype,
            bytes=n.bytes,
            kind=n.place.kind,
            reason=n.place.reason,
            ranks=n.group.ranks,
            group=n.group.description,
            peer=n.peer,
            op=n.op,
            caller=n.place.caller,
            begin_s=n.span.begin_s - self._began_s,
            end_s=None if end is None else end - self._began_s,
            exposed_s=n.span.exposed_s(),
            clock="stream" if n.span.events else "host",
        )


def record(mesh: Mesh | None = None, split: bool = False, phases: Phases | None = None) -> Recorder:
    """A recorder to enter: ``with record(mesh) as recorder``."""
    return Recorder(mesh, split, phases)


def _given(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """The arguments of an operation by place, defaults filled in."""
    rest = func._schema.arguments[len(args) :]
    return [*args, *(kwargs.get(a.name, a.default_value) for a in rest)]


def _tensors(argument: Any) -> list[torch.Tensor]:
    out = [t for t in tree_leaves(argument) if isinstance(t, torch.Tensor)]
    for t in out:
        if t.is_sparse:
            raise UnknownCollective("the recorder counts dense tensors and this collective has a sparse one")
    return out


def _meaning(code: CodeType) -> tuple[str, str, str] | bool:
    """An entry of ``private.CALLERS``; else whether the function is the program's own (not torch's, not ours)."""
    path = code.co_filename.replace(os.sep, "/")
    for (file, function), meaning in private.CALLERS.items():
        if code.co_name == function and path.endswith(file):
            return meaning
    return not path.startswith((TORCH, HERE, "<")) and "/contextlib.py" not in path
