"""The trainer: what stands round the one training step.

``train`` checks what can be checked without torch, then calls ``run`` on every rank.  ``run`` reads as the story of a
run: build, open the data, go on from a checkpoint or start, step, measure, save, tell.
"""

from __future__ import annotations

import math
import os
import sys
import time
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partita.facts.case import Case
from partita.facts.errors import BadInput
from partita.facts.precision import PRESETS
from partita.plan.account import account
from partita.plan.fit import refuse_host, refuse_machine
from partita.train import inputs
from partita.train.data import Batch, held_out_batches, micro_batches, preview, row_groups
from partita.train.launch import inside_torchrun, launch, memory_of_this_machine, oversubscribed
from partita.train.metrics import Metrics
from partita.train.mfu import Utilisation
from partita.train.options import Options
from partita.train.progress import Progress, Shown
from partita.train.rates import peak_flops
from partita.train.sources import expand
from partita.train.summary import memory_bytes, summary

if TYPE_CHECKING:
    import torch

    from partita.strategies.groups import Groups
    from partita.strategies.parallelize import Step
    from partita.train.ranks import Rank
    from partita.train.step import Result, Watch
    from partita.train.timing import Ledger, PhaseTimer


def train(options: Options) -> dict[str, Any]:
    """Train on ``options.ranks`` ranks; returns what ``summary.summary`` says.

    Raises:
        BadInput, NotInstalled: before any rank starts where that can be known.
        RankFailed: a rank raised or died.
    """
    check(options)
    crowd = None if options.device == "cuda" else oversubscribed(options.ranks, options.threads)
    if crowd and not inside_torchrun():
        print(crowd, file=sys.stderr)
    results = launch(
        run,
        options,
        ranks=options.ranks,
        threads=options.threads,
        port=options.port,
        debug=options.debug,
        environment={"TORCH_CPP_LOG_LEVEL": "INFO" if options.debug else "ERROR"},
    )
    return results[0]


def check(options: Options) -> None:
    """Refuse at once what no rank could run: layout, batch, files, folders."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", options.ranks))
    refuse_host(account(options.model, options.layout, options.work), here, memory_of_this_machine())
    row_groups(options.work.global_batch, options.layout.mb, 0, options.layout.dp)
    for files in (options.text.files, options.evaluation.files):
        if files:
            expand(list(files))
    out = Path(options.out)
    if out.exists() and not out.is_dir():
        raise BadInput(f"{out} is a file; --out needs a folder")
    if options.saving.resume and not out.is_dir():
        raise BadInput(f"there is no run at {out} to resume; leave --resume out, or name the folder of a run")
    export = options.saving.export
    if export and Path(export).exists() and (not Path(export).is_dir() or any(Path(export).iterdir())):
        raise BadInput(f"{export} exists and is not empty; --export needs a folder that does not exist yet")


@dataclass
class Run:
    """One rank's run: what is built once, and what the loop carries along."""

    options: Options
    me: Rank
    device: torch.device
    case: Case
    groups: Groups | None
    step: Step
    samples: inputs.Samples
    utilisation: Utilisation
    times: Ledger
    progress: Progress
    metrics: Metrics | None = None
    losses: list[float] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)
    first_step: int = 0

    @property
    def data_rank(self) -> tuple[int, int]:
        """(index, number) among the data ranks."""
        if self.groups is None:
            return 0, 1
        return self.case.mesh.index(self.groups.coordinate, "dp"), self.case.mesh.size("dp")


def run(options: Options) -> dict[str, Any]:
    """One rank of a run; returns its summary."""
    import torch

    from partita.train.ranks import device_of, process_group, rank

    kind = options.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = device_of(kind, rank().local)
    if not options.precision_said:
        default = PRESETS["bf16-master" if device.type == "cuda" else "fp32"]
        options = replace(options, work=replace(options.work, precision=default))
    with process_group(device) as me:
        return in_group(agreed(options), me, device)


def in_group(options: Options, me: Rank, device: torch.device) -> dict[str, Any]:
    """A run in the process group that stands (none for one rank)."""
    with ExitStack() as open_things:
        made = start(options, me, device)
        open_things.enter_context(made.progress)
        if made.metrics is not None:
            open_things.callback(made.metrics.close)
        loop(made)
        return finish(made)


