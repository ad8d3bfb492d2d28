"""``partita explain``: the ledger of one layout, with its reasons, its laws and whether it fits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from partita.commands import clock_tables
from partita.commands.common import (
    NO,
    console,
    emit_json,
    fail,
    guarded,
    short,
    size,
    table,
    training,
    work_options,
)
from partita.facts.case import Case
from partita.facts.cluster import Cluster, find_cluster
from partita.facts.errors import BadInput
from partita.facts.find import find_model
from partita.facts.layout import Layout
from partita.facts.ledger import Memory
from partita.plan.explain import Explanation, as_json, explain, link_of

if TYPE_CHECKING:
    from rich.table import Table

PHASES = ("persistent", "init", "forward", "backward", "step")
TRAFFIC_ORDER = ("forward", "backward", "step", "early", "init", "save")


@click.command("explain")
@click.argument("model")
@click.option("--cluster", help="Devices and links: h100:8x8 (nodes x devices), local:2, or a TOML file.")
@click.option("--layout", default="full_shard", show_default=True, help="Words such as 'dp=64 full_shard mb=1'.")
@click.option("--ranks", type=int, help="Number of ranks, where no cluster is given.")
@work_options(2048)
@click.option("--packed", is_flag=True, help="Several documents may share a sequence: attention carries a mask.")
@click.option("--check", is_flag=True, help="Exit with 1 where a law is broken or the layout does not fit.")
@click.option("--trace", type=click.Path(dir_okay=False), help="Write the step as a Chrome trace, for Perfetto.")
@click.option("--html", type=click.Path(dir_okay=False), help="Write one HTML page with tables and figures.")
@click.option("--json", "as_data", is_flag=True, help="Print one JSON document.")
@click.option("--download", is_flag=True, help="Fetch config.json from the hub if it is nowhere here.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@guarded
def command(
    model: str,
    cluster: str | None,
    layout: str,
    ranks: int | None,
    global_batch: int | None,
    sequence: int | None,
    precision: str | None,
    optimizer: str,
    clip: float,
    freeze: tuple[str, ...],
    packed: bool,
    check: bool,
    trace: str | None,
    html: str | None,
    as_data: bool,
    download: bool,
    debug: bool,
) -> None:
    """What LAYOUT divides, holds and sends when it trains MODEL, and whether it fits.

    MODEL is a name from the catalog, a hub id, a folder, a config.json, or a parameter count such as 7.5B. Everything
    printed here is arithmetic: nothing runs, and torch is not needed.
    """
    assumed: dict[str, str] = {}
    found = find_model(model, download=download).model
    where = find_cluster(cluster) if cluster else None
    devices = _devices(where, ranks)
    parsed = Layout.parse(layout, devices)
    if where is None and devices is None:
        assumed["ranks"] = f"{parsed.world} (the product of the layout's degrees)"
    defaults = {"global_batch": parsed.dp * parsed.mb, "sequence": 2048, "precision": "bf16-master"}
    if found.max_positions and found.positions == "learned":
        defaults["sequence"] = min(2048, found.max_positions)
    work = training(
        assumed,
        global_batch=global_batch,
        sequence=sequence,
        precision=precision,
        optimizer=optimizer,
        clip=clip,
        freeze=freeze,
        packed=packed,
        defaults=defaults,
    )
    result = explain(found, parsed, work, where, assumed)
    _write(result, trace, html)
    if as_data:
        emit_json(as_json(result))
    else:
        draw(result)
    if check and result.broken:
        fail("; ".join(f"law {f.law} ({f.name}): {f.says}" for f in result.broken), NO)


def _write(result: Explanation, trace: str | None, html: str | None) -> None:
    """The files that were asked for."""
    if trace:
        from partita.plan import trace as chrome

        if result.timing.played is None:
            raise BadInput(f"--trace needs a step's time: {result.timing.unknown}")
        chrome.write(chrome.of_step(result.timing.played), Path(trace))
    if html:
        from partita.report import page

        page.write(page.of_explanation(result), Path(html))


def _devices(cluster: Cluster | None, ranks: int | None) -> int | None:
    if cluster is None:
        return ranks
    if ranks is not None and ranks != cluster.world:
        raise BadInput(f"--ranks {ranks} differs from the {cluster.world} devices of {cluster.name}; leave one out")
    return cluster.world


def draw(e: Explanation) -> None:
    """Tables at 100 columns."""
    out = console()
    for line in _head(e):
        out.print(line)
    out.print(_memory(e))
    peaks = ((p.phase, size(p.bytes), p.moment) for p in e.peaks)
    out.print(table("Peak of each phase (what persists included)", ("phase", "bytes", "at"), peaks, right=(1,)))
    out.print(_traffic(e))
    out.print(_volume(e))
    for item in clock_tables.draw(e.timing):
        out.print(item)
    gradients = _gradients(e)
    if gradients:
        columns = ("parameters", "axis", "relation", "reduction", "divided by", "owner")
        out.print(table("Gradients", columns, gradients))
    marks = {True: "holds", False: "BROKEN", None: "-"}
    laws = ((str(f.law), f.name, marks[f.holds], f.says) for f in e.findings)
    out.print(table("Laws", ("", "law", "", "says"), laws))
    if e.fit:
        out.print(f"[bold]{e.fit.sentence}[/bold]")


def _head(e: Explanation) -> Iterator[str]:
    """What was asked: model, layout, cluster, work, and what nobody said."""
    case = e.account.case
    model, work = case.model, case.work
    shape = f", {model.layers} layers" if not model.bare else ", known by its count alone"
    yield f"[bold]{model.name}[/bold]: {model.parameter_count:,} parameters{shape}"
    yield f"[bold]layout[/bold] {case.layout}   (rooms: {', '.join(e.account.rooms)})"
    if e.cluster:
        yield f"[bold]cluster[/bold] {e.cluster.describe()}"
    batches = f"{case.micro_batches} micro-batch{'es' * (case.micro_batches > 1)} of {case.layout.mb} a rank"
    yield (
        f"[bold]work[/bold] global batch {work.global_batch} x {work.sequence} tokens ({batches}),"
        f" {work.precision.name}, {work.optimizer}"
    )
    if e.assumed:
        yield "[bold]assumed[/bold] " + ", ".join(f"{k} {v}" for k, v in e.assumed.items())
    yield "Every figure below is arithmetic, of one rank and one step. GB is 10^9 bytes.\n"


def _memory(e: Explanation) -> Table:
    """Rows of the worst rank: model state with its bytes per parameter, then what is alive at each phase's peak."""
    case, rows = e.account.case, e.account.ledger.at(e.worst).memory
    cells, before = [], ""
    for r in sorted(rows, key=lambda r: PHASES.index(r.phase)):
        state = r.phase == "persistent" or (r.object == "gradients" and r.phase == "step")
        each = _per_parameter(case, r) if state else ""
        why = r.why.partition(" (at ")[0]
        what = f"{r.unit}: {why}" if r.unit else why
        where = " (host)" if r.tier == "host" else ""
        cells.append(
            (r.phase if r.phase != before else "", r.object + where, short(r.dtype), size(r.bytes), each, what, r.owner)
        )
        before = r.phase
    title = f"Memory of rank {case.mesh.rank(e.worst)}, the fullest"
    return table(
        title, ("phase", "object", "dtype", "size", "B/param", "why", "owner"), cells, right=(3, 4), whole=(0, 1, 2, 6)
    )


