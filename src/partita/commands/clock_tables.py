"""How ``explain`` draws a step's time and the timeline of its buckets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from partita.commands.common import size, table
from partita.plan.clock import StepTime, TimeLine
from partita.plan.explain import Timing
from partita.plan.timeline import Bucket, Choice, Timeline

if TYPE_CHECKING:
    from rich.table import Table

SHOWN = 4  # buckets at each end of a long list


def draw(timing: Timing) -> Iterator[str | Table]:
    """Tables and sentences, in order."""
    if timing.time is None:
        yield f"[bold]time[/bold] {timing.unknown}\n"
    else:
        yield _times(timing.time)
        yield _total(timing.time)
    for t in timing.timelines:
        yield _buckets(t)
        yield _tail(t)
    if timing.choices:
        yield _choices(timing.choices)


def seconds(s: float) -> str:
    """Seconds for people."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if abs(s) >= factor:
            return f"{s / factor:.4g} {unit}"
    return f"{s * 1e6:.3g} us" if s else "0"


def _times(time: StepTime) -> Table:
    cells, before = [], ""
    for line in sorted(time.lines, key=lambda x: ("forward", "backward", "step").index(x.phase)):
        phase = line.phase if line.phase != before else ""
        cells.append((phase, line.name, *_parts(line), line.link or "-"))
        before = line.phase
    columns = ("phase", "what", "time", "hidden", "adds", "link")
    title = "Time of a step (hidden: behind computation; adds: what the step grows by; witness: arithmetic)"
    return table(title, columns, cells, right=(2, 3, 4), whole=(0, 5))


def _parts(line: TimeLine) -> tuple[str, str, str]:
    hidden = seconds(line.hidden_s) if line.kind == "communication" else ""
    return seconds(line.seconds), hidden, seconds(line.exposed_s)


def _total(time: StepTime) -> str:
    basis = "\n".join(f"  {name}: {says}" for name, says in time.basis)
    return (
        f"[bold]step {seconds(time.total_s)}[/bold]: computation {seconds(time.compute_s)}, exposed communication"
        f" {seconds(time.exposed_s)} (hidden {seconds(time.hidden_s)}); {time.tokens_per_s:,.0f} tokens/s, MFU"
        f" {time.mfu:.1%} ({time.convention} attention, peak of {time.dtype})\n"
        f"Not counted, so the step is rather longer: {'; '.join(time.left_out)}.\nRates\n{basis}\n"
    )


def _buckets(t: Timeline) -> Table:
    def cells(b: Bucket) -> tuple[str, ...]:
        times = (b.ready_s, b.launch_s, b.start_s, b.done_s)
        return (str(b.index), size(b.bytes), *(seconds(s) for s in times), "" if b.done_s <= t.backward_s else "tail")

    rows = [cells(b) for b in t.buckets]
    if len(rows) > 2 * SHOWN:
        rows = [*rows[:SHOWN], ("...",) + 6 * ("",), *rows[-SHOWN:]]
    title = f"Buckets of {t.owner} ({t.verb} {' x '.join(t.axis)}), after backward began (witness: {t.witness})"
    return table(title, ("bucket", "size", "ready", "launched", "on the link", "done", ""), rows, right=range(6))


def _tail(t: Timeline) -> str:
    return (
        f"{len(t.buckets)} buckets against a backward of {seconds(t.backward_s)}: {seconds(t.busy_s)} on the links,"
        f" {seconds(t.hidden_s)} hidden, exposed tail {seconds(t.tail_s)}\n"
    )


def _choices(choices: tuple[Choice, ...]) -> Table:
    def cells(c: Choice) -> tuple[str, ...]:
        times = (seconds(s) if s is not None else "-" for s in (c.busy_s, c.hidden_s, c.tail_s))
        return (f"{c.bucket_mb:g}", str(c.buckets), *(size(n) for n in _sizes(c)), *times)

    columns = ("bucket_mb", "buckets", "first", "largest", "last", "on the links", "hidden", "exposed tail")
    title = "What another bucket_mb would do (witness: arithmetic)"
    return table(title, columns, (cells(c) for c in choices), right=range(8))


def _sizes(c: Choice) -> tuple[int, int, int]:
    return c.first_bytes, c.largest_bytes, c.last_bytes
