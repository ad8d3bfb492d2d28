"""What every training step holds and sends, whatever divides it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from partita.facts.case import Alive, Case, Division, Held
from partita.facts.layout import Layout
from partita.facts.ledger import Gradient, Memory, Traffic
from partita.facts.mesh import EVERY, Coordinate
from partita.facts.precision import ITEM_BYTES, Precision
from partita.strategies.step import activations

AFTER = ("ddp", "zero", "fsdp", "offload")
WORDS = ("mb",)
SCALES_LOSS = True


def wanted(layout: Layout) -> bool:
    return True


def refuse(case: Case) -> Iterator[str]:
    """The global batch must be whole micro-batches on every data rank."""
    layout, batch = case.layout, case.work.global_batch
    step = layout.dp * layout.mb
    if batch % step:
        nearest = max(step, batch // step * step)
        yield (
            f"a global batch of {batch} is no multiple of dp x mb = {layout.dp} x {layout.mb} = {step};"
            f" the nearest that works is {nearest}"
        )
    if scaled(case.work.precision) and not case.scales_loss:
        yield (
            f"{case.work.precision.name} needs loss scaling, which {layout.state} does not do; what works:"
            " fp16-master with zero1 or zero2, or bf16-master here"
        )
    if case.model.max_positions and case.model.positions == "learned" and case.work.sequence > case.model.max_positions:
        yield (
            f"a sequence of {case.work.sequence} is longer than the {case.model.max_positions} learned positions of"
            f" {case.model.name}; what works: a sequence of at most {case.model.max_positions}"
        )


def store(precision: Precision) -> Precision:
    return precision


def divide(case: Case) -> Division:
    return Division()


def memory(case: Case) -> Iterator[Memory]:
    """What the composed division leaves on a rank; transients are in ``alive``."""
    p, moments = case.precision, case.work.moments
    rows = (
        ("parameters", "persistent", p.weights, 1, "the elements that this rank owns"),
        ("gradients", "step", p.gradients, 1, "one for every parameter element that this rank owns"),
        ("master", "persistent", p.master, 1, "a wider copy, which the optimizer updates"),
        (
            "optimizer state",
            "persistent",
            p.moments,
            moments,
            f"{case.work.optimizer}'s moments: {moments} per parameter",
        ),
    )
    frozen = bool(case.work.frozen)
    kinds = {(False, False), (False, frozen)} | ({(True, frozen)} if case.flat else set())
    folded = {
        key: list(case.mesh.fold(partial(_owned, case, *key), case.cuts, *case.mesh.names)) for key in sorted(kinds)
    }
    for name, phase, dtype, copies, why in rows:
        for ranks, elements in folded[
            case.flat is not None and name in case.flat.objects, frozen and name != "parameters"
        ]:
            if dtype and copies and elements:
                size = elements * ITEM_BYTES[dtype] * copies
                yield Memory("step", name, phase, case.tier(name), ranks, dtype, size, why)
    if case.work.scalars:
        why = "AdamW's step counter, one for every tensor that it updates"
        axes = case.mesh.names if case.flat else ()
        for ranks, tensors in case.mesh.fold(partial(_tensors, case), case.cuts, *axes):
            tier = case.tier("optimizer scalars")
            yield Memory("step", "optimizer scalars", "persistent", tier, ranks, "float32", 4 * tensors, why)


def _owned(case: Case, lies_flat: bool, trained: bool, coordinate: Coordinate) -> int:
    """Elements that one rank owns of what lies flat, or of the rest; ``trained``: of what gets a gradient."""
    if case.flat and lies_flat:
        return case.flat.elements(case.mesh.index(coordinate, *case.flat.axis))
    held = case.trained if trained else case.held
    return sum(h.count * h.elements(case.mesh, coordinate) for h in held if coordinate in h.at)


def _tensors(case: Case, coordinate: Coordinate) -> int:
    """Tensors that one rank's optimizer updates."""
    if case.flat:
        return sum(1 for _ in case.flat.pieces(case.mesh.index(coordinate, *case.flat.axis)))
    return sum(h.count for h in case.trained)


def alive(case: Case) -> Iterator[Alive]:
    """Saved activations, logits, and what the optimizer makes while it steps."""
    if not case.model.bare:
        yield from activations.alive(case)


def traffic(case: Case) -> Iterator[Traffic]:
    data, mesh = case.mesh.live("dp"), case.mesh
    if data:
        why = "tokens that count in the global batch"
        yield Traffic("step", "all_reduce", data, EVERY, "int64", 8, 1, "forward", None, why)
    shown = mesh.live("pp", "dp", "cp")
    if shown:
        why = "the loss that is shown, always added up in float64"
        yield Traffic("step", "all_reduce", shown, EVERY, "float64", 8, 1, "step", None, why)
    everybody = mesh.live(*mesh.names)
    if scaled(case.precision) and everybody:
        why = "whether a gradient overflowed anywhere, so that all ranks skip or none"
        yield Traffic("step", "all_reduce", everybody, EVERY, "float32", 4, 1, "step", None, why)
    if case.work.clip is None:
        return
    dtype = norm_dtype(case.precision)
    for axis, numbers in norm_reductions(case):
        why = f"squared gradient norm, completed over {axis}"
        size = ITEM_BYTES[dtype] * numbers
        yield Traffic("step", "all_reduce", (axis,), EVERY, dtype, size, 1, "step", None, why)


def scaled(precision: Precision) -> bool:
    """Whether the loss is scaled: float16 gradients would vanish below 6e-8 (arXiv 1710.03740, section 3.2)."""
    return precision.gradients == "float16"


def norm_dtype(precision: Precision) -> str:
    """Norms are summed in at least float32."""
    return "float64" if precision.gradients == "float64" else "float32"


def norm_axes(case: Case, held: Held) -> frozenset[str]:
    """Axes over which a parameter's squares must still be summed so that each element counts once."""
    stages = ("pp",) if held.at.axes else ()
    flat = case.flat.axis if case.flat else ()
    return frozenset(case.mesh.live(*held.axes, *stages, *flat))


def norm_reductions(case: Case) -> Iterator[tuple[str, int]]:
    """(axis, numbers in its all-reduce): one axis after another, one number for each set of axes still to sum."""
    left = {norm_axes(case, h) for h in case.trained}
    for axis in case.mesh.names:
        here = {s - {axis} for s in left if axis in s}
        if here:
            yield axis, len(here)
        left = {s - {axis} for s in left}


def gradients(case: Case) -> Iterator[Gradient]:
    return iter(())
