"""Documents as one long run of tokens on disk, and samples cut from it.

Documents are tokenised, each ends with one end-of-text token, and all stand in a row in a memory-mapped file.
Sample ``i`` of sequence ``t`` reads tokens ``i t`` to ``i t + t`` (both included): neighbours share one token, so
every token but the first of all is the target of exactly one position.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from partita.train.sources import BadData, Document, Reading, documents

FORMAT = 1
"""Raised whenever the files or the meaning of a cached run of tokens change."""
HASHED_BYTES = 256 * 2**20
"""Files up to this size are known by their content, larger ones by path, size and time of change."""
CHARACTERS_AT_ONCE = 2**20
"""Given to the tokenizer in one call: enough for its threads, little for its memory (some 200 bytes a character)."""
PIECE = 2**16
"""Characters behind which a long text is tokenised in pieces, where that changes nothing."""


class Tokenizer(Protocol):
    """What packing needs of a tokenizer."""

    @property
    def eos(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...
    def encode_batch(self, texts: list[str]) -> list[list[int]]: ...


@dataclass(frozen=True)
class Tokens:
    """A run of documents: ``ids`` int32 [N], ``counts`` bool [N] or None (all count as targets), ``starts`` int64 [D].

    ``name`` and ``source_bytes`` say where it comes from; ``skipped`` documents were empty; ``largest`` is the
    largest id.
    """

    ids: np.ndarray
    counts: np.ndarray | None
    starts: np.ndarray
    eos: int
    name: str
    source_bytes: int
    skipped: int
    largest: int

    def __len__(self) -> int:
        return len(self.ids)

    def samples(self, sequence: int) -> int:
        """How many samples there are; the last may be part padding."""
        return -(-(len(self) - 1) // sequence)


def cut(tokens: Tokens, sequence: int, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(ids, counted next tokens, positions, documents) of sample ``index``, int64 [sequence] each.

    A next token that does not count is -1: prompts, the first token of a document (nothing predicts it; the
    end-of-text token before it is predicted), and the padding behind the last token, which continues the last
    document with end-of-text tokens.  Positions restart with each document and with the sample.
    """
    first = index * sequence
    run = tokens.ids[first : first + sequence + 1].astype(np.int64)
    real = len(run) - 1
    targets = np.full(sequence, -1, np.int64)
    targets[:real] = run[1:]
    if tokens.counts is not None:
        targets[:real][~tokens.counts[first + 1 : first + 1 + real].astype(bool)] = -1
    ids = np.full(sequence, tokens.eos, np.int64)
    ids[: len(run)] = run[:sequence]
    low, high = np.searchsorted(tokens.starts, [first, first + sequence], side="right")
    borders = np.asarray(tokens.starts[low:high]) - first
    targets[borders - 1] = -1
    documents_of = np.zeros(sequence, np.int64)
    positions = np.arange(sequence, dtype=np.int64)
    inside = borders[borders < sequence]
    if len(inside):
        documents_of[inside] = 1
        documents_of = documents_of.cumsum()
        positions -= np.concatenate([[0], inside])[documents_of]
    return ids, targets, positions, documents_of


def default_cache() -> Path:
    """``${XDG_CACHE_HOME:-~/.cache}/partita/tokens``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "partita" / "tokens"


def tokenise(
    paths: Sequence[Path], tokenizer: Tokenizer, reading: Reading | None = None, cache: Path | None = None
) -> Tokens:
    """The documents of ``paths`` as tokens, from the cache or written to it first.

    Any number of processes may call this at once: each builds in a folder of its own and renames it, the first
    to finish wins, and all read what it wrote.
    """
    reading = reading or Reading()
    root = cache or default_cache()
    folder = root / _key(paths, tokenizer, reading)
    if not folder.exists():
        try:
            root.mkdir(parents=True, exist_ok=True)
            temporary = Path(tempfile.mkdtemp(prefix=f"{folder.name}.{os.getpid()}.", suffix=".tmp", dir=root))
        except OSError as error:
            raise BadData(
                f"tokens cannot be kept in {root} ({error.strerror}); set XDG_CACHE_HOME to a folder that is writable"
            ) from None
        try:
            _build(temporary, paths, tokenizer, reading)
            _publish(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return _open(folder, tokenizer.eos, paths)


def _publish(temporary: Path, folder: Path) -> None:
    try:
        temporary.rename(folder)
    except OSError:
        # Another process was first.  A folder cannot be renamed over one that holds files, so nothing was lost.
        if not folder.exists():
            raise


def _key(paths: Sequence[Path], tokenizer: Tokenizer, reading: Reading) -> str:
    facts = {
        "format": FORMAT,
        "files": [_identity(path) for path in paths],
        "tokenizer": tokenizer.fingerprint,
        "eos": tokenizer.eos,
        "reading": asdict(reading),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _identity(path: Path) -> list[str | int]:
    try:
        status = path.stat()
        if status.st_size > HASHED_BYTES:
            return [str(path.resolve()), status.st_size, status.st_mtime_ns]
        with path.open("rb") as file:
            return [path.suffix.lower(), hashlib.file_digest(file, "sha256").hexdigest()]
    except OSError as error:
        raise BadData(f"{path} cannot be read ({error.strerror})") from None


def _build(folder: Path, paths: Sequence[Path], tokenizer: Tokenizer, reading: Reading) -> None:
    """Write ids.bin, counts.bin, starts.bin and facts.json; ``counts.bin`` only where something does not count."""
    total = skipped = ignored = 0
    largest = -1
    with (folder / "ids.bin").open("wb") as ids, (folder / "counts.bin").open("wb") as counts:
        starts: list[int] = []
        for chunk in _chunks(documents(paths, reading)):
            kept = [d for d in chunk if not d.empty]
            skipped += len(chunk) - len(kept)
            for tokens, mask in _encoded(kept, tokenizer):
                starts.append(total)
                total += len(tokens)
                ignored += len(mask) - int(mask.sum())
                largest = max(largest, int(tokens.max()))
                _write(ids, tokens)
                _write(counts, mask)
    if ignored == total:
        raise BadData(f"{named(paths)} holds {total} tokens, none of which counts; at least one must be learned")
    np.array(starts, np.int64).tofile(folder / "starts.bin")
    if not ignored:
        (folder / "counts.bin").unlink()
    facts = {"tokens": total, "documents": len(starts), "skipped": skipped, "ignored": ignored, "largest": largest}
    (folder / "facts.json").write_text(json.dumps(facts))


def _write(file: BinaryIO, array: np.ndarray) -> None:
    file.write(array.tobytes())


def _chunks(stream: Iterator[Document]) -> Iterator[list[Document]]:
    """Documents in runs of about a million characters (or one that is longer)."""
    chunk: list[Document] = []
    size = 0
    for document in stream:
        chunk.append(document)
        size += 1 + sum(len(s.text) for s in document.segments)
        if size >= CHARACTERS_AT_ONCE:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _encoded(kept: Sequence[Document], tokenizer: Tokenizer) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(ids int32, counts bool) of each document, with one end-of-text token at its end."""
    split = [[(piece, s.counts) for s in d.segments for piece in pieces(s.text, tokenizer)] for d in kept]
    encoded = _in_groups([piece for document in split for piece, _ in document], tokenizer)
    for document, parts in zip(kept, split, strict=True):
        ids: list[np.ndarray] = []
        counts: list[np.ndarray] = []
        for _, counted in parts:
            ids.append(next(encoded))
            counts.append(np.full(len(ids[-1]), counted, np.bool_))
        if not len(ids[-1]) or ids[-1][-1] != tokenizer.eos:
            ids.append(np.array([tokenizer.eos], np.int32))
            counts.append(np.array([document.end_counts]))
        yield np.concatenate(ids), np.concatenate(counts)


