"""ZeRO's buckets step by step: their order, gradients that are missing, waiting, skipping, and state that moves."""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import Any

import pytest

from partita.facts.layout import Layout
from partita.facts.model import counted
from partita.facts.precision import PRESETS
from partita.facts.work import Training
from partita.plan.account import account
from tests.tiny import ZOO

torch = pytest.importorskip("torch")

# Sharded momentum SGD, worked by hand: two contributions, their mean, momentum 0.9, rate 0.1.
START = [1.0, 2.0, 3.0, 4.0]
MOMENTUM = [0.5, -0.5, 1.0, -1.0]
CONTRIBUTIONS = ([1.0, 2.0, 3.0, 4.0], [3.0, 6.0, 9.0, 12.0])


def momentum_step(rank: int, world: int, layout: str) -> tuple[list[float], list[float], int]:
    """One update of four parameters; (parameters, this rank's momentum, elements of gradient kept)."""
    from partita.strategies.groups import Groups
    from partita.strategies.order import appliers
    from partita.strategies.parallelize import Step
    from partita.strategies.step.state import StateShard, load_named_state, named_state_shards

    work = Training(2, 1, PRESETS["fp64"], "sgd", lr=0.1, momentum=0.9, clip=None)
    case = account(counted("four", 4), Layout.parse(layout, world), work).case
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.tensor(START, dtype=torch.float64))
    step = Step(module, lambda batch: None, aliases={"weight": "parameters"})
    groups = Groups(case.mesh)
    for _, room in appliers(case.layout):
        room.apply(step, groups, case)
    momentum = torch.tensor(MOMENTUM, dtype=torch.float64)
    load_named_state(step, [StateShard("parameters", "momentum_buffer", 0, 4, momentum)])
    with ExitStack() as stack:
        for context in step.around:
            stack.enter_context(context())
        for micro in step.contexts:
            stack.enter_context(micro(0, 1))
        share = torch.tensor(CONTRIBUTIONS[rank], dtype=torch.float64)
        ((module.weight * share).sum() / 2).backward()
        for finish in step.after_backward:
            finish()
        step.optimizer.step()
        for start in step.after_step:
            start()
    kept = module.weight.grad.numel() if module.weight.grad is not None else step.owned[0].tensor.grad.numel()
    values = next(p for _, p in step.named()).tolist()
    return values, next(s.tensor.tolist() for s in named_state_shards(step)), kept


@pytest.mark.parametrize("layout", ["zero1", "zero1 zero_sync=all_reduce", "zero2"])
def test_sharded_momentum_sgd_by_hand(ranks: Any, layout: str) -> None:
    found = ranks(2).run(momentum_step, layout)
    for values, _, kept in found:
        assert values == pytest.approx([0.755, 1.645, 2.31, 3.29])
        assert kept == (2 if layout == "zero2" else 4)
    assert [momentum for _, momentum, _ in found] == [pytest.approx([2.45, 3.55]), pytest.approx([6.9, 7.1])]


# The engine alone

SIZES = (3, 5, 2, 7)


