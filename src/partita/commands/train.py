"""``partita train``: one model, one layout, real ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from partita.commands.common import console, emit_json, guarded, size, table, training, work_options
from partita.facts.errors import BadInput
from partita.facts.layout import Layout

if TYPE_CHECKING:
    from rich.table import Table

    from partita.train.options import Options

SEQUENCE = 512
LARGEST_DEFAULT_WARMUP = 100


@click.command("train")
@click.argument("model")
@click.option("--layout", default="ddp", show_default=True, help="Words such as 'full_shard mb=2'.")
@click.option("--ranks", type=int, help="Ranks on this machine. Default: 1, or those of torchrun.")
@click.option("--data", multiple=True, help="A .txt, .jsonl or .parquet file, folder or glob; again for more. "
              "'synthetic': random tokens.")  # fmt: skip
@work_options(SEQUENCE)
@click.option("--steps", type=int, default=100, show_default=True)
@click.option("--lr", type=float, default=3e-4, show_default=True, help="Peak learning rate.")
@click.option("--warmup", type=int, help="Steps of warm-up. Default: a tenth of the steps, at most 100.")
@click.option("--schedule", type=click.Choice(["cosine", "linear", "constant"]), default="cosine", show_default=True)
@click.option("--final-lr", type=float, default=0.0, show_default=True, help="Learning rate at the last step.")
@click.option("--weight-decay", type=float, default=0.1, show_default=True, help="Of matrices alone.")
@click.option("--momentum", type=float, default=0.9, show_default=True, help="SGD's.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of initial values and of the samples' order.")
@click.option("--eval-every", type=int, default=0, show_default=True, help="Steps between held-out losses; 0: none.")
@click.option("--eval-data", multiple=True, help="Files to hold out.")
@click.option("--eval-fraction", type=float, default=0.05, show_default=True, help="Held out where no file is.")
@click.option("--eval-samples", type=int, default=64, show_default=True, help="At most this many.")
@click.option("--from-scratch", is_flag=True, help="Initial values from the seed instead of weights.")
@click.option("--tokenizer", help="A folder with a tokenizer.json, or 'bytes'. Default: the model's own.")
@click.option("--separator", help="What stands between documents of a .txt: 'form-feed' or a regular expression.")
@click.option("--out", type=click.Path(), help="Folder of the run. Default: runs/MODEL-DATE-TIME.")
@click.option("--save-every", type=int, default=0, show_default=True, help="Steps between checkpoints; 0: none.")
@click.option("--keep", type=int, default=2, show_default=True, help="Checkpoints that stay.")
@click.option("--resume", is_flag=True, help="Go on from the last checkpoint in --out.")
@click.option("--export", type=click.Path(), help="Write the trained model there as a Hugging Face folder.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--threads", type=int, default=1, show_default=True, help="CPU threads of each rank.")
@click.option("--port", type=int, help="Rendezvous port on this machine. Default: a free one.")
@click.option("--profile-step", default="4", show_default=True, help="The step whose communication is sampled; none.")
@click.option("--cluster", help="Devices whose peak rate MFU is measured against, such as h100:1.")
@click.option("--samples", type=int, default=2, show_default=True, help="First samples to print, decoded.")
@click.option("--tensorboard/--no-tensorboard", default=None, help="Default: where it is installed.")
@click.option("--wandb", metavar="PROJECT", help="Write to this wandb project too.")
@click.option("--download", is_flag=True, help="Fetch the model from the hub if it is nowhere here.")
@click.option("--json", "as_data", is_flag=True, help="Print the summary as one JSON document.")
@click.option("--debug", is_flag=True, help="Show tracebacks and what every rank writes.")
@guarded
def command(as_data: bool, debug: bool, **said: Any) -> None:
    """Train MODEL on real ranks, under one layout.

    MODEL is a name from the catalog, a hub id, or a folder with config.json and weights. The same command works inside
    torchrun, which then says how many ranks there are. Progress goes to stderr, metrics to OUT/metrics.jsonl.
    """
    from partita.train.trainer import train

    summary = train(options_of(debug=debug, **said))
    if not _shows():
        return
    if as_data:
        emit_json(summary)
    else:
        draw(summary)


def options_of(**said: Any) -> Options:
    """The run that the options name; raises BadInput."""
    from partita.train import inputs
    from partita.train.options import SYNTHETIC, Evaluation, Options, Saving, Text, default_out
    from partita.train.schedule import Schedule
    from partita.train.sources import Reading

    ranks = said["ranks"] or _torchrun_ranks() or 1
    layout = Layout.parse(said["layout"], ranks)
    model, weights = inputs.find(said["model"], said["from_scratch"], said["download"])
    if not said["data"]:
        raise BadInput("no data is named; --data FILE works (again for more files), and --data synthetic")
    if SYNTHETIC in said["data"] and len(said["data"]) > 1:
        raise BadInput("--data synthetic stands alone; leave it out, or leave the files out")
    defaults = {
        "global_batch": layout.dp * layout.mb,
        "sequence": min(SEQUENCE, model.max_positions or SEQUENCE),
        "precision": "fp32",
    }
    names = ("global_batch", "sequence", "precision", "optimizer", "clip", "freeze")
    work = training({}, **{n: said[n] for n in names}, defaults=defaults)
    work = _tuned(work, said)
    if said["resume"] and not said["out"]:
        raise BadInput("--resume does not say which run to go on with; name its folder with --out")
    steps, warmup = said["steps"], said["warmup"]
    if warmup is None:
        warmup = min(steps // 10, LARGEST_DEFAULT_WARMUP)
    return Options(
        model=model,
        layout=layout,
        work=work,
        schedule=Schedule(said["lr"], steps, warmup, said["schedule"], said["final_lr"]),
        text=Text(() if said["data"] == (SYNTHETIC,) else said["data"], said["tokenizer"], Reading(said["separator"])),
        evaluation=Evaluation(said["eval_every"], said["eval_data"], said["eval_fraction"], said["eval_samples"]),
        saving=Saving(said["save_every"], said["keep"], said["resume"], said["export"]),
        weights=weights,
        seed=said["seed"],
        out=said["out"] or default_out(model),
        device=said["device"],
        precision_said=said["precision"] is not None,
        ranks=ranks,
        threads=said["threads"],
        port=said["port"],
        profile_step=_profile_step(said["profile_step"]),
        cluster=said["cluster"],
        tensorboard=said["tensorboard"],
        wandb=said["wandb"],
        samples_shown=max(0, said["samples"]),
        debug=said["debug"],
    )


def _tuned(work: Any, said: dict[str, Any]) -> Any:
    from dataclasses import replace

    for name in ("weight_decay", "momentum"):
        if not 0 <= said[name] < (1 if name == "momentum" else float("inf")):
            raise BadInput(f"a {name.replace('_', ' ')} of {said[name]} does not train; use 0 or more, below 1")
    return replace(work, lr=said["lr"], weight_decay=said["weight_decay"], momentum=said["momentum"])


def _profile_step(text: str) -> int | None:
    if text == "none":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise BadInput(f"--profile-step {text} is no step; a number from 1 on works, and none")
    return int(text)


def _torchrun_ranks() -> int | None:
    import os

    from partita.train.launch import inside_torchrun

    return int(os.environ["WORLD_SIZE"]) if inside_torchrun() else None


def _shows() -> bool:
    """Inside torchrun every process comes here; the first one speaks."""
    import os

    from partita.train.launch import inside_torchrun

    return not inside_torchrun() or os.environ["RANK"] == "0"


def draw(summary: dict[str, Any]) -> None:
    """Losses, step time by rank, and where it went."""
    out = console()
    losses, first = summary["losses"], summary["first_step"]
    out.print(
        f"{summary['model']}, layout {summary['layout']}, {summary['ranks']} rank{'s' * (summary['ranks'] > 1)}, "
        f"{summary['precision']}: loss {losses[0]:.4f} at step {first + 1}, {losses[-1]:.4f} at step "
        f"{first + len(losses)}"
    )
    for held in summary["held_out"][-1:]:
        out.print(f"held-out loss {held['loss']:.4f} at step {held['step']}")
    for made in _tables(summary):
        out.print(made)
    for line in _below(summary):
        out.print(line)


def _tables(summary: dict[str, Any]) -> Iterator[Table]:
    """Seconds of each rank, and its shares."""
    ranks = summary["shares"]
    seconds = [
        (str(t["rank"]), *(_seconds(t[k]) for k in ("min_s", "median_s", "max_s")), size(memory))
        for t, memory in zip(ranks, summary["memory_bytes"], strict=False)
    ]
    yield table("Step time by rank", ("rank", "min", "median", "max", "peak memory"), seconds, right=range(1, 5))
    names = list(ranks[0]["shares"]) if ranks else []
    shares = [
        (str(t["rank"]), *("-" if t["shares"][n] is None else f"{100 * t['shares'][n]:.1f} %" for n in names))
        for t in ranks
    ]
    yield table("Where it went", ("rank", *names), shares, right=range(1, 1 + len(names)))


def _below(summary: dict[str, Any]) -> Iterator[str]:
    times = summary["step_time_s"]
    if times["median"] is not None:
        yield (
            f"step time min {_seconds(times['min'])}, median {_seconds(times['median'])}, max "
            f"{_seconds(times['max'])} (rank {times['max_rank']}); "
            f"{summary['tokens_per_s']:,.0f} tokens/s over all ranks"
        )
    if summary["mfu"] is not None:
        yield f"MFU {100 * summary['mfu']:.1f} % (model FLOPs with {summary['mfu_flops']}, no recomputation)"
    if summary["profile_step"] is not None:
        yield (
            f"exposed communication is sampled: step {summary['profile_step']} of this run ran under the recorder, and "
            "its part of each phase is taken off the means of the other steps"
        )
    yield f"metrics in {summary['out']}/metrics.jsonl"


def _seconds(s: float) -> str:
    return f"{s:.3f} s" if s >= 1 else f"{1e3 * s:.1f} ms"
