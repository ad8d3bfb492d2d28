"""Step time, optimizer memory and peak memory of ways to shard model state, side by side in one run.

    python bench/state_sharding.py            a model of 45 million parameters, 2 ranks
    python bench/state_sharding.py --quick    a small model

All contenders train the same model on the same samples in the same processes, through the same step (counted tokens,
one norm, clipping, fused AdamW in float32), and take turns step by step, the order turned every time.  Printed are
medians over repetitions of the slowest rank's step, as ratios to DDP's, and the bytes of optimizer state and of the
peak on the fullest rank.  Peers are torch's ``DistributedDataParallel``, alone and with ``ZeroRedundancyOptimizer``,
and ``fully_shard``.  Nothing is asserted.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parent.parent / "src"
if str(SOURCE) not in sys.path:
    sys.path.insert(0, str(SOURCE))

from partita.facts.layout import Layout  # noqa: E402
from partita.facts.model import Model  # noqa: E402
from partita.facts.precision import PRESETS  # noqa: E402
from partita.facts.work import Training  # noqa: E402
from partita.train.launch import launch, oversubscribed  # noqa: E402

MEDIUM = Model("medium", "llama", 10, 576, 1536, 9, 3, 64, 16384, tied=True)
QUICK = Model("quick", "llama", 4, 128, 352, 4, 2, 32, 1001, tied=True)
ZRO = "ddp + ZeroRedundancyOptimizer"
CONTENDERS = ("ddp", ZRO, "zero1", "zero1 zero_sync=all_reduce", "zero2", "shard_grad_op", "full_shard")
WARM = 2


def measure(model: Model, reps: int, sequence: int, accumulate: int) -> dict[str, Any]:
    """One rank: (seconds of every step, bytes of optimizer state, peak bytes) of each contender."""
    from partita.train.ranks import process_group

    with process_group() as me:
        return contest(me.rank, me.world, model, reps, sequence, accumulate)


def contest(rank: int, world: int, model: Model, reps: int, sequence: int, accumulate: int) -> dict[str, Any]:
    import torch.distributed as dist

    from partita.train.data import SyntheticDataset, micro_batches
    from partita.train.step import train_step

    batch = world * accumulate
    data = SyntheticDataset(model.vocab, sequence)
    made = {name: contender(name, model, batch, sequence, world) for name in CONTENDERS}
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}

    def step(name: str, index: int, *watches: Any) -> None:
        built, case, groups = made[name]
        built.optimizer.zero_grad()
        train_step(built, micro_batches(data, index, batch, 1, rank, world), case, groups, watches)

    for index in range(WARM + reps):
        names = CONTENDERS if index % 2 else CONTENDERS[::-1]
        for name in names:
            dist.barrier()
            began = time.perf_counter()
            step(name, index)
            made[name][0].settle()  # a gather that the next forward would hide is not for free here
            seconds[name].append(time.perf_counter() - began)
    return {
        name: (seconds[name][WARM:], optimizer_bytes(made[name][0].optimizer), peak(made[name][0], step, name, reps))
        for name in CONTENDERS
    }


def contender(name: str, model: Model, batch: int, sequence: int, world: int) -> tuple[Any, Any, Any]:
    """A step under a layout; or under DDP with torch's sharded optimizer in place of ours."""
    import torch
    from torch.distributed.optim import ZeroRedundancyOptimizer

    from partita.model.init import fill
    from partita.plan.account import account
    from partita.strategies.groups import Groups
    from partita.train.build import build

    work = Training(batch, sequence, PRESETS["fp32"])
    case = account(model, Layout.parse("ddp" if name == ZRO else name, world), work).case
    groups = Groups(case.mesh)
    step = build(case, groups, lambda named: fill(named, model, 0))
    if name == ZRO:
        step.optimizer = ZeroRedundancyOptimizer(
            step.module.parameters(),
            torch.optim.AdamW,
            parameters_as_bucket_view=True,
            lr=work.lr,
            betas=work.betas,
            eps=work.eps,
            weight_decay=work.weight_decay,
            fused=True,
        )
    return step, case, groups


def optimizer_bytes(optimizer: Any) -> int:
    """Of the state tensors on this rank."""
    from torch import Tensor
    from torch.distributed.tensor import DTensor

    inner = getattr(optimizer, "optim", optimizer)  # ZeroRedundancyOptimizer keeps its shard's optimizer there
    values = [v for state in inner.state.values() for v in state.values() if isinstance(v, Tensor)]
    local = [v.to_local() if isinstance(v, DTensor) else v for v in values]
    return sum(v.numel() * v.element_size() for v in local)


def peak(built: Any, step: Any, name: str, index: int) -> int:
    """Most bytes alive in one more step."""
    from torch import Tensor

    from partita.observe.peak import PeakTracker

    tracker = PeakTracker()
    inner = getattr(built.optimizer, "optim", built.optimizer)
    built.optimizer.zero_grad()

    class Watch:
        def phase(self, phase: str) -> Any:
            return tracker.phases.mark(phase)

    with tracker:
        tracker.hold("parameters", [p for _, p in built.named()])
        values = [v for state in inner.state.values() for v in state.values()]
        tracker.hold("optimizer state", [v for v in values if isinstance(v, Tensor)])
        step(name, index, Watch())
    return max(p.bytes for p in tracker.peaks(0))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small model")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--reps", type=int, default=10)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a step on each rank")
    said = parser.parse_args()
    model = QUICK if said.quick else MEDIUM
    import state_sharding  # under its own name, by which the ranks import it

    terms = (model, said.reps, said.sequence, said.accumulate)
    found = launch(state_sharding.measure, *terms, ranks=said.ranks)
    print(
        f"{model.name}, {model.parameter_count:,} parameters, fp32, {said.ranks} ranks,"
        f" {said.accumulate} x {said.sequence} tokens a rank and step"
    )
    print(oversubscribed(said.ranks, 1) or "every rank may have a core of its own")
    base = [max(s) for s in zip(*(rank["ddp"][0] for rank in found), strict=True)]
    print(f"{'':30} {'step':>9} {'x ddp':>7} {'quartiles':>15} {'optimizer':>12} {'peak':>12}")
    for name in CONTENDERS:
        steps = [max(s) for s in zip(*(rank[name][0] for rank in found), strict=True)]
        low, middle, high = statistics.quantiles([a / b for a, b in zip(steps, base, strict=True)], n=4)
        state, most = (max(rank[name][i] for rank in found) for i in (1, 2))
        print(
            f"{name:30} {statistics.median(steps):7.3f} s {middle:7.3f} {low:7.3f} {high:7.3f}"
            f" {state / 1e6:9.1f} MB {most / 1e6:9.1f} MB"
        )


if __name__ == "__main__":
    main()
