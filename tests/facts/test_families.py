"""Every family against the model that ``transformers`` builds from the same ``config.json``, and the refusals."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from partita.facts.families import EXPERT_FAMILIES, FAMILIES, RUN, model_from_config
from partita.facts.model import UnknownModel

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
NARROW = {"vocab_size": 97, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 6}

# model_type, the fields that make it tiny (odd sizes on purpose).
BUILT: list[tuple[str, dict[str, Any]]] = [
    ("llama", LLAMA),
    ("llama", {**LLAMA, "tie_word_embeddings": True, "head_dim": 8, "attention_bias": True, "mlp_bias": True}),
    ("mistral", {**LLAMA, "sliding_window": None, "head_dim": 10}),
    ("mistral", {**LLAMA, "sliding_window": 32, "tie_word_embeddings": True}),
    ("qwen2", LLAMA),
    ("qwen2", {**LLAMA, "tie_word_embeddings": True, "num_key_value_heads": 6}),
    ("qwen3", {**LLAMA, "head_dim": 8}),
    ("qwen3", {**LLAMA, "head_dim": 8, "tie_word_embeddings": True, "attention_bias": True}),
    ("gpt2", {"vocab_size": 97, "n_embd": 24, "n_layer": 3, "n_head": 6, "n_positions": 50, "n_inner": 37}),
    (
        "gpt2",
        {"vocab_size": 97, "n_embd": 24, "n_layer": 3, "n_head": 6, "n_positions": 50, "tie_word_embeddings": False},
    ),
    ("bloom", {"vocab_size": 97, "hidden_size": 24, "n_layer": 3, "n_head": 6}),
    ("mpt", {"vocab_size": 97, "d_model": 24, "n_layers": 3, "n_heads": 4, "max_seq_len": 50}),
    ("opt", {**NARROW, "ffn_dim": 37, "max_position_embeddings": 50, "word_embed_proj_dim": 24}),
    ("opt", {**NARROW, "ffn_dim": 37, "max_position_embeddings": 50, "enable_bias": False}),
    ("gpt_neox", {**NARROW, "intermediate_size": 37, "max_position_embeddings": 50}),
    ("gpt_neox", {**NARROW, "intermediate_size": 37, "attention_bias": False, "tie_word_embeddings": True}),
    ("nemotron", {**LLAMA, "head_dim": 4}),
]
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 16.0, "mscale": 0.7},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.5],
        "long_factor": [2.0, 3.0],
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    },
]


@pytest.mark.parametrize("number", range(len(BUILT)), ids=[f"{i}-{b[0]}" for i, b in enumerate(BUILT)])
def test_same_parameters_as_transformers(number: int, tmp_path: Path) -> None:
    """The count; for families that run, every shape too (the others fuse q, k and v)."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    family, fields = BUILT[number]
    config = transformers.AutoConfig.for_model(family, **{k: v for k, v in fields.items() if k != "model_type"})
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(config)
    built.tie_weights()
    config.save_pretrained(tmp_path)
    model = model_from_config(json.loads((tmp_path / "config.json").read_text()), "tiny")
    assert model.family == family and model.runs == (family in RUN)
    assert model.parameter_count == sum(p.numel() for p in built.parameters())
    if family in RUN:
        ours = sorted(p.shape for p in model.parameters)
        assert ours == sorted(tuple(p.shape) for p in built.parameters())


def test_every_family_is_compared() -> None:
    assert {family for family, _ in BUILT} == set(FAMILIES)


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: s["rope_type"])
def test_rope_in_both_spellings(scaling: dict[str, Any]) -> None:
    base = {**LLAMA}
    old = {**base, "rope_theta": 5000.0, "rope_scaling": {**scaling, "type": scaling["rope_type"]}}
    new = {**base, "rope_parameters": {**scaling, "rope_theta": 5000.0}}
    rope = model_from_config(old, "old").rope
    assert rope == model_from_config(new, "new").rope
    assert (rope.theta, rope.scaling) == (5000.0, scaling["rope_type"])
    for ours, theirs in (("factor", "factor"), ("beta_fast", "beta_fast"), ("low_freq_factor", "low_freq_factor")):
        if theirs in scaling:
            assert getattr(rope, ours) == scaling[theirs]
    if "original_max_position_embeddings" in scaling:
        assert rope.original_positions == scaling["original_max_position_embeddings"]


def test_rope_defaults() -> None:
    assert model_from_config(LLAMA, "m").rope.scaling == "none"
    assert model_from_config({**LLAMA, "rope_scaling": None, "rope_theta": 1e6}, "m").rope.theta == 1e6
    yarn = {"rope_type": "yarn", "factor": 2.0}
    rope = model_from_config({**LLAMA, "rope_parameters": yarn}, "m").rope
    assert (rope.original_positions, rope.beta_fast, rope.attention_factor) == (64, 32.0, None)
    only_type = {**LLAMA, "rope_scaling": {"type": "linear", "factor": 2}}
    assert model_from_config(only_type, "m").rope.scaling == "linear"


