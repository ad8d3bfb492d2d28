"""From what the user typed to a ``Model``: a folder, a ``config.json``, a hub id, a name, or a count.

Nothing here touches the network unless ``download`` is set, and then only for a hub id or a catalog name
whose weights are asked for.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from partita.facts.errors import NotInstalled
from partita.facts.families import model_from_config
from partita.facts.known import entry, near
from partita.facts.model import Model, UnknownModel, counted

_COUNT = re.compile(r"(\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d[\d_]*(?:\.\d+)?)([kmbt]?)", re.IGNORECASE)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SCALE = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_WEIGHTS = (
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer*",
    "special_tokens_map.json",
    "vocab*",
    "merges.txt",
)


@dataclass(frozen=True)
class Found:
    """A model, and how it was found.

    ``folder`` holds its configuration, and its weights where it has them (None: no files, shapes only).
    ``source`` is one of count, folder, catalog, cache, hub; ``where`` the path or URL of the configuration.
    """

    model: Model
    folder: Path | None
    source: str
    where: str = ""


def find_model(text: str, *, download: bool = False, weights: bool = False) -> Found:
    """The model that ``text`` names.

    Tried in this order: a path, a parameter count, the shipped catalog, the local Hugging Face cache, and, only
    where ``download`` is set, the hub.

    Args:
        text: a folder, a ``config.json``, a hub id, a name of the catalog in any case, or a count such as
            ``7.5B`` or ``236B:21B`` (total and active).
        download: fetch from the hub what is not here.
        weights: the files of the weights are needed, not the configuration alone; with ``download`` they are
            fetched, without it ``Found.folder`` stays None where they are not here.

    Raises:
        UnknownModel: nothing of that name, or it cannot be described; one sentence with what would work.
        NotInstalled: a download is asked for and ``huggingface_hub`` is not installed.
    """
    text = text.strip()
    if not text:
        raise UnknownModel("No model is named; a folder, a hub id, a name such as Llama-3.1-8B or 7.5B works.")
    found = _at_path(text) or _bare(text) or _in_catalog(text, download and weights)
    if found:
        return found
    if _HUB_ID.fullmatch(text):
        return _in_cache(text, weights) or _fetched(text, download, weights)
    hint = near(text)
    meant = f"the nearest are {', '.join(hint)}" if hint else "nothing known resembles it"
    raise UnknownModel(
        f"{text!r} is not a known model ({meant}); a folder, a config.json, a hub id (organisation/name) and a "
        "parameter count such as 7.5B work too."
    )


def parse_count(text: str) -> tuple[int, int] | None:
    """``7.5B`` or ``236B:21B`` as (total, active), active 0 where it is not given; None if it is no count."""
    parts = [_COUNT.fullmatch(part) for part in text.split(":")]
    if len(parts) > 2 or any(p is None for p in parts):
        return None
    counts = [_number(text, *p.groups()) for p in parts if p]
    if len(counts) == 2 and not counts[1]:
        raise UnknownModel(f"{text}: 0 active parameters; active parameters are 1 to the total.")
    return counts[0], counts[1] if len(counts) == 2 else 0


def _number(text: str, digits: str, unit: str) -> int:
    from decimal import Decimal

    value = Decimal(digits.replace("_", "").replace(",", "")) * _SCALE[unit.lower()]
    if value != int(value):
        raise UnknownModel(f"{text}: {value} is not a whole number of parameters; 7.5B or 7500000000 works.")
    return int(value)


def _bare(text: str) -> Found | None:
    counts = parse_count(text)
    return Found(counted(text, *counts), None, "count") if counts else None


def _at_path(text: str) -> Found | None:
    """A folder or a file.  A plain word is a path only where it leads to a configuration."""
    path = Path(text).expanduser()
    explicit = text.startswith((".", "/", "~")) or text.endswith((".json", ".gguf", os.sep))
    if path.suffix == ".gguf":
        raise UnknownModel(f"{text} is a GGUF file; the folder that converting it writes (config.json, weights) works.")
    if path.is_file() and explicit:
        return Found(_described(path, path.resolve().parent.name), path.parent, "folder", str(path))
    config = path / "config.json"
    if config.is_file():
        return Found(_described(config, path.resolve().name), path, "folder", str(config))
    if explicit:
        why = "has no config.json" if path.is_dir() else "does not exist"
        raise UnknownModel(f"{text} {why}; a folder with a config.json, or the config.json itself, works.")
    return None


def _described(path: Path, name: str) -> Model:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnknownModel(f"{path} cannot be read as JSON ({error}); a Hugging Face config.json works.") from error
    return model_from_config(config, name)


def _in_catalog(text: str, fetch_weights: bool) -> Found | None:
    known = entry(text)
    if known is None:
        return None
    ids = [text] if _HUB_ID.fullmatch(text) else list(known.hub)
    folders = (_snapshot(i) for i in ids)
    folder = next((f for f in folders if f and _has_weights(f)), None)
    if folder is None and fetch_weights:
        if not ids:
            raise UnknownModel(f"{known.name} has no published weights to download; it can be planned, not loaded.")
        folder = _download(ids[0], weights=True)
    return Found(known.model(), folder, "catalog", known.source)


def _in_cache(hub_id: str, weights: bool) -> Found | None:
    folder = _snapshot(hub_id)
    if folder is None or (weights and not _has_weights(folder)):
        return None
    config = folder / "config.json"
    return Found(_described(config, hub_id), folder, "cache", str(config))


def _fetched(hub_id: str, download: bool, weights: bool) -> Found:
    if not download:
        hint = near(hub_id)
        meant = f" (nearest: {', '.join(hint)})" if hint else ""
        raise UnknownModel(
            f"{hub_id} is neither in the catalog{meant} nor in the Hugging Face cache at {_cached(hub_id)}; "
            "--download fetches it, or name a folder that holds it."
        )
    folder = _download(hub_id, weights)
    config = folder / "config.json"
    if not config.is_file():
        raise UnknownModel(f"{hub_id} has no config.json on the hub; another hub id or a folder with one works.")
    return Found(_described(config, hub_id), folder, "hub", str(config))


def cache_folder() -> Path:
    """Where Hugging Face keeps its downloads: HF_HUB_CACHE, HF_HOME/hub, or the user's cache folder."""
    env = os.environ
    direct = env.get("HF_HUB_CACHE") or env.get("HUGGINGFACE_HUB_CACHE")
    if direct:
        return Path(direct).expanduser()
    home = env.get("HF_HOME") or os.path.join(env.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(home).expanduser() / "hub"


def _cached(hub_id: str) -> Path:
    return cache_folder() / f"models--{hub_id.replace('/', '--')}"


def _snapshot(hub_id: str) -> Path | None:
    """The cached revision that ``main`` points to, else the newest one; None without a ``config.json``."""
    root = _cached(hub_id)
    main = root / "refs" / "main"
    snapshots = [root / "snapshots" / main.read_text(encoding="utf-8").strip()] if main.is_file() else []
    if (root / "snapshots").is_dir():
        snapshots += sorted((root / "snapshots").iterdir(), key=lambda p: p.stat().st_mtime, reverse=True)
    return next((s for s in snapshots if (s / "config.json").is_file()), None)


def _has_weights(folder: Path) -> bool:
    return next(folder.glob("*.safetensors"), None) is not None


def _offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}


def _download(hub_id: str, weights: bool) -> Path:
    """Fetches the configuration, and the weights and tokenizer where asked, into the Hugging Face cache."""
    if _offline():
        raise UnknownModel(
            f"{hub_id} cannot be downloaded because HF_HUB_OFFLINE is set; unset it, or place the model in "
            f"{_cached(hub_id)}, or name a folder that holds it."
        )
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise NotInstalled(f"Downloading {hub_id} needs huggingface_hub: pip install huggingface_hub.") from error
    patterns = ["config.json", *(_WEIGHTS if weights else ())]
    try:
        return Path(snapshot_download(hub_id, allow_patterns=patterns, cache_dir=cache_folder()))
    except Exception as error:  # the hub, its HTTP client and the disk raise unrelated kinds; all mean "not fetched"
        kind = type(error).__name__
        why = {
            "GatedRepoError": "its owner must grant you access (hf auth login with an account that has it)",
            "RepositoryNotFoundError": "the hub has no such model, or it is private (hf auth login)",
        }.get(kind, f"the hub could not be reached or refused ({kind})")
        raise UnknownModel(
            f"{hub_id} was not downloaded: {why}; a folder that holds it, or {_cached(hub_id)} filled elsewhere, works."
        ) from error
