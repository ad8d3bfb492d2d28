"""Kernels: the roofline on hand-computed operations, and what each rate rests on."""

from __future__ import annotations

import math

import pytest

from partita.facts.cluster import Cluster, find_cluster
from partita.facts.device import Device, Frozen
from partita.facts.layout import Layout
from partita.facts.work import Training
from partita.plan.account import account
from partita.plan.collectives import Level, Path, path
from partita.plan.kernels import LAUNCH_S, Rates, Unmeasured, rates
from partita.plan.operations import units
from tests.tiny import ZOO, tiny_model

PLAIN = Rates("bfloat16", 100.0, 10.0, 40.0, 20.0, 200.0, 0.0, ())


def device(**changes: object) -> Device:
    values = {"name": "x", "memory_bytes": 1, "memory_bytes_per_s": 10.0, "peak_flops": Frozen.of({"bf16": 100.0})}
    return Device(**{**values, **changes})  # type: ignore[arg-type]


def test_a_product_takes_the_longer_of_arithmetic_and_memory() -> None:
    # 2 x 10 x 10 x 100 = 20,000 FLOPs at 100/s; (1,000 + 1,000 + 100) x 2 B at 10 B/s.
    assert PLAIN.gemm_s(10, 10, 100) == max(200.0, 420.0)
    assert PLAIN.gemm_s(100, 100, 100) == 2e6 / 100
    assert PLAIN.gemm_s(10, 10, 100, out_item=4) == (2000 * 2 + 100 * 4) / 10


def test_backward_attention_multiplies_five_times_where_forward_does_twice() -> None:
    assert PLAIN.attention_s(400.0, 0.0) == 10.0
    assert PLAIN.attention_s(400.0, 0.0, backward=True) == 50.0
    assert PLAIN.attention_s(400.0, 5000.0) == 500.0


@pytest.mark.parametrize(
    ("name", "dtype", "flops"),
    [
        ("h100:8", "bfloat16", 794.5e12),
        ("a100:8", "bfloat16", 271.2e12),
        ("a100:8", "float16", 271.2e12),  # no FP16 ceiling: the share of BF16's
        ("h200:8", "bfloat16", 989.5e12 * 1453.4 / 1979),  # only FP8 was measured
        ("l40s:8", "bfloat16", 362.05e12),  # nothing was measured: the peak
    ],
)
def test_the_rate_of_products_is_a_measured_ceiling_or_says_what_it_is(name: str, dtype: str, flops: float) -> None:
    found = rates(find_cluster(name).device, dtype)
    assert found.flops == pytest.approx(flops, rel=1e-12)
    basis = dict(found.basis)
    assert ("measured" in basis["matrix products"]) and ("lower bound" in basis["matrix products"]) == (
        name == "l40s:8"
    )
    assert found.attention_forward <= found.flops and found.attention_backward <= found.flops
    assert all(says for says in basis.values()) and found.launch_s == LAUNCH_S


def test_a_device_without_rates_is_never_given_any() -> None:
    with pytest.raises(Unmeasured, match="unknown until `partita calibrate`"):
        rates(find_cluster("local:2").device, "float32")
    with pytest.raises(Unmeasured, match="memory rate .* unknown until"):
        rates(device(memory_bytes_per_s=None), "bfloat16")
    with pytest.raises(Unmeasured, match="no rate for float64 .* known for bf16"):
        rates(device(), "float64")


def test_the_users_own_rates_are_used_as_they_stand() -> None:
    text = """
    devices_per_node = 2
    [device]
    name = "ours"
    kind = "cpu"
    memory_bytes = 1e9
    memory_bytes_per_s = 20e9
    sustained_memory_bytes_per_s = 15e9
    [device.peak_flops]
    fp32 = 1e12
    [device.sustained_flops]
    fp32 = 4e11
    [link]
    kind = "memory"
    bytes_per_s = 5e9
    """
    found = rates(Cluster.from_toml(text).device, "float32")
    assert (found.flops, found.bytes_per_s, found.peak_flops, found.launch_s) == (4e11, 15e9, 1e12, 0.0)
    assert found.attention_forward == 4e11 and "no figure for attention" in dict(found.basis)["attention"]


# Operations


