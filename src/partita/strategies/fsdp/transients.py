"""What full sharding gathers and reduces, and when it is alive."""

from __future__ import annotations

from collections.abc import Iterator

from partita.facts.case import BACKWARD, FORWARD, LAST_BACKWARD, START, Alive, Case, Moment
from partita.facts.precision import ITEM_BYTES
from partita.strategies.fsdp.predict import gathered_elements, wrapped


def alive(case: Case) -> Iterator[Alive]:
    """Gathered parameters, the buffers of gathers and reductions, and gradients before they are sharded."""
    keep, p = case.layout.state == "shard_grad_op", case.precision
    origin = dict.fromkeys(case.mesh.names, 0)
    several = case.micro_batches > 1
    for unit in wrapped(case):
        elements = gathered_elements(case, unit, origin)
        gathered, reduced = elements * ITEM_BYTES[p.gathered], elements * ITEM_BYTES[p.reduction]

        def row(name: str, begin: Moment, end: Moment, dtype: str, size: int, why: str, u: str = unit.name) -> Alive:
            return Alive("fsdp", name, "" if u == "root" else u, begin, end, dtype, size, why)

        full = "gathered parameters"
        if unit.name == "root":
            yield row(
                full,
                START,
                LAST_BACKWARD,
                p.gathered,
                gathered,
                "the root unit keeps its gather until backward is done",
            )
            if several:
                yield row(
                    "gradients", START, LAST_BACKWARD, p.reduction, reduced, "unsharded while micro-batches accumulate"
                )
            else:
                why = "the root unit's gradients before they are sharded"
                yield row("gradients", Moment("step", -2), LAST_BACKWARD, p.gathered, gathered, why)
            why = "the root unit's gradients, copied for the reduce-scatter"
            yield row("gradient buckets", LAST_BACKWARD, LAST_BACKWARD, p.reduction, reduced, why)
            continue
        if keep:
            begin = START if several else FORWARD
            yield row(
                full, begin, LAST_BACKWARD if several else BACKWARD, p.gathered, gathered, "kept until backward is done"
            )
        else:
            yield row(full, FORWARD, FORWARD, p.gathered, gathered, "the block in use")
            why = "the block in use, and the next one gathered ahead"
            yield row(full, Moment("backward", -1), BACKWARD, p.gathered, gathered, why)
        if several:
            yield row(
                "gradients", START, LAST_BACKWARD, p.reduction, reduced, "unsharded while micro-batches accumulate"
            )
        else:
            yield row(
                "gradients", BACKWARD, BACKWARD, p.gathered, gathered, "a block's gradients before they are sharded"
            )
        yield row(
            "gradient buckets", BACKWARD, BACKWARD, p.reduction, reduced, "gradients, copied for the reduce-scatter"
        )
        why = "parameters arrive in one buffer and are copied out"
        yield row("gathered parameters", FORWARD, FORWARD, p.gathered, gathered, why)
