"""The laws that a real run can break, checked on what the ranks tell."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence

from partita.facts.case import Case
from partita.facts.mesh import Coordinate
from partita.plan.laws import Finding
from partita.prove.compare import Box, worst
from partita.prove.ranks import Seen
from partita.prove.reference import Reference


def check(case: Case, reference: Reference, ranks: Sequence[Seen]) -> tuple[Finding, ...]:
    """In the order and with the numbers of the laws of the plan."""
    found = [
        _finding(
            1, "coverage", list(coverage(case, ranks)), "shards of every parameter make it whole, without overlap"
        ),
        _finding(3, "placements", list(misplaced(ranks)), "parameters and gradients lie as declared"),
        _finding(3, "norm", list(norms(ranks)), "every rank has the same loss and norm, and clips by the same number"),
        _finding(6, "order", list(order(ranks)), "members of a group issue the same collectives in the same order"),
        _finding(8, "initial values", list(initial(case, ranks)), "every element starts as on one device"),
        _finding(8, "data", list(data(case, reference, ranks)), "every sample of every step was used exactly once"),
    ]
    if case.model.tied:
        broken = [f"rank {s.witness.rank} cut the tie of head and embedding" for s in ranks if not s.tied]
        found.insert(3, _finding(5, "ties", broken, "head and embedding are still one storage"))
    return tuple(found)


def _finding(law: int, name: str, broken: list[str], says: str) -> Finding:
    more = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
    return Finding(law, name, not broken, broken[0] + more if broken else says)


def misplaced(ranks: Sequence[Seen]) -> Iterator[str]:
    for s in ranks:
        for sentence in s.misplaced:
            yield f"on rank {s.witness.rank} {sentence}"


def coverage(case: Case, ranks: Sequence[Seen]) -> Iterator[str]:
    """Every element lies on somebody; two ranks hold the same part or parts that do not meet; each as it should be."""
    boxes: dict[str, dict[Box, list[int]]] = defaultdict(lambda: defaultdict(list))
    for s in ranks:
        for p in s.initial:
            boxes[p.name][p.box].append(s.witness.rank)
    for name, held in case.by_name.items():
        parts = {b: r for b, r in boxes.get(name, {}).items() if _elements(b)}
        total = sum(_elements(b) for b in parts)
        if total != held.parameter.elements:
            yield f"{name} has {held.parameter.elements:,} elements and its shards have {total:,}"
        elif any(_meet(a, b) for i, a in enumerate(parts) for b in list(parts)[:i]):
            yield f"shards of {name} overlap"
        for rank in range(case.mesh.world):
            want = held.elements(case.mesh, _at(case, rank)) if _at(case, rank) in held.at else 0
            have = sum(_elements(b) for b, who in boxes.get(name, {}).items() if rank in who)
            if want != have:
                yield f"rank {rank} should hold {want:,} elements of {name} and holds {have:,}"


def _at(case: Case, rank: int) -> Coordinate:
    return case.mesh.coordinate(rank)


def _elements(box: Box) -> int:
    return math.prod(sum(b - a for a, b in runs) for runs in box)


def _meet(one: Box, other: Box) -> bool:
    return all(any(a < d and c < b for a, b in x for c, d in y) for x, y in zip(one, other, strict=True))


def norms(ranks: Sequence[Seen]) -> Iterator[str]:
    values: tuple[tuple[str, Callable[[Seen], tuple[float | None, ...]]], ...] = (
        ("norm", lambda s: s.norms),
        ("loss", lambda s: s.losses),
    )
    for what, of in values:
        for step, found in enumerate(zip(*(of(s) for s in ranks), strict=True)):
            if len({repr(v) for v in found}) > 1:
                shown = ", ".join(f"{v:.9g}" for v in found if v is not None)
                yield f"in step {step} ranks have different values of the {what}: {shown}"


def order(ranks: Sequence[Seen]) -> Iterator[str]:
    """Same collectives, same order, within each group; and what is sent is what is received, in order."""
    groups: dict[tuple[int, ...], dict[int, list[object]]] = defaultdict(dict)
    wires: dict[tuple[int, int], dict[str, list[object]]] = defaultdict(lambda: defaultdict(list))
    for s in ranks:
        me = s.witness.rank
        for verb, _, dtype, size, members, peer in s.issued:
            if verb in ("send", "recv") and peer is not None:
                wires[(me, peer) if verb == "send" else (peer, me)][verb].append((dtype, size))
            else:
                groups[members].setdefault(me, []).append((verb, dtype, size))
    for members, issued in groups.items():
        lists = [issued.get(r, []) for r in members]
        if any(x != lists[0] for x in lists):
            at = next((i for i, x in enumerate(zip(*lists)) if len(set(x)) > 1), min(map(len, lists)))
            yield f"ranks {', '.join(map(str, members))} disagree on collective {at} of a step"
    for (source, target), said in wires.items():
        if said["send"] != said["recv"]:
            yield f"what rank {source} sends is not what rank {target} receives"


def initial(case: Case, ranks: Sequence[Seen]) -> Iterator[str]:
    """Equal to the last bit, or to the rounding of the narrower dtype where one device keeps parameters in another."""
    same = case.precision.weights == case.work.precision.weights
    found = worst([s.initial for s in ranks], 0.0 if same else 2**-8)
    if not found.holds:
        yield f"{found.worst} starts differently from one device (by {found.value:.3g})"


def data(case: Case, reference: Reference, ranks: Sequence[Seen]) -> Iterator[str]:
    """Each data rank once: ranks along other axes share its samples."""
    first: dict[int, Seen] = {}
    for s in ranks:
        first.setdefault(case.mesh.index(_at(case, s.witness.rank), "dp"), s)
    for step, want in enumerate(reference.samples):
        have = Counter(name for s in first.values() for name in s.samples[step])
        lost, extra = Counter(want) - have, have - Counter(want)
        if lost or extra:
            yield (
                f"in step {step} {sum(lost.values())} of {len(want)} samples were left out and"
                f" {sum(extra.values())} were not of this step"
            )
