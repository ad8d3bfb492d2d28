"""Lays parameters into flat buckets, and gives the optimizer this rank's chunks of them."""

from __future__ import annotations

from partita.facts.case import Case
from partita.strategies.groups import Groups
from partita.strategies.parallelize import Step
from partita.strategies.timeline import Timeline
from partita.strategies.zero.engine import Engine
from partita.strategies.zero.flat import Bucket, cut, make, replace


def apply(step: Step, groups: Groups, case: Case) -> None:
    """One engine for the whole model; parameters that are frozen stay as they are."""
    mesh = groups["dp", "cp"]
    step.materialise()
    order = {p.name: i for i, p in enumerate(case.model.parameters)}
    named = [(name, p) for name, p in step.named() if p.requires_grad and p.numel()]
    named.sort(key=lambda item: -order[item[0]])
    runs = list(cut(named, case.layout.bucket_mb))
    del named
    buckets: list[Bucket] = []
    while runs:
        run = runs.pop(0)
        bucket = make(len(buckets), run, mesh.size(), mesh.get_local_rank())
        new = {place.name: place.parameter for place in bucket.places}
        replace(step.module, {p: new[name] for name, p in run})  # bucket by bucket: the old storage goes at once
        buckets.append(bucket)
    step.timeline = Timeline()
    engine = Engine(
        buckets,
        mesh.get_group(),
        keeps=case.layout.state == "zero1",
        everywhere=case.layout.zero_sync == "all_reduce",
        timeline=step.timeline,
    )
    engine.before_use(step.module)
    step.owned = [piece for bucket in buckets for piece in bucket.pieces]
    step.around.append(engine.step)
    step.contexts.append(engine.micro_batch)
    step.after_backward.append(engine.after_backward)
    step.after_step.append(engine.gather)
    step.settling.append(engine.settle)
