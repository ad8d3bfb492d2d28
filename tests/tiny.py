"""Odd tiny models that the tests share.

Sizes are odd on purpose: a vocabulary of 101, an FFN of 54 and a hidden width of 40 divide unevenly over 3 and 4 ranks,
so that faults of padding, remainder and divisor cannot pass unseen.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from partita.facts.model import Model

VOCAB, HIDDEN, FFN = 101, 40, 54

PLAIN = Model(
    name="tiny",
    family="llama",
    layers=3,
    hidden=HIDDEN,
    ffn=FFN,
    heads=4,
    kv_heads=2,
    head_dim=10,
    vocab=VOCAB,
    max_positions=64,
)


def tiny_model(**changes: Any) -> Model:
    """Three Llama blocks of hidden width 40 with 4 heads, 2 KV heads and a vocabulary of 101; fields of ``Model`` as
    ``changes``.
    """
    return replace(PLAIN, **changes)


ZOO: dict[str, Model] = {
    "plain": tiny_model(),
    "two_layers": tiny_model(name="tiny-2", layers=2),
    "four_layers": tiny_model(name="tiny-4", layers=4),
    "tied": tiny_model(name="tiny-tied", tied=True),
    "bias": tiny_model(name="tiny-bias", family="qwen2", qkv_bias=True),
    "all_biases": tiny_model(name="tiny-biases", qkv_bias=True, o_bias=True, mlp_bias=True),
    "qk_norm": tiny_model(name="tiny-qk-norm", family="qwen3", qk_norm=True, tied=True),
    "no_gqa": tiny_model(name="tiny-mha", kv_heads=4),
    "one_kv_head": tiny_model(name="tiny-mqa", kv_heads=1),
    "wide_heads": tiny_model(name="tiny-wide", head_dim=12),
    "window": tiny_model(name="tiny-window", family="mistral", sliding_window=7),
}
"""Models that the decoder runs, by what is special in them."""
