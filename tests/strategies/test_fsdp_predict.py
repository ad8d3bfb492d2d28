"""Full sharding: padding and gathers by hand on odd shapes, calls a step, and bytes by precision."""

from __future__ import annotations

import math

import pytest

from partita.facts.errors import Refused
from partita.facts.layout import Layout
from partita.facts.ledger import Memory, Traffic
from partita.facts.model import Model
from partita.facts.precision import PRESETS
from partita.facts.work import Training
from partita.plan.account import Account, account
from tests.tiny import ZOO, tiny_model

# The tiny model's rows (dim 0) over 3 and 4 ranks in chunks of ceil(n / ranks), times the ranks:
# vocabulary 101: 34 and 26 a chunk, 102 and 104 gathered; hidden and q 40: 14 and 10, 42 and 40;
# k and v 20: 7 and 5, 21 and 20; FFN 54: 18 and 14, 54 and 56.
ROOT = {3: 2 * 102 * 40 + 42, 4: 2 * 104 * 40 + 40}
BLOCK = {
    3: 2 * 42 + 42 * 40 + 2 * 21 * 40 + 42 * 40 + 2 * 54 * 40 + 42 * 54,
    4: 2 * 40 + 40 * 40 + 2 * 20 * 40 + 40 * 40 + 2 * 56 * 40 + 40 * 54,
}
LAYERS = 3


def priced(layout: str, model: Model = ZOO["plain"], precision: str = "fp32", batches: int = 1) -> Account:
    read = Layout.parse(layout)
    return account(model, read, Training(read.dp * read.mb * batches, 8, PRESETS[precision]))


def rows(found: Account) -> list[Traffic]:
    return [r for r in found.ledger.traffic if r.owner == "fsdp"]


def calls(found: Account) -> dict[tuple[str, str, str], tuple[int, int]]:
    """(unit, verb, phase): (bytes of one call, calls)."""
    out = {(r.unit, r.verb, r.phase): (r.bytes, r.count) for r in rows(found)}
    assert len(out) == len(rows(found))
    return out


def padding(found: Account, dp: int) -> dict[str, int]:
    at = {"pp": 0, "dp": dp, "cp": 0, "tp": 0}
    of = [r for r in found.ledger.memory if r.object == "padding" and at in r.ranks]
    return {f"{r.unit} {r.phase}": r.bytes for r in of}


# Gathered sizes


@pytest.mark.parametrize("ranks", [3, 4])
def test_a_gather_is_every_chunk_at_its_full_length(ranks: int) -> None:
    found = calls(priced(f"dp={ranks} full_shard"))
    assert found["root", "all_gather", "forward"][0] == 4 * ROOT[ranks]
    assert found["root", "reduce_scatter", "backward"][0] == 4 * ROOT[ranks]
    for verb, phase in (("all_gather", "forward"), ("all_gather", "backward"), ("reduce_scatter", "backward")):
        assert found["blocks.0..2", verb, phase][0] == 4 * BLOCK[ranks]


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("ranks", [2, 5, 64])
def test_gathered_units_hold_every_parameter_in_whole_chunks(name: str, ranks: int) -> None:
    model = ZOO[name]
    found = calls(priced(f"dp={ranks} full_shard", model))
    first, block, last = model.spans

    def whole(*parameters: object) -> int:
        return sum(4 * ranks * math.ceil(p.shape[0] / ranks) * math.prod(p.shape[1:]) for p in parameters)  # type: ignore[attr-defined]

    assert found["root", "all_gather", "forward"][0] == whole(*first.parameters, *last.parameters)
    assert found[block.name, "all_gather", "forward"][0] == whole(*block.parameters)


# Padding and shards


def test_storage_beyond_the_shard_is_a_padding_row() -> None:
    """Over 4 ranks the last has 23 of 26 vocabulary rows and 12 of 14 FFN rows; over 3, all but the FFN is short."""
    found = priced("dp=4 full_shard")
    last = 4 * (2 * 3 * 40 + LAYERS * 2 * 2 * 40)
    assert [padding(found, dp) for dp in range(3)] == [{}, {}, {}]
    assert padding(found, 3) == {"parameters persistent": last, "gradients step": last}
    three = priced("dp=3 full_shard")
    short = 2 * 40 + 2 + LAYERS * (2 * 2 + 2 * 40 + 2 * 1 * 40 + 2 * 40 + 2 * 54)
    assert padding(three, 1) == {} and padding(three, 2)["parameters persistent"] == 4 * short


