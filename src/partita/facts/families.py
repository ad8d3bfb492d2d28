"""From a Hugging Face ``config.json`` to a ``Model``: one reader for each family.

Each reader says what its family's ``transformers`` class would build: which tensors exist, with which shapes
and ties.  A field that changes the model in a way not described here is refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from partita.facts.config import Config, rope_of
from partita.facts.model import Model, UnknownModel

# Families whose blocks route tokens to experts; refused by name so that the sentence can say why.
EXPERT_FAMILIES = (
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5_moe",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "deepseek_v4",
    "kimi_k2",
    "gpt_oss",
    "llama4",
    "llama4_text",
    "olmoe",
    "granitemoe",
    "glm4_moe",
    "glm4_moe_lite",
    "minimax",
    "minimax_m2",
    "phimoe",
    "dbrx",
    "jamba",
    "nemotron_h",
    "ernie4_5_moe",
    "hunyuan_v1_moe",
)


def model_from_config(config: dict[str, Any], name: str) -> Model:
    """The model that a ``config.json`` describes.

    Args:
        config: the parsed file.
        name: what the user calls the model; it stands in ``Model.name`` and in every message.

    Raises:
        UnknownModel: an unknown family, a missing or impossible field, or a variant that is not described; the
            message is one sentence with the value, the limit and what works.
    """
    if not isinstance(config, dict):
        raise UnknownModel(f"{name}: a config.json must hold a table of fields, not a {type(config).__name__}.")
    reader = Config(config, name)
    family = reader.get("model_type", default=None)
    if not isinstance(family, str):
        raise UnknownModel(f"{name}: its configuration has no 'model_type'; {_works()}.")
    if family in EXPERT_FAMILIES:
        raise UnknownModel(
            f"{name}: model_type {family!r} routes tokens to experts, and experts are not described yet; "
            "its total and active parameters work, such as 46.7B:12.9B."
        )
    if family not in FAMILIES:
        raise UnknownModel(f"{name}: model_type {family!r} is not described here; {_works()}.")
    fields = FAMILIES[family](reader)
    _check_shape(reader, fields)
    return Model(name=name, family=family, **fields)


def _works() -> str:
    runs, predicts = ", ".join(RUN), ", ".join(f for f in FAMILIES if f not in RUN)
    return f"{runs} run, {predicts} can be predicted, and a parameter count such as 7.5B always works"


def _check_shape(config: Config, fields: dict[str, Any]) -> None:
    heads, kv_heads = fields["heads"], fields["kv_heads"]
    if heads % kv_heads:
        below = max(d for d in range(1, min(heads, kv_heads) + 1) if heads % d == 0)
        raise config.wrong(
            f"{heads} attention heads do not divide evenly among {kv_heads} key-value heads; {below} would work."
        )


def _head_dim(config: Config, hidden: int, heads: int) -> int:
    stated = config.get("head_dim", default=None)
    if stated is not None:
        return config.count("head_dim")
    if hidden % heads:
        raise config.wrong(f"hidden size {hidden} is not a multiple of {heads} heads; state head_dim or change one.")
    return hidden // heads


def _rotary(config: Config, tied_by_default: bool = False) -> dict[str, Any]:
    """What llama, mistral, qwen2 and qwen3 have in common: RMSNorm, rotary positions, SwiGLU, grouped heads."""
    config.must("hidden_act", "silu", "silu", "swish", why="but the feed-forward described here is SwiGLU")
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    head_dim = _head_dim(config, hidden, heads)
    if "num_key_value_heads" not in config.values and config.values["model_type"] != "llama":
        raise config.wrong("its configuration has no 'num_key_value_heads'; a config.json of this family states it.")
    return {
        "layers": config.count("num_hidden_layers"),
        "hidden": hidden,
        "ffn": config.count("intermediate_size"),
        "heads": heads,
        "kv_heads": config.count("num_key_value_heads", default=heads),
        "head_dim": head_dim,
        "vocab": config.count("vocab_size"),
        "max_positions": config.count("max_position_embeddings"),
        "eps": config.number("rms_norm_eps", default=1e-6),
        "rope": rope_of(config, head_dim),
        "tied": config.flag("tie_word_embeddings", default=tied_by_default),
    }


def _llama(config: Config) -> dict[str, Any]:
    """LlamaConfig; ``attention_bias`` covers q, k, v and o.  SmolLM and SmolLM2 are of this family."""
    bias = config.flag("attention_bias", default=False)
    mlp_bias = config.flag("mlp_bias", default=False)
    return {**_rotary(config), "qkv_bias": bias, "o_bias": bias, "mlp_bias": mlp_bias}


def _mistral(config: Config) -> dict[str, Any]:
    window = config.get("sliding_window", default=None)
    return {**_rotary(config), "sliding_window": None if window is None else config.count("sliding_window")}


def _qwen2(config: Config) -> dict[str, Any]:
    return {**_rotary(config), "qkv_bias": True, "sliding_window": _qwen_window(config)}


def _qwen3(config: Config) -> dict[str, Any]:
    bias = config.flag("attention_bias", default=False)
    # Qwen3Config's own default is 128, whatever the hidden size; a released config.json always states it.
    config.count("head_dim")
    fields = {**_rotary(config), "qkv_bias": bias, "o_bias": bias, "qk_norm": True}
    return {**fields, "sliding_window": _qwen_window(config)}


def _qwen_window(config: Config) -> int | None:
    """One window for all layers or none: Qwen's window holds for the layers from ``max_window_layers`` on."""
    layers = config.count("num_hidden_layers")
    if not config.flag("use_sliding_window", default=False) or config.get("sliding_window", default=None) is None:
        return None
    kinds = config.get("layer_types", default=None)
    if kinds is None:
        first = config.get("max_window_layers", default=28)
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    if set(kinds) == {"full_attention"}:
        return None
    if set(kinds) == {"sliding_attention"}:
        return config.count("sliding_window")
    windowed = sum(k == "sliding_attention" for k in kinds)
    raise config.wrong(
        f"{windowed} of its {layers} layers have a sliding window; all or none (use_sliding_window=false) works."
    )


