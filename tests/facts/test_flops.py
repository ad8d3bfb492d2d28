"""FLOPs worked by hand, and against the formulas of the papers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from partita.facts import flops
from partita.facts.errors import BadInput
from partita.facts.known import entry
from partita.facts.model import Model, counted


def named(text: str) -> Model:
    known = entry(text)
    assert known is not None
    return known.model()


TINY = Model("tiny", "llama", layers=2, hidden=8, ffn=12, heads=4, kv_heads=2, head_dim=4, vocab=10)


def test_a_block_by_hand() -> None:
    # q 16x8, k and v 8x8, o 8x16, gate, up and down 12x8: 128 + 2*64 + 128 + 3*96 = 672 elements.
    assert flops.block_matrix_elements(TINY) == 672
    # 6 tokens in sequences of 3; scores and values: 2*2*16 FLOPs per pair, 9 pairs per sequence, 2 sequences.
    assert flops.block_forward(TINY, 6, 3) == flops.Flops(2 * 672 * 6, 4 * 16 * 9 * 2)
    assert flops.block_forward(TINY, 6, 3, "causal").attention == 4 * 16 * 9 * 2 // 2


def test_the_head_counts_and_the_lookup_does_not() -> None:
    assert flops.head_forward(TINY, 6) == flops.Flops(2 * 80 * 6)
    assert flops.matrix_elements(TINY) == 2 * 672 + 80
    tied = replace(TINY, tied=True)
    assert flops.forward(tied, 6, 3) == flops.forward(TINY, 6, 3)


def test_a_step_is_three_forwards() -> None:
    step = flops.model_flops_per_step(TINY, 6, 3)
    assert step == flops.forward(TINY, 6, 3).total + flops.backward(TINY, 6, 3).total
    assert step == 6 * (2 * 672 + 80) * 6 + 12 * 2 * 16 * 3 * 6


@pytest.mark.parametrize("convention", ["full", "causal"])
@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-0.6b", "gpt-3-175b"])
def test_the_general_formula(name: str, convention: str) -> None:
    """6 N tokens + 12 L h_attn s tokens, the second term halved where causality is counted (PaLM, appendix B)."""
    model, tokens, s = named(name), 16384, 4096
    half = 2 if convention == "causal" else 1
    expected = 6 * flops.matrix_elements(model) * tokens + 12 * model.layers * model.q_width * s * tokens // half
    assert flops.model_flops_per_step(model, tokens, s, convention) == expected


@pytest.mark.parametrize(("name", "heads"), [("gpt-1.7b", 24), ("gpt-145b", 96), ("gpt-1t", 160)])
def test_megatron_equation_3(name: str, heads: int) -> None:
    """96 B s l h^2 (1 + s/6h + V/16lh) with full recomputation (arXiv 2104.04473): blocks run forward twice."""
    model, batch, s = named(name), 512, 2048
    l, h, v = model.layers, model.hidden, model.vocab  # noqa: E741
    tokens = batch * s
    recompute = flops.block_forward(model, tokens, s).times(l).total
    published = 96 * batch * s * l * h * h * (1 + s / (6 * h) + v / (16 * l * h))
    assert model.heads == heads
    assert flops.model_flops_per_step(model, tokens, s) + recompute == pytest.approx(published, rel=1e-12)


def test_causal_attention_in_a_window() -> None:
    windowed = replace(TINY, sliding_window=2)
    # 4 tokens, window 2: 4*2 - 2*2/2 = 6 pairs instead of 8.
    assert flops.block_forward(windowed, 4, 4, "causal").attention == 4 * 16 * 6
    assert flops.block_forward(windowed, 4, 4).attention == flops.block_forward(TINY, 4, 4).attention
    assert flops.block_forward(replace(TINY, sliding_window=9), 4, 4, "causal").attention == 4 * 16 * 8


def test_a_count_alone_has_six_flops_per_active_parameter() -> None:
    assert flops.model_flops_per_step(counted("236B:21B", 236 * 10**9, 21 * 10**9), 100, 10) == 6 * 21 * 10**9 * 100


def test_refusals() -> None:
    with pytest.raises(BadInput, match="'half' is unknown; full and causal work"):
        flops.model_flops_per_step(TINY, 6, 3, "half")
    with pytest.raises(BadInput, match="sequence of 0"):
        flops.forward(counted("7B", 7), 6, 0)


def test_the_conventions_on_llama_3_8b() -> None:
    """Worked: N = 32 x 218,103,808 + 128,256 x 4096; attention 12 x 32 x 4096 x 8192 per token, or half."""
    model, s = named("llama-3-8b"), 8192
    linear, attention = 6 * (32 * 218_103_808 + 128_256 * 4096), 12 * 32 * 4096 * s
    assert flops.model_flops_per_step(model, s, s) == (linear + attention) * s
    assert flops.model_flops_per_step(model, s, s, "causal") == (linear + attention // 2) * s
    assert (linear + attention) / (linear + attention // 2) == pytest.approx(1.125, abs=1e-3)
