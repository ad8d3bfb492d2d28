"""Documents from files: plain text, JSON lines, Parquet.

A document is a run of segments, each of which counts in the loss or not: a prompt is read and not learned.
Whatever cannot be read is refused with one sentence that names the file, the line, and what was expected.
"""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from partita.facts.errors import BadInput, NotInstalled


class BadData(BadInput):
    """Data that cannot be trained on; the message is one sentence for the user."""


class Segment(NamedTuple):
    """A piece of text; ``counts`` says whether its tokens count as targets."""

    text: str
    counts: bool = True


class Document(NamedTuple):
    """Segments in order; ``end_counts`` says whether the end-of-text token after them counts."""

    segments: tuple[Segment, ...]
    end_counts: bool = True

    @property
    def empty(self) -> bool:
        return not any(s.text for s in self.segments)


@dataclass(frozen=True)
class Chat:
    """How turns are written: ``before``, the content, ``end``, and ``after`` between two turns (ChatML by default).

    Of an assistant's turn the content and ``end`` count; nothing else does.
    """

    before: str = "<|im_start|>{role}\n"
    end: str = "<|im_end|>"
    after: str = "\n"


@dataclass(frozen=True)
class Reading:
    """Choices in reading files.

    ``separator``: None (a text file is one document), ``"form-feed"`` (a line that holds only a form feed), or a
    regular expression (multi-line mode) that matches what stands between two documents and belongs to neither.
    """

    separator: str | None = None
    chat: Chat = field(default_factory=Chat)

    def __post_init__(self) -> None:
        try:
            matches_nothing = self.pattern is not None and self.pattern.match("") is not None
        except re.error as error:
            raise BadData(f"the separator {self.separator!r} is not a regular expression ({error})") from None
        if matches_nothing:
            raise BadData(f"the separator {self.separator!r} matches the empty string, so it separates everything")

    @property
    def pattern(self) -> re.Pattern[str] | None:
        if self.separator is None:
            return None
        return re.compile(r"^\f(?:\r?\n|\Z)" if self.separator == "form-feed" else self.separator, re.MULTILINE)


KINDS = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    "": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
}
IN_FOLDERS = ("*.txt", "*.jsonl", "*.parquet")
ROLES = ("system", "developer", "user", "assistant", "tool")
SHAPES = (("text",), ("prompt", "completion"), ("messages",))
EXPECTED = '"text", "prompt" with "completion", or "messages"'


def expand(data: str | Path | Sequence[str | Path]) -> tuple[Path, ...]:
    """The files behind a file, a folder (its .txt, .jsonl and .parquet files, in all depths), a glob, or several.

    Files of one folder or glob are sorted by name, so that every machine reads them in one order.
    """
    if not isinstance(data, str | Path):
        files = tuple(path for one in data for path in expand(one))
        if not files:
            raise BadData("no data file is named; name a .txt, .jsonl or .parquet file, a folder or a glob")
        return files
    path = Path(data).expanduser()
    if path.is_dir():
        found = sorted(p for pattern in IN_FOLDERS for p in path.rglob(pattern) if p.is_file())
        if not found:
            raise BadData(f"the folder {path} holds no .txt, .jsonl or .parquet file")
    elif path.exists():
        found = [path]
    elif glob.has_magic(str(path)):
        found = sorted(Path(p) for p in glob.glob(str(path), recursive=True) if Path(p).is_file())
        if not found:
            raise BadData(f"no file matches {str(path)!r}")
    else:
        raise BadData(f"there is no data file {path}")
    for one in found:
        kind_of(one)
    return tuple(found)


def kind_of(path: Path) -> str:
    """``text``, ``jsonl`` or ``parquet``, by the name's ending."""
    kind = KINDS.get(path.suffix.lower())
    if kind is None:
        raise BadData(
            f"{path} ends in {path.suffix}, which is not read; what works: .txt (also .md), .jsonl with one object "
            f"with {EXPECTED} a line, .parquet with such columns"
        )
    return kind


def documents(paths: Iterable[Path], reading: Reading) -> Iterator[Document]:
    """Every document of the files, in order.  Raises BadData at the first fault."""
    for path in paths:
        kind = kind_of(path)
        try:
            if path.stat().st_size == 0:
                raise BadData(f"{path} is empty (0 bytes); it must hold at least one document")
            if kind == "text":
                yield from _from_text(path, reading)
            else:
                records = _jsonl(path) if kind == "jsonl" else _parquet(path)
                for where, record in records:
                    yield document_of(record, where, reading.chat)
        except OSError as error:
            raise BadData(f"{path} cannot be read ({error.strerror or error})") from None


def _from_text(path: Path, reading: Reading) -> Iterator[Document]:
    raw = path.read_bytes()
    text = _decode(raw, f"{path}, of {len(raw)} bytes,")
    if not text.strip():
        raise BadData(f"{path} holds only white space ({len(raw)} bytes); it must hold at least one document")
    pattern = reading.pattern
    if pattern is None:
        yield Document((Segment(text),))
        return
    start = 0
    for match in pattern.finditer(text):
        yield Document((Segment(text[start : match.start()]),))
        start = match.end()
    yield Document((Segment(text[start:]),))


