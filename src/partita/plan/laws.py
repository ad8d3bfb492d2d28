"""The laws: what a right layout keeps, checked on the composed rows without running anything.

Most faults of distributed training are silent: the job runs and the number is wrong.  Each law here is a question
that model, layout and ledger answer; ``prove`` asks the same of real ranks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from partita.facts.case import Case, Held
from partita.facts.cluster import Cluster
from partita.facts.ledger import Ledger
from partita.facts.mesh import Ranks
from partita.plan.account import Account
from partita.plan.fit import Fit, fit


@dataclass(frozen=True)
class Finding:
    """What a law says of a layout; ``holds`` is None where only a run can tell, or where nothing was asked."""

    law: int
    name: str
    holds: bool | None
    says: str


def check(account: Account, cluster: Cluster | None = None) -> tuple[Finding, ...]:
    """Every law, in order."""
    case, ledger = account.case, account.ledger
    return (
        coverage(case),
        gradients(case, ledger),
        norm(case, ledger),
        identity(case),
        ties(case),
        order(ledger),
        remainder(case, ledger),
        Finding(8, "initialisation and data", None, "prove compares initial values and samples with one device's"),
        fitting(account, cluster),
        topology(case, cluster),
    )


def coverage(case: Case) -> Finding:
    """Every element of every parameter is held by as many ranks as the layout says, and every layer once."""
    missing = [h.parameter.name for h in case.held if held_elements(case, h) != copies(case, h) * h.parameter.elements]
    layers = sum(u.count for u in case.units if u.is_blocks)
    if layers != case.model.layers:
        missing.append(f"{case.model.layers - layers} of {case.model.layers} layers")
    if missing:
        return Finding(1, "coverage", False, f"not held whole: {', '.join(missing[:4])}")
    elements = sum(h.count * h.parameter.elements for h in case.held)
    layered = f" in {case.model.layers} layers" if case.model.layers else ""
    return Finding(1, "coverage", True, f"all {elements:,} parameter elements{layered} are held whole")


def held_elements(case: Case, held: Held) -> int:
    """Elements of one parameter summed over all ranks."""
    mesh = case.mesh
    folded = mesh.fold(lambda c: held.elements(mesh, c) if c in held.at else 0, case.cuts, *mesh.names)
    return sum(elements * coordinates(case, ranks) for ranks, elements in folded)


def coordinates(case: Case, ranks: Ranks) -> int:
    """How many ranks a set of boxes holds."""
    others = math.prod(n for a, n in case.mesh.sizes if a not in ranks.axes)
    return others * sum(math.prod(hi - lo for lo, hi in box) for box in ranks.boxes)


def copies(case: Case, held: Held) -> int:
    """How many whole copies of a parameter there should be: one for each index of the axes that do not shard it."""
    sharding = set(case.mesh.live(*held.axes))
    return math.prod(n for a, n in case.mesh.sizes if a not in sharding)


def gradients(case: Case, ledger: Ledger) -> Finding:
    """For each parameter and axis exactly one room says how the ranks' gradients relate, and what divides their sum."""
    said = Counter((g.parameters, axis) for g in ledger.gradients for axis in g.axis)
    wrong = [
        f"{h.parameter.name} over {axis} ({said[h.parameter.name, axis]} rooms say)"
        for h in case.trained
        for axis in case.mesh.live(*case.mesh.names)
        if said[h.parameter.name, axis] != 1
    ]
    if wrong:
        return Finding(2, "gradients", False, f"not summed exactly once: {', '.join(wrong[:3])}")
    reductions = dict.fromkeys(f"{g.reduction} over {' x '.join(g.axis)}" for g in ledger.gradients)
    how = f"summed once by {' and '.join(reductions)}" if reductions else "complete on the one device"
    return Finding(2, "gradients", True, f"{how}; divided by the counted tokens of the global batch")