def test_a_rank_may_hold_nothing_of_a_tensor_and_still_store_a_chunk() -> None:
    """Over 64 ranks a norm of 40 has one element each on the first 40, and none on the others."""
    found = priced("dp=64 full_shard").case
    norm = found.by_name["norm.weight"]
    shapes = [norm.local_shape(found.mesh, {"pp": 0, "dp": d, "cp": 0, "tp": 0}) for d in (0, 39, 40, 63)]
    stored = norm.local_shape(found.mesh, {"pp": 0, "dp": 63, "cp": 0, "tp": 0}, padded=True)
    assert shapes == [(1,), (1,), (0,), (0,)] and stored == (1,)


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize(
    "layout", ["dp=3 full_shard", "dp=4 shard_grad_op", "dp=64 full_shard", "dp=6 shard=3 full_shard"]
)
def test_shards_cover_the_model_once_in_every_copy(name: str, layout: str) -> None:
    model, found = ZOO[name], priced(layout, ZOO[name])
    mesh = found.ledger.mesh
    copies = mesh.size("dp.r") if "dp.r" in mesh.names else 1

    def summed(thing: str) -> int:
        rows = [r for r in found.ledger.memory if r.object == thing and r.phase in ("persistent", "step")]
        return sum(r.bytes for k in range(mesh.world) for r in rows if mesh.coordinate(k) in r.ranks)

    assert summed("parameters") == summed("gradients") == 4 * copies * model.parameter_count
    assert summed("optimizer state") == 8 * copies * model.parameter_count


@pytest.mark.parametrize("ranks", [3, 4, 64])
def test_every_rank_stores_the_same_with_its_padding(ranks: int) -> None:
    found = priced(f"dp={ranks} full_shard").ledger

    def stored(dp: int) -> int:
        at = found.at({"pp": 0, "dp": dp, "cp": 0, "tp": 0})
        kept = [r for r in at.memory if r.phase == "persistent" and "parameters" in (r.object, r.unit)]
        return sum(r.bytes for r in kept)

    chunk = stored(0)
    assert {stored(d) for d in range(ranks)} == {chunk}
    gathered = sum(r.bytes * r.count for r in found.where(verb="reduce_scatter").traffic)
    assert gathered == ranks * chunk


# Calls a step


def test_full_shard_gathers_a_block_twice_and_the_root_once() -> None:
    found = {k: n for k, (_, n) in calls(priced("dp=4 full_shard")).items()}
    assert found == {
        ("root", "all_gather", "forward"): 1,
        ("root", "reduce_scatter", "backward"): 1,
        ("blocks.0..2", "all_gather", "forward"): 3,
        ("blocks.0..2", "all_gather", "backward"): 3,
        ("blocks.0..2", "reduce_scatter", "backward"): 3,
    }


def test_shard_grad_op_gathers_everything_once() -> None:
    found = {k: n for k, (_, n) in calls(priced("dp=4 shard_grad_op")).items()}
    assert found == {
        ("root", "all_gather", "forward"): 1,
        ("root", "reduce_scatter", "backward"): 1,
        ("blocks.0..2", "all_gather", "forward"): 3,
        ("blocks.0..2", "reduce_scatter", "backward"): 3,
    }


def test_accumulation_repeats_gathers_and_not_reductions() -> None:
    """3 micro-batches of full_shard: every gather three times, every reduction once."""
    once, thrice = (calls(priced("dp=4 full_shard", batches=b)) for b in (1, 3))
    assert {k: (size, n * (3 if k[1] == "all_gather" else 1)) for k, (size, n) in once.items()} == thrice


def test_shard_grad_op_stays_gathered_through_accumulation() -> None:
    assert calls(priced("dp=4 shard_grad_op")) == calls(priced("dp=4 shard_grad_op", batches=3))


@pytest.mark.parametrize(("state", "times"), [("full_shard", 3), ("shard_grad_op", 2)])
def test_link_bytes_are_that_many_times_the_share_of_the_others(state: str, times: int) -> None:
    """On blocks that divide evenly; DDP sends two times (Rajbhandari et al. 2020, "ZeRO", section 7.2.2)."""
    model = tiny_model(vocab=100, ffn=56)
    found = priced(f"dp=4 {state}", model)
    mesh = found.ledger.mesh
    of_blocks = sum(r.link_bytes(mesh) for r in rows(found) if r.unit != "root")
    of_root = sum(r.link_bytes(mesh) for r in rows(found) if r.unit == "root")
    assert of_blocks == times * LAYERS * model.spans[1].elements * 4 * 3 // 4
    assert of_root == 2 * (2 * 100 * 40 + 40) * 4 * 3 // 4, "the root keeps its gather"


# Hybrid sharding


