"""``partita record``: what any torch.distributed program sent, without touching it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from partita.commands.common import BAD, NO, YES, console, emit_json, fail, guarded, short, size, table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.table import Table

    from partita.facts.ledger import Traffic
    from partita.observe.recording import Recording

NARROW = 90  # columns


@click.command("record", context_settings={"ignore_unknown_options": True})
@click.argument("program", nargs=-1, type=click.UNPROCESSED, required=True)
@click.option("--out", type=click.Path(path_type=Path), default=Path("recording"), show_default=True,
              help="Folder of recording.json.")  # fmt: skip
@click.option("--json", "as_data", is_flag=True, help="Print the recording, all calls included, as JSON; what PROGRAM "
              "prints goes to stderr.")  # fmt: skip
@click.option("--debug", is_flag=True, help="Show tracebacks.")
@guarded
def command(program: tuple[str, ...], out: Path, as_data: bool, debug: bool) -> None:
    """Run PROGRAM and write down every collective of every rank.

    partita record -- torchrun --standalone --nproc-per-node 2 train.py

    Shown is a steady step, the third. A step ends with the program's optimizers; what runs after them counts to the
    next. The program's exit code is passed on; where it is 0 and ranks disagree, the exit code is 1.
    """
    from partita.observe.runner import MERGED, NothingRecorded, run_recorded

    try:
        recording = run_recorded(list(program), out, sys.stderr if as_data else None)
    except NothingRecorded as error:
        fail(str(error), _shell(error.exit_code) or BAD)
    if as_data:
        emit_json(recording.json())
    else:
        draw(recording)
        click.echo(f"written: {out / MERGED}")
    for sentence in recording.disagreements:
        click.echo(f"partita: {sentence}", err=True)
    sys.exit(_shell(recording.exit_code) or (NO if recording.disagreements else YES))


def _shell(code: int) -> int:
    """An exit code as a shell says it: a signal is 128 and its number."""
    return 128 - code if code < 0 else code


def draw(recording: Recording) -> None:
    """The steady step as a table, then what has to be known to read it."""
    screen = console()
    narrow = screen.width < NARROW
    ranks = f"{recording.world} ranks, {recording.steps} steps, torch {recording.ranks[0].torch}"
    screen.print(
        f"{' '.join(recording.command)}: {ranks}, {recording.ranks[0].backend}\n", markup=False, soft_wrap=True
    )
    if recording.init:
        screen.print(_table("Init", recording.init, recording, narrow))
    if recording.steady:
        screen.print(
            _table(
                "A steady step (exposed, hidden: ms, mean of a call's known times)", recording.steady, recording, narrow
            )
        )
    else:
        screen.print(f"no steady step: the program ended {recording.steps} steps with an optimizer, 3 are needed")
    if recording.tail_s is not None:
        screen.print(f"end of backward, waiting for what was still under way: {_ms(recording.tail_s)} ms a step")
    for sentence in recording.varying:
        screen.print(f"varies: {sentence}", markup=False, soft_wrap=True)


def _table(title: str, rows: Iterable[Traffic], recording: Recording, narrow: bool) -> Table:
    """One row a line; ``ranks`` only where not all did the same, hidden time only where there is room."""
    cells: list[tuple[str, ...]] = []
    for r in rows:
        times = recording.times.get((*r.key, r.kind))
        sends = "control" if r.kind == "control" else size(r.link_bytes(recording.mesh))
        where = "x".join(r.axis) or "itself"
        exposed, hidden = (_ms(times.exposed_s), _ms(times.hidden_s)) if times else ("-", "-")
        numbers = (f"{r.count:,}", size(r.bytes), sends, exposed, hidden)
        cells.append((r.phase, r.verb, where, short(r.dtype), *numbers, str(r.ranks)))
    columns = ["phase", "verb", "axis", "dtype", "calls", "payload", "sends", "exposed", "hidden", "ranks"]
    if all(row[-1] == "all" for row in cells):
        columns, cells = columns[:-1], [row[:-1] for row in cells]
    if narrow:
        columns, cells = [*columns[:8], *columns[9:]], [(*row[:8], *row[9:]) for row in cells]
    return table(title, columns, cells, right=range(4, 8 if narrow else 9), whole=(0, 1, 2, 3))


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.2f}"
