"""Shards blocks, and then what is left, with ``fully_shard``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from partita.facts.case import Case
from partita.strategies.fsdp.wrapping import small
from partita.strategies.groups import Groups
from partita.strategies.parallelize import Step


def apply(step: Step, groups: Groups, case: Case) -> None:
    keep = case.layout.state == "shard_grad_op"
    units = [unit for part in step.parts for unit in shard(part, groups, case)]
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


def shard(part: nn.Module, groups: Groups, case: Case) -> list[FSDPModule]:
    """Shard one part of the model; returns its units in the order of their forwards, the root first."""
    layout: Any = case.layout
    options: dict[str, Any] = {
        "mesh": mesh_of(groups, case),
        "mp_policy": policy_of(case),
        "offload_policy": offload_of(case, groups),
    }
    # The root keeps its gather after forward (FSDP2's default): backward begins with it.
    root, inner = {"default": (False, True), "all": (True, True)}.get(layout.reshard, (small(layout),) * 2)
    if layout.state == "shard_grad_op":
        root = inner = False
    trained = any(p.requires_grad for p in outside(part))
    blocks: Any = part.blocks
    units: list[FSDPModule] = []
    for at in range(0, len(blocks), layout.wrap):
        members = list(blocks[at : at + layout.wrap])
        fully_shard(members if len(members) > 1 else members[0], reshard_after_forward=inner, **options)
        trained = trained or any(p.requires_grad for m in members for p in m.parameters())
        for m in members:
            m.set_unshard_in_backward(trained)  # no gradient flows into what is frozen from the input on
        units.append(members[0])
    whole: Any = fully_shard(part, reshard_after_forward=root, **options)
    prefetch([whole, *units], layout.prefetch)
    return [whole, *units]


def outside(part: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters of what runs before the blocks."""
    embed: Any = getattr(part, "embed", None)
    return embed.parameters() if embed is not None else iter(())


def prefetch(units: Sequence[FSDPModule], depth: int) -> None:
    """Gather ``depth`` units ahead.  One is FSDP2's own rule: the next in backward, and in forward as streams allow."""
    if depth == 1:
        return
    for i, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(list(units[i + 1 : i + 1 + depth]))
    backward = [units[0], *reversed(units[1:])]
    for i, unit in enumerate(backward):
        ahead = list(backward[i + 1 : i + 1 + depth])
        if ahead:
            unit.set_modules_to_backward_prefetch(ahead)


def mesh_of(groups: Groups, case: Case) -> DeviceMesh:
    """One dim: shards over the data ranks; two: copies of shards."""
    if "dp.r" not in case.mesh.names:
        return groups["dp", "cp"]
    shards = tuple(a for a in case.mesh.atoms("dp", "cp") if a != "dp.r")
    return groups.pair(("dp.r",), shards)


def policy_of(case: Case) -> MixedPrecisionPolicy:
    """Gather in one dtype, reduce in another, as the case's precision says."""
    p = case.precision
    if p.weights == p.gathered and p.gradients == p.reduction == p.gathered:
        return MixedPrecisionPolicy()
    # Inputs are not cast: the gathered embedding makes activations in its own dtype, and rotary tables must stay wide.
    return MixedPrecisionPolicy(
        param_dtype=getattr(torch, p.gathered), reduce_dtype=getattr(torch, p.reduction), cast_forward_inputs=False
    )


def offload_of(case: Case, groups: Groups) -> OffloadPolicy:
    """Shards on the host where the case says so; there is nothing to pin where the device is the host."""
    if case.tier("parameters") == "device":
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=groups.root.device_type != "cpu")
