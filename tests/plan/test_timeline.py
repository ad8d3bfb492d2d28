"""Timelines of buckets: predicted against backward, recorded, and what other sizes would do."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest

from partita.facts.bucketing import Bucketing, GradientRun
from partita.facts.case import Unit
from partita.plan.play import _Filling, bucketings, play
from partita.plan.timeline import BUCKET_MB, Bucket, Timeline, as_json, choices, predicted, recorded
from partita.strategies.ddp.predict import MIB, steady_buckets
from tests.plan.test_clock import cluster, priced
from tests.tiny import ZOO


def timeline(layout: str, batches: int = 1, **links: float) -> Timeline:
    found = priced(layout, batches)
    (only,) = predicted(play(found, cluster(found.case.mesh.world, **links)))
    return only


@pytest.mark.parametrize("layout", ["dp=4 ddp", "dp=4 ddp bucket_mb=1", "dp=4 ddp bucket_mb=0.01"])
@pytest.mark.parametrize("link", [1e8, 1e10, 1e13])
@pytest.mark.parametrize("batches", [1, 3, 6])
def test_each_bucket_is_ready_then_launched_then_done_in_order(layout: str, link: float, batches: int) -> None:
    t = timeline(layout, batches, link=link)
    assert [b.bytes for b in t.buckets] == steady_buckets(priced(layout, batches).case)
    assert [b.index for b in t.buckets] == list(range(len(t.buckets)))
    for b in t.buckets:
        assert 0 < b.ready_s <= b.launch_s <= b.start_s < b.done_s
        assert b.ready_s <= t.backward_s * (1 + 1e-12)
    for a, b in itertools.pairwise(t.buckets):
        assert a.launch_s <= b.launch_s and a.done_s <= b.start_s * (1 + 1e-12)
    assert t.buckets[-1].ready_s == pytest.approx(t.backward_s)  # the embedding's gradient is the last
    assert t.hidden_s + t.tail_s == pytest.approx(t.busy_s)
    assert t.tail_s > 0 and t.units[0].begin_s == 0 and t.units[-1].end_s == pytest.approx(t.backward_s)


def test_the_tail_is_what_the_clock_calls_exposed() -> None:
    from partita.plan.clock import step_time

    found = priced("dp=4 ddp", 2)
    (t,) = predicted(play(found, cluster(4, link=1e9)))
    lines = [x for x in step_time(found, cluster(4, link=1e9)).lines if x.phase == "backward" and x.kind != "compute"]
    assert sum(x.exposed_s for x in lines) == pytest.approx(t.tail_s)
    assert sum(x.hidden_s for x in lines) == pytest.approx(t.hidden_s)


def test_a_bucket_is_complete_with_its_last_gradient_and_waits_for_those_before_it() -> None:
    run = GradientRun("blocks.0..1", 2, ("down", "up"), (6, 4))
    filling = _Filling(Bucketing("x", "all_reduce", ("dp",), "float32", (6, 8, 8), (6, 7, 7), (run,)))
    unit = Unit("blocks.0..1", 2, (), 1, 1)
    ready = {"down": 3.0, "up": 2.0}
    # down fills bucket 0 at 13; up, complete at 12 already, counts when its turn in the order comes.
    assert list(filling.complete(unit, 10.0, ready)) == [(0, 13.0)]
    assert list(filling.complete(unit, 20.0, ready)) == [(1, 23.0), (2, 23.0)]
    assert list(filling.complete(Unit("last", 1, (), 1, 1), 30.0, {})) == []


@dataclass
class Noted:
    """What a room notes of one bucket."""

    index: int
    bytes: int
    ready_s: float
    launch_s: float
    done_s: float | None


def test_a_recorded_backward_by_hand() -> None:
    noted = [Noted(0, 40, 101.0, 101.5, 103.0), Noted(1, 40, 102.0, 102.0, 104.0), Noted(2, 8, 105.0, 105.0, 107.5)]
    t = recorded([*noted, Noted(3, 1, 105.0, 105.5, None)], 100.0, 106.0, "ddp", "all_reduce", ("dp",))
    assert t.witness == "profile" and t.backward_s == 6.0
    assert t.buckets[1] == Bucket(1, 40, 2.0, 2.0, 3.0, 4.0)  # its link was busy until 3
    assert t.busy == ((1.5, 4.0), (5.0, 7.5))
    assert (t.busy_s, t.hidden_s, t.tail_s) == (5.0, 3.5, 1.5)
    assert recorded([], 0.0, 1.0).tail_s == 0.0


def test_what_rooms_note_can_be_recorded() -> None:
    pytest.importorskip("torch")
    from partita.strategies.ddp.apply import BucketTimes

    t = recorded([BucketTimes(0, 16, 2, 1.0, 1.25, 2.0)], 0.5, 1.5)
    assert t.buckets == (Bucket(0, 16, 0.5, 0.75, 0.75, 1.5),) and t.tail_s == 0.5


def test_other_sizes_of_buckets() -> None:
    found = priced("dp=4 ddp")
    table = choices(found, cluster(4, link=1e9))
    assert [c.bucket_mb for c in table] == list(BUCKET_MB)
    for c in table:
        sizes = steady_buckets(priced(f"dp=4 ddp bucket_mb={c.bucket_mb:g}").case)
        assert (c.buckets, c.first_bytes, c.largest_bytes, c.last_bytes) == (
            len(sizes),
            sizes[0],
            max(sizes),
            sizes[-1],
        )
        assert c.hidden_s is not None and c.tail_s is not None and c.busy_s == pytest.approx(c.hidden_s + c.tail_s)
    numbers = [c.buckets for c in table if c.bucket_mb != 25]  # the default has a first bucket of its own
    assert numbers == sorted(numbers, reverse=True) and numbers[0] > numbers[-1]
    whole = table[-1]
    assert whole.buckets == 1 and whole.hidden_s == pytest.approx(0.0, abs=1e-12) and whole.largest_bytes < 200 * MIB
    assert whole.tail_s == max(c.tail_s for c in table if c.tail_s is not None)


def test_sizes_are_known_where_times_are_not() -> None:
    table = choices(priced("dp=2 ddp bucket_mb=7"))
    assert 7.0 in [c.bucket_mb for c in table] and all(c.tail_s is None and c.buckets for c in table)
    assert choices(priced("dp=2 full_shard")) == () == bucketings(priced("dp=1").case)


@pytest.mark.parametrize("name", ZOO)
def test_ddp_offers_all_gradients_once(name: str) -> None:
    found = priced("dp=2 ddp", model=ZOO[name])
    (b,) = bucketings(found.case)
    whole = 2 * ZOO[name].parameter_count
    assert sum(b.filled) == sum(b.payloads) == whole == sum(r.count * sum(r.sizes) for r in b.runs)


def test_a_timeline_is_plain_data() -> None:
    import json

    data = json.loads(json.dumps(as_json(timeline("dp=4 ddp"))))
    assert data["hidden_s"] + data["tail_s"] == pytest.approx(data["busy_s"])
    assert data["witness"] == "arithmetic" and data["axis"] == ["dp"] and len(data["units"]) == 8
