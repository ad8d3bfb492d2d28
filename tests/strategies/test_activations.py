"""The inventory of saved tensors against what autograd really saves, byte for byte, storage by storage."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from partita.facts.layout import Layout
from partita.facts.model import Model
from partita.facts.precision import PRESETS
from partita.facts.work import Training
from partita.plan.account import account
from partita.strategies.step.activations import alive, block_saved, bytes_of, last_saved, mask_bytes
from tests.tiny import ZOO, tiny_model

torch = pytest.importorskip("torch")

from partita.model import rope  # noqa: E402
from partita.model.decoder import Block, Calls, Decoder, plain  # noqa: E402
from partita.model.loss import vocabulary_loss  # noqa: E402

BATCH, LENGTH = 2, 13
TOKENS = BATCH * LENGTH
DTYPES = {"float32": 4, "float64": 8, "bfloat16": 2}
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 8, [0] * 9 + [1] * 4])


def saved_bytes(run: Callable[[], object], apart: Iterable[Any]) -> int:
    """Bytes of the unique storages that autograd saves while ``run`` goes forward, those of ``apart`` left out."""
    known = {t.untyped_storage()._cdata for t in apart}
    sizes: dict[int, int] = {}
    alive: list[Any] = []  # so that no storage is freed and its place taken by another

    def pack(tensor: Any) -> Any:
        alive.append(tensor)
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            sizes[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        alive.append(run())
    return sum(sizes.values())


def mask_of(model: Model, calls: Calls, dtype: Any) -> list[Any]:
    """The additive mask that documents or a window need; it is built once and serves every layer."""
    mask = calls.attend.mask(torch.zeros(BATCH, model.heads, LENGTH, model.head_dim, dtype=dtype))  # type: ignore[attr-defined]
    return [] if mask is None else [mask]


@pytest.fixture(autouse=True)
def without_the_warning_that_a_norm_is_not_fused() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
        yield


def block_bytes(model: Model, dtype: Any, documents: Any = None, autocast: bool = False) -> int:
    block = Block(model, 0).to(dtype)
    table, calls = rope.tables(model, torch.arange(LENGTH), dtype), plain(model, documents)
    x = torch.randn(BATCH, LENGTH, model.hidden, dtype=dtype, requires_grad=True) * 1  # as in a model, no leaf
    mask = mask_of(model, calls, torch.bfloat16 if autocast else dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return saved_bytes(lambda: block(x, table, calls), [*block.parameters(), *table, *mask])


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["whole", "documents"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ZOO)
def test_a_block_saves_what_the_inventory_says(name: str, dtype: str, documents: Any) -> None:
    found = block_bytes(ZOO[name], getattr(torch, dtype), documents)
    assert bytes_of(block_saved(ZOO[name], DTYPES[dtype], "cpu"), TOKENS) == found


def predicted(model: Model, precision: str) -> int:
    """Bytes of what forward leaves for backward: a row of a run of blocks counts for each of them."""
    case = account(model, Layout(mb=BATCH), Training(BATCH, LENGTH, PRESETS[precision])).case
    counts = {u.name: u.count for u in case.units}
    rows = [r for r in alive(case) if r.object in ("activations", "logits", "cast weights")]
    return sum(r.bytes * counts.get(r.unit, 1) for r in rows)  # what names no unit is there once


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("fp32", "float32"), ("fp64", "float64"), ("pure-bf16", "bfloat16"), ("autocast-bf16", "float32")],
)
@pytest.mark.parametrize("name", ZOO)
def test_a_whole_decoder_saves_its_blocks_the_last_unit_and_the_logits(
    name: str, precision: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Apart from parameters, rope tables and the batch's own token ids."""
    model, autocast = ZOO[name], PRESETS[precision].autocast
    decoder, calls = Decoder(model).to(getattr(torch, dtype)), plain(model)
    ids = torch.randint(0, model.vocab, (BATCH, LENGTH))
    targets, positions = ids.roll(-1, 1), torch.arange(LENGTH)
    table = rope.tables(model, positions, getattr(torch, dtype))
    monkeypatch.setattr(rope, "tables", lambda *_: table)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = saved_bytes(
            lambda: vocabulary_loss(decoder(ids, positions, calls), targets),
            [*decoder.parameters(), *table, ids],
        )
    assert predicted(model, precision) == found


@pytest.mark.parametrize("name", ZOO)
def test_under_autocast_every_projection_keeps_its_own_cast(name: str) -> None:
    model = ZOO[name]
    weights = 2 * sum(p.elements for p in model.spans[1].parameters if len(p.shape) == 2)
    found = block_bytes(model, torch.float32, autocast=True)
    assert bytes_of(block_saved(model, 2, "cpu", autocast=True), TOKENS) + weights == found


def test_recomputed_kinds_are_not_forgotten() -> None:
    """Each tensor of the inventory has a name of its own, elements and a size."""
    for model in (*ZOO.values(), tiny_model(mlp="gelu", runs=False), tiny_model(mlp="relu", norm="layernorm")):
        for kernels in ("cpu", "cuda"):
            rows = block_saved(model, 2, kernels) + last_saved(model, 2, kernels)
            assert len({s.name for s in rows}) == len(rows)
            assert all(s.per_token > 0 and s.item in (2, 4, 8) for s in rows)


def test_fused_kernels_save_less() -> None:
    for item in (2, 4):
        eager, fused = (bytes_of(block_saved(ZOO["qk_norm"], item, k), 1) for k in ("cpu", "cuda"))
        assert fused < eager


def test_rows_are_per_block_and_grow_with_the_micro_batch() -> None:
    model = tiny_model(layers=4)

    def rows(mb: int, sequence: int) -> dict[tuple[str, str], int]:
        layout = Layout(dp=2, mb=mb)
        case = account(model, layout, Training(2 * mb, sequence, PRESETS["fp32"])).case
        return {(r.object, r.unit): r.bytes for r in alive(case) if r.object in ("activations", "logits")}

    one, more = rows(1, 8), rows(3, 16)
    assert set(one) == {("activations", "blocks.0..3"), ("activations", "last"), ("logits", "last")}
    assert {k: 6 * v for k, v in one.items()} == more
    assert one["logits", "last"] == 8 * 101 * 4
    assert one["activations", "blocks.0..3"] == bytes_of(block_saved(model, 4, "cpu"), 8)


def test_a_tied_head_leaves_its_part_of_the_gradient_waiting() -> None:
    def waiting(model: Model) -> list[int]:
        case = account(model, Layout(dp=2), Training(2, 8, PRESETS["fp32"])).case
        return [r.bytes for r in alive(case) if "tied" in r.why]

    assert waiting(tiny_model()) == []
    assert waiting(replace(tiny_model(), tied=True)) == [101 * 40 * 4]


@pytest.mark.parametrize(
    ("window", "packed", "elements"), [(None, False, 0), (5, False, 16 * 16), (None, True, 3 * 256)]
)
def test_the_mask_is_a_row_where_there_is_one(window: int | None, packed: bool, elements: int) -> None:
    model = tiny_model(sliding_window=window)
    work = Training(3, 16, PRESETS["fp32"], packed=packed)
    case = account(model, Layout(mb=3), work).case
    documents = (torch.arange(16) // 8).expand(3, 16) if packed else None
    attend = plain(model, documents).attend
    mask = attend.mask(torch.zeros(3, model.heads, 16, model.head_dim))  # type: ignore[attr-defined]
    held = 0 if mask is None else mask.untyped_storage().nbytes()
    assert mask_bytes(case) == held == 4 * elements
