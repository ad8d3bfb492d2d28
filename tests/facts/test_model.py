"""Names, shapes, roles and ties of a model's parameters, and the units they stand in."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from partita.facts.known import entry
from partita.facts.model import Model, UnknownModel, counted


def tiny(**fields: object) -> Model:
    sizes = {"layers": 3, "hidden": 12, "ffn": 20, "heads": 6, "kv_heads": 2, "head_dim": 4, "vocab": 37}
    return Model(**{"name": "tiny", "family": "llama", **sizes, **fields})  # type: ignore[arg-type]


def shapes(model: Model) -> dict[str, tuple[int, ...]]:
    return {p.name: p.shape for p in model.parameters}


def test_names_and_shapes_of_a_block() -> None:
    assert {n: s for n, s in shapes(tiny()).items() if "blocks.1." in n} == {
        "blocks.1.attn_norm.weight": (12,),
        "blocks.1.attn.q.weight": (24, 12),
        "blocks.1.attn.k.weight": (8, 12),
        "blocks.1.attn.v.weight": (8, 12),
        "blocks.1.attn.o.weight": (12, 24),
        "blocks.1.mlp_norm.weight": (12,),
        "blocks.1.mlp.gate.weight": (20, 12),
        "blocks.1.mlp.up.weight": (20, 12),
        "blocks.1.mlp.down.weight": (12, 20),
    }


def test_order_and_units() -> None:
    model = tiny()
    assert [s.name for s in model.spans] == ["first", "blocks.0..2", "last"]
    assert list(dict.fromkeys(p.unit for p in model.parameters)) == [
        "first",
        "blocks.0",
        "blocks.1",
        "blocks.2",
        "last",
    ]
    assert model.parameters[0].name == "embed.weight" and model.parameters[-1].name == "head.weight"
    assert len(shapes(model)) == len(model.parameters)
    assert model.parameter_count == sum(p.elements for p in model.parameters)


def test_a_tied_head_is_listed_once_with_its_first_holder() -> None:
    model = tiny(tied=True)
    assert model.parameters[0].tie == "head.weight"
    assert "head.weight" not in shapes(model)
    assert tiny().parameter_count - model.parameter_count == 37 * 12


def test_biases_and_norms_have_their_own_roles() -> None:
    model = tiny(qkv_bias=True, qk_norm=True, norm_bias=True, norm="layernorm")
    roles = {p.name: p.role for p in model.parameters}
    assert roles["blocks.0.attn.k.bias"] == "k_bias"
    assert roles["blocks.0.attn.q_norm.weight"] == "qk_norm" and shapes(model)["blocks.0.attn.q_norm.weight"] == (4,)
    assert roles["norm.bias"] == "norm_bias"
    assert "blocks.0.attn.o.bias" not in roles


def test_learned_positions_and_embedding_norm() -> None:
    model = tiny(positions="learned", position_rows=66, embed_norm=True, norm_bias=True, mlp="gelu")
    assert shapes(model)["positions.weight"] == (66, 12)
    assert shapes(model)["embed_norm.bias"] == (12,)
    assert "blocks.0.mlp.gate.weight" not in shapes(model)


def test_cutting_a_span() -> None:
    blocks = tiny(layers=8).spans[1]
    assert blocks.cut(2, 5).units() == ("blocks.2", "blocks.3", "blocks.4")
    assert blocks.cut(7, 12).name == "blocks.7" and blocks.cut(9, 12).count == 0


def test_a_count_alone() -> None:
    model = counted("46.7B:12.9B", 46_700_000_000, 12_900_000_000)
    assert model.bare and not model.runs
    assert (model.parameter_count, model.active_count) == (46_700_000_000, 12_900_000_000)
    assert counted("7B", 7_000_000_000).active_count == 7_000_000_000
    with pytest.raises(UnknownModel, match="active"):
        counted("1:2", 1, 2)


def test_accounting_costs_the_same_for_many_layers() -> None:
    known = entry("llama-3.1-405b")
    assert known is not None
    model = known.model()
    assert len(model.spans) == 3 and model.parameter_count == 405_853_388_800
    assert replace(model, layers=2).spans[1].elements == model.spans[1].elements


def test_facts_import_without_torch() -> None:
    """Neither torch nor numpy, transformers or huggingface_hub is touched to describe a model."""
    code = (
        "import sys\n"
        "for name in ('torch', 'numpy', 'transformers', 'huggingface_hub'): sys.modules[name] = None\n"
        "from partita.facts import flops\n"
        "from partita.facts.find import find_model\n"
        "print(flops.model_flops_per_step(find_model('llama-3.1-8b').model, 8192, 8192))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0
