"""The clock: hand-computed steps, and what holds of every step."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from partita.facts.cluster import Cluster, find_cluster
from partita.facts.layout import Layout
from partita.facts.model import Model
from partita.facts.precision import PRESETS
from partita.facts.work import Training
from partita.plan import play as player
from partita.plan.account import Account, account
from partita.plan.clock import StepTime, as_json, step_time
from partita.plan.kernels import Unmeasured
from partita.plan.play import optimizer_s, play
from partita.plan.streams import Streams
from tests.tiny import ZOO, tiny_model

WIDE = tiny_model(layers=6, hidden=512, ffn=1536, heads=8, kv_heads=4, head_dim=64)


def cluster(devices: int, nodes: int = 1, link: float = 50e9, nic: float = 10e9, memory: float = 1e12) -> Cluster:
    return Cluster.from_toml(
        f"""
        name = "bench"
        nodes = {nodes}
        devices_per_node = {devices}
        nics_per_node = 2
        [device]
        name = "chip"
        memory_bytes = 80e9
        memory_bytes_per_s = {memory}
        [device.peak_flops]
        bf16 = 100e12
        fp32 = 50e12
        [link]
        kind = "nvlink"
        bytes_per_s = {link}
        latency_s = 1e-6
        [nic]
        kind = "infiniband"
        bytes_per_s = {nic}
        latency_s = 3e-6
        """
    )


def priced(layout: str, batches: int = 1, model: Model = WIDE, precision: str = "bf16-master") -> Account:
    read = Layout.parse(layout)
    return account(model, read, Training(read.dp * read.mb * batches, 512, PRESETS[precision]), "cuda")


def timed(layout: str, batches: int = 1, **links: float) -> StepTime:
    found = priced(layout, batches)
    return step_time(found, cluster(found.case.mesh.world, **links))


LAYOUTS = (
    "dp=1",
    "dp=4 ddp",
    "dp=4 ddp bucket_mb=1",
    "dp=4 full_shard",
    "dp=4 shard_grad_op",
    "dp=8 full_shard shard=4",
)


# Two streams


def test_idle_time_is_charged_to_the_calls_that_cause_it() -> None:
    s = Streams()
    s.work("a", 2.0)
    first = s.call("x", "node", 5.0, s.now)  # 2 to 7
    s.work("b", 1.0)  # 2 to 3
    second = s.call("y", "node", 4.0, s.now)  # queues: 7 to 11
    s.wait(second)
    assert (first.begin_s, second.begin_s, s.now) == (2.0, 7.0, 11.0)
    assert (first.exposed_s, second.exposed_s) == (4.0, 4.0)
    other = s.call("z", "network", 3.0, 10.0)  # another lane: 10 to 13
    s.finish()
    assert (other.exposed_s, s.now) == (2.0, 13.0)


def test_a_call_may_come_behind_one_of_another_lane() -> None:
    s = Streams()
    first = s.call("scatter", "node", 2.0, 0.0)
    second = s.call("sum", "network", 3.0, 0.0, behind=first)
    s.wait(second)
    assert (second.begin_s, s.now, first.exposed_s, second.exposed_s) == (2.0, 5.0, 2.0, 3.0)


# By hand


def flat_units(monkeypatch: pytest.MonkeyPatch, forward: float, backward: float) -> None:
    """Every unit takes the same time, and its gradients are complete at its end."""
    from partita.plan.operations import Operation, UnitWork

    words = ("q", "k", "v", "o", "gate", "up", "down", "attn_norm", "mlp_norm", "norm", "head", "embed")
    one = Operation("all", "matrix products", forward, backward, (0, 0), words)
    monkeypatch.setattr(player, "units", lambda case, _: {u.name: UnitWork(u.name, (one,), 0.0) for u in case.units})
    monkeypatch.setattr(player, "optimizer_s", lambda *_: (0.0, 0.0))


class Fixed:
    """A path on which every data call of more than 64 bytes takes the same time."""

    name, link, basis = "node", "wire", ""

    def __init__(self, seconds: float) -> None:
        self.each = seconds

    def seconds(self, verb: str, payload: float) -> float:
        return self.each if payload > 64 else 0.0


def by_hand(monkeypatch: pytest.MonkeyPatch, layout: str, call_s: float, batches: int = 1) -> float:
    flat_units(monkeypatch, 1.0, 2.0)
    monkeypatch.setattr(player, "path", lambda *_: Fixed(call_s))
    found = priced(layout, batches, tiny_model(layers=2))
    return play(found, cluster(2)).streams.now


@pytest.mark.parametrize(("call_s", "total"), [(0.5, 13.0), (1.5, 16.0)])
def test_full_shard_of_two_blocks(monkeypatch: pytest.MonkeyPatch, call_s: float, total: float) -> None:
    """first, two blocks, last: 4 x (1 + 2) = 12 of computation.  The root's gather is waited for: c.  A block's gather
    runs behind the unit before it, 1 forward and 2 backward: 2 x max(0, c - 1).  The root's scatter comes last: c."""
    assert by_hand(monkeypatch, "dp=2 full_shard", call_s) == pytest.approx(total)


def test_a_gather_and_a_scatter_share_the_lane_in_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """c = 3: forward 3 + 2 x 2 idle.  Backward begins at 11: b1's gather 11-14 behind last (2): wait 1; b0's 14-17
    behind b1 (14-16): wait 1; b1's scatter was ready at 16: 17-20; b0 computes 17-19, its scatter 20-23; first 19-21;
    the root's scatter 23-26."""
    assert by_hand(monkeypatch, "dp=2 full_shard", 3.0) == pytest.approx(26.0)


