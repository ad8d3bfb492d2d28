"""Chrome traces: the schema that Perfetto reads, and times that are those of the step."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from partita.plan import trace
from partita.plan.play import play
from partita.plan.timeline import predicted, recorded
from tests.plan.test_clock import cluster, priced
from tests.plan.test_timeline import Noted


def check(data: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The parts of the format that readers rely on; events by phase letter."""
    assert set(data) >= {"traceEvents", "displayTimeUnit"} and data["displayTimeUnit"] in ("ms", "ns")
    out: dict[str, list[dict[str, Any]]] = {}
    for e in data["traceEvents"]:
        assert {"ph", "name", "pid", "tid"} <= set(e) and isinstance(e["pid"], int) and isinstance(e["tid"], int)
        if e["ph"] in "Xi":
            assert isinstance(e["ts"], float | int) and e["cat"] and isinstance(e["args"], dict)
        if e["ph"] == "X":
            assert e["dur"] >= 0
        out.setdefault(e["ph"], []).append(e)
    assert set(out) <= {"X", "i", "M"}
    threads = {(e["pid"], e["tid"]) for e in out["M"] if e["name"] == "thread_name"}
    processes = {e["pid"] for e in out["M"] if e["name"] == "process_name"}
    assert {(e["pid"], e["tid"]) for e in out["X"]} <= threads and {e["pid"] for e in out["X"]} == processes
    for key in threads:  # on one thread, complete events must not overlap
        spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in out["X"] if (e["pid"], e["tid"]) == key)
        assert all(a[1] <= b[0] + 2e-3 for a, b in itertools.pairwise(spans)), key
    return out


@pytest.mark.parametrize("layout", ["dp=4 ddp", "dp=4 full_shard", "dp=8 full_shard shard=4", "dp=1"])
@pytest.mark.parametrize("batches", [1, 5])
def test_a_steps_trace(layout: str, batches: int) -> None:
    found = priced(layout, batches)
    played = play(found, cluster(found.case.mesh.world, link=1e9))
    events = check(json.loads(json.dumps(trace.of_step(played))))
    ends = [e["ts"] + e["dur"] for e in events["X"]]
    assert max(ends) == pytest.approx(1e6 * played.streams.now, rel=1e-6)
    calls = [e for e in events["X"] if e["cat"] == "communication"]
    assert sum(e["args"]["times"] for e in calls) == sum(
        r.count for r in found.ledger.traffic if r.phase in ("forward", "backward", "step")
    )
    ready = [e for e in events.get("i", []) if e["name"].endswith("ready")]
    assert len(ready) == len(played.buckets) and bool(ready) == ("ddp" in layout)


def test_predicted_and_recorded_buckets_side_by_side(tmp_path: Path) -> None:
    found = priced("dp=4 ddp")
    (one,) = predicted(play(found, cluster(4)))
    two = recorded([Noted(0, 9, 1.0, 1.1, 2.0), Noted(1, 9, 2.0, 2.1, 4.0)], 0.5, 3.0, "ddp", "all_reduce")
    path = tmp_path / "buckets.json"
    trace.write(trace.of_timelines([one, two]), path)
    events = check(json.loads(path.read_text()))
    assert [p.name for p in tmp_path.iterdir()] == ["buckets.json"]
    names = {e["pid"]: e["args"]["name"] for e in events["M"] if e["name"] == "process_name"}
    assert names == {1: "ddp (arithmetic)", 2: "ddp (profile)"}
    mine = {e["name"]: (e["ts"], e["dur"]) for e in events["X"] if e["pid"] == 2}
    assert mine["all_reduce bucket 1"] == (1.6e6, 1.9e6) and mine["exposed tail"] == (2.5e6, 1.0e6)


def test_nothing_is_left_where_a_trace_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        trace.write({"traceEvents": [object()]}, tmp_path / "x.json")
    assert list(tmp_path.iterdir()) == []
