"""The account: rooms' rows composed, at a cost that grows neither with layers nor with ranks."""

from __future__ import annotations

import math
import random
import time

import pytest

from partita.facts.errors import BadInput, Refused
from partita.facts.layout import Layout
from partita.facts.ledger import MEMORY_PHASES, TRAFFIC_PHASES
from partita.facts.model import Model, counted
from partita.facts.precision import PRESETS
from partita.facts.work import Training
from partita.plan.account import Account, account
from partita.plan.fit import refuse_machine
from partita.plan.peak import peaks
from tests import seed
from tests.tiny import ZOO, tiny_model

LAYOUTS = ("dp=1", "dp=2", "dp=3 full_shard", "dp=4 shard_grad_op", "dp=6 shard=3 full_shard", "dp=7 bucket_mb=0.01")


def priced(model: Model, layout: str, precision: str = "bf16-master", batches: int = 1) -> Account:
    read = Layout.parse(layout)
    return account(model, read, Training(read.dp * read.mb * batches, 8, PRESETS[precision]))


def wide(layers: int) -> Model:
    """Llama-3.1-405B's sizes."""
    return tiny_model(
        layers=layers, hidden=16384, ffn=53248, heads=128, kv_heads=8, head_dim=128, vocab=128256, max_positions=131072
    )


# Rows


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["plain", "tied", "all_biases"])
def test_every_row_has_an_owner_that_is_in_the_layout_and_a_reason(layout: str, name: str) -> None:
    found = priced(ZOO[name], layout)
    for r in (*found.ledger.memory, *found.ledger.traffic):
        assert r.owner in found.rooms and r.why and r.bytes > 0
    for r in found.ledger.gradients:
        assert r.owner in found.rooms and r.axis
    assert {r.phase for r in found.ledger.memory} <= set(MEMORY_PHASES)
    assert {r.phase for r in found.ledger.traffic} <= set(TRAFFIC_PHASES)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_axes_of_rows_are_canonical(layout: str) -> None:
    """Parts in mesh order, axes of one rank dropped, no call among one rank."""
    found = priced(ZOO["plain"], layout).ledger
    for row in found.traffic:
        assert row.axis == found.mesh.live(*row.axis) and found.mesh.group_size(row.axis) > 1 and row.count > 0
    for gradient in found.gradients:
        assert gradient.axis == found.mesh.live(*gradient.axis)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_predicted_calls_have_one_row_a_key_and_unit(layout: str) -> None:
    rows = [(r.key, r.unit, r.owner, r.why) for r in priced(ZOO["plain"], layout).ledger.traffic]
    assert len(set(rows)) == len(rows)


def test_one_device_has_no_traffic_and_no_gradient_rows() -> None:
    found = priced(ZOO["plain"], "dp=1")
    assert found.rooms == ("step",) and found.ledger.traffic == () == found.ledger.gradients
    assert found.ledger.mesh.world == 1


def test_a_bare_count_has_model_state_and_no_activations() -> None:
    found = priced(counted("7B", 7_000_000_000), "dp=4 full_shard").ledger
    objects = {r.object for r in found.memory}
    assert {"parameters", "gradients", "optimizer state"} <= objects and "activations" not in objects


# The case


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_case_holds_every_parameter_under_its_own_name(name: str, layout: str) -> None:
    case = priced(ZOO[name], layout).case
    assert set(case.by_name) == {p.name for p in ZOO[name].parameters}
    assert all(case.by_name[p.name].parameter.shape == p.shape for p in ZOO[name].parameters)


@pytest.mark.parametrize("draw", [0, 1, seed.value()])
def test_rows_of_every_rank_are_those_of_its_own_shards(draw: int) -> None:
    """Model state by counting each rank's elements, on random models and layouts: no folding."""
    chance = random.Random(draw)
    for _ in range(12):
        heads = chance.choice((2, 3, 4))
        model = tiny_model(
            layers=chance.randint(1, 5),
            hidden=chance.randint(5, 50),
            ffn=chance.randint(5, 70),
            heads=heads,
            kv_heads=chance.choice((1, heads)),
            head_dim=chance.choice((2, 6)),
            vocab=chance.randint(3, 200),
            tied=chance.random() < 0.5,
            qkv_bias=chance.random() < 0.5,
        )
        shards, copies = chance.choice((2, 3, 5, 8, 40)), chance.choice((1, 1, 2, 3))
        found = priced(model, f"dp={shards * copies} full_shard shard={shards}", "fp32").ledger
        for rank in range(found.mesh.world):
            at = found.mesh.coordinate(rank)
            i = rank % shards
            own = padded = 0
            for p in model.parameters:
                chunk = math.ceil(p.shape[0] / shards)
                width = math.prod(p.shape[1:])
                own += len(range(*slice(i * chunk, (i + 1) * chunk).indices(p.shape[0]))) * width
                padded += chunk * width
            rows = found.at(at).where(phase="persistent").memory_by("object")
            assert rows.get(("parameters",), 0) == 4 * own
            assert rows.get(("optimizer state",), 0) == 8 * own
            assert rows.get(("padding",), 0) == 4 * (padded - own)


def test_precision_of_the_case_is_as_the_rooms_store_it() -> None:
    assert priced(ZOO["plain"], "dp=2").case.precision == PRESETS["bf16-master"]
    stored = priced(ZOO["plain"], "dp=2 full_shard").case
    assert (stored.precision.weights, stored.precision.gathered, stored.precision.master) == (
        "float32",
        "bfloat16",
        None,
    )
    assert stored.work.precision == PRESETS["bf16-master"], "what was asked for stays"


def test_what_is_refused_is_refused_before_anything_is_priced() -> None:
    for layout in ("dp=4 recompute=wild", "dp=6 full_shard shard=4"):
        with pytest.raises(Refused, match=r"^layout '"):
            priced(ZOO["plain"], layout)


def test_the_same_question_has_the_same_answer() -> None:
    for layout in LAYOUTS:
        assert priced(ZOO["plain"], layout).ledger == priced(ZOO["plain"], layout).ledger


# Cost


@pytest.mark.parametrize("state", ["ddp", "full_shard", "shard_grad_op", "full_shard shard=64"])
def test_an_account_costs_the_same_for_many_layers_and_ranks(state: str) -> None:
    """126 layers of 405B on 16,384 ranks: about a millisecond; the limit leaves room for a busy machine."""
    layout = Layout.parse(state, 16384)
    model, work = wide(126), Training(16384, 8192)
    best = math.inf
    for _ in range(30):
        begin = time.perf_counter()
        account(model, layout, work)
        best = min(best, time.perf_counter() - begin)
    assert best < 0.004


@pytest.mark.parametrize("state", ["ddp", "full_shard", "shard_grad_op"])
def test_rows_do_not_grow_with_layers_or_ranks(state: str) -> None:
    few, many = (priced(wide(layers), f"dp={dp} {state}").ledger for layers, dp in ((8, 8), (126, 16384)))
    assert len(many.memory) <= 1.5 * len(few.memory) + 12
    assert len(many.traffic) <= len(few.traffic) + 2


def test_one_machine_must_hold_all_of_its_ranks() -> None:
    """A CPU's ranks share its memory: the peak of one, times their number, against what there is."""
    found = account(tiny_model(), Layout.parse("full_shard", 4), Training(4, 8))
    most = max(p.bytes for c in found.ledger.corners() for p in peaks(found.ledger, c))
    refuse_machine(found, 4, 4 * most)
    with pytest.raises(BadInput, match=r"needs .* GB at its peak on 4 ranks of one machine"):
        refuse_machine(found, 4, 4 * most - 1)