@pytest.mark.parametrize("batches", [1, 2, 3, 7])
def test_ddp_accumulates_without_sending(monkeypatch: pytest.MonkeyPatch, batches: int) -> None:
    """Tiny gradients are one bucket, which is complete when everything is: its call is the last backward's tail."""
    found = by_hand(monkeypatch, "dp=2 ddp", 0.25, batches)
    adding = priced("dp=2 ddp", batches, tiny_model(layers=2))
    extra = sum(play(adding, cluster(2)).accumulate_s[u.name] * u.count for u in adding.case.units)
    assert found == pytest.approx(12 * batches + extra * (batches - 1) + 0.25)


def test_the_optimizers_bytes_by_hand() -> None:
    found = priced("dp=1", model=ZOO["plain"])
    n = ZOO["plain"].parameter_count
    speed = play(found, cluster(1)).rates
    clip, update = optimizer_s(found, speed)
    assert clip == pytest.approx(3 * 2 * n / 1e12)
    # Gradient 2; it widened: 4 + 4; master read and written 8; moments 16; parameter written 2.
    assert update == pytest.approx(36 * n / 1e12)
    sharded = optimizer_s(priced("dp=4 full_shard", model=WIDE), speed)[1]
    whole = optimizer_s(priced("dp=1", model=WIDE), speed)[1]
    assert sharded < whole / 3


# What holds of every step


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batches", [1, 2, 5])
def test_computation_and_exposed_communication_are_the_step(layout: str, batches: int) -> None:
    time = timed(layout, batches)
    assert time.compute_s + time.exposed_s == pytest.approx(time.total_s, rel=1e-9)
    for line in time.lines:
        assert line.witness == "arithmetic" and line.seconds >= 0
        assert line.hidden_s + line.exposed_s == pytest.approx(line.seconds, rel=1e-6, abs=1e-15)
    assert time.tokens_per_s == pytest.approx(512 * batches * Layout.parse(layout).dp / time.total_s)
    assert 0 < time.mfu < 1 and time.convention == "full"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_hidden_fits_behind_computation(layout: str) -> None:
    time = timed(layout)
    sums = {
        p: sum(x.seconds for x in time.lines if (x.kind, x.phase) == ("compute", p)) for p in ("forward", "backward")
    }
    hidden = {p: sum(x.hidden_s for x in time.lines if (x.kind, x.phase) == ("communication", p)) for p in sums}
    lanes = 2 if "shard=4" in layout else 1
    assert hidden["forward"] + hidden["backward"] <= lanes * sum(sums.values())
    assert not any(x.hidden_s for x in time.lines if x.phase == "step")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_faster_links_never_make_a_longer_step(layout: str) -> None:
    totals = [timed(layout, link=rate).total_s for rate in (1e8, 1e9, 1e10, 1e11, 1e13)]
    assert all(slow >= fast * (1 - 1e-12) for slow, fast in itertools.pairwise(totals))
    assert (totals[0] > 2 * totals[-1]) == (layout != "dp=1")


def test_calls_are_those_of_the_ledger() -> None:
    for layout, batches in itertools.product(LAYOUTS, (1, 4)):
        found = priced(layout, batches)
        time = step_time(found, cluster(found.case.mesh.world))
        rows = [r for r in found.ledger.traffic if r.phase in ("forward", "backward", "step") and r.kind == "data"]
        assert sum(x.calls for x in time.lines) == sum(r.count for r in rows), layout


def test_equal_micro_batches_played_once_take_as_long_as_each_played(monkeypatch: pytest.MonkeyPatch) -> None:
    for layout in LAYOUTS:
        folded = timed(layout, 6)
        with monkeypatch.context() as patch:
            patch.setattr(Streams, "quiet", False)
            every = timed(layout, 6)
        assert folded.total_s == pytest.approx(every.total_s, rel=1e-9)
        assert folded.exposed_s == pytest.approx(every.exposed_s, rel=1e-6, abs=1e-12)


def test_a_replayed_block_adds_its_forward() -> None:
    found = priced("dp=4 full_shard")
    units = tuple(replace(u, replay=u.forward) if u.is_blocks else u for u in found.case.units)
    again = replace(found, case=replace(found.case, units=units))
    one, two = step_time(found, cluster(4)), step_time(again, cluster(4))
    line = next(x for x in two.lines if x.name == "recomputation")
    assert two.compute_s == pytest.approx(one.compute_s + line.seconds)
    forward = sum(x.seconds for x in one.lines if (x.kind, x.phase) == ("compute", "forward"))
    assert 0.5 * forward < line.seconds < forward


def test_two_nodes_are_slower_than_one() -> None:
    found = priced("dp=8 ddp")
    assert step_time(found, cluster(4, 2)).total_s > step_time(found, cluster(8)).total_s


def test_times_are_plain_data_and_unknown_rates_are_said() -> None:
    import json

    data = json.loads(json.dumps(as_json(timed("dp=4 full_shard"))))
    assert data["total_s"] == pytest.approx(data["compute_s"] + data["exposed_s"])
    assert data["mfu_convention"] == "full" and data["left_out"] and data["basis"]
    with pytest.raises(Unmeasured, match="calibrate"):
        step_time(priced("dp=2 ddp"), find_cluster("local:2"))