def test_qwen_windows() -> None:
    base = {**LLAMA, "model_type": "qwen2", "sliding_window": 16}
    assert model_from_config({**base, "use_sliding_window": False}, "m").sliding_window is None
    assert model_from_config({**base, "use_sliding_window": True, "max_window_layers": 3}, "m").sliding_window is None
    assert model_from_config({**base, "use_sliding_window": True, "max_window_layers": 0}, "m").sliding_window == 16
    with pytest.raises(UnknownModel, match="2 of its 3 layers have a sliding window; all or none"):
        model_from_config({**base, "use_sliding_window": True, "max_window_layers": 1}, "m")


def test_mpt_variants() -> None:
    base = {"model_type": "mpt", "vocab_size": 97, "d_model": 24, "n_layers": 1, "n_heads": 4, "max_seq_len": 50}
    learned = model_from_config({**base, "attn_config": {"alibi": False}, "no_bias": False}, "m")
    assert learned.positions == "learned" and learned.position_rows == 50 and learned.qkv_bias and learned.norm_bias
    # llm-foundry honours the ratio; the class in transformers builds 4 whatever it says.
    assert model_from_config({**base, "expansion_ratio": 3}, "m").ffn == 72
    shared = {"attn_type": "grouped_query_attention", "kv_n_heads": 2}
    assert model_from_config({**base, "attn_config": shared}, "m").kv_heads == 2


OPT = {**NARROW, "model_type": "opt", "ffn_dim": 37, "max_position_embeddings": 50}


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({**LLAMA, "model_type": "mamba"}, "'mamba' is not described here; llama, mistral, qwen2, qwen3 run"),
        ({k: v for k, v in LLAMA.items() if k != "model_type"}, "no 'model_type'"),
        ({k: v for k, v in LLAMA.items() if k != "hidden_size"}, "no 'hidden_size'"),
        ({**LLAMA, "num_hidden_layers": 0}, "num_hidden_layers is 0; it must be a whole number of at least 1"),
        ({**LLAMA, "vocab_size": True}, "vocab_size is True"),
        ({**LLAMA, "vocab_size": "97"}, "vocab_size is '97'"),
        ({**LLAMA, "vocab_size": 97.5}, "vocab_size is 97.5"),
        ({**LLAMA, "num_key_value_heads": 4}, "6 attention heads do not divide evenly among 4 .* 3 would work"),
        ({**LLAMA, "num_attention_heads": 7}, "hidden size 24 is not a multiple of 7 heads"),
        ({**LLAMA, "hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({**LLAMA, "rms_norm_eps": -1}, "rms_norm_eps is -1; it must be a finite number above 0"),
        ({**LLAMA, "rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({**LLAMA, "tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; it must be true or false"),
        ({**LLAMA, "head_dim": 5}, "head_dim is 5; .* an even head_dim"),
        ({**LLAMA, "partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({**LLAMA, "rope_scaling": {"rope_type": "mrope"}}, "rope scaling 'mrope' is not described"),
        ({**LLAMA, "rope_scaling": {"rope_type": "linear"}}, "no 'factor'"),
        ({**LLAMA, "rope_scaling": [1]}, r"rope_scaling is \[1\]; it must be a table"),
        ({**LLAMA, "rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "differ between kinds of layers"),
        ({**LLAMA, "rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, "needs 2"),
        ({**LLAMA, "model_type": "mistral", "num_key_value_heads": None, "sliding_window": 0}, "sliding_window is 0"),
        ({**LLAMA, "model_type": "qwen3"}, "no 'head_dim'"),
        ({k: v for k, v in {**LLAMA, "model_type": "qwen2"}.items() if "key_value" not in k}, "'num_key_value_heads'"),
        ({**OPT, "do_layer_norm_before": False}, "do_layer_norm_before is False, .*opt-350m"),
        ({**OPT, "word_embed_proj_dim": 16}, "word_embed_proj_dim is 16, .* 24 works"),
        ({"model_type": "mpt", "d_model": 24, "n_heads": 4, "attn_config": {"qk_ln": True}}, "qk_ln is True"),
        ({"model_type": "gpt2", "n_embd": 25, "n_head": 6}, "hidden size 25 is not a multiple of 6 heads"),
    ],
)
def test_refusals_are_one_sentence(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UnknownModel, match=sentence) as caught:
        model_from_config(config, "my-model")
    message = str(caught.value)
    assert message.startswith("my-model: ") and message.endswith(".") and "\n" not in message


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_experts_are_refused_by_name(family: str) -> None:
    assert family in EXPERT_FAMILIES
    with pytest.raises(UnknownModel, match="experts are not described yet; its total and active parameters work"):
        model_from_config({"model_type": family}, "m")


def test_not_a_table() -> None:
    with pytest.raises(UnknownModel, match="not a list"):
        model_from_config([], "m")  # type: ignore[arg-type]
