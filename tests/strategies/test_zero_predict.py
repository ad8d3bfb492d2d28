"""ZeRO by arithmetic: published sums, buckets, rows, and what is refused."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from partita.facts.case import Bucket, Flat
from partita.facts.errors import Refused
from partita.facts.layout import Layout
from partita.facts.ledger import Memory, Traffic, select
from partita.facts.model import Model, counted
from partita.facts.precision import ITEM_BYTES, PRESETS
from partita.facts.work import Training
from partita.plan.account import Account, account
from partita.plan.laws import check
from partita.strategies.zero.buckets import MIB, fill, kinds
from partita.strategies.zero.predict import bucketing
from tests import seed
from tests.tiny import ZOO, tiny_model

ORIGIN = {"pp": 0, "dp": 0, "cp": 0, "tp": 0}
LAYOUTS = ("zero1", "zero1 zero_sync=all_reduce", "zero2")


def priced(model: Model, layout: str, precision: str = "bf16-master", batch: int = 0, **more: object) -> Account:
    read = Layout.parse(layout)
    work = Training(batch or read.dp * read.mb, 8, PRESETS[precision])
    return account(model, read, replace(work, **more))  # type: ignore[arg-type]


def rows(found: Account, verb: str) -> list[Traffic]:
    return [r for r in found.ledger.traffic if r.owner == "zero" and r.verb == verb]


def held(found: Account, name: str, at: dict[str, int] = ORIGIN) -> int:
    """Bytes of an object on one rank, padding aside, persistent or at the optimizer's step."""
    mine = select(found.ledger.memory, object=name, phase=["persistent", "step"])
    return sum(r.bytes for r in mine if isinstance(r, Memory) and at in r.ranks)


# Published sums


@pytest.mark.parametrize("layout, each, total_gb", [("zero1", 4 + 12 / 64, 31.4), ("zero2", 2 + 14 / 64, 16.6)])
def test_bytes_per_parameter_of_the_zero_paper(layout: str, each: float, total_gb: float) -> None:
    """Rajbhandari et al. 2020, figure 1: 7.5 billion parameters on 64 ranks, Adam with a float32 master."""
    found = priced(counted("7.5B", 7_500_000_000), f"dp=64 {layout}")
    state = found.ledger.persistent_bytes(ORIGIN)
    assert round(state / 1e9, 1) == total_gb
    assert state / 7.5e9 == pytest.approx(each, rel=1e-6)


def test_a_replica_of_70b_over_four_ranks() -> None:
    """4.375e9 parameters a device (70e9 over tp 8 x pp 2), ZeRO-1 over dp 4: 17.5 GB of weights and gradients, 13.1 GB
    of optimizer state and master, and 13.1 GB sent for an all-reduce of 8.75 GB of gradients."""
    part = counted("a sixteenth of 70B", 4_375_000_000)
    summed = priced(part, "dp=4 zero1 zero_sync=all_reduce")
    assert held(summed, "parameters") + held(summed, "gradients") == 17_500_000_000
    assert held(summed, "master") + held(summed, "optimizer state") == 13_125_000_000
    (gradients,), (parameters,) = rows(summed, "all_reduce"), rows(summed, "all_gather")
    assert (gradients.bytes, parameters.bytes) == (8_750_000_000, 8_750_000_000)
    mesh = summed.ledger.mesh
    assert gradients.link_bytes(mesh) == 13_125_000_000 and parameters.link_bytes(mesh) == 6_562_500_000
    (scattered,) = rows(priced(part, "dp=4 zero1"), "reduce_scatter")
    assert scattered.link_bytes(mesh) == 6_562_500_000


# Buckets


def one_by_one(model: Model, item: int, cap: int, first: int) -> list[Bucket]:
    """The rule, parameter by parameter."""
    out, size, matrices, limit = [], 0, 0, first
    for p in reversed(model.parameters):
        size, matrices = size + p.elements, matrices + (p.elements if len(p.shape) > 1 else 0)
        if size * item >= limit:
            out.append(Bucket(size, matrices))
            size, matrices, limit = 0, 0, cap
    return out + ([Bucket(size, matrices)] if size else [])