def _in_groups(texts: Sequence[str], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """The ids (int32) of each text, encoded some at a time."""
    start = size = 0
    for i, text in enumerate(texts, 1):
        size += len(text)
        if size >= CHARACTERS_AT_ONCE or i == len(texts):
            for ids in tokenizer.encode_batch(list(texts[start:i])):
                yield np.array(ids, np.int32)
            start, size = i, 0


def pieces(text: str, tokenizer: Tokenizer) -> list[str]:
    """``text`` cut where its tokens do not change: a tokenizer needs hundreds of bytes a character while it works.

    Candidates are the ends of lines, then the spaces between words, each tried: the text round it must have the same
    tokens whole and in two.  Where none will do (a tokenizer that puts a space before every text) the text stays whole.
    """
    out, start = [], 0
    while len(text) - start > PIECE + PIECE // 2:
        places = _candidates(text, start + PIECE, start + PIECE + PIECE // 2)
        found = next((at for at in places if _safe(text, at, tokenizer)), None)
        if found is None:
            break
        out.append(text[start:found])
        start = found
    return [*out, text[start:]]


def _candidates(text: str, low: int, high: int) -> Iterator[int]:
    # Byte-pair tokenizers split text at white space first; the last line end of several stands apart in some of
    # them (GPT-2's) and not in others (Llama 3's), so both of its sides are tried.
    for match in islice(re.compile(r"\n(?=\S)").finditer(text, low, high), 4):
        yield from (match.end(), match.start())
    for match in islice(re.compile(r"(?<=\w) (?=\w)").finditer(text, low, high), 4):
        yield match.start()


def _safe(text: str, at: int, tokenizer: Tokenizer, around: int = 256) -> bool:
    before, after = text[max(0, at - around) : at], text[at : at + around]
    whole, left, right = tokenizer.encode_batch([before + after, before, after])
    return whole == left + right


def _open(folder: Path, eos: int, paths: Sequence[Path]) -> Tokens:
    try:
        facts = json.loads((folder / "facts.json").read_text())
        return Tokens(
            ids=_map(folder / "ids.bin", np.int32, facts["tokens"]),
            counts=_map(folder / "counts.bin", np.bool_, facts["tokens"]) if facts["ignored"] else None,
            starts=_map(folder / "starts.bin", np.int64, facts["documents"]),
            eos=eos,
            name=named(paths),
            source_bytes=sum(path.stat().st_size for path in paths),
            skipped=facts["skipped"],
            largest=facts["largest"],
        )
    except (OSError, ValueError, KeyError, TypeError):
        raise BadData(f"the cached tokens in {folder} are damaged; delete that folder and start again") from None


def _map(path: Path, dtype: Any, length: int) -> np.ndarray:
    if path.stat().st_size != length * np.dtype(dtype).itemsize:
        raise ValueError(path)
    return np.memmap(path, dtype, mode="r", shape=(length,))


def named(paths: Sequence[Path]) -> str:
    """``a.txt``, or ``a.txt and 3 more files``."""
    if not paths:
        return "nothing"
    more = len(paths) - 1
    return str(paths[0]) + (f" and {more} more file{'s' * (more > 1)}" if more else "")
