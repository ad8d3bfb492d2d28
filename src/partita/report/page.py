"""Page: an explanation as one HTML file.  Everything is inside it, plotly.js included; it opens without a network."""

from __future__ import annotations

import html
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from pathlib import Path

from partita import __version__
from partita.facts.errors import NotInstalled
from partita.facts.ledger import Ledger
from partita.plan.explain import Explanation, link_of
from partita.report import figures
from partita.report.figures import Figure

STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fafafa; margin: 0; }
main { max-width: 1120px; margin: 0 auto; padding: 24px 28px 60px; }
h1 { font-size: 26px; margin: 0 0 4px; }
h2 { font-size: 19px; margin: 34px 0 8px; border-bottom: 1px solid #ddd; padding-bottom: 4px; }
.card { background: white; border: 1px solid #e2e2e2; border-radius: 8px; padding: 14px 18px; margin: 12px 0; }
.caption { color: #555; margin: 0 0 4px; }
.witness { display: inline-block; font-size: 12px; color: #0b5394; background: #e8f1fa; border-radius: 10px;
  padding: 0 9px; margin-left: 8px; white-space: nowrap; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; width: 100%; }
th { text-align: left; background: #f3f3f3; position: sticky; top: 0; }
th, td { padding: 4px 9px; border-bottom: 1px solid #eee; vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 3px 16px; margin: 0; }
dt { font-weight: 600; } dd { margin: 0; }
.good { color: #1a7f37; } .bad { color: #c00; font-weight: 700; } .none { color: #777; }
details summary { cursor: pointer; color: #0b5394; }
"""

DRAW = """
for (const f of JSON.parse(document.getElementById("figures").textContent)) {
  Plotly.newPlot(f.key, f.data, f.layout, {displayModeBar: false, responsive: true});
}
"""


def write(text: str, path: Path) -> None:
    """Write a page: under another name first, so that no half of it is ever found."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def plotly_js() -> str:
    """The text of plotly.js, from the package of that name.

    Raises:
        NotInstalled: the package is not there.
    """
    try:
        return (resources.files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")
    except (ModuleNotFoundError, FileNotFoundError):
        raise NotInstalled("an HTML page needs plotly; install it with: pip install 'partita[report]'") from None


def of_explanation(e: Explanation) -> str:
    """The page of one layout.

    Raises:
        NotInstalled: plotly is not there.
    """
    here = e.account.ledger.at(e.worst)
    drawn = list(_figures(e, here))
    case = e.account.case
    title = f"{case.model.name}: {case.layout}"
    body = [
        f"<h1>{_text(case.model.name)}</h1><p class=caption>{_text(str(case.layout))}</p>",
        _card(_facts(e)),
        *(_figure(f) for f in drawn),
        "<h2>Laws</h2>",
        _card(_laws(e)),
        "<h2>Ledger</h2>",
        _card(_details("Time of a step, line by line", _time_table(e))) if e.timing.time else "",
        _card(_details("Memory", _memory_table(here))),
        _card(_details("Traffic", _traffic_table(e, here))),
        _card(_details("Gradients", _gradient_table(here))),
        f"<p class=caption>Written by partita {_text(__version__)}. Every figure is of one rank and one step;"
        " GB is 10<sup>9</sup> bytes.</p>",
    ]
    return document(title, "\n".join(body), drawn)


def document(title: str, body: str, drawn: Iterable[Figure]) -> str:
    """A whole HTML file around a body and the data of its figures."""
    data = [{"key": f.key, "data": f.data, "layout": f.layout} for f in drawn]
    # A script's text ends at "</", whatever it means; JSON may write the slash escaped.
    text = json.dumps(data).replace("</", "<\\/")
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{_text(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style>'
        f"<script>{plotly_js()}</script></head><body><main>\n{body}\n</main>"
        f'<script type="application/json" id="figures">{text}</script><script>{DRAW}</script></body></html>\n'
    )


def _figures(e: Explanation, here: Ledger) -> Iterator[Figure]:
    timing = e.timing
    if timing.time:
        yield figures.step_time(timing.time)
    for t in timing.timelines:
        yield figures.gantt(t)
    if timing.choices and timing.time:
        yield figures.choices(timing.choices)
    yield figures.memory(here, e.cluster.device.memory_bytes if e.cluster else None)
    if here.traffic:
        yield figures.traffic(here)


def _figure(f: Figure) -> str:
    head = f"<h2>{_text(f.title)}<span class=witness>witness: {_text(f.witness)}</span></h2>"
    return head + _card(f'<p class=caption>{_text(f.caption)}</p><div id="{f.key}"></div>')


def _facts(e: Explanation) -> str:
    """What was asked, what was assumed, and the answer in short."""
    case, time = e.account.case, e.timing.time
    rows = [("model", f"{case.model.parameter_count:,} parameters"), ("layout", str(case.layout))]
    rows.append(("rooms", ", ".join(e.account.rooms)))
    if e.cluster:
        rows.append(("cluster", e.cluster.describe()))
    work = case.work
    batches = f"{case.micro_batches} micro-batch{'es' * (case.micro_batches > 1)} of {case.layout.mb} a rank"
    shape = f"global batch {work.global_batch} x {work.sequence} tokens ({batches})"
    rows.append(("work", f"{shape}, {work.precision.name}, {work.optimizer}"))
    rows.append(("assumed", ", ".join(f"{k} {v}" for k, v in e.assumed.items()) or "nothing"))
    if e.fit:
        rows.append(("fit", e.fit.sentence))
    if time:
        parts = f"computation {time.compute_s:.4g} s, exposed communication {time.exposed_s:.4g} s"
        rate = f"{time.tokens_per_s:,.0f} tokens/s, MFU {time.mfu:.1%} ({time.convention} attention, {time.dtype} peak)"
        rows.append(("step", f"{time.total_s:.4g} s: {parts}; {rate}"))
        rows += [("rate", f"{name}: {says}") for name, says in time.basis]
        rows.append(("not counted", "; ".join(time.left_out)))
    else:
        rows.append(("step", e.timing.unknown))
    rows.append(("witness", "arithmetic: nothing here was run"))
    return "<dl>" + "".join(f"<dt>{_text(k)}</dt><dd>{_text(v)}</dd>" for k, v in rows) + "</dl>"


def _laws(e: Explanation) -> str:
    marks = {True: "holds", False: "BROKEN", None: "not asked"}
    kinds = {True: "good", False: "bad", None: "none"}
    rows = "".join(
        f"<tr><td class=n>{f.law}</td><td>{_text(f.name)}</td><td class={kinds[f.holds]}>{marks[f.holds]}</td>"
        f"<td>{_text(f.says)}</td></tr>"
        for f in e.findings
    )
    return f"<table><tr><th class=n></th><th>law</th><th></th><th>says</th></tr>{rows}</table>"


def _time_table(e: Explanation) -> str:
    assert e.timing.time
    columns = ("phase", "what", "kind", "ms", "hidden, ms", "exposed, ms", "calls", "link", "why", "witness")
    rows = [
        (
            *(x.phase, x.name, x.kind, f"{1e3 * x.seconds:.3f}", f"{1e3 * x.hidden_s:.3f}", f"{1e3 * x.exposed_s:.3f}"),
            *(str(x.calls or ""), x.link, x.why, x.witness),
        )
        for x in e.timing.time.lines
    ]
    return _table(columns, rows, (3, 4, 5, 6))


def _memory_table(here: Ledger) -> str:
    columns = ("phase", "object", "unit", "tier", "dtype", "bytes", "why", "owner")
    rows = [(r.phase, r.object, r.unit, r.tier, r.dtype, f"{r.bytes:,}", r.why, r.owner) for r in here.memory]
    return _table(columns, rows, (5,))


def _traffic_table(e: Explanation, here: Ledger) -> str:
    columns = ("phase", "collective", "unit", "dtype", "calls", "payload bytes", "link bytes", "link", "why", "owner")
    rows = []
    for r in here.traffic:
        verb = f"{r.verb} {' x '.join(r.axis)}" + (f" ({r.kind})" if r.kind != "data" else "")
        counts = (f"{r.count:,}", f"{r.bytes:,}", f"{r.link_bytes(here.mesh):,}")
        rows.append((r.phase, verb, r.unit, r.dtype, *counts, link_of(r, e), r.why, r.owner))
    return _table(columns, rows, (4, 5, 6))


def _gradient_table(here: Ledger) -> str:
    columns = ("parameters", "axis", "relation", "reduction", "divided by", "owner")
    rows = [(g.parameters, " x ".join(g.axis), g.relation, g.reduction, g.divisor, g.owner) for g in here.gradients]
    return _table(columns, rows, ())


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int]) -> str:
    kind = [" class=n" if i in numbers else "" for i in range(len(columns))]
    head = "".join(f"<th{k}>{_text(c)}</th>" for k, c in zip(kind, columns, strict=True))
    cells = ("".join(f"<td{k}>{_text(c)}</td>" for k, c in zip(kind, row, strict=True)) for row in rows)
    return f"<div class=scroll><table><tr>{head}</tr>{''.join(f'<tr>{c}</tr>' for c in cells)}</table></div>"


def _details(title: str, inner: str) -> str:
    witness = "<span class=witness>witness: arithmetic</span>"
    return f"<details><summary>{_text(title)}{witness}</summary>{inner}</details>"


def _card(inner: str) -> str:
    return f"<div class=card>{inner}</div>"


def _text(raw: str) -> str:
    return html.escape(raw, quote=True)