@pytest.mark.parametrize("name", ZOO)
def test_buckets_are_filled_in_the_reverse_of_the_models_order(name: str) -> None:
    chance = random.Random(seed.value())
    model = replace(ZOO[name], layers=chance.randint(1, 40))
    for mb in (0.001, 0.01, 0.05, round(chance.uniform(0.001, 1), 4), 50.0):
        item = chance.choice((2, 4, 8))
        cap = int(mb * MIB)
        want = one_by_one(model, item, cap, cap)
        assert list(fill(model.spans, item, mb)) == want, (mb, item)
        assert Counter(dict(kinds(model.spans, item, mb))) == Counter(want)


def test_the_default_size_has_a_small_first_bucket() -> None:
    wide = tiny_model(layers=8, hidden=512, ffn=1024, heads=8, kv_heads=8, head_dim=64)
    assert list(fill(wide.spans, 4, 25.0)) == one_by_one(wide, 4, 25 * MIB, MIB)


@pytest.mark.parametrize("case", [0, 1, seed.value()])
def test_chunks_cover_every_element_once(case: int) -> None:
    chance = random.Random(case)
    for _ in range(200):
        ranks = chance.randint(1, 9)
        kinds_of = []
        for _ in range(chance.randint(1, 4)):
            n = chance.randint(1, 40)
            kinds_of.append((Bucket(n, chance.randint(0, n)), chance.randint(1, 3)))
        flat = Flat("zero", ("dp",), ranks, (), tuple(kinds_of))
        total = sum(b.elements * n for b, n in kinds_of)
        assert sum(flat.elements(i) for i in range(ranks)) == total
        assert flat.stored * ranks == total + flat.padding
        for i in range(ranks):
            assert sum(flat.pieces(i)) == flat.elements(i) <= flat.stored
        changes = {i for i in range(1, ranks) if list(flat.pieces(i)) != list(flat.pieces(i - 1))}
        whole = [i for i in changes if i not in flat.cuts()]
        assert whole == [], "a change that no cut names"


# Rows


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("precision", ["fp64", "fp32", "autocast-bf16", "bf16-master", "fp16-master"])
def test_every_byte_is_reduced_and_gathered_once(layout: str, precision: str) -> None:
    model = ZOO["all_biases"]
    found = priced(model, f"dp=3 bucket_mb=0.02 {layout}", precision)
    p, lies = found.case.precision, found.case.flat
    assert lies is not None and lies.padding > 0
    verb = "all_reduce" if "all_reduce" in layout else "reduce_scatter"
    reduced, gathered = rows(found, verb), rows(found, "all_gather")
    assert {r.phase for r in reduced} == {"backward"} and {(r.phase, r.hidden_by) for r in gathered} == {
        ("step", "forward")
    }
    padding = 0 if verb == "all_reduce" else lies.padding
    assert sum(r.bytes * r.count for r in reduced) == (model.parameter_count + padding) * ITEM_BYTES[p.gradients]
    assert sum(r.bytes * r.count for r in gathered) == (model.parameter_count + lies.padding) * ITEM_BYTES[p.weights]
    assert sum(r.count for r in reduced) == sum(r.count for r in gathered) > 2


def test_accumulation_repeats_the_reductions_of_zero2_alone() -> None:
    counts = {}
    for layout in LAYOUTS:
        for batch in (2, 6):
            found = priced(ZOO["plain"], f"dp=2 bucket_mb=0.02 {layout}", batch=batch)
            counts[layout, batch] = (
                sum(r.count for r in rows(found, "all_reduce") + rows(found, "reduce_scatter")),
                sum(r.count for r in rows(found, "all_gather")),
            )
    for layout in LAYOUTS:
        once, thrice = counts[layout, 2], counts[layout, 6]
        assert thrice[1] == once[1]
        assert thrice[0] == once[0] * (3 if layout == "zero2" else 1)


