"""Which objects lie on the host, and the buffers through which they come and go."""

from __future__ import annotations

from collections.abc import Iterator

from partita.facts.case import Alive, Case, Division
from partita.facts.layout import DEFAULT_DELAY, Layout
from partita.facts.ledger import Gradient, Memory, Traffic
from partita.facts.mesh import Coordinate
from partita.facts.precision import ITEM_BYTES, Precision

AFTER: tuple[str, ...] = ("ddp", "zero", "fsdp")
WORDS = ("offload", "delay_after")
SCALES_LOSS = True  # a scaled loss is refused here, with this room's own reason
SHARDED = ("full_shard", "shard_grad_op")

STATE = ("optimizer state", "optimizer scalars")
OBJECTS = {
    "parameters": ("parameters", "gradients", *STATE),
    "optimizer": ("master", *STATE, "pinned buffers"),
    "optimizer_delayed": ("master", *STATE, "pinned buffers"),
}


def wanted(layout: Layout) -> bool:
    return layout.offload != "none"


def refuse(case: Case) -> Iterator[str]:
    layout = case.layout
    sharded = layout.state in SHARDED and layout.dp * layout.cp > 1
    if layout.offload == "parameters" and not sharded:
        yield (
            f"offload=parameters moves FSDP's shards, and {layout.dp * layout.cp} ranks with {layout.state} have none;"
            " what works: full_shard offload=parameters on 2 ranks or more, or offload=optimizer"
        )
    if layout.offload != "parameters" and sharded:
        yield (
            f"offload={layout.offload} moves the optimizer of DDP and ZeRO, and {layout.state} has FSDP's; what works:"
            f" {layout.state} offload=parameters, whose optimizer is on the host too, or zero2 offload={layout.offload}"
        )
    if layout.offload != "optimizer_delayed" and layout.delay_after != DEFAULT_DELAY:
        yield (
            f"delay_after={layout.delay_after} is for the delayed update, and offload={layout.offload} has none; what"
            " works: offload=optimizer_delayed"
        )
    if case.work.precision.gradients == "float16":
        yield f"{case.work.precision.name} scales its loss, which offload does not do; what works: bf16-master"


def store(precision: Precision) -> Precision:
    return precision


def divide(case: Case) -> Division:
    """Where there is no master, the host's copy of the parameters becomes one."""
    return Division(host=OBJECTS[case.layout.offload], master=case.layout.offload != "parameters")


def memory(case: Case) -> Iterator[Memory]:
    """Pinned buffers: gradients come through them, and updated parameters go back."""
    if case.tier("pinned buffers") == "device":
        return
    dtype = case.precision.gradients

    def owned(c: Coordinate) -> int:
        if case.flat and "optimizer state" in case.flat.objects:
            return case.flat.elements(case.mesh.index(c, *case.flat.axis))
        return sum(h.count * h.elements(case.mesh, c) for h in case.trained if c in h.at)

    for ranks, elements in case.mesh.fold(owned, case.cuts, *case.mesh.names):
        if elements:
            size = elements * ITEM_BYTES[dtype]
            why = "gradients on their way to the host, and parameters on their way back"
            yield Memory("offload", "pinned buffers", "persistent", "host", ranks, dtype, size, why)


def alive(case: Case) -> Iterator[Alive]:
    return iter(())


def traffic(case: Case) -> Iterator[Traffic]:
    """Nothing between ranks: copies over the host link are no collectives."""
    return iter(())


def gradients(case: Case) -> Iterator[Gradient]:
    return iter(())
