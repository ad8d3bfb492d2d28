"""What every step holds and sends: model state by precision and optimizer, and its three small messages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from partita.facts.case import Held, Split, Unit
from partita.facts.errors import Refused
from partita.facts.layout import Layout
from partita.facts.ledger import Ledger
from partita.facts.mesh import Mesh
from partita.facts.model import Model, Parameter
from partita.facts.precision import PRESETS
from partita.facts.work import Training
from partita.plan.account import Account, account
from partita.strategies.step.predict import norm_reductions
from tests.tiny import ZOO, tiny_model

AT = {"pp": 0, "dp": 0, "cp": 0, "tp": 0}


def priced(layout: str, model: Model = ZOO["plain"], batch: int = 0, **work: object) -> Account:
    read = Layout.parse(layout)
    asked = Training(batch or read.dp * read.mb, 8, **{"precision": PRESETS["fp32"], **work})  # type: ignore[arg-type]
    return account(model, read, asked)


def state(ledger: Ledger) -> dict[str, int]:
    """Bytes of the step's own rows that stand between steps or when the optimizer steps."""
    kept = [r for r in ledger.at(AT).memory if r.owner == "step" and r.why and "(at " not in r.why]
    return {r.object: r.bytes for r in kept}


# Model state


@pytest.mark.parametrize(
    ("precision", "per_parameter"),
    [
        ("fp32", {"parameters": 4, "gradients": 4, "optimizer state": 8}),
        ("bf16-master", {"parameters": 2, "gradients": 2, "master": 4, "optimizer state": 8}),
        ("pure-bf16", {"parameters": 2, "gradients": 2, "optimizer state": 4}),
        ("autocast-bf16", {"parameters": 4, "gradients": 4, "optimizer state": 8}),
        ("fp64", {"parameters": 8, "gradients": 8, "optimizer state": 16}),
    ],
)
@pytest.mark.parametrize("name", ["plain", "tied", "all_biases"])
def test_bytes_per_parameter_of_each_precision(name: str, precision: str, per_parameter: dict[str, int]) -> None:
    model = ZOO[name]
    found = state(priced("dp=2", model, precision=PRESETS[precision]).ledger)
    scalars = {"optimizer scalars": 4 * len(model.parameters)}
    assert found == {k: n * model.parameter_count for k, n in per_parameter.items()} | scalars


def test_2_2_12_and_4_4_8_are_the_same_16_bytes() -> None:
    model = tiny_model(vocab=100, ffn=56)
    at = {}
    for layout, ranks in (("dp=4", 1), ("dp=4 full_shard", 4)):
        found = priced(layout, model, precision=PRESETS["bf16-master"]).ledger
        at[layout] = (found.persistent_bytes(AT) - 4 * len(model.parameters)) * ranks
    assert at["dp=4"] == at["dp=4 full_shard"] == 16 * model.parameter_count


@pytest.mark.parametrize(("optimizer", "momentum", "moments"), [("adamw", 0.9, 2), ("sgd", 0.9, 1), ("sgd", 0.0, 0)])
def test_state_of_each_optimizer(optimizer: str, momentum: float, moments: int) -> None:
    found = state(priced("dp=2", optimizer=optimizer, momentum=momentum).ledger)
    assert found.get("optimizer state", 0) == 4 * moments * ZOO["plain"].parameter_count
    assert found.get("optimizer scalars", 0) == (4 * len(ZOO["plain"].parameters) if optimizer == "adamw" else 0)


def test_the_mean_rank_holds_its_share() -> None:
    """AdamW's step counters are whole on every rank, everything else is a share."""
    model = tiny_model(vocab=100, ffn=56)
    one, four = (state(priced(f"dp={n} full_shard", model).ledger) for n in (1, 4))
    assert one.pop("optimizer scalars") == four.pop("optimizer scalars")
    assert {k: 4 * v for k, v in four.items()} == one


# Messages


def messages(found: Account) -> list[tuple[str, tuple[str, ...], str, int, int, str]]:
    return [(r.verb, r.axis, r.dtype, r.bytes, r.count, r.phase) for r in found.ledger.traffic if r.owner == "step"]


TOKENS = ("all_reduce", ("dp",), "int64", 8, 1, "forward")
LOSS = ("all_reduce", ("dp",), "float64", 8, 1, "step")


