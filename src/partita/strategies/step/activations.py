"""What one step keeps for backward, tensor by tensor, and the gradients on their way.

The inventory follows the decoder line by line, for two kernel sets: ``cpu`` (eager: a norm is several operations and
keeps its widened input and the normalised value) and ``cuda`` (fused norms and flash attention; not verified on a
device here). Sizes are elements per token; Korthikanti et al. 2022, section 4, counts in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from partita.facts.case import BACKWARD, FORWARD, LAST_BACKWARD, LOSS, START, STEP, Alive, Case, Moment, Unit
from partita.facts.model import Model
from partita.facts.precision import ITEM_BYTES
from partita.strategies.step.chunks import largest

LOSS_CHUNK_BYTES = 32 * 2**20


@dataclass(frozen=True)
class Saved:
    """One saved tensor: its name, elements per token, and bytes of an element."""

    name: str
    per_token: int
    item: int


def saved_by_norm(name: str, width: int, numbers: int, item: int, kernels: str, kind: str) -> list[Saved]:
    """A norm over ``numbers`` vectors, ``width`` elements per token in all of them, without its output."""
    wide = max(4, item)
    statistics = numbers * (2 if kind == "layernorm" else 1)
    if kernels == "cpu" and kind == "rmsnorm":
        return [
            Saved(f"{name} input, widened", width, wide),
            Saved(f"{name} 1/rms", statistics, wide),
            Saved(f"{name} normalised", width, wide),
        ]
    return [Saved(f"{name} input", width, item), Saved(f"{name} statistics", statistics, wide)]


def block_saved(model: Model, item: int, kernels: str, autocast: bool = False) -> list[Saved]:
    """What backward needs of one block, per token.

    ``autocast``: what runs between blocks is float32, and each projection keeps its own 16-bit cast of its input (only
    casts of parameters are shared).
    """
    h, f, q, kv = model.hidden, model.ffn, model.q_width, model.kv_width
    stream, qkv, gate_up = (4, 3, 2 if model.mlp == "swiglu" else 1) if autocast else (item, 1, 1)
    out = [*saved_by_norm("attn_norm", h, 1, stream, kernels, model.norm), Saved("attn_norm output", qkv * h, item)]
    if model.qk_norm:
        out += saved_by_norm("q_norm", q, model.heads, item, kernels, "rmsnorm")
        out += saved_by_norm("k_norm", kv, model.kv_heads, item, kernels, "rmsnorm")
    out += [Saved("q", q, item), Saved("k", kv, item), Saved("v", kv, item), Saved("attention output", q, item)]
    out += [Saved("log-sum-exp", model.heads, max(4, item))]
    out += saved_by_norm("mlp_norm", h, 1, stream, kernels, model.norm)
    out += [Saved("mlp_norm output", gate_up * h, item)]
    if model.mlp == "swiglu":
        out += [Saved(n, f, item) for n in ("gate", "silu(gate)", "up", "product")]
    else:
        out += [Saved("up", f, item)] if model.mlp == "relu" else [Saved("up", f, item), Saved("gelu(up)", f, item)]
    return out


def kept_and_again(case: Case, unit: Unit) -> tuple[int, int]:
    """Bytes per token that one block keeps from forward to backward, and that its replay makes again."""
    model, item, autocast = case.model, ITEM_BYTES[case.precision.compute], case.precision.autocast
    saved = block_saved(model, item, case.kernels, autocast)
    every = {s.name: s.per_token * s.item for s in saved}
    if unit.saving is None:
        return sum(every.values()), 0
    stream = 4 if autocast else item
    extra = {
        "block input": model.hidden * stream,
        "down product": model.hidden * item,
        "o product": model.hidden * item,
    }
    extra |= {"q product": model.q_width * item, "k product": model.kv_width * item}
    only, dropped = unit.saving.only, unit.saving.dropped
    kept = {n: every.get(n) or extra[n] for n in only} if only is not None else every
    kept = {n: size for n, size in kept.items() if n not in dropped}
    again = [n for n in every if n not in kept] if unit.saving.again is None else list(unit.saving.again)
    size = sum(every[n] for n in again)
    first = saved[0]  # the first norm saves the block's own input where that is wide already
    if "block input" in kept and first.name in again and first.item == stream:
        size -= every[first.name]
    return sum(kept.values()), size


def last_saved(model: Model, item: int, kernels: str, autocast: bool = False) -> list[Saved]:
    """Final norm and loss, without the logits."""
    out = saved_by_norm("norm", model.hidden, 1, 4 if autocast else item, kernels, model.norm)
    out += [Saved("norm output", model.hidden, item)]
    return [*out, Saved("normalisers of the loss", 1, max(4, item)), Saved("targets", 1, 8)]


def bytes_of(saved: list[Saved], tokens: int) -> int:
    return tokens * sum(s.per_token * s.item for s in saved)


def alive(case: Case) -> Iterator[Alive]:
    yield from _activations(case)
    yield from _weight_copies(case)
    yield from _gradients(case)


def _activations(case: Case) -> Iterator[Alive]:
    model, tokens, dtype = case.model, case.tokens, case.precision.compute
    item = ITEM_BYTES[dtype]

    def row(name: str, unit: str, begin: Moment, end: Moment, size: int, why: str) -> Alive:
        return Alive("step", name, unit, begin, end, dtype, size, why)

    for unit in case.units:
        if unit.is_blocks:
            if not unit.backward:
                continue  # all is frozen up to here: nothing is kept, because nothing runs backward
            kept, again = kept_and_again(case, unit)
            yield row(
                "activations", unit.name, FORWARD, BACKWARD, tokens * kept, "tensors kept for backward, per block"
            )
            if again:
                yield row("activations", unit.name, BACKWARD, BACKWARD, tokens * again, "made again for backward")
            width = 3 * model.ffn + 2 * model.hidden
            why = "gradients of activations inside the block"
            yield row("temporaries", unit.name, BACKWARD, BACKWARD, tokens * width * item, why)
    last = bytes_of(last_saved(model, item, case.kernels, case.precision.autocast), tokens)
    yield row("activations", "last", FORWARD, BACKWARD, last, "final norm and loss")
    logits = tokens * model.vocab * item
    yield row(
        "logits", "last", FORWARD, BACKWARD, logits, "one row of the vocabulary per token; its gradient takes its place"
    )
    mask = mask_bytes(case)
    if mask:
        yield row("activations", "", START, LAST_BACKWARD, mask, "the attention mask, one for all layers")
    chunk = min(max(4, item) * tokens * model.vocab, LOSS_CHUNK_BYTES)
    yield row("temporaries", "", LOSS, LOSS, chunk, "one chunk of the loss, widened")


def mask_bytes(case: Case) -> int:
    """Bytes of the additive attention mask: of each sequence where documents are packed, one for all sequences where a
    window is shorter than the sequence, else none."""
    window, length = case.model.sliding_window, case.sequence
    item = ITEM_BYTES[case.precision.compute]
    if case.work.packed:
        return case.layout.mb * length * length * item
    return length * length * item if window is not None and window < length else 0


def _weight_copies(case: Case) -> Iterator[Alive]:
    """Autocast keeps the cast copy of a matrix until its backward; a lookup casts nothing, a tied head does."""
    if not case.precision.autocast:
        return
    item = ITEM_BYTES[case.precision.compute]
    for unit in case.units:
        held = unit.held if unit.name != "first" else ()
        size = item * sum(h.parameter.elements for h in held if len(h.parameter.shape) == 2)
        if unit.name == "last" and case.model.tied:
            size += item * case.model.vocab * case.model.hidden
        if size:
            why = "weights cast by autocast"
            yield Alive("step", "cast weights", unit.name, FORWARD, BACKWARD, case.precision.compute, size, why)


def _gradients(case: Case) -> Iterator[Alive]:
    """Gradients as their owner keeps them, from a unit's backward until the optimizer has stepped (there they are
    rows of phase ``step``)."""
    dtype = case.precision.gradients
    item, origin = ITEM_BYTES[dtype], dict.fromkeys(case.mesh.names, 0)
    # Whole gradients accumulate from the first micro-batch on; shards of them come out of the one reduction.
    reduced = set(case.data_axes)
    shares = case.flat.ranks if case.flat and "gradients" in case.flat.objects else 1
    for unit in case.units if case.tier("gradients") == "device" else ():
        trained = (h.elements(case.mesh, origin, padded=True) for h in unit.held if h.trained)
        size = item * math.ceil(sum(trained) / shares)
        why = "as the rank that owns them keeps them"
        sharded = any(reduced & set(case.mesh.live(*h.axes)) for h in unit.held)
        begin = Moment("backward", 1) if sharded else BACKWARD if case.micro_batches == 1 else START
        yield Alive("step", "gradients", unit.name, begin, LAST_BACKWARD, dtype, size, why)
    head = next((h for h in case.trained if h.parameter.tie), None)
    if head is not None:
        size = head.parameter.elements * ITEM_BYTES[case.precision.gathered]
        why = "the head's part of a tied gradient, waiting for the embedding's"
        yield Alive("step", "temporaries", "", Moment("loss", 1), LAST_BACKWARD, dtype, size, why)
    if case.precision.master and case.tier("master") == "device":
        item = ITEM_BYTES[case.precision.master]
        if case.flat:
            runs = [([n * item], 1) for n in case.flat.pieces(0)]
        else:
            runs = [([h.elements(case.mesh, origin) * item for h in u.held if h.trained], u.count) for u in case.units]
        why = "gradients widened for the master, some at a time"
        yield Alive("step", "temporaries", "", STEP, STEP, case.precision.master, largest(runs), why)
