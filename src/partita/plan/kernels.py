"""Kernels: how long one operation takes on a device, as a roofline.

An operation takes the longer of its arithmetic and its memory traffic: max(FLOPs / rate, bytes / bandwidth), and each
kernel adds the gap that a launch leaves on the device.  Rates are the catalog's (or the user's own) figures: the best
matrix product that was measured where there is one, else the peak, and then a time is a lower bound and says so.
Nothing is fitted to whole training runs.  A device without rates raises ``Unmeasured``.

Williams et al. 2009, "Roofline: an insightful visual performance model".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from partita.facts.device import Device, UnknownCluster
from partita.facts.precision import ITEM_BYTES

# The catalog's name of the rate in which products of a dtype run.
RATE_OF = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8"}
# Rates of one kind: a measured ceiling of one stands for the other.
TWINS = {"fp16": "bf16", "bf16": "fp16"}

# What one kernel adds beside its own time when launches overlap execution: 3.8 us a kernel of 2.9 us.
LAUNCH_S = 0.9e-6
LAUNCH_SOURCE = "NVIDIA, Getting Started with CUDA Graphs (2019): 3.8 us a kernel of 2.9 us on a V100"

BACKWARD_FLOPS = 2.5  # flash attention's backward multiplies five times where forward does twice (arXiv 2307.08691)


class Unmeasured(UnknownCluster):
    """A rate that nobody published or measured; the message says what would give it."""


@dataclass(frozen=True)
class Attention:
    """Shares of a device's peak that a fused attention kernel reaches, and where they are from."""

    prefixes: tuple[str, ...]
    forward: float
    backward: float
    source: str


AMPERE = Attention((), 0.73, 0.63, "FlashAttention-2 on A100, at best 73 % forward, 63 % backward (arXiv 2307.08691)")
HOPPER = Attention(
    ("h100", "h200", "h800", "h20", "gh200"),
    0.35,
    335 / 989.4,
    "FlashAttention-2 on H100: 35 % forward (arXiv 2407.08608), 335 TFLOP/s both ways (arXiv 2307.08691)",
)


@dataclass(frozen=True)
class Rates:
    """What a device does in one dtype, per second, and the basis of each figure.

    ``flops``: matrix products; ``bytes_per_s``: device memory; ``attention_forward`` and ``attention_backward``: FLOP/s
    of the fused attention kernel; ``peak_flops``: the datasheet's, for MFU.  ``launch_s``: what a kernel adds.
    """

    dtype: str
    flops: float
    bytes_per_s: float
    attention_forward: float
    attention_backward: float
    peak_flops: float
    launch_s: float
    basis: tuple[tuple[str, str], ...]

    @property
    def item(self) -> int:
        """Bytes of one element."""
        return ITEM_BYTES[self.dtype]

    def memory_s(self, nbytes: float) -> float:
        """Seconds of an operation that moves ``nbytes`` through device memory (reads and writes together)."""
        return nbytes / self.bytes_per_s

    def gemm_s(self, m: int, n: int, k: int, out_item: int | None = None) -> float:
        """Seconds of one product [m, k] x [k, n]; ``out_item``: bytes of a result element, if not the dtype's."""
        moved = self.item * (m * k + k * n) + (out_item or self.item) * m * n
        return max(2 * m * n * k / self.flops, self.memory_s(moved))

    def attention_s(self, forward_flops: float, moved_bytes: float, backward: bool = False) -> float:
        """Seconds of fused attention; ``forward_flops`` counts only the pairs that the mask leaves."""
        if backward:
            return max(BACKWARD_FLOPS * forward_flops / self.attention_backward, self.memory_s(moved_bytes))
        return max(forward_flops / self.attention_forward, self.memory_s(moved_bytes))


def rates(device: Device, dtype: str) -> Rates:
    """The rates of ``device`` for operands of ``dtype``.

    Raises:
        Unmeasured: no rate of matrix products, or none of memory, is known for the device.
    """
    name = RATE_OF.get(dtype, "")
    if not device.peak_flops and not device.sustained_flops:
        raise Unmeasured(
            f"the rates of {device.title or device.name} are unknown until `partita calibrate` measures them"
        )
    if device.memory_bytes_per_s is None and device.sustained_memory_bytes_per_s is None:
        raise Unmeasured(
            f"the memory rate of {device.title or device.name} is unknown until `partita calibrate` measures it"
        )
    if name not in device.peak_flops and name not in device.sustained_flops:
        known = ", ".join({**device.peak_flops, **device.sustained_flops})
        raise Unmeasured(f"no rate for {dtype} is known for {device.title or device.name}; rates are known for {known}")
    flops, products = _products(device, name)
    memory, moved = _memory(device)
    peak = device.peak_flops.get(name, flops)
    forward, backward, attention = _attention(device, peak, flops)
    launch, launched = (LAUNCH_S, LAUNCH_SOURCE) if device.kind == "gpu" else (0.0, "not counted on a CPU")
    basis = (("matrix products", products), ("memory", moved), ("attention", attention), ("launch gap", launched))
    return Rates(dtype, flops, memory, forward, backward, peak, launch, basis)


def _products(device: Device, name: str) -> tuple[float, str]:
    """FLOP/s of large matrix products and what the figure rests on."""
    measured, peaks, sources = device.sustained_flops, device.peak_flops, device.sources
    if name in measured:
        return measured[name], f"{measured[name] / 1e12:.4g} TFLOP/s measured: {_source(sources, name)}"
    peak = peaks[name]
    for other in (TWINS.get(name, name), *measured):
        if other in measured and other in peaks:
            share = measured[other] / peaks[other]
            says = (
                f"{share:.1%} of the {peak / 1e12:.4g} TFLOP/s peak, as measured for {other}: {_source(sources, other)}"
            )
            return share * peak, says
    return peak, f"the peak of {peak / 1e12:.4g} TFLOP/s: no measured ceiling is known, so times are lower bounds"


def _source(sources: Mapping[str, str], name: str) -> str:
    return sources.get(f"sustained_flops.{name}", "no source is named")


def _memory(device: Device) -> tuple[float, str]:
    measured = device.sustained_memory_bytes_per_s
    if measured is not None:
        source = device.sources.get("sustained_memory_bytes_per_s", "no source is named")
        return measured, f"{measured / 1e9:.4g} GB/s measured: {source}"
    assert device.memory_bytes_per_s is not None
    says = "of the datasheet: no measured ceiling is known, so times are lower bounds"
    return device.memory_bytes_per_s, f"{device.memory_bytes_per_s / 1e9:.4g} GB/s {says}"


def _attention(device: Device, peak: float, flops: float) -> tuple[float, float, str]:
    """FLOP/s forward and backward.  No kernel is faster than the device's own products."""
    if device.kind != "gpu":
        return flops, flops, "taken as fast as matrix products: no figure for attention on this device"
    shares = HOPPER if device.name.startswith(HOPPER.prefixes) else AMPERE
    known = shares is HOPPER or device.name.startswith("a100")
    says = shares.source if known else f"no figure for this device; the shares of {shares.source}"
    return min(shares.forward * peak, flops), min(shares.backward * peak, flops), says
