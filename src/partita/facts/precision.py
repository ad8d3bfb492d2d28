"""Precision is per object; a preset names the usual sets.

``bf16-master`` and ``fp16-master`` are the 2 + 2 + 12 bytes per parameter of the textbooks (ZeRO, section 3.1):
16-bit parameters and gradients, a float32 master copy and two float32 moments.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from partita.facts.errors import BadInput

ITEM_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1, "complex64": 8,
}  # fmt: skip


@dataclass(frozen=True)
class Precision:
    """dtype of each object.

    ``weights``: parameters as stored; ``compute``: activations and matrix products; ``gathered``: parameters on the
    wire and in use; ``gradients``: as stored for the optimizer; ``reduction``: gradients on the wire;
    ``master``: a second, wider copy of the parameters, if any; ``moments``: optimizer state.
    ``autocast``: whether the forward runs under autocast, which keeps cast copies of the weights.
    """

    name: str
    weights: str
    compute: str
    gathered: str
    gradients: str
    reduction: str
    master: str | None
    moments: str
    autocast: bool = False

    def bytes(self, thing: str) -> int:
        """Bytes of one element of an object (0 where there is none)."""
        dtype = getattr(self, thing)
        return ITEM_BYTES[dtype] if dtype else 0


def _uniform(name: str, dtype: str) -> Precision:
    return Precision(name, dtype, dtype, dtype, dtype, dtype, None, dtype)


def _master(name: str, dtype: str) -> Precision:
    return Precision(name, dtype, dtype, dtype, dtype, dtype, "float32", "float32")


PRESETS = {
    "fp64": _uniform("fp64", "float64"),
    "fp32": _uniform("fp32", "float32"),
    "autocast-bf16": Precision(
        "autocast-bf16", "float32", "bfloat16", "float32", "float32", "float32", None, "float32", True
    ),
    "bf16-master": _master("bf16-master", "bfloat16"),
    "fp16-master": _master("fp16-master", "float16"),
    "pure-bf16": _uniform("pure-bf16", "bfloat16"),
}


def precision(name: str) -> Precision:
    """The preset of that name; raises ``BadInput`` naming the presets."""
    if name not in PRESETS:
        raise BadInput(f"precision {name!r} is not known; what works: {', '.join(PRESETS)}")
    return PRESETS[name]


def objects(p: Precision) -> dict[str, object]:
    """Fields by name, for JSON."""
    return {f.name: getattr(p, f.name) for f in fields(p)}
