"""Fit: whether the peak, and what the runtime keeps beside it, is below what a device has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from partita.facts.cluster import Cluster
from partita.facts.ledger import Memory
from partita.facts.mesh import EVERY
from partita.plan.account import Account
from partita.plan.peak import Peak, peaks

GIB = 2**30
MB = 10**6

# What the runtime keeps beside the model's tensors.  These are allowances, not predictions.
CONTEXT_BYTES = 1 * GIB  # 0.4 to 1.5 GB; BigScience's chronicles report 1.27 to 1.6 GB of CUDA context
COMMUNICATOR_BYTES = 400 * MB  # NCCL keeps some hundreds of MB for each set of communicators (pytorch issue 147179)
FRAGMENTATION = 0.05  # reserved beyond allocated: 5 to 20 % without expandable segments (pytorch issue 82001)
TIGHT = 0.95  # above this share of the device a plan fits tightly


@dataclass(frozen=True)
class Fit:
    """``verdict`` is ``fits``, ``fits tightly`` or ``does not fit``; bytes are those of the worst rank, at its peak."""

    verdict: str
    peak: Peak
    allowances: tuple[Memory, ...]
    needed_bytes: int
    device_bytes: int

    @property
    def fits(self) -> bool:
        return self.verdict != "does not fit"

    @property
    def margin_bytes(self) -> int:
        """What is left (negative: what is missing)."""
        return self.device_bytes - self.needed_bytes

    @property
    def sentence(self) -> str:
        beside = self.needed_bytes - self.peak.bytes
        rest = f"{abs(self.margin_bytes) / 1e9:.1f} GB {'left' if self.margin_bytes >= 0 else 'missing'}"
        return (
            f"{self.verdict}: peak {self.peak.bytes / 1e9:.1f} GB ({self.peak.moment})"
            f" and {beside / 1e9:.1f} GB beside it, of {self.device_bytes / 1e9:.1f} GB; {rest}"
        )


def fit(account: Account, cluster: Cluster) -> Fit:
    """The verdict of a layout on a cluster, by its worst rank and phase."""
    worst = max(
        (peak for c in account.ledger.corners() for peak in peaks(account.ledger, c)),
        key=lambda p: p.bytes,
        default=Peak("persistent", "always", 0),
    )
    rows = tuple(allowances(account, cluster, worst.bytes))
    needed = worst.bytes + sum(r.bytes for r in rows)
    have = cluster.device.memory_bytes
    verdict = "does not fit" if needed > have else "fits tightly" if needed > TIGHT * have else "fits"
    return Fit(verdict, worst, rows, needed, have)


def allowances(account: Account, cluster: Cluster, peak_bytes: int) -> Iterator[Memory]:
    """What the runtime keeps on a device beside the model's tensors."""
    if account.case.kernels != "cuda":
        return

    def row(name: str, size: int, why: str) -> Memory:
        return Memory("runtime", name, "persistent", "device", EVERY, "uint8", size, why)

    yield row("context", CONTEXT_BYTES, "an allowance for the driver's context and kernels")
    axes = {r.axis for r in account.ledger.traffic}
    if axes:
        why = f"an allowance for the communicators of {len(axes)} kinds of group"
        yield row("communicator buffers", COMMUNICATOR_BYTES * len(axes), why)
    yield row("fragmentation", int(FRAGMENTATION * peak_bytes), "an allowance for what the allocator cannot use")
