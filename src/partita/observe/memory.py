"""Bytes of model state that really stand on this rank: unique untyped storages, split as the ledger splits them.

What a tensor holds by its shape is a row under its object; what its storage holds beyond that (the padding of a local
shard, the gaps of a bucket) is a ``padding`` row of that object.  A storage that several tensors share (gradients that
are views of one bucket, tied weights) counts once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from partita.facts.ledger import Memory
from partita.facts.mesh import EVERY, Ranks
from partita.observe import private

# object -> phase of its rows.  A storage that two objects share belongs to the first of them.
PHASE = {
    "parameters": "persistent",
    "master": "persistent",
    "gradients": "step",
    "optimizer state": "persistent",
    "optimizer scalars": "persistent",
    "pinned buffers": "persistent",
    "buffers": "persistent",
}

Named = Iterable[tuple[str, torch.Tensor]]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor, as it lies in memory."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def state_bytes(
    parameters: Named,
    optimizer: Any = None,
    masters: Iterable[torch.Tensor] = (),
    buffers: Named = (),
    ranks: Ranks = EVERY,
    device: str | None = None,
) -> tuple[Memory, ...]:
    """Rows of parameters, gradients, master copies, optimizer state and scalars, and buffers, with their padding.

    To be read after the optimizer's step and before gradients are cleared.  ``optimizer`` needs ``state``, a mapping
    from a parameter to its named tensors.  ``device`` is the type of device whose bytes are tier ``device`` (CUDA where
    any tensor is there, else that of the first parameter); all other bytes are tier ``host``, and so are the objects
    that the optimizer says are ``on_host``: where host and device are one memory, nothing else tells.
    """
    named = list(parameters)
    held = list(_objects(named, optimizer, masters, buffers))
    types = {t.device.type for _, t in held}
    main = device or ("cuda" if "cuda" in types else held[0][1].device.type if held else "cpu")
    on_host: frozenset[str] = getattr(optimizer, "on_host", frozenset())
    rows: dict[tuple[str, str, str, str], int] = defaultdict(int)
    taken: dict[int, list[tuple[int, int]]] = defaultdict(list)
    storages: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in held:
        key = private.storage_key(tensor)
        storages.setdefault(key, (name, tensor))
        new = _claim(taken[key], tensor)
        rows[name, "", _tier(name, tensor, main, on_host), _dtype(tensor)] += new
    for key, (name, tensor) in storages.items():
        beyond = tensor.untyped_storage().nbytes() - sum(hi - lo for lo, hi in taken[key])
        rows["padding", name, _tier(name, tensor, main, on_host), _dtype(tensor)] += beyond
    return tuple(
        Memory("-", name, PHASE[of or name], tier, ranks, dtype, size, "recorded", of)
        for (name, of, tier, dtype), size in rows.items()
        if size
    )


def _objects(
    parameters: list[tuple[str, torch.Tensor]], optimizer: Any, masters: Iterable[torch.Tensor], buffers: Named
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every local tensor with the object that it belongs to, in the order of ``PHASE``."""
    for _, p in parameters:
        yield "parameters", local(p)
    for m in masters:
        yield "master", local(m)
    for _, p in parameters:
        if p.grad is not None:
            yield "gradients", local(p.grad)
    values = [v for state in (optimizer.state.values() if optimizer is not None else ()) for v in state.values()]
    tensors = [local(v) for v in values if isinstance(v, torch.Tensor)]
    yield from (("optimizer state", t) for t in tensors if t.dim())
    yield from (("optimizer scalars", t) for t in tensors if not t.dim())
    yield from (("pinned buffers", t) for t in getattr(optimizer, "pinned", ()))
    for _, b in buffers:
        yield "buffers", local(b)


def _claim(taken: list[tuple[int, int]], tensor: torch.Tensor) -> int:
    """Adds a tensor's range of bytes to the ranges of its storage; returns how many bytes of it were not there yet.

    The range of a tensor with gaps (strided) is taken as a whole: nobody else can use its gaps.
    """
    if not tensor.numel():
        return 0
    item = tensor.element_size()
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    lo = int(tensor.storage_offset()) * item
    hi = lo + (int(last) + 1) * item
    before = sum(b - a for a, b in taken)
    apart = [(a, b) for a, b in taken if b < lo or a > hi]
    touching = [(a, b) for a, b in taken if not (b < lo or a > hi)]
    taken[:] = [*apart, (min([lo, *(a for a, _ in touching)]), max([hi, *(b for _, b in touching)]))]
    return sum(b - a for a, b in taken) - before


def _tier(name: str, tensor: torch.Tensor, main: str, on_host: frozenset[str]) -> str:
    return "device" if tensor.device.type == main and name not in on_host else "host"


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
