"""The command line.  Each verb lives in ``partita.commands`` and is imported only when it is asked for."""

from __future__ import annotations

from importlib import import_module

import click

from partita import __version__

VERBS = {
    "explain": "What a layout divides, holds and sends, and whether it fits: arithmetic alone.",
    "dryrun": "Run the real code on fake tensors, as any rank of any world.",
    "train": "Train a model on real ranks.",
    "record": "Run any torch.distributed program and write down what it sent.",
    "prove": "Run layouts on real ranks and hold plan, dry run and recording together.",
}


class Lazy(click.Group):
    """A group that imports a verb when it runs, so that the others cost nothing."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in VERBS:
            return None
        command: click.Command = import_module(f"partita.commands.{name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl(list(VERBS.items()))


@click.group(cls=Lazy, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="partita")
def main() -> None:
    """Plan, run and prove distributed training and serving of language models.

    A layout says how one model is divided over many devices. Every verb answers the same questions of it: what is
    divided, what must be communicated, what limits it, and does a real run agree?

    Exit codes: 0 yes, 1 the answer is no, 2 bad input, 3 something needed is not installed.
    """