def test_copies_sum_their_shards_after_the_scatter() -> None:
    """6 ranks in 2 copies of 3 shards: the same gathers as over 3, and one all-reduce of a padded shard per unit."""
    hybrid, three = calls(priced("dp=6 shard=3 full_shard")), calls(priced("dp=3 full_shard"))
    extra = {k: v for k, v in hybrid.items() if k[1] == "all_reduce"}
    assert {k: v for k, v in hybrid.items() if k not in extra} == three
    assert extra == {
        ("root", "all_reduce", "backward"): (4 * ROOT[3] // 3, 1),
        ("blocks.0..2", "all_reduce", "backward"): (4 * BLOCK[3] // 3, 3),
    }
    axes = {r.verb: r.axis for r in rows(priced("dp=6 shard=3 full_shard"))}
    assert axes == {"all_gather": ("dp.s",), "reduce_scatter": ("dp.s",), "all_reduce": ("dp.r",)}


def test_gradients_sum_over_shards_and_copies() -> None:
    for layout, axis in (("dp=6 shard=3 full_shard", ("dp.r", "dp.s")), ("dp=6 full_shard", ("dp",))):
        found = priced(layout).ledger.gradients
        assert {(g.axis, g.relation, g.divisor) for g in found} == {
            (axis, "partial", "counted tokens of the global batch")
        }
        assert {g.parameters for g in found} == {p.name for s in ZOO["plain"].spans for p in s.parameters}


# Precision


@pytest.mark.parametrize(
    ("precision", "per_element"),
    [
        ("fp32", {"parameters": 4, "gradients": 4, "optimizer state": 8}),
        ("fp64", {"parameters": 8, "gradients": 8, "optimizer state": 16}),
        ("bf16-master", {"parameters": 4, "gradients": 4, "optimizer state": 8}),
        ("pure-bf16", {"parameters": 2, "gradients": 2, "optimizer state": 4}),
        ("autocast-bf16", {"parameters": 4, "gradients": 4, "optimizer state": 8}),
    ],
)
def test_rows_of_each_precision(precision: str, per_element: dict[str, int]) -> None:
    """FSDP2 keeps a float32 shard in place of a 16-bit parameter and its master: 4 + 4 + 8, no master row."""
    found = priced("dp=4 full_shard", precision=precision)
    owned = sum(h.count * h.elements(found.ledger.mesh, {"pp": 0, "dp": 0, "cp": 0, "tp": 0}) for h in found.case.held)
    state: list[Memory] = [
        r
        for r in found.ledger.at({"pp": 0, "dp": 0, "cp": 0, "tp": 0}).memory
        if r.owner == "step" and r.phase in ("persistent", "step") and r.object in (*per_element, "master")
    ]
    assert {r.object: r.bytes for r in state} == {k: n * owned for k, n in per_element.items()}


@pytest.mark.parametrize(
    ("precision", "gathered", "reduced"),
    [
        ("fp32", "float32", "float32"),
        ("bf16-master", "bfloat16", "float32"),
        ("pure-bf16", "bfloat16", "bfloat16"),
        ("autocast-bf16", "float32", "float32"),
    ],
)
def test_dtypes_on_the_wire(precision: str, gathered: str, reduced: str) -> None:
    found = rows(priced("dp=4 full_shard", precision=precision))
    assert {r.dtype for r in found if r.verb == "all_gather"} == {gathered}
    assert {r.dtype for r in found if r.verb == "reduce_scatter"} == {reduced}
    sizes = {r.verb: r.bytes for r in found if r.unit == "root"}
    items = {"float32": 4, "bfloat16": 2}
    assert sizes == {"all_gather": items[gathered] * ROOT[4], "reduce_scatter": items[reduced] * ROOT[4]}


# Refusals


@pytest.mark.parametrize(("layout", "works"), [("dp=6 shard=4", 3), ("dp=4 shard=8", 4), ("dp=9 shard=2", 1)])
def test_shards_that_are_no_group_are_refused_with_the_nearest(layout: str, works: int) -> None:
    with pytest.raises(Refused) as caught:
        priced(f"{layout} full_shard")
    ranks, shard = (int(w.partition("=")[2]) for w in layout.split())
    message = str(caught.value)
    assert f"shard={shard}" in message and f"{ranks} data ranks" in message and f"shard={works}" in message
    assert f"'{Layout.parse(layout + ' full_shard')}'" in message
    assert priced(f"dp={ranks} shard={works} full_shard").case.layout.shard == works


def test_one_rank_has_nothing_to_shard() -> None:
    found = priced("dp=1 full_shard")
    assert found.rooms == ("step",) and not rows(found)


# What is dropped after forward, units of several blocks, prefetch

EVEN = tiny_model(vocab=104, ffn=56, kv_heads=4)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_one_and_a_half_times_ddp_where_the_root_is_dropped_too(ranks: int) -> None:
    """In one dtype and without padding (Rajbhandari et al. 2020, "ZeRO", section 7.2.2); less where the root stays."""

    def sent(layout: str) -> int:
        found = priced(f"dp={ranks} {layout}", EVEN).ledger
        data = [r for r in found.traffic if r.owner in ("ddp", "fsdp") and r.phase in ("forward", "backward")]
        return sum(r.link_bytes(found.mesh) for r in data)

    assert 2 * sent("full_shard reshard=all") == 3 * sent("ddp")
    root = 4 * (2 * 104 * 40 + 40) * (ranks - 1) // ranks
    assert sent("full_shard reshard=all") - sent("full_shard") == root
    assert sent("shard_grad_op") == sent("ddp")


def test_a_number_for_reshard_gathers_again_from_neighbours() -> None:
    """Over 8 ranks in groups of 2: the same payload, half of which each sends where it was seven eighths."""
    found = priced("dp=8 full_shard reshard=2", EVEN)
    again = [r for r in rows(found) if r.verb == "all_gather" and r.phase == "backward"]
    first = {r.unit: r.bytes for r in rows(found) if r.verb == "all_gather" and r.phase == "forward"}
    assert {r.axis for r in again} == {("dp.i",)} and found.ledger.mesh.sizes[1:3] == (("dp.o", 4), ("dp.i", 2))
    assert {r.unit: r.bytes for r in again} == first
    assert [r.link_bytes(found.ledger.mesh) for r in again] == [r.bytes * r.count // 2 for r in again]
    assert {r.axis for r in rows(found) if r.verb == "reduce_scatter"} == {("dp.o", "dp.i")}


def test_shards_of_copies_may_have_neighbours_too() -> None:
    found = priced("dp=8 full_shard shard=4 reshard=2")
    axes = {(r.verb, r.phase): r.axis for r in rows(found)}
    assert axes == {
        ("all_gather", "forward"): ("dp.o", "dp.i"),
        ("all_gather", "backward"): ("dp.i",),
        ("reduce_scatter", "backward"): ("dp.o", "dp.i"),
        ("all_reduce", "backward"): ("dp.r",),
    }


@pytest.mark.parametrize(("wrap", "units"), [(1, [(3, 1)]), (2, [(1, 2), (1, 1)]), (3, [(1, 3)])])
def test_units_of_several_blocks(wrap: int, units: list[tuple[int, int]]) -> None:
    """Three blocks in units of ``wrap``: (number of units, blocks in each); the same bytes in fewer calls."""
    found = priced(f"dp=4 full_shard wrap={wrap}")
    reduced = [r for r in rows(found) if r.verb == "reduce_scatter" and r.unit != "root"]
    assert [(r.count, r.bytes) for r in reduced] == [(n, 4 * blocks * BLOCK[4]) for n, blocks in units]


def test_a_unit_may_hold_blocks_of_two_kinds() -> None:
    """Blocks 0 and 1 of 4 replay their forward, and units hold 3 blocks."""
    found = priced("dp=4 full_shard wrap=3 recompute=full:0-1", ZOO["four_layers"])
    gathered = [(r.unit, r.count, r.bytes) for r in rows(found) if r.phase == "forward" and r.unit != "root"]
    assert gathered == [("blocks.0..2", 1, 12 * BLOCK[4]), ("blocks.3", 1, 4 * BLOCK[4])]


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ("dp=8 full_shard reshard=3", ["reshard=3", "8 ranks", "reshard=2"]),
        ("dp=8 full_shard reshard=8", ["reshard=8", "reshard=4"]),
        ("dp=8 full_shard shard=2 reshard=2", ["reshard=2", "2 ranks", "reshard=all"]),
        ("dp=8 full_shard reshard=some", ["reshard=some", "default, all", "2, 4"]),
        ("dp=8 shard_grad_op reshard=all", ["shard_grad_op keeps", "full_shard reshard=all"]),
        ("dp=8 full_shard wrap=4", ["wrap=4", "3 blocks", "wrap=3"]),
        ("dp=8 full_shard prefetch=4", ["prefetch=4", "3 blocks", "prefetch=3"]),
        ("dp=8 wrap=2", ["wrap=2", "fsdp"]),
    ],
)
def test_words_that_cannot_work_are_refused_with_what_works(layout: str, said: list[str]) -> None:
    with pytest.raises(Refused) as caught:
        priced(layout)
    for part in said:
        assert part in str(caught.value)


def test_what_is_gathered_ahead_is_alive_ahead() -> None:
    """Each unit that waits in forward adds its buffer; dropping the root takes it from the loss."""
    model = tiny_model(layers=8)

    def alive(layout: str, phase: str) -> int:
        of = [r for r in priced(f"dp=2 {layout}", model).ledger.memory if r.object == "gathered parameters"]
        return sum(r.bytes for r in of if r.phase == phase)

    block = 4 * model.spans[1].elements
    ahead = {n: alive(f"full_shard prefetch={n}", "forward") // block for n in (1, 2, 4)}
    assert ahead[2] > ahead[1] and ahead[4] == ahead[2] + 2
    assert alive("full_shard reshard=all", "backward") >= alive("full_shard", "backward")
