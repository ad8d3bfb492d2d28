"""Figures of a plan, as Plotly's own JSON: plain data, so that nothing heavy is imported to make it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from partita.facts.ledger import Ledger
from partita.plan.clock import StepTime
from partita.plan.timeline import Choice, Timeline

# Okabe and Ito 2008: colours that most people can tell apart.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#7f7f7f", "#332288", "#88ccee")
PHASES = ("forward", "backward", "step")
HIDDEN, EXPOSED = COLOURS[2], COLOURS[5]


@dataclass(frozen=True)
class Figure:
    """One figure: Plotly's data and layout, a caption, and the witness of what it shows."""

    key: str
    title: str
    caption: str
    witness: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]


def _layout(height: int, **more: Any) -> dict[str, Any]:
    base = {
        "height": height,
        "margin": {"l": 70, "r": 20, "t": 10, "b": 45},
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": "#222"},
        "paper_bgcolor": "white",
        "plot_bgcolor": "white",
        "legend": {"orientation": "v", "x": 1.01, "y": 1},
        "bargap": 0.35,
    }
    return {**base, **more}


def _axis(title: str = "", **more: Any) -> dict[str, Any]:
    text = {"title": {"text": title}} if title else {}
    return {**text, "gridcolor": "#e8e8e8", "zerolinecolor": "#999", "automargin": True, **more}


def memory(ledger: Ledger, device_bytes: int | None) -> Figure:
    """Stacked bytes of one rank by object, at the peak of each phase; ``ledger`` holds that rank's rows."""
    sums = ledger.where(tier="device").memory_by("phase", "object")
    always = {str(o): n for (phase, o), n in sums.items() if phase == "persistent"}
    objects = dict.fromkeys([*always, *(str(o) for p, o in sums if p in PHASES)])
    data = []
    for i, name in enumerate(objects):
        values = [(always.get(name, 0) + sums.get((phase, name), 0)) / 1e9 for phase in PHASES]
        data.append(_bar(name, list(PHASES), values, COLOURS[i % len(COLOURS)], "%{y:.3f} GB"))
    shapes = []
    notes = []
    if device_bytes:
        line = {"color": "#c00", "width": 1.5, "dash": "dash"}
        at = device_bytes / 1e9
        shapes.append({"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": at, "y1": at, "line": line})
        note = {"xref": "paper", "x": 1, "y": at, "xanchor": "right", "yanchor": "bottom", "showarrow": False}
        notes.append(
            {**note, "text": f"device memory {at:.1f} GB", "font": {"color": "#c00", "size": 11}, "bgcolor": "white"}
        )
    layout = _layout(
        380, barmode="stack", xaxis=_axis(), yaxis=_axis("GB", rangemode="tozero"), shapes=shapes, annotations=notes
    )
    caption = "What persists, and what is alive beside it at the peak of each phase, on the fullest rank."
    return Figure("memory", "Memory by phase", caption, "arithmetic", data, layout)


def traffic(ledger: Ledger) -> Figure:
    """Link bytes of one rank's steady step by collective and phase; ``ledger`` holds that rank's rows."""
    sums: dict[str, dict[str, float]] = {}
    for r in ledger.traffic:
        if r.phase in PHASES and r.kind == "data":
            here = sums.setdefault(f"{r.verb} {' x '.join(r.axis)}", {})
            here[r.phase] = here.get(r.phase, 0.0) + r.link_bytes(ledger.mesh) / 1e9
    data = [
        _bar(name, list(PHASES), [values.get(p, 0.0) for p in PHASES], COLOURS[i % len(COLOURS)], "%{y:.4g} GB")
        for i, (name, values) in enumerate(sums.items())
    ]
    layout = _layout(300, barmode="stack", xaxis=_axis(), yaxis=_axis("GB sent", rangemode="tozero"), showlegend=True)
    caption = "What one rank sends over its links in a steady step."
    return Figure("traffic", "Traffic by phase", caption, "arithmetic", data, layout)


def _bar(name: str, x: list[str], y: list[float], colour: str, shown: str) -> dict[str, Any]:
    hover = f"%{{x}}<br>{shown}<extra>{name}</extra>"
    return {"type": "bar", "name": name, "x": x, "y": y, "marker": {"color": colour}, "hovertemplate": hover}


def step_time(time: StepTime) -> Figure:
    """Lines of a step in milliseconds: computation, and communication as hidden and exposed parts."""
    lines = [line for line in reversed(time.lines) if line.seconds > 0.002 * time.total_s]
    names = [f"{line.phase}: {line.name}" for line in lines]
    parts = (
        ("computation", COLOURS[0], [x.seconds if x.kind == "compute" else 0.0 for x in lines]),
        ("communication, exposed", EXPOSED, [x.exposed_s if x.kind != "compute" else 0.0 for x in lines]),
        ("communication, hidden", HIDDEN, [x.hidden_s for x in lines]),
    )
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "y": names,
            "x": [1e3 * v for v in values],
            "marker": {"color": colour},
            "hovertemplate": f"%{{y}}<br>%{{x:.3f}} ms<extra>{name}</extra>",
        }
        for name, colour, values in parts
    ]
    layout = _layout(120 + 26 * len(lines), barmode="stack", xaxis=_axis("ms"), yaxis=_axis(), bargap=0.25)
    caption = (
        "Hidden communication runs behind computation and adds nothing. Lines below 0.2 % of the step are left out."
    )
    return Figure("time", "Time of a step", caption, time.witness, data, layout)


