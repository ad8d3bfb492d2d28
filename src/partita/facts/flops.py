"""Model FLOPs: the arithmetic that a model needs, whatever layout runs it.

One multiply-add is 2 FLOPs.  A weight matrix costs 2 FLOPs per element and token forward; the embedding is a
lookup and costs none; the head costs its matrix even where that is the embedding's.  Attention costs 2 FLOPs
per query, key and channel for the scores and as many for the values.  Norms, activations, softmax and rotary
positions are left out, as in every published formula.  Backward is twice forward, once for the gradient of
each product's input and once for that of its weight.

Sources: PaLM (arXiv 2204.02311), appendix B: 6N + 12LHQT per token; Narayanan et al. (arXiv 2104.04473),
equation 3, which is the same sum for GELU blocks with h_ffn = 4h, times 4/3 for full recomputation.

Two conventions exist for attention and change an MFU by several percent, so every figure names its own:
``full`` counts every query against every key (PaLM, Megatron-LM, llm-foundry); ``causal`` counts half of
that, or less with a sliding window (Megatron-Bridge).
"""

from __future__ import annotations

from dataclasses import dataclass

from partita.facts.errors import BadInput
from partita.facts.model import Model

CONVENTIONS = ("full", "causal")

# The roles of parameters that multiply activations, apart from the head.
_MATRICES = frozenset({"q", "k", "v", "o", "gate", "up", "down"})


@dataclass(frozen=True)
class Flops:
    """FLOPs of weight matrices and of attention's scores and values, apart."""

    matmul: int
    attention: int = 0

    @property
    def total(self) -> int:
        return self.matmul + self.attention

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.matmul + other.matmul, self.attention + other.attention)

    def times(self, factor: int) -> Flops:
        return Flops(factor * self.matmul, factor * self.attention)


def block_matrix_elements(model: Model) -> int:
    """Weight-matrix elements of one block (0 for a model known by its count alone)."""
    return sum(p.elements for s in model.spans if s.is_blocks for p in s.parameters if p.role in _MATRICES)


def matrix_elements(model: Model) -> int:
    """N of the 6N rule: elements that one token multiplies, the head included and the embedding lookup not.

    A model known by its count alone has its active parameters; that includes an embedding it cannot tell apart.
    """
    if model.bare:
        return model.active_count
    return model.layers * block_matrix_elements(model) + model.vocab * model.hidden


def attention_pairs(sequence: int, convention: str, window: int | None = None) -> int:
    """Twice the query-key pairs that one sequence counts, so that the causal half stays a whole number.

    ``full`` is s^2 pairs, mask or not.  ``causal`` is s^2/2, the half of the square that published figures use
    (the exact triangle has s/2 more); under a window of w < s keys it is sw - w^2/2.

    Raises:
        BadInput: an unknown convention or a sequence below 1.
    """
    if convention not in CONVENTIONS:
        raise BadInput(f"FLOPs convention {convention!r} is unknown; {' and '.join(CONVENTIONS)} work.")
    if sequence < 1:
        raise BadInput(f"A sequence of {sequence} tokens has no FLOPs; 1 token or more works.")
    if convention == "full":
        return 2 * sequence * sequence
    reach = min(sequence, window or sequence)
    return reach * (2 * sequence - reach)


def block_forward(model: Model, tokens: int, sequence: int, convention: str = "full") -> Flops:
    """Forward FLOPs of one block over ``tokens`` tokens in sequences of ``sequence``."""
    pairs = attention_pairs(sequence, convention, model.sliding_window)
    attention = 2 * model.q_width * pairs * tokens // sequence
    return Flops(2 * block_matrix_elements(model) * tokens, attention)


def head_forward(model: Model, tokens: int) -> Flops:
    """Forward FLOPs of the head over ``tokens`` rows: 2 V h each."""
    return Flops(2 * model.vocab * model.hidden * tokens)


def forward(model: Model, tokens: int, sequence: int, convention: str = "full") -> Flops:
    """Forward FLOPs of the whole model; one known by its count alone has 2 per active parameter, no attention."""
    if model.bare:
        attention_pairs(sequence, convention)  # refuses the same bad arguments
        return Flops(2 * model.active_count * tokens)
    return block_forward(model, tokens, sequence, convention).times(model.layers) + head_forward(model, tokens)


def backward(model: Model, tokens: int, sequence: int, convention: str = "full") -> Flops:
    """Backward FLOPs: twice forward.  Recomputation is the layout's, not the model's, and is not counted."""
    return forward(model, tokens, sequence, convention).times(2)


def model_flops_per_step(model: Model, tokens: int, sequence: int, convention: str = "full") -> int:
    """Forward and backward FLOPs of one training step over ``tokens`` tokens: the numerator of MFU.

    With N = ``matrix_elements`` and h_attn = heads x head_dim, this is 6 N tokens + 12 L h_attn s tokens under
    ``full``, and half of the second term under ``causal``.
    """
    return forward(model, tokens, sequence, convention).times(3).total
