"""``partita dryrun``: the real code on fake tensors, as any rank of any world, beside the arithmetic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from partita.commands.common import NO, WORK, YES, console, emit_json, guarded, training, work_options
from partita.facts.find import find_model
from partita.facts.layout import Layout

if TYPE_CHECKING:
    from partita.plan.account import Account
    from partita.prove.reconcile import Table
    from partita.prove.witness import Witness


@click.command("dryrun")
@click.argument("model")
@click.option("--layout", default="full_shard", show_default=True, help="Words such as 'dp=64 full_shard mb=1'.")
@click.option("--world", "--ranks", "world", type=int, help="Ranks of the world. Default: the layout's degrees.")
@click.option(
    "--rank",
    "ranks",
    type=int,
    multiple=True,
    help="Be this rank (repeatable). Default: 0, and the last where it differs.",
)
@work_options(2048)
@click.option("--steps", type=int, default=3, show_default=True, help="Steps; the last one is taken as the steady one.")
@click.option("--json", "as_data", is_flag=True, help="Print one JSON document.")
@click.option("--download", is_flag=True, help="Fetch config.json from the hub if it is nowhere here.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@guarded
def command(model: str, as_data: bool, download: bool, debug: bool, **said: Any) -> None:
    """Run MODEL's training step under LAYOUT with tensors that have no data, and hold it against the arithmetic.

    Exits with 0 where both agree on every collective and every persistent byte, and with 1 where they do not.
    """
    from partita.commands.tables import busy
    from partita.plan.account import account
    from partita.prove.dryrun import dry_ranks, dry_runs
    from partita.prove.reconcile import reconcile
    from partita.prove.report import dry_json

    assumed: dict[str, str] = {}
    found = find_model(model, download=download).model
    layout = Layout.parse(said["layout"], said["world"])
    defaults = {"global_batch": layout.dp * layout.mb, "sequence": 2048, "precision": "bf16-master"}
    work = training(assumed, **{name: said[name] for name in WORK}, defaults=defaults)
    accounted = account(found, layout, work)
    wanted = list(said["ranks"]) or dry_ranks(accounted)
    with busy(False)(f"{layout} as rank {', '.join(map(str, wanted))}"):
        seen = list(dry_runs(found, layout, work, wanted, layout.world, said["steps"]))
    table = reconcile(accounted.case, accounted.ledger, seen, [])
    if as_data:
        emit_json(dry_json(accounted.case, table, seen, assumed))
    else:
        draw(accounted, table, seen, assumed)
    raise SystemExit(NO if table.clashes else YES)


def draw(accounted: Account, table: Table, seen: list[Witness], assumed: dict[str, str]) -> None:
    """Both witnesses at 100 columns."""
    from partita.commands import tables

    out, case = console(), accounted.case
    work, model = case.work, case.model
    out.print(f"[bold]{model.name}[/bold]: {model.parameter_count:,} parameters")
    out.print(
        f"[bold]layout[/bold] {case.layout}; [bold]work[/bold] global batch {work.global_batch} x {work.sequence}"
        f" tokens, {work.precision.name}, {work.optimizer}"
    )
    if assumed:
        out.print("[bold]assumed[/bold] " + ", ".join(f"{k} {v}" for k, v in assumed.items()))
    out.print(f"As rank {', '.join(str(w.rank) for w in seen)} of {case.mesh.world}. GB is 10^9 bytes.\n")
    tables.divided(case, accounted.ledger.gradients, out)
    out.print()
    out.print(tables.traffic(table.traffic, len(seen)))
    out.print(tables.memory(table.memory, len(seen)))
    out.print(tables.peaks(table.peaks))
    stands = dict.fromkeys(n for w in seen for n in w.stand_ins)
    if stands:
        out.print(f"Stand-in: {', '.join(stands)} (its C++ cannot read fake tensors).")
    if table.clashes:
        out.print(f"[bold red]disagrees[/bold red]: {len(table.clashes)} rows of arithmetic and dry run differ")
    else:
        out.print("[bold green]agrees[/bold green]: arithmetic and dry run; no real rank was asked")
