"""The pool of ranks itself: order, errors, deaths, hangs, sizes, and what stays behind."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from tests.pool import Pool, RanksFailed, RanksTimedOut, opened


def total(rank: int, world: int, value: int) -> tuple[int, int, int]:
    import torch
    import torch.distributed as dist

    tensor = torch.tensor([value * 10**rank])
    dist.all_reduce(tensor)
    return rank, os.getpid(), int(tensor.item())


def fail_while_others_wait(rank: int, world: int, guilty: int) -> None:
    import torch
    import torch.distributed as dist

    if rank == guilty:
        raise KeyError("the guilty rank")
    dist.all_reduce(torch.ones(1))


def sleep_on(rank: int, world: int, sleeper: int) -> int:
    if rank == sleeper:
        time.sleep(60)
    return rank


def die(rank: int, world: int) -> None:
    import torch
    import torch.distributed as dist

    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def sum_over_mesh(rank: int, world: int, swapped: bool) -> tuple[list[float], list[float]]:
    """A DTensor reduction over each axis of a 2x2 mesh, with groups made in another order when `swapped`."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate

    if swapped:
        for members in ([0, 3], [1, 2], [0, 1, 2]):
            dist.new_group(members)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    local = torch.tensor([float(10**rank)])
    down = DTensor.from_local(local, mesh, [Partial(), Replicate()]).redistribute(mesh, [Replicate(), Replicate()])
    across = DTensor.from_local(local, mesh, [Replicate(), Partial()]) * 1.0
    return down.to_local().tolist(), across.full_tensor().tolist()


def give_back(rank: int, world: int, value: Any) -> Any:
    return value


def give_a_lambda(rank: int, world: int) -> Any:
    return lambda: rank


def test_results_come_in_rank_order(ranks: Pool) -> None:
    results = ranks(4).run(total, 3)
    assert [rank for rank, _, _ in results] == [0, 1, 2, 3]
    assert {sum_ for _, _, sum_ in results} == {3333}


def test_sizes_share_the_same_processes(ranks: Pool) -> None:
    two = ranks(2).run(total, 1)
    four = ranks(4).run(total, 1)
    assert [pid for _, pid, _ in two] == [pid for _, pid, _ in four][:2]
    assert [sum_ for _, _, sum_ in two] == [11, 11]
    assert ranks(1).run(total, 7)[0][2] == 7


def test_a_job_costs_little(ranks: Pool) -> None:
    """Not a benchmark: a job that started processes would take seconds."""
    ranks(4).run(total, 1)
    spans = []
    for _ in range(5):
        begin = time.perf_counter()
        ranks(4).run(total, 1)
        spans.append(time.perf_counter() - begin)
    assert min(spans) < 1.0


def test_tensors_and_arrays_travel(ranks: Pool) -> None:
    torch = pytest.importorskip("torch")
    sent = {"a": torch.arange(70_000.0), "b": torch.ones(3, dtype=torch.bfloat16)}
    for result in ranks(2).run(give_back, sent):
        assert torch.equal(result["a"], sent["a"])
        assert torch.equal(result["b"], sent["b"])


@pytest.mark.parametrize("guilty", [0, 1])
def test_an_error_names_its_rank_first_and_is_quick(ranks: Pool, guilty: int) -> None:
    ranks(3).run(total, 1)
    begin = time.perf_counter()
    with pytest.raises(RanksFailed) as caught:
        ranks(3).run(fail_while_others_wait, guilty)
    assert time.perf_counter() - begin < 10
    assert next(iter(caught.value.tracebacks)) == guilty
    lines = str(caught.value).splitlines()
    assert f"failed on rank {guilty} of 3" in lines[0]
    assert lines[1] == f"--- rank {guilty} ---"
    assert "KeyError: 'the guilty rank'" in caught.value.tracebacks[guilty]
    assert [sum_ for _, _, sum_ in ranks(3).run(total, 1)] == [111, 111, 111]


def test_a_hang_is_ended_and_the_pool_goes_on(ranks: Pool) -> None:
    begin = time.perf_counter()
    with pytest.raises(RanksTimedOut, match=r"ranks \[1\] of 2 after 1 s"):
        ranks(2).run(sleep_on, 1, timeout_s=1)
    assert time.perf_counter() - begin < 10
    assert [sum_ for _, _, sum_ in ranks(2).run(total, 1)] == [11, 11]


def test_a_killed_rank_is_reported_and_replaced(ranks: Pool) -> None:
    with pytest.raises(RanksFailed) as caught:
        ranks(2).run(die)
    assert "exit code -9" in caught.value.tracebacks[1]
    assert [sum_ for _, _, sum_ in ranks(2).run(total, 1)] == [11, 11]


def test_a_result_that_cannot_travel_is_an_error_of_its_rank(ranks: Pool) -> None:
    with pytest.raises(RanksFailed, match="give_a_lambda"):
        ranks(1).run(give_a_lambda)


def test_equal_meshes_of_two_jobs_do_not_share_groups(ranks: Pool) -> None:
    for swapped in (False, True, False):
        results = ranks(4).run(sum_over_mesh, swapped)
        assert [down for down, _ in results] == [[101.0], [1010.0], [101.0], [1010.0]]
        assert [across for _, across in results] == [[11.0], [11.0], [1100.0], [1100.0]]


def test_refuses_what_no_rank_could_run(ranks: Pool) -> None:
    with pytest.raises(ValueError, match="top-level function"):
        ranks(1).run(lambda rank, world: 0)
    with pytest.raises(ValueError, match="9 ranks were asked for; the pool has 1 to 8"):
        ranks(9)


def test_no_process_stays_behind() -> None:
    with opened() as pool:
        (_, pid, _) = pool(1).run(total, 1)[0]
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
