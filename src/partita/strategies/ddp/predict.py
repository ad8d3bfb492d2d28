"""Every rank holds everything; gradients are summed over the data axes in buckets while backward runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from partita.facts.bucketing import Bucketing, GradientRun, word_of
from partita.facts.case import BACKWARD, START, Alive, Case, Division, Held, Moment, Unit
from partita.facts.layout import DEFAULT_BUCKET_MB, Layout
from partita.facts.ledger import Gradient, Memory, Traffic
from partita.facts.mesh import EVERY
from partita.facts.precision import ITEM_BYTES, Precision

AFTER: tuple[str, ...] = ()
WORDS = ("state", "bucket_mb")

Run = tuple[list[int], int]

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
        size = sum(h.parameter.elements for h in unit.held if h.trained) * item
        # Accumulated gradients are tensors of their own, beside the buckets, until the last micro-batch fills those.
        end = Moment("backward", -1) if case.micro_batches == 1 else BACKWARD
        why = "the buckets stand before backward fills them"
        yield Alive("ddp", "gradient buckets", unit.name, START, end, dtype, size, why)
        largest = max((h.parameter.elements for h in unit.held if h.trained), default=0) * item
        why = "a gradient before it is copied into its bucket"
        yield Alive("ddp", "temporaries", unit.name, BACKWARD, BACKWARD, dtype, largest, why)


def ready_runs(case: Case) -> Iterator[Run]:
    """Bytes of every gradient in the order in which backward makes it ready (a tied embedding last), by runs of alike
    units: (bytes of one unit's gradients, number of units).
    """
    item = case.precision.bytes("gradients")
    for unit in reversed(case.units):
        yield [h.parameter.elements * item for h in ready_in_unit(unit)], unit.count


def ready_in_unit(unit: Unit) -> list[Held]:
    """A unit's parameters that get gradients, in ready order: reverse order of use, a bias before its weight."""
    trained = [h for h in unit.held if h.trained]
    if not unit.is_blocks:
        order = list(reversed(trained))
        return sorted(order, key=lambda h: not h.parameter.name.startswith("head"))
    rank = {name: i for i, name in enumerate(READY)}

    def place(held: Held) -> int:
        stem, _, kind = held.parameter.name.rpartition(".")
        name = stem.rpartition(".")[2]
        return rank[f"{name}_bias"] if kind == "bias" and f"{name}_bias" in rank else rank[name]

    return sorted(trained, key=place)


def buckets(runs: Iterable[Run], cap: int, first_cap: int) -> list[int]:
    """Bytes of the buckets that torch fills with runs of alike units: a bucket closes when it has reached its cap, and
    the first has a cap of its own.

    A unit that begins where another of its run began (a bucket as full) closes the same buckets, so that the cost
    hardly grows with the number of units.
    """
    out: list[int] = []
    size, limit = 0, first_cap
    for sizes, count in runs:
        known: dict[tuple[int, int], tuple[list[int], int, int]] = {}
        for _ in range(count):
            begin = (size, limit)
            if begin not in known:
                closed = []
                for s in sizes:
                    size += s
                    if size >= limit:
                        closed.append(size)
                        size, limit = 0, cap
                known[begin] = closed, size, limit
            closed, size, limit = known[begin]
            out += closed
    return out + ([size] if size else [])


def steady_buckets(case: Case) -> list[int]:
    """Bytes of the buckets as they stand once torch has rebuilt them in ready order."""
    mb = case.layout.bucket_mb
    cap = int(mb * MIB)
    return buckets(ready_runs(case), cap, FIRST_BUCKET_BYTES if mb == DEFAULT_BUCKET_MB else cap)


def bucketing(case: Case) -> Iterator[Bucketing]:
    """The buckets of a steady step, all-reduced in the last micro-batch's backward alone."""
    item, sizes = case.precision.bytes("gradients"), tuple(steady_buckets(case))
    runs = []
    for unit in reversed(case.units):
        held = ready_in_unit(unit)
        names = tuple(word_of(h.parameter.name) for h in held)
        runs.append(GradientRun(unit.name, unit.count, names, tuple(h.parameter.elements * item for h in held)))
    yield Bucketing("ddp", "all_reduce", case.data_axes, case.precision.gradients, sizes, sizes, tuple(runs))


def traffic(case: Case) -> Iterator[Traffic]:
    axis, dtype = case.data_axes, case.precision.gradients
    for size, count in sorted(Counter(steady_buckets(case)).items()):
        why = "gradient bucket, summed once a step"
        yield Traffic("ddp", "all_reduce", axis, EVERY, dtype, size, count, "backward", "backward", why)
    yield from _init(case, axis)
    yield from _early(case, axis)


def _early(case: Case, axis: tuple[str, ...]) -> Iterator[Traffic]:
    """What the first two steps send beyond a steady one (torch 2.11 to 2.13): every gradient in one bucket, because
    their order is not known yet; then the order that was seen, from rank 0, with the new buckets."""
    dtype, found = case.precision.gradients, steady_buckets(case)
    if len(found) > 1:
        why = "one bucket for everything in the first step, whose order nobody knows"
        yield Traffic("ddp", "all_reduce", axis, EVERY, dtype, sum(found), 1, "early", None, why, kind="control")
    tensors = sum(h.count for h in case.trained)
    for numbers, why in ((tensors + 1, "rank 0's order of gradients"), (len(found), "sizes of the rebuilt buckets")):
        yield Traffic("ddp", "broadcast", axis, EVERY, "int32", 4 * numbers, 1, "early", None, why, kind="control")


def _init(case: Case, axis: tuple[str, ...]) -> Iterator[Traffic]:
    """What the constructor sends: a check of shapes, then rank 0's parameters in coalesced broadcasts."""
    ranks = case.mesh.size(*axis)
    tensors = sum(h.count for h in case.trained)
    dims = sum(h.count * len(h.parameter.shape) for h in case.trained)
    why = f"number of parameters, compared: {tensors}"
    yield Traffic("ddp", "all_gather", axis, EVERY, "int64", 8 * ranks, 1, "init", None, why, kind="control")
    why = "shapes and strides of rank 0, compared"
    yield Traffic("ddp", "broadcast", axis, EVERY, "int64", 16 * dims, 1, "init", None, why, kind="control")
    item = ITEM_BYTES[case.precision.weights]
    runs = (([h.parameter.elements * item for h in u.held], u.count) for u in case.units)
    for size, count in sorted(Counter(buckets(runs, BROADCAST_BYTES, BROADCAST_BYTES)).items()):
        why = "parameters of rank 0, to every replica"
        yield Traffic("ddp", "broadcast", axis, EVERY, case.precision.weights, size, count, "init", None, why)


def gradients(case: Case) -> Iterator[Gradient]:
    for h in case.trained:
        yield Gradient(
            "ddp", h.parameter.name, case.data_axes, "partial", "all_reduce, sum", "counted tokens of the global batch"
        )
