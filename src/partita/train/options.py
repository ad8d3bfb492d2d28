"""Everything that ``partita train`` can be told.  No torch: options are plain facts that ranks are sent."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from partita.facts.errors import BadInput
from partita.facts.layout import Layout
from partita.facts.model import Model
from partita.facts.work import Training
from partita.train.schedule import Schedule
from partita.train.sources import Reading

SYNTHETIC = "synthetic"
BYTES = "bytes"


@dataclass(frozen=True)
class Text:
    """Where samples come from.

    ``files``: text, JSON lines or Parquet, folders or globs; empty: random tokens.  ``tokenizer``: a folder with a
    tokenizer.json, ``bytes``, or None for the one that stands beside the weights.
    """

    files: tuple[str, ...] = ()
    tokenizer: str | None = None
    reading: Reading = field(default_factory=Reading)
    shuffle: bool = True
    cache: str | None = None


@dataclass(frozen=True)
class Evaluation:
    """A held-out loss every ``every`` steps (0: never) over at most ``samples`` samples.

    They come from ``files``, or else are the last ``fraction`` of the training data.
    """

    every: int = 0
    files: tuple[str, ...] = ()
    fraction: float = 0.05
    samples: int = 64

    def __post_init__(self) -> None:
        if self.every < 0 or self.samples < 1:
            raise BadInput(
                f"a held-out loss every {self.every} steps over {self.samples} samples cannot be measured; "
                "0 steps (never) or more, and 1 sample or more, work"
            )


@dataclass(frozen=True)
class Saving:
    """Checkpoints every ``every`` steps (0: none), of which the last ``keep`` stay; ``resume`` goes on from the last.

    ``export``: a folder for the trained model in Hugging Face form.
    """

    every: int = 0
    keep: int = 2
    resume: bool = False
    export: str | None = None

    def __post_init__(self) -> None:
        if self.every < 0 or self.keep < 1:
            raise BadInput(
                f"checkpoints every {self.every} steps of which {self.keep} stay cannot be kept; "
                "0 steps (none) or more, and 1 to keep or more, work"
            )


@dataclass(frozen=True)
class Weights:
    """A Hugging Face ``folder`` or the ``packaged`` SmolLM2; ``load``: initial values come from there.

    Otherwise they come from the seed, and the folder serves for its tokenizer alone.
    """

    folder: str | None = None
    packaged: bool = False
    load: bool = False


@dataclass(frozen=True)
class Options:
    """One training run.

    ``work`` is the step, ``layout`` how it is divided, ``schedule`` the learning rate and the number of steps.
    ``precision_said``: whether the user chose the precision; if not it is float32 on CPUs and bf16-master on CUDA.
    ``out``: folder of the run.  ``profile_step``: the step (from 1) whose collectives are recorded; None: none.
    ``peak_flops``: one device's dense FLOP/s where it is known, for MFU.
    """

    model: Model
    layout: Layout
    work: Training
    schedule: Schedule
    text: Text = field(default_factory=Text)
    evaluation: Evaluation = field(default_factory=Evaluation)
    saving: Saving = field(default_factory=Saving)
    weights: Weights = field(default_factory=Weights)
    seed: int = 0
    out: str = "runs/run"
    device: str = "auto"
    precision_said: bool = True
    ranks: int = 1
    threads: int = 1
    port: int | None = None
    profile_step: int | None = 4
    cluster: str | None = None
    tensorboard: bool | None = None
    wandb: str | None = None
    samples_shown: int = 2
    debug: bool = False

    @property
    def steps(self) -> int:
        return self.schedule.steps


def default_out(model: Model) -> str:
    """``runs/NAME-DATE-TIME``, in this folder."""
    return str(Path("runs") / f"{model.name.rpartition('/')[2]}-{time.strftime('%Y%m%d-%H%M%S')}")
