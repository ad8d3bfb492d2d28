"""Text to token ids and back."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from partita.facts.errors import BadInput, NotInstalled


class Tokenizer(Protocol):
    """What data preparation and sampling need: ids below ``size``, and ``eos`` at the end of a document."""

    @property
    def size(self) -> int: ...
    @property
    def eos(self) -> int: ...
    @property
    def fingerprint(self) -> str:
        """Tells tokenizers apart that encode differently; prepared tokens are kept under it."""
        ...

    def encode(self, text: str) -> list[int]: ...
    def encode_batch(self, texts: list[str]) -> list[list[int]]: ...
    def decode(self, ids: Iterable[int]) -> str: ...


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, and 256 as end of document.  For tiny models; never chosen silently."""

    size = 257
    eos = 256
    fingerprint = "bytes-256"

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Ids beyond the bytes (``eos``) are left out; broken UTF-8 shows as U+FFFD."""
        return bytes(i for i in ids if 0 <= i < 256).decode(errors="replace")


class FileTokenizer:
    """A ``tokenizer.json``; see ``load_tokenizer``."""

    def __init__(self, inner: Any, eos: int) -> None:
        self._inner, self.eos = inner, eos
        self.size = inner.get_vocab_size(with_added_tokens=True)
        self.fingerprint = hashlib.sha256(f"{eos}\n{inner.to_str()}".encode()).hexdigest()[:32]

    def encode(self, text: str) -> list[int]:
        """Ids of the text alone: nothing is put before or after it."""
        return list(self._inner.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """As ``encode``, of many texts, on all cores."""
        return [list(e.ids) for e in self._inner.encode_batch(texts, add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        """The text with its special tokens shown."""
        return str(self._inner.decode(list(ids), skip_special_tokens=False))


def load_tokenizer(folder: str | os.PathLike[str]) -> FileTokenizer:
    """The tokenizer of a model folder (tokenizer.json; the end token from the configurations beside it).

    Raises:
        BadInput: no tokenizer.json, one that cannot be read, or no end token; NotInstalled: no ``tokenizers``.
    """
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise BadInput(
            f"{folder} has no tokenizer.json; give a folder that has one, or ask for the byte tokenizer by name"
        )
    try:
        import tokenizers
    except ModuleNotFoundError:
        raise NotInstalled("reading tokenizer.json needs the package tokenizers: pip install tokenizers") from None
    try:
        inner = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises a bare Exception
        raise BadInput(f"{path} is not a readable tokenizer.json: {error}") from None
    inner.no_truncation()
    inner.no_padding()
    return FileTokenizer(inner, _eos(Path(folder), inner))


def _eos(folder: Path, inner: Any) -> int:
    """From tokenizer_config.json (a token), else generation_config.json or config.json (an id or several)."""
    token = _fields(folder / "tokenizer_config.json").get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    if isinstance(token, str):
        found = inner.token_to_id(token)
        if found is None:
            raise BadInput(f"{folder}/tokenizer_config.json names the end token {token!r}, which tokenizer.json lacks")
        return int(found)
    for name in ("generation_config.json", "config.json"):
        ids = _fields(folder / name).get("eos_token_id")
        first = ids[0] if isinstance(ids, list) and ids else ids
        if isinstance(first, int):
            return first
    raise BadInput(
        f"{folder} names no end-of-text token; put eos_token in tokenizer_config.json or eos_token_id in config.json"
    )


def _fields(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError):
        raise BadInput(f"{path} is not a JSON object; copy it again") from None