def _layernorm(hidden: int, heads: int, **fields: Any) -> dict[str, Any]:
    """What the LayerNorm families share; their heads fill the hidden size."""
    return {
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": hidden // heads,
        "norm": "layernorm",
        "norm_bias": True,
        "mlp": "gelu",
        "runs": False,
        **fields,
    }


def _even_heads(config: Config, hidden: int, heads: int) -> None:
    if hidden % heads:
        raise config.wrong(f"hidden size {hidden} is not a multiple of {heads} heads; a divisor of {hidden} works.")


def _activation(config: Config, key: str, default: str) -> str:
    """The two-matrix feed-forward: ``gelu`` (any approximation), ``relu``, or ``relu2`` (squared)."""
    value = config.get(key, default=default)
    if value == "relu2":
        return "relu2"
    if value == "relu":
        return "relu"
    if isinstance(value, str) and value.startswith("gelu"):
        return "gelu"
    raise config.wrong(f"{key} is {value!r}; gelu, relu and relu2 feed-forwards of two matrices are described.")


def _gpt2(config: Config) -> dict[str, Any]:
    """GPT2Config; GPT-3 and Megatron's GPT have the same tensors, with other sizes."""
    hidden, heads = config.count("n_embd", "hidden_size"), config.count("n_head", "num_attention_heads")
    _even_heads(config, hidden, heads)
    config.must("add_cross_attention", False, False, why="but only decoders without an encoder are described")
    rows = config.count("n_positions", "max_position_embeddings")
    return _layernorm(
        hidden,
        heads,
        layers=config.count("n_layer", "num_hidden_layers"),
        ffn=config.count("n_inner", default=4 * hidden),
        vocab=config.count("vocab_size"),
        max_positions=rows,
        position_rows=rows,
        positions="learned",
        mlp=_activation(config, "activation_function", "gelu_new"),
        eps=config.number("layer_norm_epsilon", default=1e-5),
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        tied=config.flag("tie_word_embeddings", default=True),
    )


def _bloom(config: Config) -> dict[str, Any]:
    """BloomConfig: ALiBi, a norm after the embedding, biases everywhere."""
    hidden, heads = config.count("n_embed", "hidden_size"), config.count("n_head", "num_attention_heads")
    _even_heads(config, hidden, heads)
    return _layernorm(
        hidden,
        heads,
        layers=config.count("n_layer", "num_hidden_layers"),
        ffn=config.count("n_inner", default=4 * hidden),
        vocab=config.count("vocab_size"),
        max_positions=config.count("seq_length", default=2048),
        positions="alibi",
        embed_norm=True,
        eps=config.number("layer_norm_epsilon", default=1e-5),
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        tied=config.flag("tie_word_embeddings", default=True),
    )


