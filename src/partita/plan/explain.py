"""Explain: everything that arithmetic says of one layout, as data.  How it is drawn is for the command to say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from partita.facts.cluster import Cluster
from partita.facts.flops import model_flops_per_step
from partita.facts.layout import Layout
from partita.facts.ledger import Traffic
from partita.facts.model import Model
from partita.facts.precision import objects
from partita.facts.work import Training
from partita.plan import clock, timeline
from partita.plan.account import Account, account
from partita.plan.clock import StepTime
from partita.plan.fit import Fit, fit
from partita.plan.kernels import Unmeasured
from partita.plan.laws import Finding, check
from partita.plan.peak import Peak, peaks
from partita.plan.play import Played, play
from partita.plan.timeline import Choice, Timeline


@dataclass(frozen=True)
class Timing:
    """A step's time and the timelines of its buckets; where they are not known, ``unknown`` says why.

    ``choices``: what other sizes of buckets would do, with times where they are known.
    """

    time: StepTime | None
    played: Played | None
    timelines: tuple[Timeline, ...]
    choices: tuple[Choice, ...]
    unknown: str = ""


@dataclass(frozen=True)
class Explanation:
    """A layout's account with its peaks, time, laws and fit; ``assumed`` lists every default that nobody gave."""

    account: Account
    cluster: Cluster | None
    findings: tuple[Finding, ...]
    fit: Fit | None
    peaks: tuple[Peak, ...]
    worst: dict[str, int]
    flops_per_step: int | None
    assumed: dict[str, str]
    timing: Timing

    @property
    def broken(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.holds is False)


def explain(
    model: Model, layout: Layout, work: Training, cluster: Cluster | None = None, assumed: dict[str, str] | None = None
) -> Explanation:
    """Account, peaks of the worst rank, laws and fit.  Raises ``Refused``."""
    found = account(model, layout, work, kernels_of(cluster))
    by_rank = {i: peaks(found.ledger, c) for i, c in enumerate(found.ledger.corners())}
    corners = found.ledger.corners()
    worst = max(by_rank, key=lambda i: max((p.bytes for p in by_rank[i]), default=0))
    flops = None if model.bare else model_flops_per_step(model, work.global_batch * work.sequence, work.sequence)
    return Explanation(
        found,
        cluster,
        check(found, cluster),
        fit(found, cluster) if cluster else None,
        by_rank[worst],
        dict(corners[worst]),
        flops,
        assumed or {},
        timing(found, cluster),
    )


def timing(found: Account, cluster: Cluster | None) -> Timing:
    """The step on the clock, as far as the cluster's rates are known."""
    if cluster is None:
        return Timing(None, None, (), timeline.choices(found), "no cluster is given, so nothing says how fast it is")
    try:
        played = play(found, cluster)
    except Unmeasured as why:
        return Timing(None, None, (), timeline.choices(found), str(why))
    time = clock.read(found, cluster, played)
    return Timing(time, played, timeline.predicted(played), timeline.choices(found, cluster))


def kernels_of(cluster: Cluster | None) -> str:
    """The kernel set of a cluster's devices: fused on accelerators, eager on CPUs."""
    return "cpu" if cluster is not None and cluster.name.startswith("local") else "cuda"


def link_of(row: Traffic, explanation: Explanation) -> str:
    """Name of the slowest link that a row's group crosses."""
    cluster, mesh = explanation.cluster, explanation.account.case.mesh
    atoms = [a for a in row.axis if a in mesh.names]
    if cluster is None or len(atoms) != len(row.axis):
        return ""
    crossing = cluster.crossing(*((mesh.stride(a), mesh.size(a)) for a in atoms))
    return crossing.link.name if crossing.link else ""


def as_json(e: Explanation) -> dict[str, Any]:
    """The explanation as plain data; rows carry the ledger's field names, bytes as integers."""
    case = e.account.case
    rows = e.account.ledger.json()
    for row, t in zip(rows["traffic"], e.account.ledger.traffic, strict=True):
        row["link"] = link_of(t, e)
    return {
        "model": {
            "name": case.model.name,
            "family": case.model.family,
            "parameters": case.model.parameter_count,
            "active_parameters": case.model.active_count,
            "layers": case.model.layers,
        },
        "layout": str(case.layout),
        "cluster": e.cluster.name if e.cluster else None,
        "work": work_json(case.work) | {"micro_batches": case.micro_batches},
        "assumed": e.assumed,
        "witness": "arithmetic",
        **rows,
        "peaks": [{"phase": p.phase, "moment": p.moment, "bytes": p.bytes} for p in e.peaks],
        "worst_rank": e.worst,
        "model_flops_per_step": e.flops_per_step,
        "step_time": clock.as_json(e.timing.time) if e.timing.time else None,
        "step_time_unknown": e.timing.unknown or None,
        "timeline": {
            "buckets": [timeline.as_json(t) for t in e.timing.timelines],
            "bucket_mb": timeline.choices_json(e.timing.choices),
        },
        "fit": _fit_json(e.fit),
        "laws": [{"law": f.law, "name": f.name, "holds": f.holds, "says": f.says} for f in e.findings],
    }


def work_json(work: Training) -> dict[str, Any]:
    return {
        "global_batch": work.global_batch,
        "sequence": work.sequence,
        "optimizer": work.optimizer,
        "clip": work.clip,
        "precision": objects(work.precision),
    }


def _fit_json(found: Fit | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "verdict": found.verdict,
        "needed_bytes": found.needed_bytes,
        "device_bytes": found.device_bytes,
        "margin_bytes": found.margin_bytes,
        "allowances": [{"object": r.object, "bytes": r.bytes, "why": r.why} for r in found.allowances],
    }
