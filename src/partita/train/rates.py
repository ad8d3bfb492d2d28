"""The peak rate of the device at hand, which MFU is measured against."""

from __future__ import annotations

from typing import TYPE_CHECKING

from partita.train.options import Options

if TYPE_CHECKING:
    import torch

RATES = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def peak_flops(options: Options, device: torch.device) -> float | None:
    """Dense FLOP/s of one device in the precision of the products; None where nobody knows it."""
    import torch

    from partita.facts.cluster import find_cluster
    from partita.facts.device import UnknownCluster, shipped

    rate = RATES[options.work.precision.compute]
    if options.cluster:
        where = find_cluster(options.cluster)
    elif device.type == "cuda":
        names = catalog_names(torch.cuda.get_device_name(device))
        known = next((n for n in names if n in shipped().aliases), None)
        if known is None:
            return None
        where = find_cluster(f"{known}:1")
    else:
        return None
    try:
        return where.device.peak(rate)
    except UnknownCluster:
        return None


def catalog_names(name: str) -> list[str]:
    """``NVIDIA A100-SXM4-40GB`` -> [``a100-40``, ``a100``]: what the catalog may call a CUDA device."""
    words = name.lower().replace("nvidia", "").replace("-", " ").split()
    if not words:
        return []
    kind = words[0]
    if "pcie" in words:
        return [f"{kind}-pcie"]
    sizes = [w.removesuffix("gb") for w in words if w.endswith("gb")]
    return [*(f"{kind}-{s}" for s in sizes), kind]
