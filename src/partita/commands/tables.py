"""Tables that ``prove`` and ``dryrun`` share: traffic, persistent bytes and peaks, by witness."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from partita.commands.common import console, short, size, table
from partita.facts.case import Case
from partita.facts.ledger import Gradient
from partita.prove.reconcile import Counts, MemoryLine, PeakLine, TrafficLine

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

MARK = {True: "", False: "[bold red]<[/bold red]"}
WITNESSES = ("plan", "dry", "run")


def busy(quiet: bool) -> Callable[[str], AbstractContextManager[Any]]:
    """Shows on stderr what runs and for how long, where a person looks at it."""
    out = console(error=True)

    @contextmanager
    def show(text: str) -> Iterator[None]:
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=out, transient=True) as progress:
            progress.add_task(text, total=None)
            yield

    return show if out.is_terminal and not quiet else lambda text: nullcontext()


def cells(counts: Counts, show: Callable[[int], str]) -> list[str]:
    """A cell for each witness; one that was not asked says so."""
    return ["-" if v is None else show(v) for v in (counts.predicted, counts.dry, counts.recorded)]


def ranks_text(ranks: tuple[int, ...], world: int) -> str:
    """``all``, or the ranks of a line."""
    if len(ranks) == world:
        return "all"
    return ",".join(map(str, ranks[:4])) + ("..." if len(ranks) > 4 else "")


def traffic(lines: Iterable[TrafficLine], world: int) -> Table:
    """One line a verb, axis and payload."""
    rows, before = [], ""
    for t in lines:
        shown = next(v for v in (t.counts.recorded, t.counts.dry, t.counts.predicted) if v is not None)
        sends = t.link_bytes(shown) or 0
        kind = " (control)" if t.kind == "control" else ""
        rows.append(
            (
                t.phase if t.phase != before else "",
                f"{t.verb} {' x '.join(t.axis)}{kind}",
                short(t.dtype),
                size(t.bytes),
                *cells(t.counts, lambda n: f"{n:,}"),
                size(sends),
                ranks_text(t.ranks, world),
                ", ".join(t.owners) or "-",
                MARK[t.agrees],
            )
        )
        before = t.phase
    columns = ("phase", "collective", "dtype", "payload", *WITNESSES, "sends", "ranks", "room", "")
    title = "Traffic: calls a step, by witness (sends: link bytes of one rank)"
    return table(title, columns, rows, right=(3, 4, 5, 6, 7), whole=(0, 2, 8, 9))


def memory(lines: Iterable[MemoryLine], world: int) -> Table:
    """Persistent bytes in full: they must be equal to the byte."""
    rows = (
        (m.object, short(m.dtype), *cells(m.counts, lambda n: f"{n:,}"), ranks_text(m.ranks, world), MARK[m.agrees])
        for m in lines
    )
    columns = ("object", "dtype", *WITNESSES, "ranks", "")
    return table("Persistent bytes of one rank, by witness", columns, rows, right=(2, 3, 4), whole=(0, 1, 5))


def peaks(lines: Iterable[PeakLine]) -> Table:
    rows = (
        (
            p.phase,
            *cells(p.counts, size),
            "-" if p.off is None else f"{p.off:+.1%}",
            "" if p.within else "over 10 %",
            p.moment,
        )
        for p in lines
    )
    columns = ("phase", *WITNESSES, "plan is off", "", "at (plan)")
    return table("Peak of each phase on the fullest rank", columns, rows, right=(1, 2, 3, 4), whole=(0,))


def divided(case: Case, gradients: Iterable[Gradient], out: Console) -> None:
    """What is divided, in words."""
    share: dict[tuple[int, ...], int] = {}
    for h in case.held:
        degrees = tuple(case.mesh.size(*s.axis) for s in h.splits)
        share[degrees] = share.get(degrees, 0) + h.count * h.parameter.elements
    batch = f"{case.micro_batches} micro-batch{'es' * (case.micro_batches > 1)} of {case.layout.mb} a rank and step"
    data = case.mesh.size("dp")
    out.print(f"Divided: the global batch of {case.work.global_batch} sequences over {data} data ranks ({batch});")
    for degrees, elements in share.items():
        ways = " x ".join(map(str, degrees))
        how = f"in shards over {ways} ranks" if degrees else "whole on every rank"
        flat = case.flat.objects if case.flat and not degrees else ()
        apart = [o for o in ("gradients", "master", "optimizer state") if o in flat]
        whole = [o for o in ("gradients", "optimizer state") if o not in flat]
        out.print(f"  {elements:,} parameters{', with ' * bool(whole)}{' and '.join(whole)}, {how};")
        if apart and case.flat:
            out.print(f"  {', '.join(apart)}: flat, in equal chunks over {case.flat.ranks} ranks;")
    said = {(g.relation, " x ".join(g.axis), g.reduction, g.divisor) for g in gradients}
    for relation, axis, reduction, divisor in sorted(said):
        out.print(f"  gradients are {relation} sums over {axis}: {reduction}; divided by {divisor}.")