def norm(case: Case, ledger: Ledger) -> Finding:
    """Squares are completed over exactly the axes in which gradients lie in shards."""
    if case.work.clip is None:
        return Finding(3, "norm", None, "the norm is not measured: clipping is off")
    flat = case.flat.axis if case.flat else ()
    sharded = {a for h in case.trained for a in case.mesh.live(*h.axes, *flat)}
    summed = {a for r in ledger.traffic if r.owner == "step" and "norm" in r.why for a in r.axis}
    if sharded != summed:
        return Finding(
            3, "norm", False, f"gradients lie in shards over {sorted(sharded)}, squares sum over {sorted(summed)}"
        )
    where = f"completed over {' and '.join(sorted(summed))}" if summed else "complete on every rank"
    return Finding(3, "norm", True, f"each element counts once: local squares, {where}")


def identity(case: Case) -> Finding:
    """Global names map one to one onto the single-device model."""
    names = {p.name for p in case.model.parameters}
    if names != case.by_name.keys():
        odd = sorted(names ^ case.by_name.keys())
        return Finding(4, "identity", False, f"names differ from the single-device model: {', '.join(odd[:4])}")
    return Finding(
        4, "identity", True, f"{len(names):,} tensor{'s' * (len(names) > 1)} under global names and index ranges"
    )


def ties(case: Case) -> Finding:
    """A tied tensor is one storage, or its holders are summed together."""
    tied = [p for s in case.model.spans for p in s.parameters if p.tie]
    if not tied:
        return Finding(5, "ties", True, "no parameter is tied")
    apart = [p for p in tied if not any({"first", "last"} <= set(part.units) for part in case.parts)]
    if apart:
        return Finding(5, "ties", False, f"{apart[0].name} and {apart[0].tie} are on different stages")
    return Finding(5, "ties", True, f"{tied[0].name} and {tied[0].tie} are one storage on every rank, counted once")


def order(ledger: Ledger) -> Finding:
    """All members of a group issue the same collectives: no row's ranks depend on the axes of its own group."""
    split = [r for r in ledger.traffic if set(r.ranks.axes) & set(r.axis) and r.verb not in ("send", "recv")]
    if split:
        r = split[0]
        return Finding(6, "order", False, f"{r.verb} over {r.axis} is issued by {r.ranks} alone: its peers would wait")
    groups = dict.fromkeys(" x ".join(r.axis) for r in ledger.traffic)
    if not groups:
        return Finding(6, "order", True, "one device: nothing is sent")
    return Finding(6, "order", True, f"all members of a group issue the same collectives (groups: {', '.join(groups)})")


def remainder(case: Case, ledger: Ledger) -> Finding:
    """What does not divide, and what it costs."""
    parts = []
    worst = max((r.bytes for r in ledger.memory if r.object == "padding" and r.phase == "persistent"), default=0)
    if worst:
        parts.append(f"parameters do not divide: {worst:,} bytes of padding on the worst rank")
    if case.sequence != case.work.sequence:
        parts.append(f"the sequence is padded from {case.work.sequence} to {case.sequence}")
    return Finding(7, "remainder", True, "; ".join(parts) or "everything divides")


def fitting(account: Account, cluster: Cluster | None) -> Finding:
    if cluster is None:
        return Finding(9, "fit", None, "no cluster is given, so nothing says how much memory there is")
    found: Fit = fit(account, cluster)
    return Finding(9, "fit", found.fits, found.sentence)


def topology(case: Case, cluster: Cluster | None) -> Finding:
    """Each axis' groups, the slowest link they cross, and how many sibling groups share it."""
    if cluster is None:
        return Finding(10, "topology", None, "no cluster is given, so nothing says which links are crossed")
    said = list(crossings(case, cluster))
    return Finding(10, "topology", True, "; ".join(said) or "one device: nothing is crossed")


def crossings(case: Case, cluster: Cluster) -> Iterator[str]:
    """A sentence for every axis with more than one rank."""
    for axis in dict.fromkeys(a.partition(".")[0] for a in case.mesh.names):
        for group in {(axis,), *((a,) for a in case.mesh.atoms(axis))}:
            atoms = case.mesh.live(*group)
            if atoms and (group == (axis,) or len(case.mesh.atoms(axis)) > 1):
                dims = [(case.mesh.stride(a), case.mesh.size(a)) for a in atoms]
                yield f"{group[0]}: {cluster.crossing(*dims).describe()}"
