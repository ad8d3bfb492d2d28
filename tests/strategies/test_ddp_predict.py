"""DDP: its rows against torch's rule for buckets, and the order in which a real backward makes gradients ready."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from partita.facts.layout import Layout
from partita.facts.ledger import Traffic
from partita.facts.model import Model
from partita.facts.precision import ITEM_BYTES, PRESETS
from partita.facts.work import Training
from partita.plan.account import Account, account
from partita.strategies.ddp.predict import MIB, buckets, ready_in_unit, ready_runs, steady_buckets
from tests import seed
from tests.tiny import ZOO, tiny_model


def priced(model: Model, layout: str, precision: str = "fp32", batch: int = 0) -> Account:
    read = Layout.parse(layout)
    return account(model, read, Training(batch or read.dp * read.mb, 8, PRESETS[precision]))


def rows(found: Account, phase: str) -> list[Traffic]:
    return [r for r in found.ledger.traffic if r.owner == "ddp" and r.phase == phase]


def one_by_one(sizes: list[int], cap: int, first_cap: int) -> list[int]:
    return buckets([(sizes, 1)], cap, first_cap)


# Buckets


@pytest.mark.parametrize("case", [0, 1, 2, seed.value()])
def test_buckets_are_those_of_torch(case: int) -> None:
    torch = pytest.importorskip("torch")
    import torch.distributed as dist

    chance = random.Random(case)
    for _ in range(150):
        item, dtype = chance.choice(((2, torch.bfloat16), (4, torch.float32), (8, torch.float64)))
        largest = chance.choice((3, 50, 3000))
        tensors = [torch.empty(chance.randint(1, largest), dtype=dtype) for _ in range(chance.randint(1, 60))]
        sizes = [t.numel() * item for t in tensors]
        first, cap = (chance.randint(1, chance.choice((20, 200, 20000))) for _ in range(2))
        limits = [first, cap] if chance.random() < 0.7 else [cap]
        indices, _ = dist._compute_bucket_assignment_by_size(tensors, limits)
        assert one_by_one(sizes, cap, limits[0]) == [sum(sizes[i] for i in b) for b in indices]


@pytest.mark.parametrize("case", [0, 1, seed.value()])
def test_buckets_of_alike_units_are_those_of_their_tensors_one_by_one(case: int) -> None:
    chance = random.Random(case)
    for _ in range(200):
        runs = [
            ([chance.randint(1, 30) for _ in range(chance.randint(1, 9))], chance.choice((1, 1, 2, 40)))
            for _ in range(chance.randint(1, 4))
        ]
        flat = [s for sizes, count in runs for _ in range(count) for s in sizes]
        cap, first = chance.randint(1, 400), chance.randint(1, 100)
        assert buckets(runs, cap, first) == one_by_one(flat, cap, first)


def test_a_bucket_closes_when_it_has_reached_its_cap() -> None:
    assert one_by_one([4, 4, 4, 4, 4], 8, 8) == [8, 8, 4]
    assert one_by_one([4, 4, 4, 4, 4], 12, 1) == [4, 12, 4]
    assert one_by_one([100, 1, 1], 8, 8) == [100, 2]
    assert one_by_one([], 8, 8) == []


def test_the_first_bucket_has_a_cap_of_its_own_only_where_the_size_is_unset() -> None:
    """torch: bucket_cap_mb=None is 25 MiB with a first bucket of 1 MiB; a number caps every bucket."""
    wide = tiny_model(layers=8, hidden=512, ffn=1024, heads=8, kv_heads=8, head_dim=64)
    unset = steady_buckets(priced(wide, "dp=2").case)
    # float32: the head is 101 x 512 x 4 = 206,848 B and the norm 2,048 B; down (2 MiB) then closes the first bucket.
    assert unset[0] == 206_848 + 2_048 + 1024 * 512 * 4
    assert all(b >= 25 * MIB for b in unset[1:-1]) and len(unset) > 2
    asked = steady_buckets(priced(wide, "dp=2 bucket_mb=24").case)
    assert all(b >= 24 * MIB for b in asked[:-1])
    assert sum(unset) == sum(asked) == 4 * wide.parameter_count
    assert max(steady_buckets(priced(wide, "dp=2 bucket_mb=0.001").case)) == 1024 * 512 * 4


# The order in which gradients become ready


def order_of_a_real_backward(model: Model) -> list[str]:
    torch = pytest.importorskip("torch")
    from partita.model.decoder import Decoder, plain
    from partita.model.loss import vocabulary_loss

    decoder = Decoder(model)
    seen: list[str] = []
    for name, p in decoder.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
    ids = torch.randint(0, model.vocab, (2, 9))
    logits = decoder(ids, torch.arange(9), plain(model))
    vocabulary_loss(logits, ids.roll(-1, 1)).backward()
    return seen


@pytest.mark.parametrize("name", ZOO)
def test_ready_order_is_that_of_a_real_backward(name: str) -> None:
    model = ZOO[name]
    expanded = []
    case = priced(model, "dp=2").case
    for unit, span in zip(reversed(case.units), reversed(model.spans)):
        for i in reversed(range(span.first, span.end)) if span.is_blocks else [0]:
            expanded += [h.parameter.name.replace("*", str(i)) for h in ready_in_unit(unit)]
    assert expanded == order_of_a_real_backward(model)
    shapes = {p.name: p.elements for p in model.parameters}
    assert [s for sizes, count in ready_runs(case) for s in count * sizes] == [4 * shapes[n] for n in expanded]


@pytest.mark.parametrize(
    "changes",
    [
        {"norm_bias": True, "norm": "layernorm", "positions": "learned", "mlp": "gelu", "qkv_bias": True},
        {"mlp": "relu", "embed_norm": True, "norm_bias": True},
        {"mlp": "relu2"},
    ],
)
def test_models_that_only_plan_have_an_order_of_every_parameter_too(changes: dict[str, object]) -> None:
    model = tiny_model(runs=False, **changes)
    assert sum(steady_buckets(priced(model, "dp=2").case)) == 4 * model.parameter_count


# Rows


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16-master", "autocast-bf16"])
def test_every_gradient_byte_is_reduced_once(name: str, precision: str) -> None:
    model = ZOO[name]
    found = priced(model, "dp=3 bucket_mb=0.02", precision)
    steady = rows(found, "backward")
    item = {"fp64": 8, "fp32": 4, "bf16-master": 2, "autocast-bf16": 4}[precision]
    assert {(r.verb, r.axis, r.kind) for r in steady} == {("all_reduce", ("dp",), "data")}
    assert sum(r.bytes * r.count for r in steady) == model.parameter_count * item
    assert {r.dtype for r in steady} == {found.case.precision.gradients}
    assert Counter({r.bytes: r.count for r in steady}) == Counter(steady_buckets(found.case))
    assert sum(r.count for r in steady) > 2
    assert rows(found, "forward") == rows(found, "step") == []


def test_accumulation_does_not_reduce_more() -> None:
    once, thrice = (priced(ZOO["plain"], "dp=2", batch=b) for b in (2, 6))
    assert thrice.case.micro_batches == 3
    assert rows(once, "backward") == rows(thrice, "backward")


def test_a_rank_sends_twice_the_share_of_the_others() -> None:
    """2(r-1)/r of every gradient byte (Li et al. 2020, "PyTorch Distributed", section 3.2)."""
    model = ZOO["plain"]
    found = priced(model, "dp=4 bucket_mb=1000")
    (row,) = rows(found, "backward")
    assert row.link_bytes(found.ledger.mesh) == round(4 * model.parameter_count * 2 * 3 / 4)


def test_the_constructor_checks_shapes_and_sends_rank_0s_parameters() -> None:
    model = tiny_model(qkv_bias=True)
    init = rows(priced(model, "dp=4"), "init")
    control = [(r.verb, r.dtype, r.bytes, r.count) for r in init if r.kind == "control"]
    dims = sum(len(p.shape) for p in model.parameters)
    assert control == [("all_gather", "int64", 8 * 4, 1), ("broadcast", "int64", 16 * dims, 1)]
    data = [(r.verb, r.dtype, r.bytes, r.count) for r in init if r.kind == "data"]
    assert data == [("broadcast", "float32", 4 * model.parameter_count, 1)]


def test_parameters_are_sent_in_buckets_of_250_mib() -> None:
    wide = tiny_model(layers=4, hidden=4096, ffn=16384, heads=32, kv_heads=32, head_dim=128)
    sent = [r for r in rows(priced(wide, "dp=2"), "init") if r.kind == "data"]
    assert sum(r.bytes * r.count for r in sent) == 4 * wide.parameter_count
    sizes = [p.elements * 4 for p in wide.parameters]
    assert Counter({r.bytes: r.count for r in sent}) == Counter(one_by_one(sizes, 250 * MIB, 250 * MIB))
    assert sum(r.count for r in sent) > 4


def test_every_parameter_is_partial_over_the_data_ranks() -> None:
    found = priced(ZOO["all_biases"], "dp=2").ledger.gradients
    assert {g.parameters for g in found} == {p.name for s in ZOO["all_biases"].spans for p in s.parameters}
    assert {(g.axis, g.relation, g.divisor) for g in found} == {
        (("dp",), "partial", "counted tokens of the global batch")
    }


def test_one_data_rank_has_no_ddp() -> None:
    found = priced(ZOO["plain"], "dp=1", batch=2)
    assert found.rooms == ("step",) and found.ledger.traffic == () and found.ledger.gradients == ()


def test_nothing_shrinks_with_ranks() -> None:
    one, many = (priced(ZOO["plain"], f"dp={n}").ledger for n in (2, 64))
    at = {"pp": 0, "dp": 0, "cp": 0, "tp": 0}
    assert one.persistent_bytes(at) == many.persistent_bytes(at)


@pytest.mark.parametrize("precision", ["fp32", "bf16-master"])
@pytest.mark.parametrize("batch", [2, 6])
def test_buckets_stand_all_the_time_and_accumulated_gradients_beside_them(precision: str, batch: int) -> None:
    """Gradients are views into the buckets, so there is one copy; while micro-batches accumulate without
    synchronisation they are tensors of their own, and there are two."""
    model = ZOO["four_layers"]
    found = priced(model, "dp=2", precision, batch)
    whole = model.parameter_count * ITEM_BYTES[found.case.precision.gradients]
    for phase in ("forward", "backward"):
        held = [r for r in found.ledger.memory if r.phase == phase and r.object in ("gradients", "gradient buckets")]
        assert sum(r.bytes for r in held) == whole * (1 if batch == 2 else 2), phase
