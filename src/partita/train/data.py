"""What a training step is fed: sample ``i`` of step ``s``, the same under every layout.

A dataset is an endless stream of samples.  Step ``s`` of a global batch of ``g`` samples reads the stream at
``s * g`` to ``s * g + g - 1``; nothing else enters, so the number of ranks, the micro-batch and a resumed run
change who computes a sample, never which sample it is, and the step number alone is the state to resume from.
Index work is numpy; torch is imported only where tensors are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    import torch

IGNORE = -100
"""Target of a position that does not count in the loss (the convention of torch's cross entropy)."""


class BadData(ValueError):
    """Data that cannot be trained on; the message is one sentence for the user."""


@dataclass(frozen=True)
class Batch:
    """Some rows (samples) of a global batch.

    ``ids`` and ``targets`` are int64 [B, T]; a target is the next token, or ``IGNORE``.  ``positions`` is int64
    [T] and ``documents`` None when every row is one piece of text; else both are int64 [B, T]: positions restart
    with each document, and tokens attend only to tokens of the same document.  ``counted`` is the number of
    targets that count, known here so that a step need not read it back from a device.
    """

    ids: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor
    documents: torch.Tensor | None
    counted: int


@dataclass(frozen=True)
class Rows:
    """The arrays behind a ``Batch``: int64 [B, T], ``documents`` always given."""

    ids: np.ndarray
    targets: np.ndarray
    positions: np.ndarray
    documents: np.ndarray

    def batch(self) -> Batch:
        """As tensors; the block-diagonal mask is left out where no row has a boundary."""
        import torch

        whole = not self.documents.any()
        positions = self.positions[0] if whole else self.positions
        return Batch(
            ids=torch.from_numpy(self.ids),
            targets=torch.from_numpy(self.targets),
            positions=torch.from_numpy(positions.copy()),
            documents=None if whole else torch.from_numpy(self.documents),
            counted=int((self.targets != IGNORE).sum()),
        )


class Dataset(Protocol):
    """An endless, random-access stream of samples of ``sequence`` positions."""

    @property
    def sequence(self) -> int: ...

    def batch(self, step: int, rows: Sequence[int], global_batch: int) -> Batch:
        """Rows ``rows`` (each in 0 <= row < ``global_batch``) of the global batch of step ``step`` (from 0)."""
        ...


def micro_batches(
    dataset: Dataset, step: int, global_batch: int, mb: int, data_rank: int = 0, data_ranks: int = 1
) -> list[Batch]:
    """The micro-batches of one data rank in one step, ``mb`` rows each.

    Data rank ``r`` of ``n`` gets rows ``r, r + n, r + 2n, ...`` of the global batch.  Raises BadData where the
    global batch is not a multiple of ``data_ranks * mb``.
    """
    return [dataset.batch(step, rows, global_batch) for rows in row_groups(global_batch, mb, data_rank, data_ranks)]


def row_groups(global_batch: int, mb: int, data_rank: int = 0, data_ranks: int = 1) -> list[range]:
    """The rows of each micro-batch of a data rank; see ``micro_batches``."""
    if not 0 <= data_rank < data_ranks:
        raise BadData(f"data rank {data_rank} does not exist among {data_ranks} data ranks; use 0 to {data_ranks - 1}")
    each = data_ranks * mb
    if mb < 1 or global_batch < 1 or global_batch % each:
        near = max(1, round(global_batch / each)) * each if each > 0 else 1
        raise BadData(
            f"a global batch of {global_batch} samples does not divide into micro-batches of {mb} on {data_ranks} "
            f"data ranks ({each} samples at a time); a global batch of {near} would"
        )
    return [range(first + data_rank, first + each, data_ranks) for first in range(0, global_batch, each)]


@dataclass(frozen=True)
class SyntheticDataset:
    """Random tokens that depend on (seed, stream index) alone.

    ``ignore="uneven"`` (default) makes the count of targets differ by sample, so that a loss divided by anything
    but the global count is wrong visibly: row 0 of each global batch counts nowhere, row ``i`` loses its last
    ``i % 3 + 1`` positions.  (A global batch of one sample loses one position: something must count.)
    ``ignore="none"`` counts everything.
    """

    vocab: int
    sequence: int
    seed: int = 0
    ignore: str = "uneven"

    def __post_init__(self) -> None:
        if self.ignore not in ("uneven", "none"):
            raise BadData(f"ignore={self.ignore!r} is not known; use 'uneven' or 'none'")
        if self.ignore == "uneven" and self.sequence < 4:
            raise BadData(f"a sequence of {self.sequence} is too short for uneven counts; use 4 or more")

    def batch(self, step: int, rows: Sequence[int], global_batch: int) -> Batch:
        """See ``Dataset``."""
        length = self.sequence
        tokens = np.stack([self._tokens(step * global_batch + row) for row in checked(rows, global_batch)])
        targets = tokens[:, 1:].copy()
        for target, row in zip(targets, rows, strict=True):
            target[length - self._lost(row, global_batch) :] = IGNORE
        positions = np.broadcast_to(np.arange(length, dtype=np.int64), targets.shape)
        return Rows(tokens[:, :-1].copy(), targets, positions, np.zeros_like(targets)).batch()

    def _tokens(self, index: int) -> np.ndarray:
        # Raw words of a counter-based generator: the same on every machine and numpy version.
        raw = np.random.Philox(key=np.array([self.seed, index], np.uint64)).random_raw(self.sequence + 1)
        return (raw % np.uint64(self.vocab)).astype(np.int64)

    def _lost(self, row: int, global_batch: int) -> int:
        if self.ignore == "none":
            return 0
        return self.sequence if row == 0 and global_batch > 1 else row % 3 + 1


def checked(rows: Sequence[int], global_batch: int) -> Sequence[int]:
    """``rows``, if there are any and all lie in the global batch."""
    if not len(rows) or min(rows) < 0 or max(rows) >= global_batch:
        raise BadData(f"rows {list(rows)} do not lie in a global batch of {global_batch}; use 0 to {global_batch - 1}")
    return rows
