"""GGUF files (llama and qwen2 architectures) to Hugging Face folders.

Quantised tensors are dequantised by the ``gguf`` package, whose metadata names are used here
(ggml-org/ggml, docs/gguf.md).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from partita.facts.errors import BadInput, NotInstalled
from partita.facts.families import model_from_config
from partita.model import hf

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}

_BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_ROPE_FACTORS = "rope_freqs.weight"

# How text is split before byte-pair merging: the expressions of the models' own tokenizer.json files.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {"llama-bpe": _CONTRACTIONS + r"\p{N}{1,3}" + _REST, "qwen2": _CONTRACTIONS + r"\p{N}" + _REST}
_PRE = ("smollm", "gpt-2", *_SPLITS)
_CONTROL, _USER_DEFINED = 3, 4


def convert(
    source: str | os.PathLike[str], folder: str | os.PathLike[str], dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write ``folder`` (config.json, model.safetensors, tokenizer files) from a GGUF file.

    Raises:
        BadInput: the file is damaged, or of an architecture, rope scaling or tokenizer that is not known here, or
            the folder is not empty.
        NotInstalled: the package ``gguf`` is missing.
    """
    path = Path(source)
    reader = _open(path)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    shapes = {t.name: tuple(int(n) for n in reversed(t.shape)) for t in reader.tensors}
    fields = _config(path, facts, shapes, reader)
    model = model_from_config(fields, path.name)
    tokenizer, companions = _tokenizer(path, facts)
    with hf.fresh_folder(Path(folder)) as draft:
        heads = (model.heads, model.kv_heads) if model.family == "llama" else None
        hf.write_tensors({n: t.to(dtype) for n, t in _tensors(path, reader, heads)}, draft)
        fields["torch_dtype"] = str(dtype).removeprefix("torch.")
        for name, content in {"config": fields, "tokenizer": tokenizer, **companions}.items():
            (draft / f"{name}.json").write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")
        hf.inspect(draft, model)


def _open(path: Path) -> Any:
    try:
        import gguf
    except ModuleNotFoundError:
        raise NotInstalled("reading GGUF files needs the package gguf: pip install gguf") from None
    try:
        return gguf.GGUFReader(path)
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, IndexError, KeyError) as error:
        raise BadInput(f"{path} is not a whole GGUF file ({error}); copy it again") from None


