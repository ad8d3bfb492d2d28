"""Every rank holds everything; gradients are summed over the data axes in buckets while backward runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from partita.facts.case import BACKWARD, START, Alive, Case, Division, Held, Moment, Unit
from partita.facts.layout import DEFAULT_BUCKET_MB, Layout
from partita.facts.ledger import Gradient, Memory, Traffic
from partita.facts.mesh import EVERY
from partita.facts.precision import ITEM_BYTES, Precision

AFTER: tuple[str, ...] = ()
WORDS = ("state", "bucket_mb")

MIB = 2**20
FIRST_BUCKET_BYTES = MIB  # torch.distributed._DEFAULT_FIRST_BUCKET_BYTES, used only with the unset default cap
BROADCAST_BYTES = 250 * MIB  # DistributedDataParallel.broadcast_bucket_size

# The order in which autograd makes a block's gradients ready: the newest node first, a bias before its weight.
READY = (
    "down_bias", "down", "up_bias", "up", "gate_bias", "gate", "mlp_norm", "o_bias", "o",
    "k_norm", "q_norm", "v_bias", "v", "k_bias", "k", "q_bias", "q", "attn_norm",
)  # fmt: skip


def wanted(layout: Layout) -> bool:
    return layout.state == "ddp" and layout.dp * layout.cp > 1


def refuse(case: Case) -> Iterator[str]:
    return iter(())


def store(precision: Precision) -> Precision:
    return precision


def divide(case: Case) -> Division:
    return Division()


def memory(case: Case) -> Iterator[Memory]:
    """Nothing persistent beyond the step's own rows: gradients are views into the buckets."""
    return iter(())


def alive(case: Case) -> Iterator[Alive]:
    """The buckets stand from step to step, so that a gradient has its place before it is made; and each gradient is
    made outside its bucket and copied in."""
    dtype = case.precision.gradients
    item = ITEM_BYTES[dtype]
    for unit in case.units:
        size = sum(h.parameter.elements for h in unit.held) * item
        if case.micro_batches == 1:
            why = "the buckets stand before backward fills them"
            yield Alive("ddp", "gradient buckets", unit.name, START, Moment("backward", -1), dtype, size, why)
        largest = max((h.parameter.elements for h in unit.held), default=0) * item
        why = "a gradient before it is copied into its bucket"
        yield Alive("ddp", "temporaries", unit.name, BACKWARD, BACKWARD, dtype, largest, why)


def ready_order(case: Case) -> Iterator[int]:
    """Bytes of every gradient in the order in which backward makes it ready (a tied embedding last)."""
    item = case.precision.bytes("gradients")
    for unit in reversed(case.units):
        sizes = [h.parameter.elements * item for h in ready_in_unit(unit)]
        for _ in range(unit.count):
            yield from sizes


def ready_in_unit(unit: Unit) -> list[Held]:
    """A unit's parameters in ready order: reverse order of use, a bias before its weight."""
    if not unit.is_blocks:
        order = list(reversed(unit.held))
        return sorted(order, key=lambda h: not h.parameter.name.startswith("head"))
    rank = {name: i for i, name in enumerate(READY)}

    def place(held: Held) -> int:
        stem, _, kind = held.parameter.name.rpartition(".")
        name = stem.rpartition(".")[2]
        return rank[f"{name}_bias"] if kind == "bias" and f"{name}_bias" in rank else rank[name]

    return sorted(unit.held, key=place)


def buckets(sizes: Iterator[int], cap: float, first_cap: float) -> list[int]:
    """Torch's rule: a bucket closes when it has reached its cap; the first has a cap of its own."""
    out, size, limit = [], 0, first_cap
    for s in sizes:
        size += s
        if size >= limit:
            out.append(size)
            size, limit = 0, cap
    return out + ([size] if size else [])


def steady_buckets(case: Case) -> list[int]:
    """Bytes of the buckets as they stand once torch has rebuilt them in ready order."""
    mb = case.layout.bucket_mb
    cap = int(mb * MIB)
    return buckets(ready_order(case), cap, FIRST_BUCKET_BYTES if mb == DEFAULT_BUCKET_MB else cap)


def traffic(case: Case) -> Iterator[Traffic]:
    axis, dtype = case.data_axes, case.precision.gradients
    for size, count in sorted(Counter(steady_buckets(case)).items()):
        why = "gradient bucket, summed once a step"
        yield Traffic("ddp", "all_reduce", axis, EVERY, dtype, size, count, "backward", "backward", why)
    yield from _init(case, axis)


def _init(case: Case, axis: tuple[str, ...]) -> Iterator[Traffic]:
    """What the constructor sends: a check of shapes, then rank 0's parameters in coalesced broadcasts."""
    ranks = case.mesh.size(*axis)
    tensors = sum(h.count for h in case.held)
    dims = sum(h.count * len(h.parameter.shape) for h in case.held)
    why = f"number of parameters, compared: {tensors}"
    yield Traffic("ddp", "all_gather", axis, EVERY, "int64", 8 * ranks, 1, "init", None, why, kind="control")
    why = "shapes and strides of rank 0, compared"
    yield Traffic("ddp", "broadcast", axis, EVERY, "int64", 16 * dims, 1, "init", None, why, kind="control")
    item = ITEM_BYTES[case.precision.weights]
    in_order = (h.parameter.elements * item for u in case.units for _ in range(u.count) for h in u.held)
    for size, count in sorted(Counter(buckets(in_order, BROADCAST_BYTES, BROADCAST_BYTES)).items()):
        why = "parameters of rank 0, to every replica"
        yield Traffic("ddp", "broadcast", axis, EVERY, case.precision.weights, size, count, "init", None, why)


def gradients(case: Case) -> Iterator[Gradient]:
    for h in case.held:
        yield Gradient(
            "ddp", h.parameter.name, case.data_axes, "partial", "all_reduce, sum", "counted tokens of the global batch"
        )