def _decode(raw: bytes, where: str) -> str:
    """UTF-8 text; a file that starts with a byte order mark loses it."""
    if raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise BadData(f"{where} starts with the byte order mark of UTF-16; convert it to UTF-8")
    nul = raw.find(b"\0")
    if nul >= 0:
        raise BadData(f"{where} is binary (a NUL byte at offset {nul}); data must be UTF-8 text")
    try:
        return raw.decode("utf-8-sig" if raw.startswith(b"\xef\xbb\xbf") else "utf-8")
    except UnicodeDecodeError as error:
        byte = raw[error.start]
        raise BadData(f"{where} is not UTF-8 text (byte 0x{byte:02x} at offset {error.start}); convert it") from None


def _jsonl(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(where, object) of each line that is not blank."""
    some = False
    with path.open("rb") as lines:
        for number, raw in enumerate(lines, 1):
            where = f"{path} line {number}"
            line = _decode(raw, where)
            if not line.strip():
                continue
            some = True
            try:
                record = json.loads(line)
            except (json.JSONDecodeError, RecursionError) as error:
                fault = (
                    f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else "too deep"
                )
                raise BadData(f"{where} is not JSON ({fault}); a line must be one object with {EXPECTED}") from None
            if not isinstance(record, dict):
                raise BadData(f"{where} is a {type(record).__name__}; a line must be one object with {EXPECTED}")
            yield where, record
    if not some:
        raise BadData(f"{path} holds only blank lines ({path.stat().st_size} bytes); it must hold at least one object")


def _parquet(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(where, row) of each row, read one row group after another."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise NotInstalled(
            f"{path} needs the package pyarrow to be read; install it with: pip install pyarrow"
        ) from None
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            wanted = [*_shape(names, f"{path}, by its columns,"), *(n for n in ("ignore",) if n in names)]
            for batch in file.iter_batches(batch_size=1024, columns=wanted):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path} row {number}", {k: v for k, v in row.items() if k != "ignore" or v is not None}
    except pyarrow.ArrowException as error:
        size = path.stat().st_size
        fault = str(error).splitlines()[0].rstrip(".")
        raise BadData(f"{path}, of {size} bytes, is not a whole Parquet file ({fault}); write it again") from None
    if not number:
        raise BadData(f"{path} holds no rows; it must hold at least one document")


def _shape(names: Iterable[str], where: str) -> tuple[str, ...]:
    """Which of the three shapes a record has."""
    have = set(names)
    found = [shape for shape in SHAPES if have.issuperset(shape)]
    if len(found) == 1:
        return found[0]
    if found:
        both = " and ".join(f'"{shape[0]}"' for shape in found)
        raise BadData(f"{where} has {both}, of which only one can be learned; keep one of {EXPECTED}")
    shown = ", ".join(f'"{name}"' for name in sorted(map(str, have))[:8]) or "nothing"
    raise BadData(f"{where} has {shown}; expected {EXPECTED}")


def document_of(record: Mapping[str, Any], where: str, chat: Chat) -> Document:
    """One record as a document.

    ``{"text", "ignore"?}``: ``ignore`` lists character ranges ``[start, end)`` that do not count.
    ``{"prompt", "completion"}``: the prompt does not count.  ``{"messages": [{"role", "content"}]}``: only the
    assistant's turns count.  Segments are tokenised one by one, so that no token straddles their border.
    """
    shape = _shape(record, where)
    if shape == ("text",):
        return _with_ignored(_text(record, "text", where), record.get("ignore", []), where)
    if shape == ("messages",):
        return _conversation(record["messages"], where, chat)
    return Document((Segment(_text(record, "prompt", where), False), Segment(_text(record, "completion", where))))


def _text(record: Mapping[str, Any], key: str, where: str) -> str:
    value = record[key]
    if not isinstance(value, str):
        raise BadData(f'{where} has a "{key}" of type {type(value).__name__}; it must be a string')
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadData(f'{where} has half a surrogate pair in "{key}" at character {error.start}; remove it') from None
    return value


def _with_ignored(text: str, ranges: Any, where: str) -> Document:
    segments: list[Segment] = []
    at = 0
    for span in ranges if isinstance(ranges, list) else [ranges]:
        whole = isinstance(span, list) and len(span) == 2 and all(type(x) is int for x in span)
        if not whole or not at <= span[0] <= span[1] <= len(text):
            raise BadData(
                f'{where} has {json.dumps(span)} in "ignore"; expected character ranges [start, end] in order, '
                f"not overlapping, within the {len(text)} characters of its text"
            )
        segments += [Segment(text[at : span[0]]), Segment(text[span[0] : span[1]], False)]
        at = span[1]
    segments.append(Segment(text[at:]))
    shown = tuple(s for s in segments if s.text)
    return Document(shown, end_counts=not shown or shown[-1].counts)


def _conversation(turns: Any, where: str, chat: Chat) -> Document:
    if not isinstance(turns, list) or not turns:
        raise BadData(f'{where} has no turns in "messages"; expected a list of objects with "role" and "content"')
    segments: list[Segment] = []
    for number, turn in enumerate(turns, 1):
        here = f"{where}, message {number},"
        if not isinstance(turn, dict) or "role" not in turn or "content" not in turn:
            raise BadData(f'{here} is not an object with "role" and "content"')
        role = turn["role"]
        if role not in ROLES:
            raise BadData(f"{here} has the role {role!r}; expected one of {', '.join(ROLES)}")
        between = chat.after if segments else ""
        segments.append(Segment(between + chat.before.replace("{role}", role), False))
        segments.append(Segment(_text(turn, "content", here) + chat.end, role == "assistant"))
    if not any(s.counts for s in segments):
        raise BadData(f"{where} has no turn of the assistant among {len(turns)}; nothing in it would be learned")
    return Document(tuple(segments), end_counts=segments[-1].counts)