def engine_steps(rank: int, world: int, keeps: bool, everywhere: bool, unused: int, passes: int) -> dict[str, Any]:
    """One step of four small parameters, each a bucket, whose gradients the last rank makes in the opposite order.

    The last rank does not use parameter ``unused`` (-1: uses all).
    """
    import torch.distributed as dist

    from partita.strategies.timeline import Timeline
    from partita.strategies.zero.engine import Engine
    from partita.strategies.zero.flat import cut, make

    named = [(f"p{i}", torch.nn.Parameter(torch.arange(n) + 10.0 * i)) for i, n in enumerate(SIZES)]
    buckets = [make(i, run, world, rank) for i, run in enumerate(cut(named, 1e-6))]
    engine = Engine(buckets, dist.group.WORLD, keeps, everywhere, Timeline())
    ready: list[int] = []
    for b in buckets:
        b.places[0].parameter.register_post_accumulate_grad_hook(lambda _, i=b.index: ready.append(i))
    last = rank == world - 1
    with engine.step():
        for n in range(passes):
            with engine.micro_batch(n, passes):
                order = [b for b in (buckets if last else reversed(buckets)) if not (last and b.index == unused)]
                sum((b.places[0].parameter * float(rank + 1)).sum() for b in order).backward()
        engine.after_backward()
    gradients = [piece.tensor.grad.tolist() for b in buckets for piece in b.pieces]
    held = [b.full is not None for b in buckets]
    return {
        "ready": ready,
        "launched": [t.index for t in engine.timeline.buckets],
        "complete": all(t.done_s is not None and t.ready_s <= t.launch_s <= t.done_s for t in engine.timeline.buckets),
        "gradients": gradients,
        "whole": held,
    }


MODES = [(True, False), (True, True), (False, False)]


@pytest.mark.parametrize("keeps, everywhere", MODES, ids=["zero1", "zero1 all_reduce", "zero2"])
@pytest.mark.parametrize("world, unused, passes", [(2, -1, 1), (2, 1, 1), (2, 2, 3), (4, -1, 1), (4, 0, 2)])
def test_buckets_are_launched_in_one_order(
    ranks: Any, keeps: bool, everywhere: bool, world: int, unused: int, passes: int
) -> None:
    """Also where one rank makes its gradients in another order, or one of them not at all; and where a parameter is
    smaller than the number of ranks."""
    found = ranks(world).run(engine_steps, keeps, everywhere, unused, passes)
    backwards = [i for i in reversed(range(4)) if i != unused]
    assert found[0]["ready"] == [0, 1, 2, 3] * passes and found[-1]["ready"] == backwards * passes
    for seen in found:
        assert seen["launched"] == [0, 1, 2, 3] * (1 if keeps else passes)
        assert seen["complete"]
        assert seen["whole"] == [keeps] * 4
    everybody = sum(range(1, world + 1))
    per_element = sum(sum(g) for seen in found for g in seen["gradients"])
    assert per_element == sum(n * passes * (everybody - (world if i == unused else 0)) for i, n in enumerate(SIZES))
    assert {v for seen in found for g in seen["gradients"] for v in g} <= {
        float(passes * everybody),
        float(passes * (everybody - world)),
    }


# Parameters on their way


def waits(rank: int, world: int, bucket_mb: float) -> list[tuple[str, int | str, tuple[int, ...]]]:
    """What happened in the forward after a step: waits for buckets, and modules that ran, with their buckets."""
    from partita.model.init import fill
    from partita.strategies.groups import Groups
    from partita.train.build import build
    from partita.train.data import SyntheticDataset, micro_batches
    from partita.train.step import train_step

    model = ZOO["tied"]
    layout = Layout.parse(f"zero1 bucket_mb={bucket_mb}", world)
    case = account(model, layout, Training(2, 8, PRESETS["fp32"])).case
    groups = Groups(case.mesh)
    step = build(case, groups, lambda named: fill(named, model, 0))
    engine = step.settling[0].__self__  # type: ignore[attr-defined]
    data = SyntheticDataset(model.vocab, 8)
    (batch,) = micro_batches(data, 0, 2, 1, rank, world)
    train_step(step, [batch], case, groups)
    events: list[Any] = []
    arrive = engine.arrive

    def noted(bucket: Any) -> None:
        if bucket.gather is not None:
            events.append(("wait", bucket.index, ()))
        arrive(bucket)

    engine.arrive = noted
    where = {p.parameter: b.index for b in engine.buckets for p in b.places}
    for name, part in step.module.named_modules():
        own = tuple(where[p] for p in part._parameters.values() if p is not None)
        if own:
            part.register_forward_pre_hook(lambda m, x, name=name, own=own: events.append(("run", name, own)))
    with torch.no_grad():
        step.parts[0](batch.ids, batch.positions, step.calls(batch))
    return events


