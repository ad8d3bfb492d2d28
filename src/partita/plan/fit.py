"""Fit: whether the peak, and what the runtime keeps beside it, is below what a device has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from partita.facts.cluster import Cluster
from partita.facts.errors import BadInput
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
    """``verdict`` is ``fits``, ``fits tightly`` or ``does not fit``; bytes are those of the worst rank, at its peak.

    ``host_needed_bytes`` is what the ranks of one node keep in host memory, of ``host_bytes`` (None: nobody said).
    """

    verdict: str
    peak: Peak
    allowances: tuple[Memory, ...]
    needed_bytes: int
    device_bytes: int
    host_needed_bytes: int = 0
    host_bytes: int | None = None

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
            f" and {beside / 1e9:.1f} GB beside it, of {self.device_bytes / 1e9:.1f} GB; {rest}{self._host}"
        )

    @property
    def _host(self) -> str:
        if not self.host_needed_bytes:
            return ""
        have = "" if self.host_bytes is None else f" of {self.host_bytes / 1e9:.1f} GB"
        return f"; in host memory {self.host_needed_bytes / 1e9:.1f} GB{have} a node"


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
    host, hosts_have = host_bytes(account) * min(cluster.devices_per_node, cluster.world), cluster.host_memory_bytes
    pairs = [(needed, have), *([(host, hosts_have)] if hosts_have is not None else [])]
    verdict = "fits tightly" if any(n > TIGHT * h for n, h in pairs) else "fits"
    verdict = "does not fit" if any(n > h for n, h in pairs) else verdict
    return Fit(verdict, worst, rows, needed, have, host, hosts_have)


def host_bytes(account: Account) -> int:
    """What the rank with the most of it keeps in host memory."""
    ledger = account.ledger
    if not any(r.tier == "host" for r in ledger.memory):
        return 0
    return max(sum(r.bytes for r in ledger.at(c).memory if r.tier == "host") for c in ledger.corners())


def refuse_host(account: Account, ranks: int, have_bytes: int) -> None:
    """Raise BadInput where ``ranks`` of one machine together keep more in host memory than it has."""
    need = ranks * host_bytes(account)
    if need > have_bytes:
        raise BadInput(
            f"layout '{account.case.layout}' keeps {need / 1e9:.1f} GB in host memory on {ranks} ranks, and there are"
            f" {have_bytes / 1e9:.1f} GB; more ranks with zero1 or zero2 on more machines, or no offload, work"
        )


def refuse_machine(account: Account, ranks: int, have_bytes: int) -> None:
    """Raise BadInput where ``ranks``, whose devices are the cores of one machine, together need more than it has."""
    ledger = account.ledger
    highest = max((p.bytes for c in ledger.corners() for p in peaks(ledger, c)), default=0)
    need = ranks * (highest + host_bytes(account))
    if need > have_bytes:
        where = f"{ranks} ranks of one machine" if ranks > 1 else "one device"
        raise BadInput(
            f"{account.case.model.name} under '{account.case.layout}' needs {need / 1e9:.1f} GB at its peak on {where},"
            f" and there are {have_bytes / 1e9:.1f} GB; a smaller model or a shorter sequence fits, and partita dryrun"
            " needs no memory"
        )


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
