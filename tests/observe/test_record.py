"""The recorder: every verb's payload, axes, phases, steps, what DDP, FSDP2 and DTensor issue inside, and times."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from partita.facts.errors import BadInput
from partita.facts.mesh import Mesh
from tests.pool import Pool, RanksFailed

Key = tuple[str, str, tuple[str, ...], str, int, str]


def keys(recorder: Any) -> list[Key]:
    return [call.key for call in recorder.calls]


def every_verb(rank: int, world: int) -> dict[str, list[Key]]:
    """Each collective once, on tensors whose sizes differ, by the name of the call."""
    import torch
    import torch.distributed as dist

    from partita.observe.record import record

    def ones(n: int, dtype: Any = torch.float32) -> Any:
        return torch.ones(n, dtype=dtype)

    def parts(n: int) -> list[Any]:
        return [ones(n) for _ in range(world)]

    def coalesced() -> None:
        with dist._coalescing_manager(async_ops=True) as manager:
            dist.all_gather_into_tensor(ones(3 * world), ones(3))
            dist.all_gather_into_tensor(ones(5 * world), ones(5))
        manager.wait()

    def batched() -> None:
        ops = [dist.P2POp(dist.isend, ones(6), 1 - rank), dist.P2POp(dist.irecv, ones(6), 1 - rank)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    def message() -> None:
        dist.send(ones(9, torch.bfloat16), 1) if rank == 0 else dist.recv(ones(9, torch.bfloat16), 0)

    def uneven() -> None:
        given, taken = [[2, 3], [3, 4]][rank], [[2, 3], [3, 4]][rank]
        dist.all_to_all_single(ones(sum(taken)), ones(sum(given)), taken, given)

    jobs = {
        "all_reduce": lambda: dist.all_reduce(ones(7)),
        "all_reduce_async": lambda: dist.all_reduce(ones(7, torch.int64), async_op=True).wait(),
        "broadcast": lambda: dist.broadcast(ones(7, torch.bfloat16), 0),
        "reduce": lambda: dist.reduce(ones(7), 0),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(ones(7 * world), ones(7)),
        "all_gather": lambda: dist.all_gather(parts(7), ones(7)),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(ones(7), ones(7 * world)),
        "reduce_scatter": lambda: dist.reduce_scatter(ones(7), parts(7)),
        "all_to_all_single": lambda: dist.all_to_all_single(ones(8), ones(8)),
        "all_to_all_uneven": uneven,
        "gather": lambda: dist.gather(ones(7), parts(7) if rank == 0 else None, 0),
        "scatter": lambda: dist.scatter(ones(7), parts(7) if rank == 0 else None, 0),
        "message": message,
        "batched": batched,
        "barrier": lambda: dist.barrier(),
        "coalesced": coalesced,
    }  # fmt: skip
    out = {}
    for name, job in jobs.items():
        with record(Mesh((("dp", world),))) as recorder:
            job()
        out[name] = keys(recorder)
    return out


EXPECTED = {
    "all_reduce": ("all_reduce", "float32", 28),
    "all_reduce_async": ("all_reduce", "int64", 56),
    "broadcast": ("broadcast", "bfloat16", 14),
    "reduce": ("reduce", "float32", 28),
    "all_gather_into_tensor": ("all_gather", "float32", 56),
    "all_gather": ("all_gather", "float32", 56),
    "reduce_scatter_tensor": ("reduce_scatter", "float32", 56),
    "reduce_scatter": ("reduce_scatter", "float32", 56),
    "all_to_all_single": ("all_to_all", "float32", 32),
    "gather": ("gather", "float32", 56),
    "scatter": ("scatter", "float32", 56),
    "coalesced": ("all_gather", "float32", 64),
}


def test_payload_of_every_verb(ranks: Pool) -> None:
    results = ranks(2).run(every_verb)
    for rank, found in enumerate(results):
        for name, (verb, dtype, size) in EXPECTED.items():
            assert found[name] == [("forward", verb, ("dp",), dtype, size, "data")], name
        assert found["all_to_all_uneven"][0][4] == 4 * [5, 7][rank]  # the local input
        assert found["message"] == [("forward", ["send", "recv"][rank], ("dp",), "bfloat16", 18, "data")]
        assert sorted(k[1] for k in found["batched"]) == ["recv", "send"]
        assert {k[4] for k in found["batched"]} == {24}
        assert found["barrier"] == [("forward", "barrier", ("dp",), "-", 0, "control")]


def objects(rank: int, world: int) -> list[tuple[str, str, str, str]]:
    import torch.distributed as dist

    from partita.observe.record import record

    with record(Mesh((("dp", world),))) as recorder:
        dist.all_gather_object([None] * world, {"rank": rank})
        dist.broadcast_object_list([rank], 0)
        dist.all_gather_object([None] * world, "again")
    return [(c.verb, c.kind, c.reason, c.dtype) for c in recorder.calls]


def test_object_collectives_are_control(ranks: Pool) -> None:
    for calls in ranks(2).run(objects):
        assert [c[1] for c in calls] == ["control"] * 6
        assert {c[2] for c in calls} == {"objects: all_gather_object", "objects: broadcast_object_list"}
        assert [c[0] for c in calls] == ["all_gather"] * 2 + ["broadcast"] * 2 + ["all_gather"] * 2


def functional(rank: int, world: int) -> list[tuple[Key, float | None]]:
    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives as fc

    from partita.observe.record import record

    group, x = dist.group.WORLD, torch.ones(6, requires_grad=True)
    with record(Mesh((("tp", world),))) as recorder:
        (fc.all_reduce(torch.ones(6), "sum", group) + 1).sum().item()
        fc.wait_tensor(fc.all_gather_tensor(torch.ones(6), 0, group))
        fc.wait_tensor(fc.reduce_scatter_tensor(torch.ones(6), "sum", 0, group))
        y = fc.all_to_all_single_autograd(x, [3, 3], [3, 3], group)
        y.sum().backward()
        [fc.wait_tensor(t) for t in fc.all_reduce_coalesced([torch.ones(2), torch.ones(3)], "sum", group)]
    assert torch.equal(x.grad, torch.ones(6))
    return [(c.key, c.exposed_s) for c in recorder.calls]


def test_functional_collectives(ranks: Pool) -> None:
    for calls in ranks(2).run(functional):
        assert [(k[0], k[1], k[4]) for k, _ in calls] == [
            ("forward", "all_reduce", 24),
            ("forward", "all_gather", 48),
            ("forward", "reduce_scatter", 24),
            ("forward", "all_to_all", 24),
            ("backward", "all_to_all", 24),
            ("forward", "all_reduce", 20),
        ]
        assert all(exposed is not None and exposed > 0 for _, exposed in calls[:3])


def axes(rank: int, world: int, named: bool) -> list[tuple[str, ...]]:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from partita.observe.record import record

    device = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with record(Mesh((("dp", 2), ("tp", 2))) if named else None) as recorder:
        for group in (device["dp"].get_group(), device["tp"].get_group(), None):
            dist.all_reduce(torch.ones(1), group=group)
    return [c.axis for c in recorder.calls]


def test_a_group_is_named_by_the_axes_that_it_spans(ranks: Pool) -> None:
    for found in ranks(4).run(axes, True):
        assert found == [("dp",), ("tp",), ("dp", "tp")]


def test_without_a_mesh_a_group_is_named_by_its_ranks(ranks: Pool) -> None:
    for rank, found in enumerate(ranks(4).run(axes, False)):
        columns, rows = ["{0,2}", "{1,3}"], ["{0,1}", "{2,3}"]
        assert found == [(columns[rank % 2],), (rows[rank // 2],), ("world",)]


def wrong_mesh(rank: int, world: int) -> None:
    from partita.observe.record import record

    with record(Mesh((("dp", 3),))):
        pass


def test_refuses_the_mesh_of_another_program(ranks: Pool) -> None:
    with pytest.raises(RanksFailed, match="the mesh has 3 ranks and the program has 2"):
        ranks(2).run(wrong_mesh)


def unknown(rank: int, world: int) -> str:
    import torch

    from partita.observe.record import record

    library = torch.library.Library("_c10d_functional", "FRAGMENT")
    library.define("partita_test_shuffle(Tensor input, str group_name) -> Tensor")
    library.impl("partita_test_shuffle", lambda x, group: x.clone(), "CPU")
    with record() as recorder:
        try:
            torch.ops._c10d_functional.partita_test_shuffle(torch.ones(1), "0")
        except BadInput as error:
            return str(error)
        finally:
            library._destroy()
    return f"recorded {recorder.calls}"


def test_an_unknown_operation_is_an_error_and_not_a_gap(ranks: Pool) -> None:
    (said,) = ranks(1).run(unknown)
    assert "does not know the operation _c10d_functional::partita_test_shuffle" in said


def ddp(rank: int, world: int) -> dict[str, Any]:
    """Five steps of a small model under DDP; 37 x 11 + 11 + 11 x 3 + 3 parameters in float32."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from partita.observe.record import record

    net = torch.nn.Sequential(torch.nn.Linear(37, 11), torch.nn.ReLU(), torch.nn.Linear(11, 3))
    with record(Mesh((("dp", world),)), split=True) as recorder:
        model = DistributedDataParallel(net)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(5):
            model(torch.randn(4, 37)).sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return {
        "init": [(r.verb, r.dtype, r.bytes, r.kind) for r in recorder.rows() if r.phase == "init"],
        "steps": recorder.steps,
        "rows": [[(r.phase, r.verb, r.bytes, r.count, r.kind) for r in recorder.rows(i)] for i in range(5)],
        "tails": [(t.step, t.exposed_s) for t in recorder.tails],
        "known": [c.exposed_s for c in recorder.calls if c.phase == "backward"],
        "callers": {c.caller for c in recorder.calls if c.phase == "backward"},
        "control": [(c.step, c.reason) for c in recorder.calls if c.kind == "control"],
    }


