"""Initial values that do not depend on the layout.

An element's value is a function of the seed, the parameter's global name and the element's index in the
global tensor, and of nothing else.  So any shard is made without the whole tensor, and every layout
starts from the same model.  The generator is a counter hash in the manner of SplittableRandom (Steele,
Lea, Flood 2014: the finaliser of SplitMix64 over a counter), with two keys per name; normals come from
the Box-Muller transform of its two halves.

Values are made in float32 by numpy on the host and then cast, so that they are the same for every dtype
(up to its rounding) and on every device.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from partita.facts.model import Model
from partita.model import shards

STD = 0.02
"""Standard deviation of matrices and embeddings (GPT-2's, and the usual ``initializer_range``)."""

CHUNK = 1 << 16
"""Elements made at a time; the working arrays stay in cache."""

_GAMMA, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1


class Like(Protocol):
    """What ``initial`` reads of a ``partita.facts.model.Parameter``."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def role(self) -> str: ...


def spread(role: str, layers: int) -> float | None:
    """Standard deviation of a role's values; None for norms (all ones) and 0 for biases (all zeros).

    The two outputs into the residual are scaled by 1/sqrt(2 layers) (GPT-2 report, section 2.3).
    """
    if role.endswith("bias"):
        return 0.0
    if role in ("norm", "qk_norm"):
        return None
    return STD / math.sqrt(2 * layers) if role in ("o", "down") else STD


def initial(
    name: str,
    parameter: Like,
    seed: int,
    layers: int,
    dtype: torch.dtype = torch.float32,
    ranges: shards.Box | None = None,
) -> Tensor:
    """Initial values of the parameter ``name``, or of the part of it in ``ranges``, on the CPU.

    Args:
        name: the global name (``blocks.3.attn.q.weight``).
        parameter: its global shape and its role.
        seed: any integer.
        layers: blocks of the whole model.
        ranges: runs of indices for each dim (``shards.box((0, 4), (2, 5))``); None is the whole tensor.
    """
    held = shards.whole(parameter.shape) if ranges is None else ranges
    out = torch.empty(shards.box_shape(held), dtype=dtype)
    _write(out, name, parameter, seed, layers, held)
    return out


@torch.no_grad()
def fill(parameters: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], model: Model, seed: int) -> None:
    """Give every parameter its initial values in place; a DTensor gets those of its local shard.

    Args:
        parameters: global name and tensor (``decoder.named_parameters()``), on a real device.

    Raises:
        ValueError: a name or a shape that ``model`` does not have, or a tensor without storage (meta).
    """
    known = {p.name: p for p in model.parameters}
    items = parameters.items() if isinstance(parameters, Mapping) else parameters
    for name, tensor in items:
        check_known(name, tensor, known.get(name), model)
        mine, held = shards.local(tensor)
        if mine.numel():
            _write(mine, name, known[name], seed, model.layers, held)


def check_known(name: str, tensor: Tensor, parameter: Like | None, model: Model) -> None:
    """Raise ValueError unless ``tensor`` can take the values of the model's ``parameter``."""
    if parameter is None:
        raise ValueError(f"{model.name} has no parameter named {name!r}; its names are those of Model.parameters")
    if tuple(tensor.shape) != parameter.shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, but {model.name} says {parameter.shape}")
    if tensor.is_meta:
        raise ValueError(f"{name} is on the meta device and has no storage for values; materialise it first")


def _write(out: Tensor, name: str, parameter: Like, seed: int, layers: int, held: shards.Box) -> None:
    std = spread(parameter.role, layers)
    if std is None or std == 0:
        out.fill_(1 if std is None else 0)
        return
    key1, key2 = _keys(seed, name)
    rows, columns = _counters(parameter.shape, held, key1)
    flat = (out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)).view(
        rows.size, columns.size
    )
    for top, left, values in _normals(rows, columns, key2):
        piece = torch.from_numpy(values) * std
        flat[top : top + values.shape[0], left : left + values.shape[1]].copy_(piece)
    if not out.is_contiguous():
        out.copy_(flat.view(out.shape))


def _keys(seed: int, name: str) -> tuple[int, int]:
    digest = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


def _counters(shape: tuple[int, ...], held: shards.Box, key: int) -> tuple[np.ndarray, np.ndarray]:
    """Two arrays whose outer sum (mod 2^64) is key + GAMMA x global flat index, for the last dim and the others."""
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    parts = []
    for runs, stride in zip(held, strides, strict=True):
        index = np.concatenate([np.arange(a, b, dtype=np.uint64) for a, b in runs] or [np.empty(0, np.uint64)])
        parts.append(index * np.uint64(stride * _GAMMA & _MASK))
    rows = np.full(1, key, np.uint64)
    for part in parts[:-1]:
        rows = (rows[:, None] + part).ravel()
    return rows, parts[-1]


def _normals(rows: np.ndarray, columns: np.ndarray, key: int) -> Iterator[tuple[int, int, np.ndarray]]:
    """Standard normals of all (row, column) pairs, in pieces: first row, first column, float32 values."""
    if not rows.size or not columns.size:
        return
    wide = min(columns.size, CHUNK)
    tall = max(CHUNK // wide, 1)
    # Working arrays of a fixed size, a multiple of any vector width: numpy's vector code then treats every
    # element alike, wherever a slice begins or ends.
    size = -(-wide * tall // 64) * 64
    bits, spare = np.zeros(size, np.uint64), np.zeros(size, np.uint64)
    radius, angle = np.empty(size, np.float32), np.empty(size, np.float32)
    for top in range(0, rows.size, tall):
        row = rows[top : top + tall, None]
        for left in range(0, columns.size, wide):
            column = columns[left : left + wide]
            count = row.size * column.size
            np.add(row, column, out=bits[:count].reshape(row.size, column.size))
            _hash(bits, spare, key)
            _box_muller(bits, spare, radius, angle)
            yield top, left, radius[:count].reshape(row.size, column.size)


def _hash(bits: np.ndarray, spare: np.ndarray, key: int) -> None:
    """SplitMix64's finaliser in place, with a second key between its rounds, so that two names whose
    counters overlap still have unrelated values."""
    for shift, factor in ((30, _MIX1), (27, _MIX2), (31, None)):
        np.right_shift(bits, np.uint64(shift), out=spare)
        np.bitwise_xor(bits, spare, out=bits)
        if factor is not None:
            np.multiply(bits, np.uint64(factor), out=bits)
        if shift == 30:
            np.bitwise_xor(bits, np.uint64(key), out=bits)


def _box_muller(bits: np.ndarray, spare: np.ndarray, radius: np.ndarray, angle: np.ndarray) -> None:
    """``radius`` becomes sqrt(-2 ln u) cos(2 pi v), with u in (0, 1] and v in [0, 1] from the halves of ``bits``."""
    np.right_shift(bits, np.uint64(32), out=spare)
    np.copyto(radius, spare, casting="unsafe")
    np.add(radius, np.float32(0.5), out=radius)
    np.multiply(radius, np.float32(2**-32), out=radius)
    np.log(radius, out=radius)
    np.multiply(radius, np.float32(-2), out=radius)
    np.sqrt(radius, out=radius)
    np.bitwise_and(bits, np.uint64(0xFFFFFFFF), out=spare)
    np.copyto(angle, spare, casting="unsafe")
    np.multiply(angle, np.float32(2 * math.pi / 2**32), out=angle)
    np.cos(angle, out=angle)
    np.multiply(radius, angle, out=radius)