def test_together_they_send_what_an_all_reduce_sends() -> None:
    """ZeRO, section 7.2.1, with whole gradients summed everywhere for comparison: half as much again."""
    model = tiny_model(hidden=48, ffn=64, head_dim=12, vocab=96)
    sent = {
        layout: priced(model, f"dp=4 {layout}", "fp32", clip=None).ledger.at(ORIGIN).where(owner={"ddp", "zero"})
        for layout in ("ddp", *LAYOUTS)
    }
    links = {
        k: sum(r.link_bytes(v.mesh) for r in v.traffic if r.kind == "data" and r.phase not in ("init", "early"))
        for k, v in sent.items()
    }
    assert links["zero1"] == links["zero2"] == links["ddp"]
    assert links["zero1 zero_sync=all_reduce"] == 1.5 * links["ddp"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_every_rank_owns_adds_up(layout: str) -> None:
    model = ZOO["qk_norm"]
    found = priced(model, f"dp=7 bucket_mb=0.004 {layout}")
    ranks = [{**ORIGIN, "dp": i} for i in range(7)]
    n = model.parameter_count
    assert [held(found, "parameters", at) for at in ranks] == [2 * n] * 7
    assert sum(held(found, "master", at) for at in ranks) == 4 * n
    assert sum(held(found, "optimizer state", at) for at in ranks) == 8 * n
    gradients = [held(found, "gradients", at) for at in ranks]
    assert sum(gradients) == 2 * n if layout == "zero2" else gradients == [2 * n] * 7
    assert len({held(found, "master", at) for at in ranks}) > 1, "sizes are meant to differ by rank"
    padding = select(found.ledger.memory, object="padding")
    assert {r.unit for r in padding} == ({"parameters"} if "all_reduce" in layout else {"parameters", "gradients"})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ZOO)
def test_the_laws_hold(layout: str, name: str) -> None:
    found = priced(ZOO[name], f"dp=3 {layout}")
    assert [f for f in check(found) if f.holds is False] == []
    assert found.rooms == ("zero", "step")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batch", [2, 6])
def test_buckets_for_the_clock_are_those_of_the_rows(layout: str, batch: int) -> None:
    found = priced(ZOO["tied"], f"dp=2 bucket_mb=0.02 {layout}", batch=batch)
    (b,) = bucketing(found.case)
    times = found.case.micro_batches if b.every_pass else 1
    want = Counter({r.bytes: r.count for r in rows(found, b.verb)})
    assert Counter({size: n * times for size, n in Counter(b.payloads).items()}) == want
    assert sum(b.filled) == sum(sum(r.sizes) * r.count for r in b.runs)
    assert b.every_pass == (layout == "zero2")


def test_zero2_holds_two_buckets_of_whole_gradients_where_zero1_holds_all() -> None:
    model = tiny_model(layers=24)
    peak = {}
    for layout in ("zero1", "zero2"):
        found = priced(model, f"dp=8 bucket_mb=0.02 {layout}", "fp32").ledger
        grads = [r for r in found.memory if r.phase == "backward" and r.object in ("gradients", "gradient buckets")]
        peak[layout] = sum(r.bytes for r in grads)
    whole = 4 * model.parameter_count
    assert peak["zero1"] >= 0.9 * whole and peak["zero2"] < 0.35 * whole


# Refusals


@pytest.mark.parametrize(
    "layout, words",
    [
        ("dp=4 zero2 zero_sync=all_reduce", ("zero2", "zero_sync=all_reduce", "zero1")),
        ("dp=4 zero1 shard=2", ("shard=2", "fsdp")),
        ("dp=4 ddp zero_sync=all_reduce", ("zero_sync=all_reduce", "zero")),
        ("dp=2 tp=2 zero1", ("tp=2",)),
    ],
)
def test_what_does_not_work_is_refused(layout: str, words: tuple[str, ...]) -> None:
    with pytest.raises(Refused) as refusal:
        priced(ZOO["plain"], layout)
    for word in words:
        assert word in str(refusal.value)


def test_a_room_that_does_not_scale_the_loss_refuses_float16() -> None:
    with pytest.raises(Refused, match=r"full_shard does not do; what works: fp16-master with zero1 or zero2"):
        priced(ZOO["plain"], "dp=2 full_shard", "fp16-master")
    for layout in LAYOUTS:
        found = priced(ZOO["plain"], f"dp=2 {layout}", "fp16-master")
        (flag,) = [r for r in found.ledger.traffic if "overflowed" in r.why]
        assert (flag.verb, flag.axis, flag.dtype, flag.bytes, flag.count) == ("all_reduce", ("dp",), "float32", 4, 1)


def test_one_data_rank_has_no_zero() -> None:
    found = priced(ZOO["plain"], "dp=1 zero1", batch=2)
    assert found.rooms == ("step",) and found.ledger.traffic == ()