def test_ddp(ranks: Pool) -> None:
    size = 4 * (37 * 11 + 11 + 11 * 3 + 3)
    for found in ranks(2).run(ddp):
        assert found["init"] == [
            ("all_gather", "int64", 16, "control"),
            ("broadcast", "int64", 16 * 6, "control"),
            ("broadcast", "float32", size, "data"),
        ]
        assert found["steps"] == 5
        assert found["rows"][0] == [("backward", "all_reduce", size, 1, "data")]
        assert found["rows"][2] == found["rows"][3] == found["rows"][4] == found["rows"][0]
        assert (1, "bucket rebuild") in found["control"]
        # DDP waits in C++, so each bucket's exposure is unknown, and the end of backward tells the sum.
        assert found["known"] == [None] * 5
        assert [step for step, _ in found["tails"]] == [0, 1, 2, 3, 4]
        assert all(seconds > 0 for _, seconds in found["tails"])
        assert all("test_record.py" in c and c.endswith(" ddp") for c in found["callers"])


def fsdp(rank: int, world: int) -> dict[str, Any]:
    import torch
    from torch.distributed.fsdp import fully_shard

    from partita.observe.record import record

    net = torch.nn.Sequential(torch.nn.Linear(37, 11), torch.nn.ReLU(), torch.nn.Linear(11, 3))
    for layer in (net[0], net[2], net):
        fully_shard(layer)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with record(Mesh((("dp", world),))) as recorder:
        for i in range(3):
            recorder.step(i)
            net(torch.randn(4, 37)).sum().backward()
            norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            norm.full_tensor()
            optimizer.step()
            optimizer.zero_grad()
    return {
        "rows": [(r.phase, r.verb, r.bytes, r.count) for r in recorder.rows(2)],
        "exposed": [(c.verb, c.exposed_s) for c in recorder.calls if c.step == 2],
    }


