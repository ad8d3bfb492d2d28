"""What all verbs share: errors as exit codes, the options that name a piece of work, and how output is drawn."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from partita.facts.errors import BadInput, NotInstalled, RunFailed
from partita.facts.work import Training

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

F = TypeVar("F", bound=Callable[..., Any])
YES, NO, BAD, MISSING, INTERRUPTED = 0, 1, 2, 3, 130
WIDTH = 100


def fail(sentence: str, code: int) -> NoReturn:
    """Say one sentence on stderr and leave."""
    click.echo(f"partita: {sentence}", err=True)
    sys.exit(code)


def guarded(function: F) -> F:
    """Turn the errors that a user meets into one sentence and an exit code; ``--debug`` shows the traceback instead."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (BadInput, NotInstalled, RunFailed, ImportError, OSError) as error:
            if kwargs.get("debug"):
                click.echo(getattr(error, "traceback", ""), err=True)
                raise
            fail(*_sentence(error))
        except KeyboardInterrupt:
            fail("stopped", INTERRUPTED)

    return run  # type: ignore[return-value]


def _sentence(error: Exception) -> tuple[str, int]:
    if isinstance(error, NotInstalled):
        return str(error), MISSING
    if isinstance(error, RunFailed):
        return str(error) + ("; --debug shows where" if error.traceback else ""), NO
    if isinstance(error, ImportError):
        name = (error.name or str(error)).partition(".")[0]
        if name == "partita":
            raise error
        return f"{name} is not installed; install it with: pip install 'partita[run]'", MISSING
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}", BAD
    if isinstance(error, OSError):
        raise error
    return str(error), BAD


def emit_json(data: Any) -> None:
    """One JSON document on stdout."""
    click.echo(json.dumps(data, indent=1, ensure_ascii=False))


def console(error: bool = False) -> Console:
    """A console that is as wide as the terminal, or 100 columns where there is none; ``NO_COLOR`` is obeyed."""
    from rich.console import Console

    stream = sys.stderr if error else sys.stdout
    width = None if stream.isatty() else int(os.environ.get("COLUMNS", WIDTH))
    return Console(stderr=error, width=width, highlight=False)


def table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    right: Iterable[int] = (),
    whole: Iterable[int] = (),
) -> Table:
    """A plain table; ``right`` are the columns of numbers, and these and ``whole`` never break a line."""
    from rich import box
    from rich.table import Table

    out = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, title_style="bold", pad_edge=False, padding=(0, 1, 0, 0)
    )
    numbers, unbroken = set(right), {*right, *whole}
    for i, name in enumerate(columns):
        out.add_column(name, justify="right" if i in numbers else "left", no_wrap=i in unbroken, overflow="fold")
    for row in rows:
        out.add_row(*row)
    return out


def size(n: float) -> str:
    """Bytes for people: GB is 10^9."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(n) >= factor:
            return f"{n / factor:.4g} {unit}"
    return f"{n:.0f} B"


SHORT = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def short(dtype: str) -> str:
    """The usual short name of a dtype."""
    return SHORT.get(dtype, dtype)


def work_options(default_sequence: int | None) -> Callable[[F], F]:
    """The options that name a piece of training work; None where the user said nothing."""
    options = [
        click.option("--global-batch", type=int, help="Sequences a step, over all ranks. Default: dp x mb."),
        click.option(
            "--sequence", "--seq", type=int, help=f"Tokens a sequence. Default: {default_sequence or 'the verb says'}."
        ),
        click.option("--precision", help="fp32, autocast-bf16, bf16-master, pure-bf16, fp64 (for proofs)."),
        click.option("--optimizer", type=click.Choice(["adamw", "sgd"]), default="adamw", show_default=True),
        click.option(
            "--clip", type=float, default=1.0, show_default=True, help="Largest global gradient norm; 0: off."
        ),
        click.option(
            "--freeze", multiple=True, metavar="PATTERN", help="Parameters without gradients: 'embed.*', 'blocks.0.*'."
        ),
    ]

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


WORK = ("global_batch", "sequence", "precision", "optimizer", "clip", "freeze")
"""The names of ``work_options``, as a command gets them."""


def training(
    assumed: dict[str, str],
    *,
    global_batch: int | None,
    sequence: int | None,
    precision: str | None,
    optimizer: str,
    clip: float,
    freeze: tuple[str, ...] = (),
    defaults: dict[str, Any],
    packed: bool = False,
) -> Training:
    """The work that the options name; what was not said comes from ``defaults`` and is noted in ``assumed``."""
    from partita.facts.precision import precision as preset

    said = {"global_batch": global_batch, "sequence": sequence, "precision": precision}
    for key, value in said.items():
        if value is None:
            said[key] = defaults[key]
            assumed[key.replace("_", "-")] = str(defaults[key])
    return Training(
        global_batch=int(said["global_batch"]),  # type: ignore[arg-type]
        sequence=int(said["sequence"]),  # type: ignore[arg-type]
        precision=preset(str(said["precision"])),
        optimizer=optimizer,
        clip=clip or None,
        packed=packed,
        frozen=freeze,
    )
