"""Models and work as JSON, for processes that run a part of a proof."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from partita.facts.layout import Layout
from partita.facts.model import Model, Rope
from partita.facts.precision import Precision
from partita.facts.work import Training


def pack(model: Model, layout: Layout, work: Training) -> dict[str, Any]:
    """Plain dictionaries, lists, numbers and text."""
    return {"model": asdict(model), "layout": str(layout), "work": asdict(work)}


def unpack(data: dict[str, Any]) -> tuple[Model, Layout, Training]:
    """The inverse of ``pack``."""
    rope: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data["model"]["rope"].items()}
    model = Model(**{**data["model"], "rope": Rope(**rope)})
    work = {**data["work"], "precision": Precision(**data["work"]["precision"]), "betas": tuple(data["work"]["betas"])}
    return model, Layout.parse(data["layout"]), Training(**work)