def gantt(timeline: Timeline) -> Figure:
    """Buckets against the backward pass: the units that compute above, the buckets on the links below."""
    name = f"{timeline.verb} bucket"
    units = [(u.begin_s, u.end_s, u.name) for u in timeline.units] or [(0.0, timeline.backward_s, "backward")]
    hidden = [(b.start_s, min(b.done_s, timeline.backward_s), b) for b in timeline.buckets]
    tail = [(max(b.start_s, timeline.backward_s), b.done_s, b) for b in timeline.buckets]
    data = [
        _spans("computation", "backward", [(lo, hi, text) for lo, hi, text in units], COLOURS[0]),
        _spans("hidden", "links", [(lo, hi, _said(name, b)) for lo, hi, b in hidden if hi > lo], HIDDEN),
        _spans("exposed tail", "links", [(lo, hi, _said(name, b)) for lo, hi, b in tail if hi > lo], EXPOSED),
        {
            "type": "scatter",
            "mode": "markers",
            "name": "bucket ready",
            "x": [1e3 * b.ready_s for b in timeline.buckets],
            "y": ["ready"] * len(timeline.buckets),
            "text": [_said(name, b) for b in timeline.buckets],
            "marker": {"symbol": "line-ns-open", "size": 14, "color": "#444"},
            "hovertemplate": "%{text}<extra>ready</extra>",
        },
    ]
    rows: dict[str, Any] = {"categoryorder": "array", "categoryarray": ["links", "ready", "backward"]}
    end = {
        "type": "line",
        "yref": "paper",
        "y0": 0,
        "y1": 1,
        "x0": 1e3 * timeline.backward_s,
        "x1": 1e3 * timeline.backward_s,
    }
    shapes = [{**end, "line": {"color": "#222", "width": 1.5, "dash": "dot"}}]
    xaxis = _axis("ms after backward began", rangemode="tozero")
    layout = _layout(270, barmode="overlay", xaxis=xaxis, yaxis=_axis("", **rows), shapes=shapes, bargap=0.3)
    caption = (
        f"{len(timeline.buckets)} buckets of {timeline.owner}. The dotted line is the end of backward; what comes after"
        f" it, {1e3 * timeline.tail_s:.4g} ms, is the exposed tail."
    )
    return Figure(f"gantt-{timeline.owner}", "Buckets against backward", caption, timeline.witness, data, layout)


def _said(name: str, b: Any) -> str:
    times = f"ready {1e3 * b.ready_s:.3f} ms, on the link {1e3 * b.start_s:.3f} ms, done {1e3 * b.done_s:.3f} ms"
    return f"{name} {b.index}: {b.bytes / 1e6:.4g} MB<br>{times}"


def _spans(name: str, row: str, spans: list[tuple[float, float, str]], colour: str) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": [row] * len(spans),
        "base": [1e3 * lo for lo, _, _ in spans],
        "x": [1e3 * (hi - lo) for lo, hi, _ in spans],
        "text": [text for _, _, text in spans],
        "textposition": "none",
        "marker": {"color": colour, "line": {"color": "white", "width": 0.6}},
        "hovertemplate": "%{text}<extra>" + name + "</extra>",
    }


def choices(found: tuple[Choice, ...]) -> Figure:
    """Exposed tail and number of buckets for every size of buckets."""
    names = [f"{c.bucket_mb:g}" for c in found]
    tails = [1e3 * c.tail_s for c in found if c.tail_s is not None]
    bars = {
        "type": "bar",
        "name": "exposed tail, ms",
        "x": names,
        "y": tails,
        "marker": {"color": EXPOSED},
        "hovertemplate": "bucket_mb=%{x}<br>%{y:.4g} ms<extra>exposed tail</extra>",
    }
    count = {
        "type": "scatter",
        "mode": "lines+markers",
        "name": "buckets",
        "x": names,
        "y": [c.buckets for c in found],
        "yaxis": "y2",
        "line": {"color": COLOURS[0]},
        "hovertemplate": "bucket_mb=%{x}<br>%{y} buckets<extra></extra>",
    }
    second = _axis("buckets", overlaying="y", side="right", rangemode="tozero", showgrid=False, tickmode="auto")
    xaxis, yaxis = _axis("bucket_mb", type="category"), _axis("ms", rangemode="tozero")
    legend = {"orientation": "h", "x": 0, "y": 1.15}
    layout = _layout(300, xaxis=xaxis, yaxis=yaxis, yaxis2=second, legend=legend)
    caption = "What another size of buckets would do."
    return Figure("choices", "Size of buckets", caption, "arithmetic", [bars, count], layout)