def _mpt(config: Config) -> dict[str, Any]:
    """MptConfig.  ``no_bias`` removes the biases of norms and matrices alike; without ALiBi positions are learned."""
    hidden, heads = config.count("d_model", "hidden_size"), config.count("n_heads", "num_attention_heads")
    _even_heads(config, hidden, heads)
    attention = config.sub("attn_config")
    kinds = ("multihead_attention", "multiquery_attention", "grouped_query_attention")
    attention.must("attn_type", kinds[0], *kinds, why="a kind of attention that is not described")
    attention.must("qk_ln", False, False, why="and norms of queries and keys are not described for MPT")
    attention.must("rope", False, False, why="and MPT with rotary positions is not described")
    alibi = attention.flag("alibi", default=True)
    if not alibi and not config.flag("learned_pos_emb", default=True):
        raise config.wrong("it has neither ALiBi nor learned positions; one of the two works.")
    bias, rows = not config.flag("no_bias", default=True), config.count("max_seq_len", default=2048)
    kind = attention.get("attn_type", default=kinds[0])
    groups = {kinds[0]: heads, kinds[1]: 1}
    ratio = config.number("expansion_ratio", default=4)
    return _layernorm(
        hidden,
        heads,
        kv_heads=groups[kind] if kind in groups else attention.count("kv_n_heads"),
        layers=config.count("n_layers", "num_hidden_layers"),
        ffn=int(ratio * hidden),
        vocab=config.count("vocab_size"),
        max_positions=rows,
        positions="alibi" if alibi else "learned",
        position_rows=0 if alibi else rows,
        eps=config.number("layer_norm_epsilon", default=1e-5),
        norm_bias=bias,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        tied=config.flag("tie_word_embeddings", default=True),
    )


def _opt(config: Config) -> dict[str, Any]:
    """OPTConfig: learned positions with two rows that no position uses, and the norm before each part."""
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    _even_heads(config, hidden, heads)
    plain = "and only OPT with the norm first and without projections is described (opt-350m is the exception)"
    config.must("do_layer_norm_before", True, True, why=plain)
    config.must("word_embed_proj_dim", hidden, hidden, why=plain)
    config.must("_remove_final_layer_norm", False, False, why=plain)
    config.must("layer_norm_elementwise_affine", True, True, why=plain)
    bias, rows = config.flag("enable_bias", default=True), config.count("max_position_embeddings")
    return _layernorm(
        hidden,
        heads,
        layers=config.count("num_hidden_layers"),
        ffn=config.count("ffn_dim"),
        vocab=config.count("vocab_size"),
        max_positions=rows,
        position_rows=rows + 2,
        positions="learned",
        mlp=_activation(config, "activation_function", "relu"),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        tied=config.flag("tie_word_embeddings", default=True),
    )


def _gpt_neox(config: Config) -> dict[str, Any]:
    """GPTNeoXConfig (Pythia): attention and feed-forward side by side, which changes no tensor."""
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    _even_heads(config, hidden, heads)
    bias = config.flag("attention_bias", default=True)
    return _layernorm(
        hidden,
        heads,
        layers=config.count("num_hidden_layers"),
        ffn=config.count("intermediate_size"),
        vocab=config.count("vocab_size"),
        max_positions=config.count("max_position_embeddings"),
        mlp=_activation(config, "hidden_act", "gelu"),
        eps=config.number("layer_norm_eps", default=1e-5),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=True,
        tied=config.flag("tie_word_embeddings", default=False),
    )


def _nemotron(config: Config) -> dict[str, Any]:
    """NemotronConfig (Nemotron-3 8B, Nemotron-4): squared ReLU, no biases but the norms', untied."""
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    bias, mlp_bias = config.flag("attention_bias", default=False), config.flag("mlp_bias", default=False)
    return _layernorm(
        hidden,
        heads,
        kv_heads=config.count("num_key_value_heads", default=heads),
        head_dim=_head_dim(config, hidden, heads),
        layers=config.count("num_hidden_layers"),
        ffn=config.count("intermediate_size"),
        vocab=config.count("vocab_size"),
        max_positions=config.count("max_position_embeddings"),
        mlp=_activation(config, "hidden_act", "relu2"),
        eps=config.number("norm_eps", default=1e-5),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=mlp_bias,
        tied=config.flag("tie_word_embeddings", default=False),
    )


RUN = ("llama", "mistral", "qwen2", "qwen3")

FAMILIES: dict[str, Callable[[Config], dict[str, Any]]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gpt2": _gpt2,
    "bloom": _bloom,
    "mpt": _mpt,
    "opt": _opt,
    "gpt_neox": _gpt_neox,
    "nemotron": _nemotron,
}
