"""The names of torch that are not public, or whose meaning torch does not promise, all in one place.

Each is used because no public name says the same; ``tests/observe/test_private.py`` checks each one, so that a new
version of torch fails there first and not in a recording.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

# Functions of torch under which a collective is not part of a step's work, or belongs to a phase that nothing else
# tells: (end of the file name, function) -> (kind, reason, phase or "").  The innermost match decides the kind.
CALLERS: dict[tuple[str, str], tuple[str, str, str]] = {
    ("torch/distributed/distributed_c10d.py", name): ("control", f"objects: {name}", "")
    for name in (
        "all_gather_object",
        "gather_object",
        "send_object_list",
        "recv_object_list",
        "broadcast_object_list",
        "scatter_object_list",
        "_new_group_with_tag",
    )
} | {
    ("torch/distributed/utils.py", "_verify_param_shape_across_processes"): ("control", "parameter verification", ""),
    ("torch/nn/parallel/distributed.py", "__init__"): ("data", "", "init"),
    ("torch/nn/parallel/distributed.py", "_sync_buffers"): ("data", "", ""),
    ("torch/nn/parallel/distributed.py", "_pre_forward"): ("control", "bucket rebuild", ""),
    ("torch/nn/utils/clip_grad.py", "_get_total_norm"): ("data", "", "step"),
    ("torch/nn/utils/clip_grad.py", "_clip_grads_with_norm_"): ("data", "", "step"),
    ("torch/nn/utils/clip_grad.py", "clip_grad_norm_"): ("data", "", "step"),
    ("torch/distributed/fsdp/fully_sharded_data_parallel.py", "clip_grad_norm_"): ("data", "", "step"),
    ("torch/distributed/pipelining/schedules.py", "_warmup_p2p"): ("control", "pipeline handshake", ""),
    ("torch/distributed/pipelining/stage.py", "_prepare_forward_infra"): ("control", "pipeline shapes", ""),
    ("torch/distributed/tensor/parallel/api.py", "parallelize_module"): ("data", "", "init"),
    ("torch/distributed/device_mesh.py", "init_device_mesh"): ("control", "groups of a device mesh", "init"),
}

# Operations that belong to collectives and move nothing.
SILENT = frozenset({"wait_tensor", "_wrap_tensor_autograd", "check_for_nan", "mesh_get_process_group"})

# op -> (verb, the argument whose bytes are the payload, whether a group of n multiplies them by n).
C10D: dict[str, tuple[str, str, bool]] = {
    "allreduce_": ("all_reduce", "tensors", False),
    "allreduce_coalesced_": ("all_reduce", "tensors", False),
    "broadcast_": ("broadcast", "tensors", False),
    "_allgather_base_": ("all_gather", "output_tensor", False),
    "allgather_": ("all_gather", "output_tensors", False),
    "allgather_coalesced_": ("all_gather", "output_lists", False),
    "allgather_into_tensor_coalesced_": ("all_gather", "outputs", False),
    "_reduce_scatter_base_": ("reduce_scatter", "input_tensor", False),
    "reduce_scatter_": ("reduce_scatter", "input_tensors", False),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", "inputs", False),
    "alltoall_": ("all_to_all", "input_tensors", False),
    "alltoall_base_": ("all_to_all", "input", False),
    "gather_": ("gather", "input_tensors", True),
    "scatter_": ("scatter", "output_tensors", True),
    "reduce_": ("reduce", "tensors", False),
    "send": ("send", "tensors", False),
    "recv_": ("recv", "tensors", False),
    "recv_any_source_": ("recv", "tensors", False),
    "barrier": ("barrier", "", False),
    "monitored_barrier_": ("barrier", "", False),
}
FUNCTIONAL: dict[str, tuple[str, str, bool]] = {
    "all_reduce": ("all_reduce", "input", False),
    "all_reduce_": ("all_reduce", "input", False),
    "all_reduce_coalesced": ("all_reduce", "inputs", False),
    "all_reduce_coalesced_": ("all_reduce", "inputs", False),
    "all_gather_into_tensor": ("all_gather", "input", True),
    "all_gather_into_tensor_out": ("all_gather", "input", True),
    "all_gather_into_tensor_coalesced": ("all_gather", "inputs", True),
    "reduce_scatter_tensor": ("reduce_scatter", "input", False),
    "reduce_scatter_tensor_out": ("reduce_scatter", "input", False),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", "inputs", False),
    "all_to_all_single": ("all_to_all", "input", False),
    "broadcast": ("broadcast", "input", False),
    "broadcast_": ("broadcast", "input", False),
    "isend": ("send", "tensor", False),
    "irecv": ("recv", "tensor", False),
}
# Where collectives live in the dispatcher, by namespace.
OPS: dict[str, dict[str, tuple[str, str, bool]]] = {
    "c10d": C10D,
    "_c10d_functional": FUNCTIONAL,
    "_c10d_functional_autograd": FUNCTIONAL,
    "_dtensor": {"shard_dim_alltoall": ("all_to_all", "input", False)},
    "symm_mem": {},
}
# One op that stands for several messages: its lists of verbs, peers and tensors.
BATCH = "batch_p2p_ops"
BATCH_VERBS = {"isend": "send", "irecv": "recv"}


NO_BACKWARD = -1


def backward_task() -> int:
    """The backward of autograd that this thread runs (replay of checkpointed blocks included), or ``NO_BACKWARD``."""
    return torch._C._current_graph_task_id()


def after_backward(function: Callable[[], None]) -> None:
    """Calls ``function`` when the backward that runs now ends, after the callbacks queued before it."""
    torch.autograd.Variable._execution_engine.queue_callback(function)  # type: ignore[attr-defined]


def process_group(handle: Any) -> dist.ProcessGroup:
    """The process group that an operation's argument stands for: a boxed object, its name, or itself."""
    if isinstance(handle, str):
        return distributed_c10d._resolve_process_group(handle)  # type: ignore[arg-type]
    if isinstance(handle, torch.ScriptObject):
        return dist.ProcessGroup.unbox(handle)
    return handle


