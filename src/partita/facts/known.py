"""The shipped catalog of models: their configuration, where it is published, and their published size."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from partita.facts.families import model_from_config
from partita.facts.model import Model, counted

CATALOG = Path(__file__).parent / "catalog" / "models"


@dataclass(frozen=True)
class Entry:
    """One model of the catalog.

    ``parameters`` is the published count: exact where ``tolerance`` is 0, else rounded to that relative
    tolerance.  ``counts`` says what is counted where that is not every parameter.  ``experts`` marks a model
    that is known by its total and active parameters alone.
    """

    name: str
    source: str
    parameters: int
    hub: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    active: int = 0
    tolerance: float = 0.0
    counts: str = "all"
    experts: bool = False
    note: str = ""
    config: dict[str, Any] = field(default_factory=dict)

    def model(self) -> Model:
        if self.experts:
            return counted(self.name, self.parameters, self.active, "experts")
        return model_from_config(self.config, self.name)

    def names(self) -> set[str]:
        """Everything that names this model, as ``key`` writes it; a hub id also without its organisation."""
        names = {self.name, *self.aliases, *self.hub, *(h.partition("/")[2] for h in self.hub)}
        return {key(n) for n in names}


def key(text: str) -> str:
    """A name without case and separators, so that ``llama3.1-8b`` and ``Llama 3.1 8B`` are one."""
    return re.sub(r"[^a-z0-9.()]", "", text.lower())


def entries(containing: str = "") -> Iterator[Entry]:
    """The catalog in order of its files; only the files in which the key ``containing`` occurs are parsed."""
    for path in sorted(CATALOG.glob("*.toml")):
        text = path.read_text(encoding="utf-8")
        if containing in key(text):
            yield from _parse(text)


def _parse(text: str) -> Iterator[Entry]:
    import tomllib

    table = tomllib.loads(text)
    for row in table["model"]:
        common = table["common"][row.pop("like")] if "like" in row else {}
        hub, aliases = tuple(row.pop("hub", ())), tuple(row.pop("aliases", ()))
        yield Entry(hub=hub, aliases=aliases, config={**common, **row.pop("config", {})}, **row)


def entry(text: str) -> Entry | None:
    """The entry that ``text`` names: its name, an alias, or a hub id with or without the organisation."""
    wanted = key(text)
    return next((e for e in entries(wanted) if wanted in e.names()), None) if wanted else None


def near(text: str, at_most: int = 3) -> list[str]:
    """Names of the catalog that resemble ``text``, most alike first."""
    import difflib

    names = {key(n): e.name for e in entries() for n in (e.name, *e.aliases, *(h.partition("/")[2] for h in e.hub))}
    # Only the last part of a hub id resembles a model's name; organisations are all over the place.
    alike = difflib.get_close_matches(key(text.rpartition("/")[2]), list(names), 3 * at_most, 0.6)
    return list(dict.fromkeys(names[a] for a in alike))[:at_most]