def _per_parameter(case: Case, row: Memory) -> str:
    """Bytes of a row per parameter of the model: ``4 / 64`` is four bytes, divided over 64 ranks."""
    shards = max((case.mesh.size(*h.axes) for h in case.held if h.axes), default=1)
    each = row.bytes * shards / case.model.parameter_count
    if each < 0.01:
        return ""
    return f"{each:.3g} / {shards}" if shards > 1 else f"{each:.3g}"


def _traffic(e: Explanation) -> Table:
    """Rows of the worst rank, those of init last."""
    case, cells, before = e.account.case, [], ""
    rows = e.account.ledger.at(e.worst).traffic
    for r in sorted(rows, key=lambda r: TRAFFIC_ORDER.index(r.phase)):
        why = f"{r.unit}: {r.why}" if r.unit else r.why
        collective = f"{r.verb} {' x '.join(r.axis)}"
        sends, payload = size(r.link_bytes(case.mesh)), size(r.bytes)
        phase = r.phase if r.phase != before else ""
        why += f" (may hide behind {r.hidden_by})" if r.hidden_by else ""
        cells.append((phase, collective, f"{r.count:,}", payload, sends, link_of(r, e) or "-", why))
        before = r.phase
    columns = ("phase", "collective", "calls", "payload", "sends", "link", "why")
    title = "Traffic of one rank (payload: bytes of one call; sends: link bytes of all calls)"
    return table(title, columns, cells, right=(2, 3, 4), whole=(0, 1, 5))


def _volume(e: Explanation) -> str:
    ledger = e.account.ledger.at(e.worst)
    total = ledger.where(phase=["forward", "backward", "step"]).link_bytes()
    flops = f"; model FLOPs of all ranks {e.flops_per_step:.4g} (full attention)" if e.flops_per_step else ""
    return f"In a step one rank sends {size(total)}{flops}.\n"


def _gradients(e: Explanation) -> list[tuple[str, ...]]:
    """Gradient rows, those that say the same together."""
    same: dict[tuple[str, ...], list[str]] = {}
    for g in e.account.ledger.gradients:
        same.setdefault((" x ".join(g.axis), g.relation, g.reduction, g.divisor, g.owner), []).append(g.parameters)
    more = {key: f" and {len(names) - 1} more" if len(names) > 1 else "" for key, names in same.items()}
    return [(names[0] + more[key], *key) for key, names in same.items()]
