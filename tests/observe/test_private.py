"""The names of torch that are not public: each still there, each still meaning what the recorder takes it for."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from tests.pool import Pool

torch = pytest.importorskip("torch")

from partita.observe import private  # noqa: E402


def test_every_named_caller_exists() -> None:
    """A function of torch that was renamed would silently stop being told apart."""
    import torch.distributed.fsdp
    import torch.distributed.pipelining.stage
    import torch.distributed.tensor.parallel

    root = inspect.getfile(torch).removesuffix("torch/__init__.py")
    for file, function in private.CALLERS:
        source = Path(root + file).read_text(encoding="utf-8")
        assert f"def {function}(" in source, (file, function)


def test_every_listed_operation_and_argument_exists() -> None:
    import torch.distributed.tensor

    known = {s.name: {a.name for a in s.arguments} for s in torch._C._jit_get_all_schemas()}
    for space, operations in private.OPS.items():
        for name, (_, argument, _) in operations.items():
            if space == "_c10d_functional_autograd" and f"{space}::{name}" not in known:
                continue  # it has three of the operations of its neighbour
            assert f"{space}::{name}" in known, name
            assert not argument or argument in known[f"{space}::{name}"], name


def test_every_operation_that_has_a_group_is_known() -> None:
    """Whatever torch can send must have a rule; what is left out here is named."""
    import torch.distributed._functional_collectives

    for schema in torch._C._jit_get_all_schemas():
        space, _, name = schema.name.partition("::")
        arguments = {a.name for a in schema.arguments}
        if space in private.OPS.keys() - {"symm_mem"} and arguments & {"process_group", "group_name"}:
            assert name in {*private.OPS[space], *private.SILENT, private.BATCH}, schema.name


def test_backward_is_told_by_its_task() -> None:
    seen: list[Any] = []
    x = torch.ones(2, requires_grad=True)
    assert private.backward_task() == private.NO_BACKWARD

    def hook(grad: Any) -> None:
        seen.append(private.backward_task())
        private.after_backward(lambda: (seen.append("first"), private.after_backward(lambda: seen.append("nested"))))
        private.after_backward(lambda: seen.append("second"))

    (x * 2).sum().register_hook(hook)
    loss = x * 2
    loss.register_hook(hook)
    loss.sum().backward()
    assert seen[0] != private.NO_BACKWARD
    assert seen[1:] == ["first", "second", "nested"]
    assert private.backward_task() == private.NO_BACKWARD


def handles(rank: int, world: int) -> dict[str, bool]:
    import torch.distributed as dist
    from torch.utils._python_dispatch import TorchDispatchMode

    found: dict[str, bool] = {}
    made: list[Any] = []

    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if func.namespace == "c10d":
                (boxed,) = (a for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type()))
                found["boxed group"] = private.process_group(boxed).group_name == dist.group.WORLD.group_name
                made.append(private.work_of(out))
            return out

    with Look():
        work = dist.all_reduce(torch.ones(1), async_op=True)
    found["the same work"] = made[0] is work
    work.wait()
    found["named group"] = private.process_group(dist.group.WORLD.group_name).size() == world
    return found


def test_groups_and_works_are_found_in_operations(ranks: Pool) -> None:
    for found in ranks(2).run(handles):
        assert found == {"boxed group": True, "the same work": True, "named group": True}


def test_which_tensors_run_operations_themselves() -> None:
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.tensor import DTensor

    assert private.takes_over(DTensor)
    assert private.takes_over(AsyncCollectiveTensor)
    assert not private.takes_over(FakeTensor)
    assert not private.takes_over(torch.Tensor)
    assert not private.takes_over(torch.nn.Parameter)


def test_storages_are_told_apart_without_data() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        a, b = torch.empty(4), torch.empty(4)
    assert private.storage_key(a) != private.storage_key(b)
    assert private.storage_key(a) == private.storage_key(a[1:])
    assert private.bytes_of([a, b[1:]]) == 28


def test_which_tensors_have_no_data() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        made = torch.empty(3)
    assert private.is_fake(made) and private.is_fake(mode.from_tensor(torch.ones(2)))
    assert not private.is_fake(torch.ones(2))