def test_forward_waits_for_a_bucket_where_it_first_uses_it(ranks: Any) -> None:
    for events in ranks(2).run(waits, 0.02):
        waited = [b for kind, b, _ in events if kind == "wait"]
        assert len(waited) > 3 and sorted(waited) == list(range(len(waited)))
        there: set[int] = set()
        for i, (kind, what, own) in enumerate(events):
            if kind == "run":
                assert set(own) <= there, f"{what} ran before its parameters were there"
            else:
                there.add(what)
                following = next(e for e in events[i:] if e[0] == "run")
                assert what in following[2], (
                    f"bucket {what} was waited for before {following[1]}, which does not use it"
                )


# Loss scaling


def scaled_steps(rank: int, world: int, layout: str, optimizer: str) -> dict[str, Any]:
    """Six steps in float16; in the first and the fourth one gradient of rank 1 alone becomes infinite."""
    from partita.model.init import fill
    from partita.strategies.groups import Groups
    from partita.strategies.step.state import named_state_shards
    from partita.train.build import build
    from partita.train.data import SyntheticDataset, micro_batches
    from partita.train.step import train_step

    model = ZOO["plain"]
    work = Training(2, 8, PRESETS["fp16-master"], optimizer, lr=1e-3)
    case = account(model, Layout.parse(layout, world), work).case
    groups = Groups(case.mesh)
    step = build(case, groups, lambda named: fill(named, model, 0))
    step.scaling.interval = 2
    bad: set[int] = {0, 3}
    now = [0]

    def spoil() -> None:
        if now[0] in bad and rank == 1:
            step.owned[0].tensor.grad[0] = float("inf")

    step.after_backward.append(spoil)
    data = SyntheticDataset(model.vocab, 8)
    out: dict[str, Any] = {"skipped": [], "scale": [], "changed": [], "finite": True, "loss": []}

    def snapshot() -> list[Any]:
        return [p.detach().clone() for _, p in step.named()] + [
            s.tensor.clone() for s in named_state_shards(step) if s.key != "step"
        ]

    before = snapshot()
    for i in range(6):
        now[0] = i
        result = train_step(step, micro_batches(data, 0, 2, 1, rank, world), case, groups)
        step.optimizer.zero_grad()
        after = snapshot()
        out["skipped"].append(float(result.skipped))
        out["scale"].append(float(step.scaling.scale))
        out["changed"].append(any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)))
        out["finite"] &= all(bool(torch.isfinite(t).all()) for t in after)
        out["loss"].append(float(result.loss))
        before = after
    out["count"] = int(step.scaling.skipped)
    return out


