"""Shards each block, and then what is left, with ``fully_shard``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from partita.facts.case import Case
from partita.strategies.groups import Groups
from partita.strategies.parallelize import Step


def apply(step: Step, groups: Groups, case: Case) -> None:
    keep = case.layout.state == "shard_grad_op"
    mesh, policy = mesh_of(groups, case), policy_of(case)
    units: list[FSDPModule] = []
    for part in step.parts:
        blocks: Any = part.blocks
        for module in (*blocks, part):
            # The root keeps its gather after forward (FSDP2's default): backward begins with it.
            reshard = not keep and module is not part
            units.append(fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard))  # type: ignore[arg-type]
    step.materialise()
    for unit in units:
        unit.set_gradient_divide_factor(1.0)  # a sum: the loss is divided by counted tokens
        unit.set_force_sum_reduction_for_comms(True)  # float32 and bfloat16 would use PREMUL_SUM, which gloo refuses
    root = step.parts[0]
    assert isinstance(root, FSDPModule)

    @contextmanager
    def synchronise(i: int, n: int) -> Iterator[None]:
        """Only the last micro-batch reduces; shard_grad_op keeps parameters gathered until then."""
        last = i == n - 1
        root.set_requires_gradient_sync(last)
        if keep:
            root.set_reshard_after_backward(last)
        root.set_is_last_backward(last)
        yield

    step.contexts.append(synchronise)


def mesh_of(groups: Groups, case: Case) -> DeviceMesh:
    """One dim: shards over the data ranks; two: copies of shards."""
    return groups.root["dp.r", "dp.s"] if "dp.s" in case.mesh.names else groups["dp", "cp"]


def policy_of(case: Case) -> MixedPrecisionPolicy:
    """Gather in one dtype, reduce in another, as the case's precision says."""
    p = case.precision
    if p.weights == p.gathered and p.gradients == p.reduction == p.gathered:
        return MixedPrecisionPolicy()
    # Inputs are not cast: the gathered embedding makes activations in its own dtype, and rotary tables must stay wide.
    return MixedPrecisionPolicy(
        param_dtype=getattr(torch, p.gathered), reduce_dtype=getattr(torch, p.reduction), cast_forward_inputs=False
    )
