"""Operations: what the decoder computes in one micro-batch, unit by unit, with the time of each operation.

The inventory follows the decoder line by line, as the activations' inventory does.  An operation names the parameters
whose gradients are complete when its backward ends (``makes``), so that buckets know when they are ready.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from partita.facts.case import Case
from partita.facts.flops import attention_pairs
from partita.plan.kernels import Rates, Unmeasured

KINDS = ("matrix products", "attention", "memory-bound")


@dataclass(frozen=True)
class Operation:
    """One operation both ways, in seconds without launch gaps; ``kernels``: launches forward and backward."""

    name: str
    kind: str
    forward_s: float
    backward_s: float
    kernels: tuple[int, int]
    makes: tuple[str, ...] = ()


@dataclass(frozen=True)
class UnitWork:
    """The operations of one unit in forward order, and the gap of one launch."""

    name: str
    operations: tuple[Operation, ...]
    launch_s: float

    @cached_property
    def forward_s(self) -> float:
        return sum(o.forward_s + o.kernels[0] * self.launch_s for o in self.operations)

    @cached_property
    def backward_s(self) -> float:
        return sum(o.backward_s + o.kernels[1] * self.launch_s for o in self.operations)

    def by_kind(self, backward: bool) -> dict[str, float]:
        """Seconds by kind, with the launch gaps as a kind of their own."""
        out = dict.fromkeys((*KINDS, "launch gaps"), 0.0)
        for o in self.operations:
            out[o.kind] += o.backward_s if backward else o.forward_s
            out["launch gaps"] += o.kernels[backward] * self.launch_s
        return out

    @cached_property
    def ready_s(self) -> dict[str, float]:
        """When each parameter's gradient is complete, in seconds after the unit's backward began."""
        out, now = {}, 0.0
        for o in reversed(self.operations):
            now += o.backward_s + o.kernels[1] * self.launch_s
            for name in o.makes:
                out[name] = now
        return out


@dataclass(frozen=True)
class _Maker:
    """Makes operations over ``tokens`` rows at some rates."""

    rates: Rates
    tokens: int

    def product(self, name: str, width: int, depth: int) -> Operation:
        """A projection to ``width`` channels from ``depth``: one product forward, two backward (input and weight)."""
        r, t = self.rates, self.tokens
        backward = r.gemm_s(t, depth, width) + r.gemm_s(width, depth, t)
        return Operation(name, "matrix products", r.gemm_s(t, width, depth), backward, (1, 2), (name,))

    def moved(
        self, name: str, forward: float, backward: float, kernels: tuple[int, int] = (1, 1), makes: tuple[str, ...] = ()
    ) -> Operation:
        """Elements per token that are read or written, each way."""
        size = self.rates.item * self.tokens
        ways = self.rates.memory_s(size * forward), self.rates.memory_s(size * backward)
        return Operation(name, "memory-bound", *ways, kernels, makes)


def units(case: Case, rates: Rates) -> dict[str, UnitWork]:
    """The work of each unit in one micro-batch of ``case.tokens`` positions.

    Raises:
        Unmeasured: a model that is known by its count alone has no shapes to time.
    """
    if case.model.bare:
        raise Unmeasured(f"{case.model.name} is known by its parameter count alone, and a step's time needs its shapes")
    make = _Maker(rates, case.tokens)
    block = UnitWork("blocks", tuple(_block(case, make)), rates.launch_s)
    ends = {"first": _first(case, make), "last": _last(case, make)}
    return {u.name: block if u.is_blocks else UnitWork(u.name, ends[u.name], rates.launch_s) for u in case.units}


def _block(case: Case, make: _Maker) -> list[Operation]:
    """Norms read and write once forward and read twice, write once backward; every join of the residual stream adds
    two gradients."""
    m = case.model
    h, f, q, kv = m.hidden, m.ffn, m.q_width, m.kv_width
    out = [make.moved("attn_norm", 2 * h, 3 * h + 3 * h, (1, 2), ("attn_norm",))]
    # Backward adds the three gradients of the norm's output.
    out += [make.product("q", q, h), make.product("k", kv, h), make.product("v", kv, h)]
    out += [make.moved("gradients of q, k and v, added", 0, 2 * 3 * h, (0, 2))]
    if m.qk_norm:
        out += [make.moved(f"{n}_norm", 2 * w, 3 * w, (1, 1), (f"{n}_norm",)) for n, w in (("q", q), ("k", kv))]
    if m.positions == "rope":
        out.append(make.moved("rotary positions", 2 * (q + kv), 2 * (q + kv), (2, 2)))
    out += [_attention(case, make), make.product("o", h, q), make.moved("residual", 3 * h, 0, (1, 0))]
    out.append(make.moved("mlp_norm", 2 * h, 3 * h + 3 * h, (1, 2), ("mlp_norm",)))
    if m.mlp == "swiglu":
        out += [make.product("gate", f, h), make.product("up", f, h)]
        out += [make.moved("gradients of gate and up, added", 0, 3 * h, (0, 1))]
        out.append(make.moved("silu(gate) x up", 5 * f, 8 * f, (2, 3)))
    else:
        out += [make.product("up", f, h), make.moved(m.mlp, 2 * f, 3 * f)]
    return [*out, make.product("down", h, f), make.moved("residual", 3 * h, 0, (1, 0))]


def _attention(case: Case, make: _Maker) -> Operation:
    """Fused attention of this micro-batch's sequences: the pairs under the mask are computed, the others skipped."""
    m, r = case.model, make.rates
    pairs = attention_pairs(case.sequence, "causal", m.sliding_window)
    flops = 2 * m.q_width * pairs * make.tokens // case.sequence
    forward = r.item * make.tokens * (2 * m.q_width + 2 * m.kv_width)
    ways = r.attention_s(flops, forward), r.attention_s(flops, 2.5 * forward, backward=True)
    return Operation("attention", "attention", *ways, (1, 3))


def _first(case: Case, make: _Maker) -> tuple[Operation, ...]:
    """A lookup; its backward writes a gradient of the whole table."""
    m, r = case.model, make.rates
    table = r.memory_s(r.item * (2 * make.tokens * m.hidden + m.vocab * m.hidden))
    lookup = r.memory_s(2 * r.item * make.tokens * m.hidden)
    out = [Operation("embedding", "memory-bound", lookup, table, (1, 2), ("embed",))]
    if m.positions == "learned":
        out.append(make.moved("positions", 3 * m.hidden, 2 * m.hidden, (2, 1), ("positions",)))
    if m.embed_norm:
        out.append(make.moved("embed_norm", 2 * m.hidden, 3 * m.hidden, (1, 1), ("embed_norm",)))
    return tuple(out)


def _last(case: Case, make: _Maker) -> tuple[Operation, ...]:
    """Final norm, head and loss.  The loss widens chunks of the logits: forward reads them once, writes the wide copy
    and passes over it twice; backward makes the gradient in three passes over a wide chunk."""
    m, r = case.model, make.rates
    wide = max(4, r.item) / r.item
    loss = make.moved("loss", m.vocab * (1 + 3 * wide), m.vocab * (2 + 6 * wide), (6, 8))
    head = make.product("head", m.vocab, m.hidden)
    return (make.moved("norm", 2 * m.hidden, 3 * m.hidden, (1, 1), ("norm",)), head, loss)
