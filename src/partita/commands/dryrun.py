"""``partita dryrun``: the real code on fake tensors, as any rank of any world, beside the arithmetic."""

from __future__ import annotations

import click

from partita.commands.common import NO, YES, console, emit_json, guarded, training, work_options
from partita.facts.find import find_model
from partita.facts.layout import Layout


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
def command(
    model: str,
    layout: str,
    world: int | None,
    ranks: tuple[int, ...],
    global_batch: int | None,
    sequence: int | None,
    precision: str | None,
    optimizer: str,
    clip: float,
    steps: int,
    as_data: bool,
    download: bool,
    debug: bool,
) -> None:
    """Run MODEL's training step under LAYOUT with tensors that have no data, and hold it against the arithmetic.

    Exits with 0 where both agree on every collective and every persistent byte, and with 1 where they do not.
    """
    from partita.commands import tables
    from partita.plan.account import account
    from partita.prove.dryrun import DryRunFailed, dry_ranks, dry_runs
    from partita.prove.reconcile import reconcile
    from partita.prove.report import dry_json

    assumed: dict[str, str] = {}
    found = find_model(model, download=download).model
    parsed = Layout.parse(layout, world)
    defaults = {"global_batch": parsed.dp * parsed.mb, "sequence": 2048, "precision": "bf16-master"}
    work = training(
        assumed,
        global_batch=global_batch,
        sequence=sequence,
        precision=precision,
        optimizer=optimizer,
        clip=clip,
        defaults=defaults,
    )
    accounted = account(found, parsed, work)
    wanted = list(ranks) or dry_ranks(accounted)
    try:
        with tables.busy(False)(f"{parsed} as rank {', '.join(map(str, wanted))}"):
            seen = list(dry_runs(found, parsed, work, wanted, parsed.world, steps))
    except DryRunFailed as error:
        if debug:
            raise
        raise click.ClickException(str(error).splitlines()[-1]) from None
    case, table = accounted.case, reconcile(accounted.case, accounted.ledger, seen, [])
    verdict = NO if table.clashes else YES
    if as_data:
        emit_json(dry_json(case, table, seen, assumed))
        raise SystemExit(verdict)
    out = console()
    out.print(f"[bold]{found.name}[/bold]: {found.parameter_count:,} parameters")
    out.print(
        f"[bold]layout[/bold] {parsed}; [bold]work[/bold] global batch {work.global_batch} x {work.sequence} tokens,"
        f" {work.precision.name}, {work.optimizer}"
    )
    if assumed:
        out.print("[bold]assumed[/bold] " + ", ".join(f"{k} {v}" for k, v in assumed.items()))
    out.print(f"As rank {', '.join(str(w.rank) for w in seen)} of {parsed.world}. GB is 10^9 bytes.\n")
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
    raise SystemExit(verdict)
