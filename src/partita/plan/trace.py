"""Trace: a step's streams in the Chrome trace event format, which Perfetto and chrome://tracing open.

One process for each witness; in it a thread for computation, one for each level of links, and one that marks when each
bucket was ready.  Times are in microseconds.  The format: Google, "Trace Event Format" (complete events ``X``, instant
events ``i``, metadata ``M``).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from partita.plan.play import Played
from partita.plan.timeline import Timeline

Event = dict[str, Any]
COMPUTE, READY = "computation", "gradients ready"


class _Process:
    """Events of one process; threads are numbered as they are met."""

    def __init__(self, pid: int, name: str) -> None:
        self.pid, self.threads = pid, dict[str, int]()
        self.events: list[Event] = [{"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}]

    def thread(self, name: str) -> int:
        if name not in self.threads:
            tid = self.threads[name] = len(self.threads) + 1
            args = {"name": name}
            self.events.append({"ph": "M", "name": "thread_name", "pid": self.pid, "tid": tid, "args": args})
            order = {"sort_index": tid}
            self.events.append({"ph": "M", "name": "thread_sort_index", "pid": self.pid, "tid": tid, "args": order})
        return self.threads[name]

    def span(self, thread: str, name: str, category: str, begin_s: float, end_s: float, **args: Any) -> None:
        """A complete event from ``begin_s`` to ``end_s``."""
        where = {"pid": self.pid, "tid": self.thread(thread), "ts": _us(begin_s), "dur": _us(max(0.0, end_s - begin_s))}
        self.events.append({"ph": "X", "name": name, "cat": category, **where, "args": args})

    def instant(self, thread: str, name: str, category: str, at_s: float, **args: Any) -> None:
        """A mark on a thread."""
        where = {"pid": self.pid, "tid": self.thread(thread), "ts": _us(at_s), "s": "t"}
        self.events.append({"ph": "i", "name": name, "cat": category, **where, "args": args})


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def of_step(played: Played) -> dict[str, Any]:
    """The trace of a predicted step: every unit and every call.  Equal micro-batches are drawn once."""
    out = _Process(1, "predicted step of rank 0 (arithmetic)")
    out.thread(COMPUTE)
    for work in played.streams.works:
        out.span(COMPUTE, work.name, "compute", work.begin_s, work.end_s, times=work.times)
    for call in played.streams.calls:
        row = played.rows[call.row]
        args = {
            "bytes": row.bytes,
            "axis": " x ".join(row.axis),
            "phase": row.phase,
            "exposed_us": _us(call.exposed_s),
            "times": call.times,
            "why": row.why,
        }
        lane = f"links: {call.lane}"
        out.span(lane, call.name, "communication", call.begin_s, call.done_s, **args)
    for b in played.buckets:
        size = b.bucketing.payloads[b.index]
        out.instant(READY, f"bucket {b.index} ready", "buckets", b.ready_s, bytes=size)
    return _trace(out.events, "arithmetic")


def of_timelines(timelines: Iterable[Timeline]) -> dict[str, Any]:
    """The trace of buckets against backward, one process for each timeline: predicted and recorded side by side."""
    events: list[Event] = []
    witnesses = []
    for pid, t in enumerate(timelines, 1):
        out = _Process(pid, f"{t.owner or 'buckets'} ({t.witness})")
        out.span(COMPUTE, "backward", "compute", 0.0, t.backward_s)
        for u in t.units:
            out.span("units", u.name, "compute", u.begin_s, u.end_s)
        for b in t.buckets:
            name = f"{t.verb} bucket {b.index}".strip()
            waited = {"ready_us": _us(b.ready_s), "launch_us": _us(b.launch_s)}
            out.span("links", name, "communication", b.start_s, b.done_s, bytes=b.bytes, **waited)
            out.instant(READY, f"bucket {b.index} ready", "buckets", b.ready_s, bytes=b.bytes)
        if t.tail_s:
            out.span(COMPUTE, "exposed tail", "wait", t.backward_s, t.backward_s + t.tail_s)
        events += out.events
        witnesses.append(t.witness)
    return _trace(events, ", ".join(dict.fromkeys(witnesses)))


def _trace(events: list[Event], witness: str) -> dict[str, Any]:
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"witness": witness}}


def write(trace: dict[str, Any], path: Path) -> None:
    """Write a trace as JSON: under another name first, so that no half of it is ever found."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_text(json.dumps(trace), encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
