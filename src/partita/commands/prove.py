"""``partita prove``: layouts on real ranks beside one device; plan, dry run and recording joined line by line."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from partita.commands.common import NO, WORK, YES, console, emit_json, guarded, size, table, training, work_options
from partita.facts.errors import BadInput, NotInstalled
from partita.facts.find import find_model
from partita.facts.layout import Layout
from partita.facts.model import Model

if TYPE_CHECKING:
    from rich.console import Console

    from partita.prove.proof import Proof
    from partita.prove.prove import Report

SEQUENCE = 64
MICRO_BATCHES = 2


@click.command("prove")
@click.argument("model")
@click.option("--layout", "layouts", multiple=True, default=("full_shard",), show_default=True, help="May be repeated.")
@click.option("--ranks", type=int, required=True, help="Real ranks on this machine.")
@click.option("--data", multiple=True, help="Text, JSON lines or Parquet; may be repeated. Default: random tokens.")
@work_options(SEQUENCE)
@click.option("--lr", type=float, default=3e-4, show_default=True, help="Learning rate.")
@click.option("--steps", type=int, default=4, show_default=True, help="Steps of each run, three or more.")
@click.option("--threads", type=int, default=1, show_default=True, help="CPU threads of each rank.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of initial values and of the order of samples.")
@click.option("--from-scratch", is_flag=True, help="Initial values from the seed, although the model has weights.")
@click.option("--no-dry", is_flag=True, help="Leave the dry run out.")
@click.option("--json", "as_data", is_flag=True, help="Print one JSON document.")
@click.option("--out", type=click.Path(path_type=Path), help="Also write the JSON document to this file.")
@click.option("--download", is_flag=True, help="Fetch the model from the hub if it is nowhere here.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@guarded
def command(as_data: bool, out: Path | None, debug: bool, **said: Any) -> None:
    """Run MODEL under each LAYOUT on real ranks and say whether plan, dry run and recording agree.

    Every layout runs a few steps from the same initial values on the same samples as one device. Exits with 0 where
    everything agrees and with 1 where anything does not.
    """
    from partita.commands.tables import busy
    from partita.prove.prove import prove
    from partita.prove.report import as_json

    assumed: dict[str, str] = {}
    layouts = [Layout.parse(text, said["ranks"]) for text in said["layouts"]]
    proof = proof_of(layouts, assumed, **said)
    screen = console(error=as_data)
    if not as_data:
        head(screen, proof, assumed)
    reports = prove(
        proof,
        layouts,
        dry=not said["no_dry"],
        threads=said["threads"],
        busy=busy(False),
        done=lambda report: None if as_data else draw(screen, report),
    )
    document = as_json(reports, assumed)
    if as_data:
        emit_json(document)
    if out is not None:
        write(out, document)
    if not as_data:
        each = "; ".join(f"{r.proof.layout} {r.verdict}" for r in reports)
        screen.print(f"[bold]{document['verdict']}[/bold]: {each}")
    raise SystemExit(YES if document["verdict"] == "agrees" else NO)


def proof_of(parsed: list[Layout], assumed: dict[str, str], **said: Any) -> Proof:
    """What is to be proven, of the first layout; what was not said is noted in ``assumed``.  Raises BadInput."""
    from partita.prove.proof import Proof, Source

    found, folder = locate(said["model"], said["download"])
    together = math.lcm(*(x.dp * x.mb for x in parsed))
    defaults = {"global_batch": MICRO_BATCHES * together, "sequence": SEQUENCE, "precision": "fp32"}
    work = training(assumed, **{name: said[name] for name in WORK}, defaults=defaults)
    data, seed = said["data"], said["seed"]
    if data and folder is None:
        raise BadInput(
            f"--data needs the tokenizer of {found.name}, which has no folder here; name a folder that has one"
        )
    weights = None if said["from_scratch"] or folder is None else str(folder)
    assumed["initial values"] = f"from {folder}" if weights else f"seed {seed}"
    source = Source(tuple(data), str(folder) if data else "", seed)
    return Proof(found, parsed[0], replace(work, lr=said["lr"]), said["steps"], source, weights, seed)


def locate(text: str, download: bool) -> tuple[Model, Path | None]:
    """The model, and a folder with its weights and tokenizer where there is one.

    SmolLM2-135M is found in the package that carries it, as its folder is nowhere else by default.
    """
    found = find_model(text, download=download, weights=True)
    folder = found.folder
    if (folder is None or not any(folder.glob("*.safetensors"))) and "smollm2-135m" in text.lower():
        from partita.model import smollm2

        try:
            folder = smollm2.folder()
        except NotInstalled:
            folder = None
        if folder is not None:
            return find_model(str(folder)).model, folder
    if folder is not None and not any(folder.glob("*.safetensors")):
        folder = None
    return found.model, folder


def write(path: Path, document: dict[str, Any]) -> None:
    """A JSON file, under a temporary name first."""
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_text(json.dumps(document, indent=1) + "\n")
    temporary.replace(path)


def head(out: Console, proof: Any, assumed: dict[str, str]) -> None:
    model, work = proof.model, proof.work
    out.print(f"[bold]{model.name}[/bold]: {model.parameter_count:,} parameters, {model.layers} layers")
    out.print(
        f"[bold]work[/bold] global batch {work.global_batch} x {work.sequence} tokens, {work.precision.name},"
        f" {work.optimizer}, {proof.steps} steps; samples: {proof.source}"
    )
    out.print("[bold]assumed[/bold] " + ", ".join(f"{k} {v}" for k, v in assumed.items()), soft_wrap=True)
    out.print("plan: arithmetic; dry: the code on fake tensors; run: recorded on real ranks. GB is 10^9 bytes.\n")


def draw(out: Console, report: Report) -> None:
    """One layout at 100 columns."""
    from partita.commands import tables

    case, world = report.account.case, report.account.case.mesh.world
    out.rule(f"[bold]{case.layout}[/bold]", align="left")
    tables.divided(case, report.account.ledger.gradients, out)
    out.print()
    out.print(tables.traffic(report.table.traffic, world))
    out.print(tables.memory(report.table.memory, world))
    out.print(tables.peaks(report.table.peaks))
    out.print(_differences(report))
    marks = {True: "holds", False: "[bold red]BROKEN[/bold red]", None: "-"}
    laws = ((str(f.law), f.name, marks[f.holds], f.says) for f in report.laws)
    out.print(table("Laws, on real ranks", ("", "law", "", "says"), laws, whole=(1, 2)))
    _times(out, report)
    if report.stand_ins:
        out.print(f"Stand-in in the dry run: {', '.join(report.stand_ins)}.")
    missing = {"dry run", "recording"} - set(report.witnesses)
    if missing:
        out.print(f"Not asked: {', '.join(sorted(missing))}.")
    agreed = ", ".join(report.witnesses)
    if report.verdict == "agrees":
        out.print(f"[bold green]agrees[/bold green]: {agreed} and one device\n")
    else:
        out.print(f"[bold red]disagrees[/bold red]: {'; '.join(report.reasons)}\n", soft_wrap=True)


def _differences(report: Report) -> Any:
    rows = (
        (
            name,
            f"{d.value:.1e}",
            "reported" if d.limit is None else f"{d.limit:.0e}",
            d.worst or "-",
            "" if d.holds else "[bold red]<[/bold red]",
        )
        for name, d in report.differences.items()
    )
    return table("Difference from one device", ("", "value", "limit", "worst", ""), rows, right=(1, 2))


def _times(out: Console, report: Report) -> None:
    t = report.step_time
    if t is None:
        return
    how = "" if t.plain else " (under the recorder: give more --steps for plain ones)"
    out.print(
        f"Step time: min {t.least:.3g} s (rank {t.fastest}), median {t.median:.3g} s, max {t.most:.3g} s"
        f" (rank {t.slowest}){how}"
    )
    shares = ", ".join(f"{name} {share:.0%}" for name, share in t.shares.items())
    out.print(f"Shares of the recorded step: {shares}")
    tracked = next((p.counts.recorded for p in report.table.peaks if p.phase == "backward"), None)
    if tracked:
        out.print(f"One device ran {report.seconds['one device']:.0f} s; the peak of backward was {size(tracked)}.")
