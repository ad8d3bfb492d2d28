"""The run on one device that every layout is compared with.  It is made once, and kept in files.

Ranks map the files into memory and read the slices that they hold, so that no rank needs a second whole model.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partita.facts.layout import Layout
from partita.facts.work import Training
from partita.plan.account import account
from partita.prove.proof import Proof, fingerprint

if TYPE_CHECKING:
    from torch import Tensor

    from partita.train.data import Batch

TOKENS = 1024
"""Most tokens of one micro-batch of the run on one device."""


@dataclass(frozen=True)
class Reference:
    """What one device did.  ``norms`` are before clipping, ``samples`` name the rows of each step's global batch."""

    folder: str
    losses: tuple[float, ...]
    norms: tuple[float | None, ...]
    samples: tuple[tuple[str, ...], ...]
    seconds: float

    def file(self, name: str) -> Path:
        """``initial``, ``gradients`` (of the first step, before clipping) or ``parameters`` (after the last)."""
        return Path(self.folder) / f"{name}.safetensors"


class Captured:
    """A watch of ``train_step`` that looks at gradients once: when they are complete and nothing has clipped them."""

    def __init__(self, look: Any) -> None:
        self.look, self.done = look, False

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if name == "step" and not self.done:
            self.done = True
            self.look()
        yield


def micro_batch(work: Training) -> int:
    """The largest divisor of the global batch whose tokens stay within ``TOKENS``."""
    return max(
        (d for d in range(1, work.global_batch + 1) if not work.global_batch % d and d * work.sequence <= TOKENS),
        default=1,
    )


def one_device(proof: Proof, folder: str) -> Reference:
    """Run the proof's steps on this process alone and write the three files.  ``proof.layout`` is not looked at."""
    from partita.train.build import build
    from partita.train.data import micro_batches
    from partita.train.step import train_step

    began = time.perf_counter()
    work = proof.work
    case = account(proof.model, Layout(mb=micro_batch(work)), work).case
    step = build(case, None, proof.values)
    data = proof.source.open(proof.model, work.sequence)
    kept = Reference(folder, (), (), (), 0.0)
    write(kept.file("initial"), step.named())
    losses, norms, samples = [], [], []
    for i in range(proof.steps):
        batches = micro_batches(data, i, work.global_batch, case.layout.mb)
        watch = Captured(lambda: write(kept.file("gradients"), ((n, p.grad) for n, p in step.named())))
        result = train_step(step, batches, case, None, [watch] if i == 0 else [])
        losses.append(float(result.loss))
        norms.append(None if result.norm is None else float(result.norm))
        samples.append(names(batches))
        step.optimizer.zero_grad()
    write(kept.file("parameters"), step.named())
    return replace(
        kept,
        losses=tuple(losses),
        norms=tuple(norms),
        samples=tuple(samples),
        seconds=time.perf_counter() - began,
    )


def names(batches: Iterable[Batch]) -> tuple[str, ...]:
    """Names of the rows in some micro-batches."""
    return tuple(fingerprint(i) + fingerprint(t) for b in batches for i, t in zip(b.ids, b.targets, strict=True))


def write(path: Path, named: Iterable[tuple[str, Tensor | None]]) -> None:
    """A safetensors file, under a temporary name first."""
    from safetensors.torch import save_file

    temporary = path.with_suffix(".part")
    save_file({n: t.detach().contiguous() for n, t in named if t is not None}, temporary)
    temporary.replace(path)