def agreed(options: Options) -> Options:
    """Inside torchrun each process has its own clock; the folder is the one of rank 0."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return options
    out = [options.out]
    dist.broadcast_object_list(out)
    return replace(options, out=out[0])


def start(options: Options, me: Rank, device: torch.device) -> Run:
    """Build the step, open the samples, and go on from the last checkpoint where that is asked for."""
    import torch

    from partita.strategies.groups import Groups
    from partita.train import checkpoint
    from partita.train.build import build
    from partita.train.timing import Ledger

    torch.manual_seed(options.seed)
    out = Path(options.out)
    if not options.saving.resume and checkpoint.complete(out):
        raise BadInput(f"{out} holds the checkpoints of a run; --resume goes on with it, and another --out starts anew")
    accounted = account(options.model, options.layout, options.work, "cuda" if device.type == "cuda" else "cpu")
    if device.type == "cpu":
        refuse_machine(accounted, int(os.environ.get("LOCAL_WORLD_SIZE", options.ranks)), memory_of_this_machine())
    case = accounted.case
    groups = Groups(case.mesh, device.type) if me.world > 1 else None
    values, samples = prepared(options, me)
    step = build(case, groups, values, device)
    progress = Progress(options.steps, enabled=me.first, stream=sys.stderr)
    made = Run(options, me, device, case, groups, step, samples, utilisation(options, device), Ledger(), progress)
    if options.saving.resume:
        for left in checkpoint.broken(out) if me.first else ():
            progress.say(f"{left} was never finished and is left alone")
        newest = checkpoint.latest(out)
        made.first_step = checkpoint.load(step, newest, same(made)).step
        progress.say(f"resumed from {newest}: step {made.first_step} of {options.steps} is done")
        if made.first_step >= options.steps:
            raise BadInput(
                f"{newest} has {made.first_step} steps, and {options.steps} were asked for; use more --steps"
            )
    if me.first:
        made.metrics = Metrics(
            out, made.first_step, tensorboard=options.tensorboard, wandb=options.wandb, config=same(made)
        )
    return made


def prepared(options: Options, me: Rank) -> tuple[inputs.Values, inputs.Samples]:
    """Weights and samples; rank 0 converts and tokenises what is not there yet, and the others find it."""
    import torch.distributed as dist

    made = (inputs.values(options), inputs.samples(options)) if me.first else None
    if me.world > 1:
        dist.barrier()
    return made or (inputs.values(options), inputs.samples(options))


def same(run: Run) -> dict[str, Any]:
    """What must not change when a run goes on."""
    work = run.case.work
    return {
        "layout": str(run.options.layout),
        "model": {k: v for k, v in asdict(run.options.model).items() if k != "name"},
        "precision": work.precision.name,
        "optimizer": work.optimizer,
        "global batch": work.global_batch,
        "sequence": work.sequence,
        "seed": run.options.seed,
        "data": run.samples.key,
        "frozen": list(work.frozen) or None,
    }


def utilisation(options: Options, device: torch.device) -> Utilisation:
    """MFU's terms; the peak from the cluster that was named, or from the CUDA device's name."""
    work, peak = options.work, peak_flops(options, device)
    return Utilisation(
        options.model, work.global_batch * work.sequence, work.sequence, options.layout.world, peak, "full"
    )


def loop(run: Run) -> None:
    """Every step that is left."""
    from partita.train.timing import PhaseTimer

    timer = PhaseTimer(run.device.type == "cuda")
    show_samples(run)
    for index in range(run.first_step, run.options.steps):
        iterate(run, index, timer)


def iterate(run: Run, index: int, timer: PhaseTimer) -> None:
    """One turn of the loop: the rate, data, the step itself, the clock, and what is due after it."""
    rate = run.options.schedule.rate(index)
    for group in run.step.optimizer.param_groups:
        group["lr"] = rate
    sampled = run.options.profile_step == index - run.first_step + 1 and run.me.world > 1
    began = time.perf_counter()
    result = one_step(run, index, timer, sampled)
    loss = float(result.loss)  # the one read of a step: on CUDA it waits for the device
    took = time.perf_counter() - began
    phases = timer.taken()
    if not sampled:
        run.times.add(took, phases)
    run.losses.append(loss)
    after(run, index, loss, result, rate, took)


def one_step(run: Run, index: int, timer: PhaseTimer, sampled: bool) -> Result:
    """Fetch the micro-batches of a step and train on them; a sampled step runs under the recorder."""
    from partita.observe.record import Recorder
    from partita.train.step import train_step
    from partita.train.timing import exposed

    work, (data_rank, data_ranks) = run.case.work, run.data_rank
    with timer.phase("data"):
        batches = micro_batches(
            run.samples.training, index, work.global_batch, run.options.layout.mb, data_rank, data_ranks
        )
        batches = [moved(b, run.device) for b in batches]
    recorder = Recorder(run.case.mesh) if sampled else None
    with recorder or nullcontext():
        watches: list[Watch] = [timer, recorder] if recorder else [timer]
        result = train_step(run.step, batches, run.case, run.groups, watches)
    run.step.optimizer.zero_grad()
    if run.step.timeline is not None:
        run.step.timeline.buckets.clear()
    if recorder is not None:
        run.times.exposed = exposed(recorder, timer.taken(), waits_unseen=run.options.layout.state == "ddp")
    return result


def moved(batch: Batch, device: torch.device) -> Batch:
    if device.type == "cpu":
        return batch
    tensors = {name: getattr(batch, name) for name in ("ids", "targets", "positions", "documents")}
    there = {n: t.to(device, non_blocking=True) for n, t in tensors.items() if t is not None}
    return replace(batch, **there)


def after(run: Run, index: int, loss: float, result: Result, rate: float, took: float) -> None:
    """What follows a step: held-out loss, a check that it is a number, metrics, the live line, a checkpoint."""
    options, done = run.options, index + 1
    held = None
    if options.evaluation.every and (done % options.evaluation.every == 0 or done == options.steps):
        held = held_out_loss(run)
        run.held_out.append((done, held))
    norm = None if result.norm is None else float(result.norm)
    tokens_per_s = run.utilisation.tokens / took
    memory = memory_bytes(run.device)
    if run.metrics is not None:
        values = {
            "loss": loss,
            "held_out_loss": held,
            "grad_norm": norm,
            "rate": rate,
            "counted_tokens": int(result.counted),
            "step_s": took,
            "tokens_per_s": tokens_per_s,
            "mfu": run.utilisation.of(took),
            "mfu_flops": f"{run.utilisation.convention} attention",
            "memory_bytes": memory,
        }
        run.metrics.log(index, {k: v for k, v in values.items() if v is not None})
    run.progress.update(
        Shown(
            index,
            loss,
            rate=rate,
            grad_norm=norm,
            tokens_per_s=tokens_per_s,
            mfu=run.utilisation.of(took),
            convention=run.utilisation.convention,
            memory_bytes=memory,
            held_out=held,
        )
    )
    skips = run.step.scaling is not None  # a scaled loss may overflow: that step is left out, and the scale halved
    if not math.isfinite(loss) or (norm is not None and not math.isfinite(norm) and not skips):
        # The loss and the norm are sums over all ranks, so that every rank stops here.
        raise BadInput(
            f"step {done} has loss {loss} and gradient norm {norm}, which are not both numbers; a smaller --lr (now "
            f"{rate:g}), more --warmup or a wider --precision (now {run.case.work.precision.name}) may help"
        )
    if options.saving.every and (done % options.saving.every == 0 or done == options.steps):
        save(run, done)


def held_out_loss(run: Run) -> float:
    """The loss on the held-out samples; every rank runs as many forwards."""
    from partita.train.evaluate import evaluate

    held = run.samples.held_out
    assert held is not None
    batches = held_out_batches(held, run.options.layout.mb, *run.data_rank, limit=run.options.evaluation.samples)
    return evaluate(run.step, (moved(b, run.device) for b in batches), run.case, run.groups)


def save(run: Run, done: int) -> None:
    import torch

    from partita.train import checkpoint

    about = {
        "torch": torch.__version__,
        "ranks": run.me.world,
        "learning_rate": asdict(run.options.schedule),
        "data_position": done * run.case.work.global_batch,
    }
    meta = checkpoint.Meta(done, same(run), about)
    checkpoint.save(run.step, meta, Path(run.options.out), run.options.saving.keep)


def show_samples(run: Run) -> None:
    """The start of the first rows that rank 0 is about to train on, decoded: what counts, and what is only read."""
    if not run.me.first or not run.options.samples_shown:
        return
    work, (data_rank, data_ranks) = run.case.work, run.data_rank
    run.progress.say(run.samples.says)
    first = micro_batches(
        run.samples.training, run.first_step, work.global_batch, run.options.layout.mb, data_rank, data_ranks
    )
    rows = [(b, i) for b in first for i in range(b.ids.shape[0])][: run.options.samples_shown]
    for number, (batch, row) in enumerate(rows):
        text = preview(batch, row, run.samples.decode)
        run.progress.say(f"sample {number} ([...] is read and does not count): {text!r}")


def finish(run: Run) -> dict[str, Any]:
    """Export where asked for, and the summary."""
    if run.options.saving.export:
        export(run, Path(run.options.saving.export))
    return summary(run)


def export(run: Run, folder: Path) -> None:
    """The trained model as a Hugging Face folder: every tensor is gathered whole, rank 0 writes."""
    from torch.distributed.tensor import DTensor

    from partita.model import hf

    state: dict[str, torch.Tensor] = {}
    for name, p in run.step.named():
        whole = p.full_tensor().detach() if isinstance(p, DTensor) else p.detach()
        if run.me.first:
            state[name] = whole.cpu().clone()
    if run.me.first:
        like = inputs.folder_of(run.options.weights)
        hf.save(state, run.options.model, folder, like if like and (like / "config.json").is_file() else None)
        run.progress.say(f"exported to {folder}")