def test_fsdp2_and_the_norm_inside_dtensor(ranks: Pool) -> None:
    """Shards are padded on dim 0: 11 rows become 12, 3 become 4."""
    first, second = 4 * 12 * (37 + 1), 4 * 4 * (11 + 1)
    for found in ranks(2).run(fsdp):
        rows = found["rows"]
        assert ("forward", "all_gather", first, 1) in rows
        assert ("forward", "all_gather", second, 1) in rows
        assert ("backward", "reduce_scatter", first, 1) in rows
        assert ("backward", "reduce_scatter", second, 1) in rows
        # The norm of each of the four parameters, stacked.
        assert [r for r in rows if r[1] == "all_reduce"] == [("step", "all_reduce", 4 * 4, 1)]
        assert all(s is not None for verb, s in found["exposed"] if verb == "all_gather")


def phases(rank: int, world: int) -> list[tuple[int, str]]:
    import torch
    import torch.distributed as dist

    from partita.observe.record import record

    class Summing(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            dist.all_reduce(torch.ones(1))
            super().step(closure)

    x = torch.nn.Parameter(torch.ones(2))
    x.register_hook(lambda g: dist.all_reduce(g))

    def fails() -> float:
        raise KeyError("the closure")

    optimizer = Summing([x], lr=0.1)
    with record(split=True) as recorder:
        with recorder.phase("load"), contextlib.suppress(KeyError):
            optimizer.step(fails)
        for _ in range(2):
            dist.all_reduce(torch.ones(1))
            (x * 2).sum().backward()
            optimizer.step()
        dist.all_reduce(torch.ones(1))
    return [(c.step, c.phase) for c in recorder.calls]


def test_phases_and_steps(ranks: Pool) -> None:
    """A step that raised is none; what comes before the next optimizer begins cannot know that it did."""
    one = ["forward", "backward", "step"]
    expected = [(0, "load"), (0, "step"), *((0, p) for p in one[1:]), *((1, p) for p in one), (2, "forward")]
    assert ranks(2).run(phases) == [expected, expected]


def times(rank: int, world: int) -> dict[str, Any]:
    """Rank 1 comes late, so rank 0 waits in a blocking call and works meanwhile beside an asynchronous one."""
    import time

    import torch
    import torch.distributed as dist

    from partita.observe.record import record

    with record() as recorder:
        dist.barrier()
        if rank == 1:
            time.sleep(0.2)
        dist.all_reduce(torch.ones(4))
        dist.barrier()
        if rank == 1:
            time.sleep(0.2)
        work = dist.all_reduce(torch.ones(4), async_op=True)
        if rank == 0:
            time.sleep(0.1)
        work.wait()
        dist.barrier()
        if rank == 1:
            time.sleep(0.2)
        work = dist.all_reduce(torch.ones(4), async_op=True)
        time.sleep(0.4)
        work.wait()
    calls = [c for c in recorder.calls if c.verb == "all_reduce"]
    return {
        "exposed": [c.exposed_s for c in calls],
        "hidden": [c.hidden_s for c in calls],
        "end": [c.end_s for c in calls],
    }


def test_hidden_and_exposed_time(ranks: Pool) -> None:
    found = ranks(2).run(times)[0]
    blocking, half, whole = range(3)
    assert found["exposed"][blocking] > 0.15
    assert found["hidden"][blocking] < 0.05
    assert found["exposed"][half] > 0.05
    assert found["hidden"][half] > 0.08
    assert found["exposed"][whole] < 0.05
    # It was done before anybody looked: when, nobody knows.
    assert found["end"][whole] is None
    assert found["hidden"][whole] is None


def left_as_found(rank: int, world: int) -> list[bool]:
    import torch
    import torch.distributed as dist
    from torch.optim import optimizer

    from partita.observe.record import record

    before = (dist.Work.wait, len(optimizer._global_optimizer_pre_hooks), len(optimizer._global_optimizer_post_hooks))
    with record():
        dist.all_reduce(torch.ones(1))
    after = (dist.Work.wait, len(optimizer._global_optimizer_pre_hooks), len(optimizer._global_optimizer_post_hooks))
    return [a is b or a == b for a, b in zip(before, after, strict=True)]


def test_nothing_stays_behind(ranks: Pool) -> None:
    assert ranks(1).run(left_as_found) == [[True, True, True]]


def dry(rank: int, world: int) -> list[Key]:
    """One step of FSDP2 on fake tensors and a fake group, as rank 3 of 8."""
    import torch
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from partita.observe.record import record

    dist.destroy_process_group()
    dist.init_process_group("fake", rank=3, world_size=8, store=FakeStore())
    mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("dp",))
    with FakeTensorMode():
        net = torch.nn.Linear(5, 16)
        with unset_fake_temporarily():
            fully_shard(net, mesh=mesh)
        with record(Mesh((("dp", 8),))) as recorder:
            net(torch.ones(2, 5)).sum().backward()
    return keys(recorder)


def test_a_dry_run_is_recorded_too(ranks: Pool) -> None:
    size = 4 * 16 * (5 + 1)
    (found,) = ranks(1).run(dry)
    assert [(k[0], k[1], k[2], k[4]) for k in found] == [
        ("forward", "all_gather", ("dp",), size),
        ("backward", "reduce_scatter", ("dp",), size),
    ]