def test_copies_send_a_count_and_a_loss() -> None:
    """Every rank has the whole gradient, so its norm needs no one."""
    assert messages(priced("dp=4")) == [TOKENS, LOSS]


def test_shards_complete_the_norm_too() -> None:
    assert messages(priced("dp=4 full_shard")) == [TOKENS, LOSS, ("all_reduce", ("dp",), "float32", 4, 1, "step")]
    assert messages(priced("dp=4 full_shard", precision=PRESETS["fp64"]))[2][2:4] == ("float64", 8)
    assert messages(priced("dp=4 full_shard", precision=PRESETS["pure-bf16"]))[2][2:4] == ("float32", 4)


def test_copies_of_shards_complete_it_within_one_copy() -> None:
    both = ("dp.r", "dp.s")
    assert messages(priced("dp=6 shard=3 full_shard")) == [
        ("all_reduce", both, "int64", 8, 1, "forward"),
        ("all_reduce", both, "float64", 8, 1, "step"),
        ("all_reduce", ("dp.s",), "float32", 4, 1, "step"),
    ]


def test_without_clipping_the_norm_is_not_measured() -> None:
    assert messages(priced("dp=4 full_shard", clip=None)) == [TOKENS, LOSS]


def test_messages_do_not_grow_with_micro_batches() -> None:
    assert messages(priced("dp=2 full_shard", batch=2)) == messages(priced("dp=2 full_shard", batch=10))


def test_a_norm_over_several_axes_is_completed_one_axis_after_another() -> None:
    """Tensors in shards over dp and tp, over dp alone, over tp alone and whole.

    Over dp two numbers are summed (what tp must still sum, and what is done); over tp then one, in which the first of
    them has joined what lay over tp alone.
    """
    bare = priced("dp=4").case
    mesh = Mesh.of(Layout(dp=4, tp=2))

    def lying(*axes: str) -> Held:
        return Held(Parameter("p", (8, 8), "test", "first"), 1, tuple(Split("room", (a,), 0) for a in axes))

    def reductions(*held: Held) -> list[tuple[str, int]]:
        return list(norm_reductions(replace(bare, mesh=mesh, units=(Unit("first", 1, held, 1, 1),))))

    assert reductions(lying("dp", "tp"), lying("dp"), lying("tp"), lying()) == [("dp", 2), ("tp", 1)]
    assert reductions(lying("tp"), lying()) == [("tp", 1)]
    assert reductions(lying("tp", "dp")) == [("dp", 1), ("tp", 1)]
    assert reductions(lying()) == []


def test_one_device_sends_nothing() -> None:
    assert priced("dp=1", batch=3).ledger.traffic == ()
    assert list(norm_reductions(priced("dp=1").case)) == []


# Refusals


@pytest.mark.parametrize(("layout", "batch", "works"), [("dp=4", 6, 4), ("dp=2 mb=3", 13, 12), ("dp=8", 3, 8)])
def test_a_batch_that_does_not_divide_is_refused_with_the_nearest(layout: str, batch: int, works: int) -> None:
    with pytest.raises(Refused, match=f"global batch of {batch} .* the nearest that works is {works}"):
        priced(layout, batch=batch)
    assert priced(layout, batch=works).case.micro_batches * works // works >= 1


def test_float16_is_refused_as_long_as_nothing_scales_the_loss() -> None:
    with pytest.raises(Refused, match="fp16-master.*bf16-master"):
        priced("dp=2", precision=PRESETS["fp16-master"])


def test_a_sequence_beyond_learned_positions_is_refused() -> None:
    short = tiny_model(positions="learned", max_positions=7, runs=False)
    with pytest.raises(Refused, match="sequence of 8 .* 7 learned positions"):
        priced("dp=2", short)
    assert priced("dp=2", tiny_model(positions="learned", max_positions=8, runs=False)).case.sequence == 8


@pytest.mark.parametrize(("layout", "batch", "count"), [("dp=4", 4, 1), ("dp=4", 12, 3), ("dp=2 mb=2", 12, 3)])
def test_micro_batches_are_what_the_batch_leaves(layout: str, batch: int, count: int) -> None:
    found = priced(layout, batch=batch).case
    assert found.micro_batches == count
    assert {(u.forward, u.backward, u.replay) for u in found.units} == {(count, count, 0)}
    assert found.tokens == found.layout.mb * 8