def work_of(result: Any) -> dist.Work | None:
    """The ``Work`` in the result of a ``c10d`` operation: the very object that its caller will wait for."""
    for part in result if isinstance(result, tuple) else (result,):
        if isinstance(part, torch.ScriptObject):
            return dist.Work.unbox(part)
    return None


def takes_over(kind: type) -> bool:
    """Whether a tensor class runs operations itself, on local tensors that come back to the dispatcher.

    True for DTensor and for the tensors that functional collectives return; false for plain and for fake tensors,
    whose operation is the one that counts.
    """
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    own = kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl  # type: ignore[attr-defined]
    return own and not issubclass(kind, (FakeTensor, FunctionalTensor))


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no data (a dry run); one fake mode serves one thread at a time."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of a tensor's untyped storage. The data pointer would be 0 for every fake tensor."""
    return tensor.untyped_storage()._cdata


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


# Operations that give their argument back and may have given it another storage or size.
RESIZING = frozenset({"resize_", "resize_as_", "set_", "lift_fresh", "resize_storage_bytes_"})


def may_show(func: Any) -> bool:
    """Whether an operation can show storage that was not seen before: any but those that only write in place.

    A view can: of a tensor that came from elsewhere, or of one that a backend made for itself.
    """
    schema = func._schema
    if schema.name.split("::")[1] in RESIZING or "out" in schema.overload_name:
        return True
    tensors = [r for r in schema.returns if "Tensor" in str(r.type)]
    return any(r.alias_info is None or not r.alias_info.is_write for r in tensors)


def is_gather(code: CodeType) -> bool:
    """Whether a function of FSDP2 fills or frees the storage of gathered parameters."""
    return code.co_name in ("alloc_storage", "free_storage") and "_fully_shard" in code.co_filename
