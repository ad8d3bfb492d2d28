"""What a model is: its parameters by global name, in the units that run together.

A unit is what runs as one: ``first`` (embeddings), each block, ``last`` (final norm and head).  Blocks
that are alike stand in one ``Span`` with a range, so that accounting costs the same for 2 layers and
for 126.  Nothing here decides anything and nothing here needs torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

from partita.facts.errors import BadInput


class UnknownModel(BadInput):
    """A model that cannot be described; the message is one sentence for the user."""


@dataclass(frozen=True)
class Rope:
    """Rotary positions (RoFormer, section 3.2.2) and how their frequencies are stretched.

    ``scaling`` is one of none, linear, dynamic, yarn, llama3, longrope; the other fields carry the
    names of Hugging Face's ``rope_scaling``.
    """

    theta: float = 10000.0
    scaling: str = "none"
    factor: float = 1.0
    original_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


@dataclass(frozen=True)
class Parameter:
    """One stored tensor of the single-device model.

    ``name`` is global; inside a ``Span`` of several blocks it is a pattern (``blocks.*.attn.q.weight``).
    ``tie`` is the other name under which the same storage is used (a tied head), which has no entry
    of its own: a parameter is listed once, with its first holder.  ``frozen``: it gets no gradient.
    """

    name: str
    shape: tuple[int, ...]
    role: str
    unit: str
    tie: str | None = None
    frozen: bool = False

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Span:
    """A run of units that are alike: ``first``, ``last``, or the blocks ``first`` <= i < ``end``."""

    name: str
    parameters: tuple[Parameter, ...]
    first: int = -1
    end: int = 0

    @property
    def is_blocks(self) -> bool:
        return self.first >= 0

    @property
    def count(self) -> int:
        return self.end - self.first if self.is_blocks else 1

    @property
    def elements(self) -> int:
        """Parameter elements of one unit of the span."""
        return sum(p.elements for p in self.parameters)

    def cut(self, first: int, end: int) -> Span:
        """The blocks of this span that lie in ``first`` <= i < ``end`` (possibly none)."""
        lo, hi = max(self.first, first), min(self.end, end)
        return replace(self, name=span_name(lo, hi), first=lo, end=max(lo, hi))

    def units(self) -> tuple[str, ...]:
        return tuple(f"blocks.{i}" for i in range(self.first, self.end)) if self.is_blocks else (self.name,)


def span_name(first: int, end: int) -> str:
    """``blocks.3`` for one block, ``blocks.0..79`` for a run of them."""
    return f"blocks.{first}" if end - first == 1 else f"blocks.{first}..{end - 1}"


@dataclass(frozen=True)
class Model:
    """A decoder language model, as its ``config.json`` describes it.

    ``mlp`` is ``swiglu`` (three matrices) or ``gelu``/``relu``/``relu2`` (two); ``positions`` is ``rope``,
    ``learned`` or ``alibi``; ``norm`` is ``rmsnorm`` or ``layernorm``.  ``runs`` says whether the decoder
    in ``partita.model`` executes this family; the others are for prediction only.  A model given as a bare
    parameter count has no ``layers`` and one flat parameter.
    """

    name: str
    family: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int = 2048
    norm: str = "rmsnorm"
    eps: float = 1e-5
    mlp: str = "swiglu"
    positions: str = "rope"
    rope: Rope = field(default_factory=Rope)
    sliding_window: int | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    norm_bias: bool = False
    qk_norm: bool = False
    embed_norm: bool = False
    position_rows: int = 0
    tied: bool = False
    runs: bool = True
    total: int = 0
    active: int = 0

    @property
    def bare(self) -> bool:
        """Known by its parameter count alone."""
        return self.layers == 0

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """The units in the order in which they run."""
        if self.bare:
            flat = Parameter("parameters", (self.total,), "bare", "first")
            return (Span("first", (flat,)),)
        return (
            Span("first", self._first()),
            Span(span_name(0, self.layers), self._block(), 0, self.layers),
            Span("last", self._last()),
        )

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """Every parameter under its own global name, in the order in which the decoder uses it."""
        out: list[Parameter] = []
        for span in self.spans:
            for unit in span.units():
                index = unit.partition(".")[2]
                out += [
                    replace(p, name=p.name.replace("*", index, 1), unit=unit) if span.is_blocks else p
                    for p in span.parameters
                ]
        return tuple(out)

    @property
    def parameter_count(self) -> int:
        """Stored elements; a tied tensor counts once."""
        return sum(s.count * s.elements for s in self.spans)

    @property
    def active_count(self) -> int:
        """Parameters that one token's forward uses (all of them, unless the model routes to experts)."""
        return self.active or self.parameter_count

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    def _norm(self, name: str, width: int, unit: str) -> list[Parameter]:
        out = [Parameter(f"{name}.weight", (width,), "norm", unit)]
        return out + ([Parameter(f"{name}.bias", (width,), "norm_bias", unit)] if self.norm_bias else [])

    def _linear(self, name: str, rows: int, columns: int, role: str, bias: bool) -> list[Parameter]:
        out = [Parameter(f"{name}.weight", (rows, columns), role, "blocks.*")]
        return out + ([Parameter(f"{name}.bias", (rows,), f"{role}_bias", "blocks.*")] if bias else [])

    def _first(self) -> tuple[Parameter, ...]:
        tie = "head.weight" if self.tied else None
        out = [Parameter("embed.weight", (self.vocab, self.hidden), "embedding", "first", tie)]
        if self.positions == "learned":
            rows = self.position_rows or self.max_positions
            out.append(Parameter("positions.weight", (rows, self.hidden), "position", "first"))
        return tuple(out + (self._norm("embed_norm", self.hidden, "first") if self.embed_norm else []))

    def _block(self) -> tuple[Parameter, ...]:
        b, d, f, q, kv = "blocks.*.", self.hidden, self.ffn, self.q_width, self.kv_width
        out = self._norm(b + "attn_norm", d, "blocks.*")
        out += self._linear(b + "attn.q", q, d, "q", self.qkv_bias)
        out += self._linear(b + "attn.k", kv, d, "k", self.qkv_bias)
        out += self._linear(b + "attn.v", kv, d, "v", self.qkv_bias)
        if self.qk_norm:
            out += [Parameter(b + f"attn.{n}_norm.weight", (self.head_dim,), "qk_norm", "blocks.*") for n in "qk"]
        out += self._linear(b + "attn.o", d, q, "o", self.o_bias)
        out += self._norm(b + "mlp_norm", d, "blocks.*")
        if self.mlp == "swiglu":
            out += self._linear(b + "mlp.gate", f, d, "gate", self.mlp_bias)
        out += self._linear(b + "mlp.up", f, d, "up", self.mlp_bias)
        return tuple(out + self._linear(b + "mlp.down", d, f, "down", self.mlp_bias))

    def _last(self) -> tuple[Parameter, ...]:
        out = self._norm("norm", self.hidden, "last")
        return tuple(out if self.tied else [*out, Parameter("head.weight", (self.vocab, self.hidden), "head", "last")])


def counted(name: str, total: int, active: int = 0, family: str = "bare") -> Model:
    """A model known by its parameter count alone (``active``: per token, where it routes to experts).

    Raises:
        UnknownModel: a count below 1, or more active parameters than there are.
    """
    if total < 1:
        raise UnknownModel(f"{name}: {total} parameters is no model; a count of at least 1 such as 7.5B works.")
    if active > total or active < 0:
        raise UnknownModel(f"{name}: {active:,} active parameters of {total:,}; active parameters are 1 to the total.")
    return Model(
        name=name,
        family=family,
        layers=0,
        hidden=0,
        ffn=0,
        heads=0,
        kv_heads=0,
        head_dim=0,
        vocab=0,
        max_positions=0,
        runs=False,
        total=total,
        active=active,
    )
