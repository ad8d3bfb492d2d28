"""A proof's terms: what is run, on what data, from what values.  Plain facts that ranks are sent; no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from partita.facts.layout import Layout
from partita.facts.model import Model
from partita.facts.work import Training

if TYPE_CHECKING:
    from torch import Tensor

    from partita.train.data import Dataset

STEPS = 4


@dataclass(frozen=True)
class Source:
    """Where samples come from: text files with the tokenizer in a model's folder, or random tokens (no paths)."""

    paths: tuple[str, ...] = ()
    tokenizer: str = ""
    seed: int = 0

    def open(self, model: Model, sequence: int) -> Dataset:
        """The samples; raises BadData for files that cannot be used."""
        from partita.train.data import SyntheticDataset, open_dataset

        if not self.paths:
            return SyntheticDataset(model.vocab, sequence, self.seed)
        from partita.model.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(self.tokenizer)
        return open_dataset(list(self.paths), tokenizer, sequence, seed=self.seed, vocabulary=model.vocab)

    def __str__(self) -> str:
        from pathlib import Path

        if not self.paths:
            return "random tokens of uneven counts"
        more = f" and {len(self.paths) - 1} more" if len(self.paths) > 1 else ""
        return Path(self.paths[0]).name + more


@dataclass(frozen=True)
class Proof:
    """One layout of a model, run for ``steps`` steps.

    ``weights`` is a folder with a checkpoint; without one, initial values come from ``seed``.
    """

    model: Model
    layout: Layout
    work: Training
    steps: int = STEPS
    source: Source = field(default_factory=Source)
    weights: str | None = None
    seed: int = 0

    def values(self, named: Any) -> None:
        """Initial values of parameters, or of the shards of them that lie here, in place."""
        from partita.model import hf, init

        if self.weights is not None:
            hf.load(named, self.model, self.weights)
        else:
            init.fill(named, self.model, self.seed)


def fingerprint(row: Tensor) -> str:
    """A short name of one row of ids or targets, by its values."""
    import hashlib

    return hashlib.blake2b(row.contiguous().numpy().tobytes(), digest_size=8).hexdigest()
