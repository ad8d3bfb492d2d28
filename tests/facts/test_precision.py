"""Presets of precision: bytes of every object."""

from __future__ import annotations

import pytest

from partita.facts.errors import BadInput
from partita.facts.precision import ITEM_BYTES, PRESETS, Precision, objects, precision


def state_bytes(p: Precision) -> int:
    """Bytes per parameter of what stands when Adam steps: weights, gradients, master, two moments."""
    return p.bytes("weights") + p.bytes("gradients") + p.bytes("master") + 2 * p.bytes("moments")


@pytest.mark.parametrize(
    ("name", "total"),
    [("fp64", 32), ("fp32", 16), ("autocast-bf16", 16), ("bf16-master", 16), ("fp16-master", 16), ("pure-bf16", 8)],
)
def test_bytes_per_parameter_with_adam(name: str, total: int) -> None:
    assert state_bytes(precision(name)) == total


@pytest.mark.parametrize("name", ["bf16-master", "fp16-master"])
def test_master_presets_are_2_2_12(name: str) -> None:
    """ZeRO (arXiv 1910.02054), section 3.1: 2 bytes of weights, 2 of gradients, 12 of optimizer state."""
    p = precision(name)
    assert (p.bytes("weights"), p.bytes("gradients")) == (2, 2)
    assert p.bytes("master") + 2 * p.bytes("moments") == 12
    assert (p.bytes("compute"), p.bytes("gathered"), p.bytes("reduction")) == (2, 2, 2)


def test_autocast_keeps_float32_parameters_and_computes_in_bfloat16() -> None:
    p = precision("autocast-bf16")
    assert p.autocast and p.weights == p.gradients == "float32" and p.compute == "bfloat16" and p.master is None
    assert not any(q.autocast for q in PRESETS.values() if q is not p)


def test_only_master_presets_have_a_master() -> None:
    assert {n for n, p in PRESETS.items() if p.master} == {"bf16-master", "fp16-master"}
    assert PRESETS["fp32"].bytes("master") == 0


def test_a_preset_knows_its_name_and_every_dtype_has_a_size() -> None:
    for name, p in PRESETS.items():
        assert p.name == name
        dtypes = [v for k, v in objects(p).items() if k not in ("name", "autocast") and v]
        assert all(d in ITEM_BYTES for d in dtypes)


def test_item_bytes_are_those_of_torch() -> None:
    torch = pytest.importorskip("torch")
    for name, size in ITEM_BYTES.items():
        assert getattr(torch, name).itemsize == size, name


def test_an_unknown_preset_is_refused_by_name() -> None:
    with pytest.raises(BadInput, match=r"'bf32'.*bf16-master"):
        precision("bf32")
