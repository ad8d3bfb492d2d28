"""What a run came to: losses, times by rank, memory."""

from __future__ import annotations

import resource
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from partita.train.trainer import Run


def summary(run: Run) -> dict[str, Any]:
    """What a run came to; gathered over all ranks, so that every rank must call it.

    ``step_time_s``: min, median and max over the ranks' steps (without the first two and the sampled one), and of
    which rank the max is.  ``ranks``: the same for each, with its shares; see ``timing.RankTimes``.
    """
    from partita.train.timing import times_of

    rows = gathered(run.times.row(), run.device)
    ranks = [t for i, row in enumerate(rows) if (t := times_of(i, row))]
    slowest = max(ranks, key=lambda t: t.max_s, default=None)
    medians = sorted(t.median_s for t in ranks)
    step_time = {
        "min": min((t.min_s for t in ranks), default=None),
        "median": medians[len(medians) // 2] if medians else None,
        "max": slowest.max_s if slowest else None,
        "max_rank": slowest.rank if slowest else None,
    }
    memory = [int(row[0]) for row in gathered([float(memory_bytes(run.device))], run.device)]
    median = step_time["median"]
    return {
        "model": run.options.model.name,
        "parameters": run.options.model.parameter_count,
        "layout": str(run.options.layout),
        "ranks": run.me.world,
        "device": run.device.type,
        "precision": run.case.work.precision.name,
        "steps": run.options.steps,
        "first_step": run.first_step,
        "losses": run.losses,
        "held_out": [{"step": s, "loss": v} for s, v in run.held_out],
        "step_time_s": step_time,
        "shares": [t.json() for t in ranks],
        "profile_step": run.options.profile_step if run.times.exposed is not None else None,
        "tokens_per_s": run.utilisation.tokens / median if median else None,
        "mfu": run.utilisation.of(median) if median else None,
        "mfu_flops": f"{run.utilisation.convention} attention",
        "memory_bytes": memory,
        "out": run.options.out,
    }


def gathered(row: list[float], device: torch.device) -> list[list[float]]:
    """One row of numbers of every rank, in rank order."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        return [row]
    mine = torch.tensor(row, dtype=torch.float64, device=device)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return [t.tolist() for t in every]


def memory_bytes(device: torch.device) -> int:
    """Peak of this rank: of the process on a CPU (libraries included), of torch's allocator on CUDA."""
    import torch

    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
