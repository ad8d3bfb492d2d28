"""Every combination that runs, on tiny models: ``python -m tests.matrix``.

Proves each one with all three witnesses on real ranks and writes ``docs/prove-all.md``. What is done is kept in
``build/prove-all.jsonl`` under the state of ``src`` that it was done on, so that an interrupted run goes on where it
stopped. Exits with 1 where any combination disagrees.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from partita.facts.model import Model
from partita.plan.account import account
from partita.prove.dryrun import dry_ranks, dry_runs
from partita.prove.proof import Proof
from partita.prove.prove import Report, judge
from partita.prove.reference import Reference
from tests import pool
from tests.prove import jobs
from tests.tiny import tiny_model

ROOT = Path(__file__).resolve().parent.parent
DONE, TABLE = ROOT / "build" / "prove-all.jsonl", ROOT / "docs" / "prove-all.md"

LAYOUTS = {
    2: ("ddp", "ddp bucket_mb=0.05", "full_shard", "shard_grad_op"),
    4: ("ddp", "ddp bucket_mb=0.05", "full_shard", "shard_grad_op", "full_shard shard=2"),
}
# Every way to shard model state, each with every kind of recomputation.
STATES = {
    2: ("ddp", "zero1", "zero1 zero_sync=all_reduce", "zero2", "full_shard", "shard_grad_op"),
    4: ("ddp", "zero1", "zero1 zero_sync=all_reduce", "zero2", "full_shard", "shard_grad_op", "full_shard shard=2"),
}
RECOMPUTE = ("none", "selective", "full", "ops")
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "qk_norm": {"qk_norm": True},
}
KINDS = (
    ("fp64", "adamw"), ("fp64", "sgd"), ("fp32", "adamw"), ("fp32", "sgd"),
    ("autocast-bf16", "adamw"), ("bf16-master", "adamw"), ("pure-bf16", "adamw"), ("pure-bf16", "sgd"),
)  # fmt: skip


@dataclass(frozen=True)
class Combination:
    ranks: int
    layout: str
    precision: str
    optimizer: str
    model: str
    tied: bool
    each: int

    @property
    def proof(self) -> Proof:
        model: Model = tiny_model(name=self.model, tied=self.tied, **MODELS[self.model])
        return jobs.proof(self.layout, self.ranks, model, self.precision, self.optimizer, self.each)


def combinations() -> Iterator[Combination]:
    """In an order in which neighbours share their run on one device.

    Biases and q/k norms are crossed with float64 alone: it decides, and they change what is divided, not its dtype.
    Other numbers run with the tied model, whose embedding is the hardest case.
    """
    seen: set[Combination] = set()
    for (precision, optimizer), model, tied, each in itertools.product(KINDS, MODELS, (False, True), (1, 3)):
        if precision != "fp64" and (model != "plain" or not tied):
            continue
        found = [(ranks, layout) for ranks, layouts in LAYOUTS.items() for layout in layouts]
        if (precision, optimizer, model, tied) == ("fp64", "adamw", "plain", True):
            found += [(n, f"{s} recompute={r}") for n, states in STATES.items() for s in states for r in RECOMPUTE]
        for ranks, layout in found:
            text = layout.removesuffix(" recompute=none")
            combination = Combination(ranks, text, precision, optimizer, model, tied, each)
            if combination not in seen:
                seen.add(combination)
                yield combination


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sample", type=int, help="only so many, chosen by --seed; the table is not written")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    wanted = list(combinations())
    if chosen.sample is not None:
        wanted = sorted(random.Random(chosen.seed).sample(wanted, chosen.sample), key=wanted.index)
    commit, tree = revision("HEAD"), revision("HEAD:src")
    done = {} if chosen.sample is not None else read(tree)
    began = time.monotonic()
    with pool.opened() as ranks, tempfile.TemporaryDirectory() as folder:
        references: dict[Any, Reference] = {}
        for number, each in enumerate(wanted, 1):
            if each in done:
                continue
            result = done[each] = prove(ranks, each, references, folder)
            if chosen.sample is None:
                append(tree, each, result)
            print(f"{number}/{len(wanted)} {result['verdict']} {result['seconds']:.1f} s  {each}", flush=True)
            for reason in result["reasons"]:
                print(f"    {reason}", flush=True)
    if chosen.sample is None:
        write(commit, done)
    bad = sum(r["verdict"] != "agrees" for r in done.values())
    print(f"{len(done) - bad} of {len(wanted)} combinations agree, in {time.monotonic() - began:.0f} s")
    return 1 if bad else 0


def prove(ranks: pool.Pool, each: Combination, references: dict[Any, Reference], folder: str) -> dict[str, Any]:
    """One combination: real ranks, dry runs, verdict."""
    began = time.monotonic()
    proof = each.proof
    found = account(proof.model, proof.layout, proof.work)
    key = (proof.model, proof.work)
    if key not in references:
        where = Path(folder) / str(len(references))
        where.mkdir()
        references[key] = ranks(1).run(jobs.alone, proof, str(where))[0]
    seen = ranks(each.ranks).run(jobs.together, proof, references[key])
    dry = list(dry_runs(proof.model, proof.layout, proof.work, dry_ranks(found), each.ranks))
    return summary(judge(proof, references[key], seen, dry), time.monotonic() - began)


def summary(report: Report, seconds: float) -> dict[str, Any]:
    return {
        "verdict": report.verdict,
        "reasons": list(report.reasons),
        "rows": len(report.table.traffic) + len(report.table.memory),
        "differences": {name: d.value for name, d in report.differences.items()},
        "peak_off": max((abs(p.off) for p in report.table.peaks if p.off is not None), default=0.0),
        "seconds": seconds,
    }


def revision(name: str) -> str:
    command = ["git", "rev-parse", "--short", name]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def read(tree: str) -> dict[Combination, dict[str, Any]]:
    """What was done on this state of the sources; a last line cut short is left out."""
    out = {}
    for line in DONE.read_text().splitlines() if DONE.exists() else ():
        try:
            data = json.loads(line)
        except ValueError:
            continue
        if data["tree"] == tree:
            out[Combination(**data["combination"])] = data["result"]
    return out


def append(tree: str, each: Combination, result: dict[str, Any]) -> None:
    DONE.parent.mkdir(exist_ok=True)
    with DONE.open("a") as file:
        file.write(json.dumps({"tree": tree, "combination": asdict(each), "result": result}) + "\n")


def write(commit: str, done: dict[Combination, dict[str, Any]]) -> None:
    """The table: a line for each layout and kind of numbers, and every combination that disagrees."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for c, r in done.items():
        groups.setdefault((c.ranks, c.layout, c.precision, c.optimizer), []).append(r)
    bad = {c: r for c, r in done.items() if r["verdict"] != "agrees"}
    seconds = sum(r["seconds"] for r in done.values())
    lines = [
        "# Every combination, proven",
        "",
        "`make prove-all` writes this page. Each line stands for tiny models with one and with three micro-batches a",
        "step, in fp64 also plain, with biases and with q/k norms, tied and untied: arithmetic, dry run and recording",
        "joined line by line, and loss, norm, gradients and parameters compared with one device. Peaks have no vote.",
        "",
        f"Commit {commit}: {len(done) - len(bad)} of {len(done)} agree; {seconds / 60:.0f} minutes.",
        "",
        "| ranks | layout | numbers | optimizer | agree | rows | loss | gradients | parameters | peak off by |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (ranks, layout, precision, optimizer), found in sorted(groups.items()):
        agree, rows = sum(r["verdict"] == "agrees" for r in found), sum(r["rows"] for r in found)
        lines.append(
            f"| {ranks} | {layout} | {precision} | {optimizer} | {agree} of {len(found)} | {rows}"
            f" | {most(found, 'loss')} | {most(found, 'gradients')} | {most(found, 'parameters')}"
            f" | {max(r['peak_off'] for r in found):.1%} |"
        )
    if bad:
        lines += ["", "Disagreeing:", ""]
        lines += [f"- {c}: {'; '.join(r['reasons'])}" for c, r in bad.items()]
    temporary = TABLE.with_suffix(".part")
    temporary.write_text("\n".join(lines) + "\n")
    temporary.replace(TABLE)


def most(found: Iterable[dict[str, Any]], name: str) -> str:
    return f"{max(r['differences'][name] for r in found):.0e}"


if __name__ == "__main__":
    sys.exit(main())
