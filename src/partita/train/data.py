"""What a training step is fed: sample ``i`` of step ``s``, the same under every layout.

A dataset is an endless stream of samples.  Step ``s`` of a global batch of ``g`` samples reads the stream at
``s * g`` to ``s * g + g - 1``; nothing else enters, so the number of ranks, the micro-batch and a resumed run
change who computes a sample, never which sample it is, and the step number alone is the state to resume from.
Index work is numpy; torch is imported only where tensors are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from partita.train.packing import Tokenizer, Tokens, cut, tokenise
from partita.train.sources import BadData, Reading, expand

if TYPE_CHECKING:
    import torch

IGNORE = -100
"""Target of a position that does not count in the loss (the convention of torch's cross entropy)."""


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
        indices = [step * global_batch + row for row in checked(rows, global_batch)]
        return self._rows(indices, [self._lost(row, global_batch) for row in rows]).batch()

    def fixed(self, indices: Sequence[int]) -> Rows:
        """Samples for evaluation, which no step of training ever draws."""
        return self._rows([2**63 + i for i in indices], [self._lost(1 + i, 2) for i in indices])

    def held_out(self, samples: int = 8) -> HeldOut:
        """Samples for evaluation; what they count is uneven too."""
        return HeldOut(self, 0, samples)

    def _rows(self, indices: Sequence[int], lost: Sequence[int]) -> Rows:
        tokens = np.stack([self._tokens(index) for index in indices])
        targets = tokens[:, 1:].copy()
        for target, n in zip(targets, lost, strict=True):
            target[self.sequence - n :] = IGNORE
        positions = np.broadcast_to(np.arange(self.sequence, dtype=np.int64), targets.shape)
        return Rows(tokens[:, :-1].copy(), targets, positions, np.zeros_like(targets))

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


@dataclass(frozen=True)
class PackedDataset:
    """Samples of ``sequence`` positions cut from documents, in an order drawn anew for each epoch.

    The first ``samples`` samples are trained on (those behind them are held out).  Stream index ``i`` is sample
    ``order(i // samples)[i % samples]``: each sample once an epoch, whatever the steps and batches are.
    """

    tokens: Tokens
    sequence: int
    samples: int
    seed: int = 0
    shuffle: bool = True
    _orders: dict[int, np.ndarray] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __len__(self) -> int:
        """Samples an epoch."""
        return self.samples

    def batch(self, step: int, rows: Sequence[int], global_batch: int) -> Batch:
        """See ``Dataset``."""
        return self.fixed([self.sample(step * global_batch + row) for row in checked(rows, global_batch)]).batch()

    def sample(self, index: int) -> int:
        """Which sample stands at place ``index`` of the endless stream."""
        epoch, place = divmod(index, self.samples)
        return int(self.order(epoch)[place]) if self.shuffle else place

    def order(self, epoch: int) -> np.ndarray:
        """The permutation of one epoch, from (seed, epoch) alone."""
        found = self._orders.get(epoch)
        if found is None:
            found = permutation(self.seed, epoch, self.samples)
            for old in [e for e in self._orders if e != epoch - 1]:  # a global batch may lie in two epochs
                del self._orders[old]
            self._orders[epoch] = found
        return found

    def fixed(self, samples: Sequence[int]) -> Rows:
        """Rows by sample number, in the order of the text."""
        ids, following, positions, documents = map(
            np.stack, zip(*(cut(self.tokens, self.sequence, i) for i in samples), strict=True)
        )
        return Rows(ids, np.where(following < 0, IGNORE, following), positions, documents)

    def split(self, fraction: float) -> tuple[PackedDataset, HeldOut]:
        """(what is trained on, what is held out): the last samples, rounded, at least one, are held out."""
        if not 0 < fraction < 1:
            raise BadData(f"a held-out fraction of {fraction} is not between 0 and 1; 0.05 would hold out a twentieth")
        held = max(1, round(self.samples * fraction))
        if held >= self.samples:
            raise BadData(
                f"{self.tokens.name} has {self.samples} sample{'s' * (self.samples > 1)} of sequence {self.sequence}, "
                f"of which {held} cannot be held out and one trained on; use a shorter sequence or a held-out file"
            )
        kept = self.samples - held
        return replace(self, samples=kept), HeldOut(self, kept, held)

    def held_out(self) -> HeldOut:
        """All of it for evaluation: for data held out in a file of its own."""
        return HeldOut(self, 0, self.samples)

    def describe(self) -> str:
        """One sentence: documents, tokens, samples, padding.  Nothing is dropped, and it says so."""
        t, total = self.tokens, self.tokens.samples(self.sequence)
        padding = total * self.sequence - (len(t) - 1)
        text = (
            f"{t.name}: {len(t.starts):,} document{'s' * (len(t.starts) != 1)}, {len(t):,} tokens with their ends, "
            f"{total:,} samples of {self.sequence:,}"
        )
        if total > self.samples:
            text += f" (the last {total - self.samples:,} held out)"
        text += "; nothing is dropped"
        if padding:
            text += f", the last sample ends in {padding:,} padded positions that do not count"
        if t.skipped:
            text += f"; {t.skipped:,} empty document{'s' * (t.skipped > 1)} skipped"
        return text


def open_dataset(
    data: str | Path | Sequence[str | Path],
    tokenizer: Tokenizer,
    sequence: int,
    *,
    seed: int = 0,
    shuffle: bool = True,
    reading: Reading | None = None,
    cache: Path | None = None,
    vocabulary: int | None = None,
) -> PackedDataset:
    """The samples of a file, folder or glob (or several), tokenised once and kept in ``cache``.

    ``vocabulary``: rows of the model's embedding, checked against the largest token.  Raises BadData for files
    that cannot be read, for a text shorter than one sequence, and for tokens that the model does not have.
    """
    if sequence < 1 or not 0 <= seed < 2**63:
        raise BadData(f"sequence {sequence} must be at least 1, and seed {seed} at least 0 and below 2**63")
    tokens = tokenise(expand(data), tokenizer, reading, cache)
    if len(tokens) < sequence + 1:
        works = f"a sequence of {len(tokens) - 1:,} or less, or " if len(tokens) > 1 else ""
        raise BadData(
            f"{tokens.name} ({tokens.source_bytes:,} bytes) has {len(tokens):,} tokens, fewer than the "
            f"{sequence + 1:,} of one sample of sequence {sequence:,}; use {works}a longer text"
        )
    if vocabulary is not None and tokens.largest >= vocabulary:
        raise BadData(
            f"{tokens.name} has token {tokens.largest}, and the model's vocabulary ends at {vocabulary - 1}; "
            "use the tokenizer that belongs to the model"
        )
    return PackedDataset(tokens, sequence, tokens.samples(sequence), seed, shuffle)


def permutation(seed: int, epoch: int, length: int) -> np.ndarray:
    """A permutation of ``length`` samples from (seed, epoch): the stable order of Philox's raw words.

    Raw words are the one part of numpy's generators that is promised never to change.
    """
    words = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(length)
    return np.argsort(words, kind="stable")


class Fixed(Protocol):
    """Samples by number, without order or chance."""

    def fixed(self, samples: Sequence[int]) -> Rows: ...


@dataclass(frozen=True)
class HeldOut:
    """``samples`` samples of a source, from sample ``first`` on, for evaluation."""

    source: Fixed
    first: int
    samples: int

    def __len__(self) -> int:
        return self.samples


def held_out_batches(
    held: HeldOut, mb: int, data_rank: int = 0, data_ranks: int = 1, limit: int | None = None
) -> Iterator[Batch]:
    """The batches in which one data rank evaluates: ``mb`` rows each, as many on every rank.

    Data rank ``r`` of ``n`` gets samples ``r, r + n, ...`` (of the first ``limit``).  Ranks that share collectives
    must run the same number of batches of the same shape, so what is missing at the end is filled with rows in
    which nothing counts.  The sum of the losses over all ranks, divided by the sum of ``counted``, is therefore
    the same under every layout.
    """
    total = min(held.samples, limit) if limit is not None else held.samples
    for rows in row_groups(-(-total // (mb * data_ranks)) * mb * data_ranks, mb, data_rank, data_ranks):
        made = held.source.fixed([held.first + min(row, total - 1) for row in rows])
        filling = np.array([row >= total for row in rows])
        made.targets[filling] = IGNORE
        yield made.batch()


def preview(batch: Batch, row: int, decode: Callable[[list[int]], str], tokens: int = 64) -> str:
    """The start of a row as text; what does not count as a target stands in ``[...]``, documents divide by ``|``.

    A token counts where the position before it predicts it, so the first token of a row stands in brackets.
    """
    ids = batch.ids[row, :tokens].tolist()
    counts = [False, *(t != IGNORE for t in batch.targets[row, : tokens - 1].tolist())]
    parts = batch.documents[row, :tokens].tolist() if batch.documents is not None else [0] * len(ids)
    text, start = "", 0
    for i in range(1, len(ids) + 1):
        if i == len(ids) or (counts[i], parts[i]) != (counts[i - 1], parts[i - 1]):
            piece = decode(ids[start:i])
            text += piece if counts[start] else f"[{piece}]"
            text += "|" if i < len(ids) and parts[i] != parts[start] else ""
            start = i
    return text