@pytest.mark.parametrize("name", ZOO)
def test_products_of_all_units_are_the_models_flops(name: str) -> None:
    """With memory that costs nothing, time is FLOPs over the rate: 2 per matrix element and token, twice backward."""
    from partita.facts.flops import head_forward, model_flops_per_step

    model = ZOO[name]
    case = account(model, Layout(), Training(1, 8)).case
    free = Rates("bfloat16", 1.0, math.inf, 1.0, 1.0, 1.0, 0.0, ())
    work = units(case, free)
    forward = sum(work[u.name].by_kind(False)["matrix products"] * u.count for u in case.units)
    backward = sum(work[u.name].by_kind(True)["matrix products"] * u.count for u in case.units)
    attention = sum(work[u.name].by_kind(False)["attention"] * u.count for u in case.units)
    assert 2 * forward == backward
    assert 3 * (forward + attention) == model_flops_per_step(model, 8, 8, "causal")
    assert work["last"].by_kind(False)["matrix products"] == head_forward(model, 8).total


@pytest.mark.parametrize("name", ZOO)
def test_every_parameters_gradient_is_complete_within_its_units_backward(name: str) -> None:
    from partita.facts.bucketing import word_of

    case = account(ZOO[name], Layout(), Training(1, 8)).case
    work = units(case, PLAIN)
    for unit in case.units:
        ready = work[unit.name].ready_s
        for held in unit.held:
            assert 0 < ready[word_of(held.parameter.name)] <= work[unit.name].backward_s * (1 + 1e-9)
        if unit.is_blocks:
            assert ready["down"] < ready["up"] < ready["mlp_norm"] < ready["o"] < ready["q"] < ready["attn_norm"]


def test_a_model_known_by_its_count_has_no_shapes_to_time() -> None:
    from partita.facts.model import counted

    case = account(counted("7B", 7_000_000_000), Layout(), Training(1, 8)).case
    with pytest.raises(Unmeasured, match="needs its shapes"):
        units(case, PLAIN)


# Collectives

NONE = Level(1, math.inf, 0.0)


def test_a_ring_inside_a_node() -> None:
    way = Path("node", "x", Level(4, 100.0, 0.5), NONE, "")
    assert way.seconds("all_gather", 800) == 3 * 0.5 + 0.75 * 800 / 100
    assert way.seconds("reduce_scatter", 800) == way.seconds("all_gather", 800)
    assert way.seconds("all_reduce", 800) == 6 * 0.5 + 1.5 * 800 / 100
    # A small payload goes over a tree: 2 levels up, 2 down.
    assert way.seconds("all_reduce", 4) == 4 * 0.5 + 2 * 4 / 100


def test_two_levels_take_the_slower_one() -> None:
    fast, slow = Level(8, 400.0, 0.0), Level(4, 100.0, 0.0)
    way = Path("network", "x", fast, slow, "")
    assert way.seconds("all_gather", 800) == max(7 / 8 * 800 / 400, 3 / 4 * 800 / 100)
    slower_inside = Path("network", "x", Level(8, 50.0, 0.0), slow, "")
    assert slower_inside.seconds("all_gather", 800) == 7 / 8 * 800 / 50
    # Each of 32 ranks sends 7/32 of its input inside the node; the node's 8 ranks send 24/32 of theirs out of it.
    assert way.seconds("all_to_all", 320) == max(7 / 32 * 320 / 400, 8 * 24 / 32 * 320 / 100)


def test_the_path_of_an_axis_knows_its_links_and_their_measured_share() -> None:
    cluster = find_cluster("h100:4x8")
    case = account(tiny_model(), Layout.parse("dp=32 shard=8 full_shard"), Training(32, 8)).case
    near, far = path(cluster, case.mesh, ("dp.s",)), path(cluster, case.mesh, ("dp.r",))
    assert (near.name, near.inside.ranks, near.between.ranks) == ("node", 8, 1)
    assert near.inside.bytes_per_s == pytest.approx(367.2e9)
    assert (far.name, far.inside.ranks, far.between.ranks) == ("network", 1, 4)
    assert far.between.bytes_per_s == 50e9  # eight sibling groups share eight NICs
    assert "no measured ceiling" in far.basis
    with pytest.raises(Unmeasured, match="rate of shared memory"):
        path(find_cluster("local:32"), case.mesh, ("dp",))
