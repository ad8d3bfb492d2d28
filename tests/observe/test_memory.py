"""Bytes of model state: DDP and FSDP2 on uneven shapes, ties, views of buckets, several tiers of objects."""

from __future__ import annotations

from typing import Any

import pytest

from tests.pool import Pool

torch = pytest.importorskip("torch")

from partita.observe.memory import state_bytes  # noqa: E402

Table = dict[tuple[str, str, str], int]


def table(rows: Any) -> Table:
    """(object, the object whose padding it is, dtype) -> bytes."""
    out: Table = {}
    for r in rows:
        key = (r.object, r.unit, r.dtype)
        assert key not in out
        out[key] = r.bytes
    return out


def net() -> Any:
    return torch.nn.Sequential(torch.nn.Linear(37, 11), torch.nn.ReLU(), torch.nn.Linear(11, 3))


SIZE = 4 * (37 * 11 + 11 + 11 * 3 + 3)


def ddp(rank: int, world: int, views: bool) -> Table:
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(net(), gradient_as_bucket_view=views)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 37)).sum().backward()
        optimizer.step()
    return table(state_bytes(model.named_parameters(), optimizer))


@pytest.mark.parametrize("views", [False, True])
def test_ddp(ranks: Pool, views: bool) -> None:
    """Gradients that are views of one bucket are counted once, all of them."""
    for found in ranks(2).run(ddp, views):
        assert found == {
            ("parameters", "", "float32"): SIZE,
            ("gradients", "", "float32"): SIZE,
            ("optimizer state", "", "float32"): 2 * SIZE,
            ("optimizer scalars", "", "float32"): 4 * 4,
        }


def fsdp(rank: int, world: int) -> tuple[Table, list[str]]:
    from torch.distributed.fsdp import fully_shard

    model = net()
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 37)).sum().backward()
    optimizer.step()
    rows = state_bytes(model.named_parameters(), optimizer)
    return table(rows), [r.phase for r in rows if r.object == "padding"]


def test_fsdp2_with_uneven_shapes(ranks: Pool) -> None:
    """Eleven rows are six and five, three are two and one; the smaller shard lies in a storage of the larger size."""
    columns = {11: (37, 1), 3: (11, 1)}
    for rank, (found, phases) in enumerate(ranks(2).run(fsdp)):
        logical = 4 * sum([(n + 1) // 2, n // 2][rank] * c for n, cs in columns.items() for c in cs)
        padding = 4 * sum(c for cs in columns.values() for c in cs) if rank == 1 else 0
        assert found[("parameters", "", "float32")] == logical
        assert found[("gradients", "", "float32")] == logical
        assert found[("optimizer state", "", "float32")] == 2 * logical
        assert found[("optimizer scalars", "", "float32")] == 16
        assert found.get(("padding", "parameters", "float32"), 0) == padding
        # FSDP reduces a unit into one flat tensor, of which gradients are views: its end is padding as well.
        assert found.get(("padding", "gradients", "float32"), 0) == padding
        assert phases == (["persistent", "step"] if rank == 1 else [])


def test_a_tie_counts_once() -> None:
    weight = torch.nn.Parameter(torch.zeros(5, 3))
    view = torch.nn.Parameter(weight.detach()[:2])
    assert table(state_bytes([("a", weight), ("b", weight), ("c", view)])) == {("parameters", "", "float32"): 60}


def test_what_lies_between_parts_of_one_storage_is_padding() -> None:
    flat = torch.zeros(20, dtype=torch.bfloat16)
    parts = [("a", flat[0:5]), ("b", flat[8:12].view(2, 2)), ("c", flat[12:13])]
    assert table(state_bytes(parts)) == {
        ("parameters", "", "bfloat16"): 20,
        ("padding", "parameters", "bfloat16"): 20,
    }


def test_masters_buffers_and_tiers() -> None:
    weight = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    master = torch.zeros(4)
    optimizer = torch.optim.SGD([master], lr=0.1, momentum=0.9)
    master.grad = torch.ones(4)
    optimizer.step()
    rows = state_bytes([("w", weight)], optimizer, [master], [("b", torch.zeros(3, dtype=torch.int64))])
    assert {(r.object, r.phase, r.dtype): r.bytes for r in rows} == {
        ("parameters", "persistent", "bfloat16"): 8,
        ("master", "persistent", "float32"): 16,
        ("optimizer state", "persistent", "float32"): 16,
        ("buffers", "persistent", "int64"): 24,
    }
    assert {r.tier for r in rows} == {"device"}
    assert {r.tier for r in state_bytes([("w", weight)], device="cuda")} == {"host"}


def test_fake_tensors_are_counted_as_if_real() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        named = [("a", torch.empty(100, 7)), ("b", torch.empty(50))]
        assert table(state_bytes(named)) == {("parameters", "", "float32"): 4 * 750}
