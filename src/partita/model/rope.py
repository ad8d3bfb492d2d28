"""Rotary positions and the usual ways to stretch them.

Every formula is the one that Hugging Face transformers evaluates (``modeling_rope_utils.py``), in the
same order of operations, so that float32 results are the same bits or one rounding away.  Nothing is
read on the host: ``dynamic`` and ``longrope`` look at the longest position with tensor operations.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from partita.facts.model import Model, Rope, UnknownModel

Table = tuple[Tensor, Tensor]


def tables(model: Model, positions: Tensor, dtype: torch.dtype, length: int | Tensor | None = None) -> Table:
    """Cosines and sines of ``positions`` [..., T], each [..., T, 1, head_dim / 2], in at least float32.

    ``length`` is the length of the sequence that ``positions`` belong to; it matters to ``dynamic`` and
    ``longrope`` alone and must be given where a process holds only some of the positions.  None means
    the largest of ``positions`` plus one.
    """
    wide = torch.promote_types(torch.float32, dtype)
    inverse, scale = frequencies(model, positions, wide, length)
    angle = positions[..., None, None].to(wide) * inverse
    return angle.cos() * scale, angle.sin() * scale


def rotate(x: Tensor, table: Table) -> Tensor:
    """Rotate ``x`` [..., T, H, D]; dimension i turns with dimension i + D/2 (the Hugging Face layout).

    Computed in the tables' dtype, returned in that of ``x``.  Backward keeps the tables only.
    """
    cos, sin = table
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1).to(x.dtype)


def frequencies(
    model: Model, positions: Tensor, dtype: torch.dtype, length: int | Tensor | None = None
) -> tuple[Tensor, float]:
    """Angle per position of each pair of dimensions [head_dim / 2], and the factor on cosines and sines."""
    rope, dim = model.rope, model.head_dim
    exponent = torch.arange(0, dim, 2, device=positions.device).to(dtype) / dim
    if rope.scaling in ("none", "default"):
        return 1.0 / rope.theta**exponent, 1.0
    if rope.scaling == "linear":
        return 1.0 / rope.theta**exponent / rope.factor, 1.0
    if rope.scaling == "dynamic":
        return _dynamic(model, exponent, _length(positions, length)), 1.0
    if rope.scaling == "llama3":
        return _llama3(rope, _trained(model), 1.0 / rope.theta**exponent), 1.0
    if rope.scaling == "yarn":
        return _yarn(rope, dim, _trained(model), exponent), _yarn_scale(rope)
    if rope.scaling == "longrope":
        return _longrope(rope, _trained(model), exponent, _length(positions, length)), _longrope_scale(model)
    raise UnknownModel(
        f"the decoder does not know the rope scaling {rope.scaling!r}; "
        "it knows none, linear, dynamic, yarn, llama3 and longrope"
    )


def _trained(model: Model) -> int:
    """Positions of the pre-training: without its own entry, all that the model allows."""
    return model.rope.original_positions or model.max_positions


def _length(positions: Tensor, length: int | Tensor | None) -> Tensor:
    if length is None:
        return positions.max() + 1
    return torch.as_tensor(length, device=positions.device)


def _dynamic(model: Model, exponent: Tensor, length: Tensor) -> Tensor:
    """NTK-aware scaling whose base grows once the sequence is longer than the model's positions."""
    dim, factor, most = model.head_dim, model.rope.factor, model.max_positions
    longest = length.clamp(min=most).to(exponent.dtype)
    base = model.rope.theta * (factor * longest / most - (factor - 1)) ** (dim / (dim - 2))
    return 1.0 / base**exponent


def _llama3(rope: Rope, trained: int, inverse: Tensor) -> Tensor:
    """Llama 3.1: long waves are divided by the factor, short ones kept, those between interpolated."""
    wave = 2 * math.pi / inverse
    longest, shortest = trained / rope.low_freq_factor, trained / rope.high_freq_factor
    divided = torch.where(wave > longest, inverse / rope.factor, inverse)
    smooth = (trained / wave - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - smooth) * divided / rope.factor + smooth * divided
    return torch.where((wave >= shortest) & (wave <= longest), between, divided)


def _yarn(rope: Rope, dim: int, trained: int, exponent: Tensor) -> Tensor:
    """YaRN (arXiv 2309.00071), "NTK-by-parts": a ramp from kept to divided frequencies."""

    def turning(rotations: float) -> float:
        return dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = turning(rope.beta_fast), turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # the ramp would divide by zero
    step = torch.arange(dim // 2, device=exponent.device).to(exponent.dtype)
    kept = 1 - ((step - low) / (high - low)).clamp(0, 1)
    waves = rope.theta**exponent
    return 1.0 / (rope.factor * waves) * (1 - kept) + 1.0 / waves * kept


def _yarn_scale(rope: Rope) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def _longrope(rope: Rope, trained: int, exponent: Tensor, length: Tensor) -> Tensor:
    """LongRoPE (arXiv 2402.13753): one list of factors for short sequences and one for long ones."""
    for name, factors in (("short_factor", rope.short_factor), ("long_factor", rope.long_factor)):
        if len(factors) != exponent.shape[0]:
            raise UnknownModel(
                f"longrope needs {exponent.shape[0]} values in {name} (half of head_dim), found {len(factors)}"
            )
    short, long = (exponent.new_tensor(f) for f in (rope.short_factor, rope.long_factor))
    return 1.0 / (torch.where(length > trained, long, short) * rope.theta**exponent)


def _longrope_scale(model: Model) -> float:
    rope, trained = model.rope, _trained(model)
    if rope.attention_factor is not None:
        return rope.attention_factor
    return 1.0 if rope.factor <= 1 else math.sqrt(1 + math.log(rope.factor) / math.log(trained))