def _config(path: Path, facts: dict[str, Any], shapes: dict[str, tuple[int, ...]], reader: Any) -> dict[str, Any]:
    arch = facts.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise BadInput(f"{path} is of architecture {arch!r}; what can be converted is {', '.join(ARCHITECTURES)}")
    if "token_embd.weight" not in shapes:
        raise BadInput(f"{path} has no token_embd.weight; a GGUF file of a whole model has one")

    def fact(key: str, default: Any = None) -> Any:
        value = facts.get(f"{arch}.{key}", default)
        if value is None:
            raise BadInput(f"{path} does not say {arch}.{key}; convert its source again with a current llama.cpp")
        return value

    hidden, heads = fact("embedding_length"), fact("attention.head_count")
    head_dim = fact("attention.key_length", hidden // heads)
    if fact("attention.value_length", head_dim) != head_dim or fact("rope.dimension_count", head_dim) != head_dim:
        raise BadInput(f"{path} has keys of {head_dim} that differ from its values or rotated dims; they must be equal")
    vocab = shapes["token_embd.weight"][0]
    fields = {
        "architectures": [ARCHITECTURES[arch]],
        "model_type": arch,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": fact("feed_forward_length"),
        "num_hidden_layers": fact("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fact("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": fact("context_length"),
        # Stored in float32: 7 digits give back what was meant (1e-05).
        "rms_norm_eps": float(f"{fact('attention.layer_norm_rms_epsilon'):.7g}"),
        "rope_theta": float(fact("rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(path, facts, arch, head_dim, reader),
        "tie_word_embeddings": "output.weight" not in shapes,
        "bos_token_id": facts.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": facts.get("tokenizer.ggml.eos_token_id"),
    }
    if arch == "llama":
        fields |= {"attention_bias": "blk.0.attn_q.bias" in shapes, "mlp_bias": "blk.0.ffn_up.bias" in shapes}
    else:
        fields |= {"use_sliding_window": False}
    return fields


def _rope_scaling(path: Path, facts: dict[str, Any], arch: str, head_dim: int, reader: Any) -> dict[str, Any] | None:
    factors = next((t.data for t in reader.tensors if t.name == _ROPE_FACTORS), None)
    if factors is not None:
        return _llama3(path, facts, arch, head_dim, np.asarray(factors, np.float64))
    kind = facts.get(f"{arch}.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise BadInput(f"{path} scales its rotary positions by {kind!r}; what can be converted is none, linear, yarn")
    factor = facts.get(f"{arch}.rope.scaling.factor")
    if factor is None:
        raise BadInput(f"{path} scales its rotary positions but does not say {arch}.rope.scaling.factor")
    out = {"rope_type": kind, "factor": float(factor)}
    trained = facts.get(f"{arch}.rope.scaling.original_context_length")
    return out | ({"original_max_position_embeddings": trained} if kind == "yarn" and trained else {})


def _llama3(path: Path, facts: dict[str, Any], arch: str, head_dim: int, found: np.ndarray) -> dict[str, Any]:
    """GGUF keeps Llama 3's scaling as divisors of the frequencies; find the published setting that gives them."""
    theta = float(facts.get(f"{arch}.rope.freq_base", 10000.0))
    wave = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high, trained = 1.0, 4.0, 8192  # Llama 3.1, 3.2 and 3.3 alike (their config.json)
    smooth = (trained / wave - low) / (high - low)
    for factor in (8.0, 32.0):
        between = 1 / ((1 - smooth) / factor + smooth)
        want = np.where(wave < trained / high, 1.0, np.where(wave > trained / low, factor, between))
        if found.shape == want.shape and np.allclose(found, want, rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": trained,
            }
    raise BadInput(f"{path} has rope factors that are not those of Llama 3.1 (8) or 3.2 (32); use its safetensors")


def _tensors(path: Path, reader: Any, heads: tuple[int, int] | None) -> Iterator[tuple[str, Tensor]]:
    """Hugging Face names and float32 values; ``heads`` (query, key) where rows are to be put back in order."""
    import gguf

    for tensor in reader.tensors:
        if tensor.name == _ROPE_FACTORS:
            continue
        found = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", tensor.name)
        if found and found[2] in _BLOCK:
            name = f"model.layers.{found[1]}.{_BLOCK[found[2]]}.{found[3]}"
        elif tensor.name in _OUTER:
            name = _OUTER[tensor.name]
        else:
            raise BadInput(f"{path} holds a tensor {tensor.name}, which is not part of the models converted here")
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if heads and found and found[2] in ("attn_q", "attn_k"):
            values = _half_and_half(values, heads[found[2] == "attn_k"])
        yield name, torch.from_numpy(np.array(values, copy=True, order="C"))


def _half_and_half(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from pairs side by side (llama.cpp's llama) to two halves (Hugging Face)."""
    pairs = values.reshape(heads, -1, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _tokenizer(path: Path, facts: dict[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """tokenizer.json, and the small files beside it by stem."""
    kind, pre = facts.get("tokenizer.ggml.model"), facts.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or pre not in _PRE:
        raise BadInput(f"{path} has a tokenizer {kind!r} with {pre!r}; what can be converted is gpt2 with {_PRE}")
    tokens, types = facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.token_type"]
    special = [i for i, t in enumerate(types) if t in (_CONTROL, _USER_DEFINED)]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    out = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(i, tokens[i], types[i] == _CONTROL) for i in special],
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": _pre_tokenizer(pre, level),
        "post_processor": None,
        "decoder": level | {"add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre == "llama-bpe",
            "vocab": {t: i for i, t in enumerate(tokens)},
            "merges": [m.split(" ") for m in facts["tokenizer.ggml.merges"]],
        },
    }
    bos, eos = (facts.get(f"tokenizer.ggml.{end}_token_id") for end in ("bos", "eos"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None if bos is None else tokens[bos],
        "eos_token": None if eos is None else tokens[eos],
        "clean_up_tokenization_spaces": False,
        "chat_template": facts.get("tokenizer.chat_template"),
    }
    return out, {"tokenizer_config": settings, "generation_config": {"bos_token_id": bos, "eos_token_id": eos}}


def _added(index: int, text: str, control: bool) -> dict[str, Any]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": index, "content": text, **plain, "special": control}


def _pre_tokenizer(pre: str, level: dict[str, Any]) -> dict[str, Any]:
    if pre == "gpt-2":
        return level
    if pre == "smollm":
        return {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, level]}
    split = {"type": "Split", "pattern": {"Regex": _SPLITS[pre]}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, level | {"use_regex": False}]}