@pytest.mark.parametrize("layout", ["zero1", "zero1 zero_sync=all_reduce", "zero2"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_an_overflow_on_one_rank_makes_all_ranks_skip(ranks: Any, layout: str, optimizer: str) -> None:
    found = ranks(2).run(scaled_steps, layout, optimizer)
    for seen in found:
        assert seen["skipped"] == [1, 0, 0, 1, 0, 0] and seen["count"] == 2
        assert seen["changed"] == [False, True, True, False, True, True]
        first = 2.0**16
        assert seen["scale"] == [first / 2, first / 2, first, first / 2, first / 2, first]
        assert seen["finite"] and seen["loss"][-1] < seen["loss"][0]
    assert found[0]["loss"] == found[1]["loss"]


# State that moves


def trained(
    rank: int, world: int, layout: str, precision: str, first: int, steps: int, start: Any
) -> tuple[dict[str, Any], list[Any]]:
    """Steps ``first`` and on; (parameters, this rank's shards of state).  ``start``: parameters and all shards."""
    from partita.model.init import fill
    from partita.strategies.groups import Groups
    from partita.strategies.step.state import load_named_state, named_state_shards
    from partita.train.build import build
    from partita.train.data import SyntheticDataset, micro_batches
    from partita.train.step import train_step

    model = ZOO["all_biases"]
    case = account(model, Layout.parse(layout, world), Training(4, 8, PRESETS[precision])).case
    groups = Groups(case.mesh) if world > 1 else None
    step = build(case, groups, lambda named: fill(named, model, 0))
    if start is not None:
        with torch.no_grad():
            for name, p in step.named():
                p.copy_(start[0][name])
        load_named_state(step, start[1])
    data = SyntheticDataset(model.vocab, 8)
    for s in range(first, first + steps):
        train_step(step, micro_batches(data, s, 4, case.layout.mb, rank, world), case, groups)
        step.optimizer.zero_grad()
    return {n: p.detach().clone() for n, p in step.named()}, list(named_state_shards(step))


@pytest.mark.parametrize("precision", ["fp64", "bf16-master"])
def test_state_of_four_ranks_opens_on_two_and_on_one(ranks: Any, precision: str) -> None:
    def go_on(world: int, layout: str, first: int, steps: int, start: Any) -> Any:
        found = ranks(world).run(trained, layout, precision, first, steps, start)
        return found[0][0], [s for _, shards in found for s in shards]

    four = go_on(4, "zero2 bucket_mb=0.02", 0, 2, None)
    two = go_on(2, "zero1", 2, 0, four)
    one = go_on(1, "zero1 mb=4", 2, 0, two)
    assert len(four[1]) > len(two[1]) > len(one[1])
    for name, key in {(s.name, s.key) for s in one[1]}:
        whole = [put_together(found[1], name, key) for found in (four, two, one)]
        assert torch.equal(whole[0], whole[1]) and torch.equal(whole[1], whole[2]), (name, key)
    if precision == "fp64":
        resumed = go_on(2, "zero1", 2, 2, four)[0]
        alone = go_on(1, "zero1 mb=4", 0, 4, None)[0]
        for name, p in alone.items():
            assert torch.linalg.vector_norm(resumed[name] - p) <= 1e-9 * torch.linalg.vector_norm(p), name


def put_together(shards: list[Any], name: str, key: str) -> Any:
    found = sorted((s for s in shards if (s.name, s.key) == (name, key)), key=lambda s: s.begin)
    if not found[0].tensor.dim():
        return found[0].tensor
    assert [s.begin for s in found[1:]] == [s.end for s in found[:-1]] and found[0].begin == 0
    return torch.cat([s.tensor for s in found])


def test_state_with_a_gap_is_refused(ranks: Any) -> None:
    from partita.strategies.step.state import BadState

    _, shards = ranks(2).run(trained, "zero1", "fp32", 0, 1, None)[0]
    with pytest.raises(BadState, match="give every rank's shards"):
        load_alone(shards)


def load_alone(shards: list[Any]) -> None:
    from partita.model.init import fill
    from partita.strategies.step.state import load_named_state
    from partita.train.build import build

    model = ZOO["all_biases"]
    case = account(model, Layout(mb=4), Training(4, 8, PRESETS["fp32"])).case
    load_named_state(build(case, None, lambda named: fill(named, model, 0)), shards)


@pytest.mark.parametrize("shape", [(7,), (1, 5), (5, 1), (4, 6)])
def test_a_flat_range_is_a_few_boxes(shape: tuple[int, ...]) -> None:
    from partita.model.shards import box_shape
    from partita.strategies.step.state import boxes

    whole = torch.arange(math.prod(shape)).view(shape)
    for begin in range(whole.numel() + 1):
        for end in range(begin, whole.numel() + 1):
            found = list(boxes(shape, begin, end))
            got = []
            for at, part in found:
                assert at == len(got)
                got += whole[tuple(slice(lo, hi) for ((lo, hi),) in part)].flatten().tolist()
                assert math.prod(box_shape(part)) > 0
            assert got == list(range(begin, end)) and len(found) <= 3
