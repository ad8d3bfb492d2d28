"""What the trainer costs: its loop against a hand-written one with the same decoder, DDP, optimizer and data.

    python bench/train_overhead.py            SmolLM2-135M's size, 2 ranks
    python bench/train_overhead.py --quick    a small model

Both loops live in the same processes and take turns, step by step, with the order changed every time, so that what
else runs on the machine hits both.  Recording is off in both.  Printed is the ratio of each pair of steps, and their
median: 1.00 is no cost, and the aim is 1.03 at most.  The same ratio of processor time stands beside it: it is steadier
where other programs share the cores, and blind to waiting.  Nothing is asserted.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parent.parent / "src"
if str(SOURCE) not in sys.path:
    sys.path.insert(0, str(SOURCE))

from partita.facts.find import find_model  # noqa: E402
from partita.facts.layout import Layout  # noqa: E402
from partita.facts.model import Model  # noqa: E402
from partita.facts.precision import PRESETS  # noqa: E402
from partita.facts.work import Training  # noqa: E402
from partita.train.launch import launch, oversubscribed  # noqa: E402
from partita.train.options import Options  # noqa: E402
from partita.train.schedule import Schedule  # noqa: E402

WARM = 3
QUICK = Model("quick", "llama", 6, 256, 704, 4, 2, 64, 8192, tied=True)


def options_of(model: Model, ranks: int, reps: int, sequence: int, out: str) -> Options:
    """The same run for both loops: float32, AdamW, clipped, one micro-batch a step."""
    work = Training(ranks, sequence, PRESETS["fp32"])
    schedule = Schedule(1e-4, reps + WARM, kind="constant")
    layout = Layout.parse("ddp", ranks)
    return Options(
        model, layout, work, schedule, out=out, device="cpu", ranks=ranks, profile_step=None, samples_shown=0
    )


Seconds = tuple[float, float]
"""Of a step: by the clock on the wall, and of processor time."""


def measure(options: Options, reps: int) -> list[tuple[Seconds, Seconds]]:
    """On one rank: (of the trainer's step, of the hand-written one) for each pair."""
    import torch
    import torch.distributed as dist

    from partita.train.ranks import process_group
    from partita.train.timing import PhaseTimer
    from partita.train.trainer import iterate, start

    with process_group() as me:
        run = start(options, me, torch.device("cpu"))
        run.progress.update = lambda shown: None  # type: ignore[method-assign]  # a terminal's speed is not measured
        timer = PhaseTimer()
        by_hand = hand_written(options, me.rank, me.world)

        def ours(index: int) -> None:
            iterate(run, index, timer)

        def timed(step: Callable[[int], None], index: int) -> Seconds:
            dist.barrier()
            began, used = time.perf_counter(), time.process_time()
            step(index)
            return time.perf_counter() - began, time.process_time() - used

        pairs = []
        for index in range(reps + WARM):
            if index % 2:
                first = timed(ours, index)
                pairs.append((first, timed(by_hand, index)))
            else:
                second = timed(by_hand, index)
                pairs.append((timed(ours, index), second))
        if run.metrics is not None:
            run.metrics.close()
    return pairs[WARM:]


def hand_written(options: Options, rank: int, world: int) -> Callable[[int], None]:
    """A training loop as one would write it for this model alone; returns its step."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from partita.model.decoder import Decoder, plain
    from partita.model.init import fill
    from partita.model.loss import vocabulary_loss
    from partita.train.data import SyntheticDataset

    model, work = options.model, options.work
    decoder = Decoder(model)
    fill(decoder.named_parameters(), model, options.seed)
    wrapped = DistributedDataParallel(decoder, gradient_as_bucket_view=True)
    matrices = [p for p in decoder.parameters() if p.dim() >= 2]
    vectors = [p for p in decoder.parameters() if p.dim() < 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": work.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=options.schedule.peak, betas=work.betas, eps=work.eps, fused=True)
    data = SyntheticDataset(model.vocab, work.sequence, options.seed)

    def step(index: int) -> None:
        batch = data.batch(index, [rank], work.global_batch)
        counted = torch.tensor(batch.counted)
        dist.all_reduce(counted)
        logits = wrapped(batch.ids, batch.positions, plain(model, batch.documents))
        loss = vocabulary_loss(logits, batch.targets) / counted
        (loss * world).backward()  # DDP averages over the ranks
        shown = loss.detach()
        dist.all_reduce(shown)
        norm = torch.nn.utils.clip_grad_norm_(decoder.parameters(), work.clip or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        float(shown), float(norm)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small model in place of SmolLM2-135M's size")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--reps", type=int, help="pairs of steps (default 12, with --quick 40)")
    parser.add_argument("--sequence", type=int, default=128)
    said = parser.parse_args()
    model = QUICK if said.quick else find_model("SmolLM2-135M").model
    reps = said.reps or (40 if said.quick else 12)
    import train_overhead  # under its own name, by which the ranks import it

    with tempfile.TemporaryDirectory() as out:
        options = options_of(model, said.ranks, reps, said.sequence, out)
        ranks = launch(train_overhead.measure, options, reps, ranks=said.ranks)
    # A step takes as long as its slowest rank; processor time is that of all ranks.
    wall = [tuple(max(rank[i][0] for rank in pair) for i in range(2)) for pair in zip(*ranks, strict=True)]
    cpu = [tuple(sum(rank[i][1] for rank in pair) for i in range(2)) for pair in zip(*ranks, strict=True)]
    print(f"{model.name}, {model.parameter_count:,} parameters, {said.ranks} ranks, ddp, {said.sequence} tokens a rank")
    print(oversubscribed(said.ranks, 1) or "every rank may have a core of its own")
    print("ratio of each pair: " + " ".join(f"{ours / hand:.3f}" for ours, hand in wall))
    print(told("step time", wall) + "; aim: at most 1.03")
    print(told("processor time", cpu))


def told(what: str, pairs: list[tuple[float, ...]]) -> str:
    """Medians of both loops and of their ratio."""
    ours, hand = (statistics.median(pair[i] for pair in pairs) for i in range(2))
    low, middle, high = statistics.quantiles([a / b for a, b in pairs], n=4)
    return (
        f"{what}: trainer {ours:.3f} s, hand-written {hand:.3f} s, median ratio {middle:.3f} "
        f"(quartiles {low:.3f} to {high:.3f})"
    )


if __name__ == "__main__":
    main()
