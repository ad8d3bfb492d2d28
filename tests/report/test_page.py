"""The page: everything inside, nothing asked of anybody, and its figures are the ledger's numbers."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from partita.facts.errors import NotInstalled
from partita.facts.layout import Layout
from partita.facts.work import Training
from partita.plan.explain import Explanation, explain
from partita.report import figures, page
from tests.plan.test_clock import WIDE, cluster
from tests.tiny import tiny_model


@pytest.fixture
def no_plotly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "plotly_js", lambda: "/* plotly.js */")


def explained(layout: str, **model: Any) -> Explanation:
    read = Layout.parse(layout)
    chosen = tiny_model(**model) if model else WIDE
    return explain(chosen, read, Training(read.dp * 2, 64), cluster(read.world, link=1e9), {"sequence": "64"})


class Reader(HTMLParser):
    """Tags that load something, the text of scripts by id, and whether tags are closed in order."""

    VOID = ("meta", "link", "br", "img", "input")

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.scripts: dict[str, str] = {}
        self.open: list[str] = []
        self.ids: list[str] = []
        self.here = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.loads += [f"{tag} {k}" for k in ("src", "href", "srcset", "action") if k in named]
        self.ids += [named["id"] or ""] if "id" in named else []
        if tag not in self.VOID:
            self.open.append(tag)
        self.here = (named.get("id") or "") if tag == "script" else ""

    def handle_endtag(self, tag: str) -> None:
        if tag != "p" or self.open[-1] == "p":
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[self.here] = self.scripts.get(self.here, "") + data


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    return reader


@pytest.mark.usefixtures("no_plotly")
@pytest.mark.parametrize("layout", ["dp=4 ddp", "dp=4 full_shard", "dp=1"])
def test_a_page_holds_its_figures_and_loads_nothing(layout: str) -> None:
    text = page.of_explanation(explained(layout))
    found = read(text)
    assert found.loads == [] and not re.search(r"https?://", text)
    drawn = json.loads(found.scripts["figures"])
    keys = [f["key"] for f in drawn]
    assert {"time", "memory"} <= set(keys) <= set(found.ids) and len(keys) == len(set(keys))
    assert ("gantt-ddp" in keys) == ("ddp" in layout) and ("traffic" in keys) == (layout != "dp=1")
    assert text.count("witness: arithmetic") >= len(keys) + 3


@pytest.mark.usefixtures("no_plotly")
def test_names_cannot_break_out_of_the_page() -> None:
    text = page.of_explanation(explained("dp=2 ddp", name="</script><b onload=x>&"))
    read(text)
    assert "<b onload" not in text and "&lt;/script&gt;" in text


def test_bars_are_the_ledgers_bytes() -> None:
    e = explained("dp=4 ddp")
    here = e.account.ledger.at(e.worst)
    memory = figures.memory(here, 10**9)
    for i, phase in enumerate(figures.PHASES):
        stacked = sum(bar["y"][i] for bar in memory.data)
        assert stacked * 1e9 == pytest.approx(next(p.bytes for p in e.peaks if p.phase == phase))
    sent = sum(sum(bar["y"]) for bar in figures.traffic(here).data)
    assert sent * 1e9 == pytest.approx(here.where(phase=["forward", "backward", "step"]).link_bytes())


def test_the_gantt_shows_hidden_and_exposed_parts() -> None:
    e = explained("dp=4 ddp")
    (t,) = e.timing.timelines
    shown = {d["name"]: d for d in figures.gantt(t).data}
    assert sum(shown["exposed tail"]["x"]) == pytest.approx(1e3 * t.tail_s)
    assert sum(shown["hidden"]["x"]) == pytest.approx(1e3 * t.hidden_s)
    assert len(shown["bucket ready"]["x"]) == len(t.buckets)


def test_without_plotly_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from partita.commands.explain import command

    def missing(name: str) -> Any:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(resources, "files", missing)
    with pytest.raises(NotInstalled, match=r"pip install 'partita\[report\]'"):
        page.plotly_js()
    args = ["llama-3.1-8b", "--cluster", "h100:8", "--layout", "dp=8 ddp", "--html", str(tmp_path / "p.html")]
    answer = CliRunner().invoke(command, args)
    assert answer.exit_code == 3 and list(tmp_path.iterdir()) == []


def test_explain_writes_the_page_and_the_trace(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    from partita.commands.explain import command

    html, trace = tmp_path / "p.html", tmp_path / "t.json"
    args = ["llama-3.1-8b", "--cluster", "h100:8", "--layout", "dp=8 ddp", "--json"]
    answer = CliRunner().invoke(command, [*args, "--html", str(html), "--trace", str(trace)])
    assert answer.exit_code == 0, answer.output
    data = json.loads(answer.output)
    assert (
        data["step_time"]["total_s"] > 0 and data["timeline"]["bucket_mb"] and data["timeline"]["buckets"][0]["buckets"]
    )
    assert "Plotly.newPlot" in html.read_text() and json.loads(trace.read_text())["traceEvents"]
    assert {p.name for p in tmp_path.iterdir()} == {"p.html", "t.json"}


def test_a_trace_without_rates_is_refused(tmp_path: Path) -> None:
    from partita.commands.explain import command

    args = ["llama-3.1-8b", "--cluster", "local:2", "--layout", "dp=2 ddp"]
    answer = CliRunner().invoke(command, [*args, "--trace", str(tmp_path / "t.json")])
    assert answer.exit_code == 2 and list(tmp_path.iterdir()) == []
    answer = CliRunner().invoke(command, args)
    assert answer.exit_code == 0 and "until `partita calibrate`" in answer.output
