"""Reading a ``config.json``: each field by name, refused with one sentence where it is missing or wrong."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from partita.facts.model import Rope, UnknownModel

_ABSENT: Any = object()


@dataclass(frozen=True)
class Config:
    """The values of one ``config.json``; ``name`` is what the user calls the model, for the messages.

    Every reader takes several spellings of a field, returns ``default`` where none is present (an explicit
    null counts as absent) and raises ``UnknownModel`` where there is no default or the value is no such thing.
    """

    values: dict[str, Any]
    name: str

    def wrong(self, sentence: str) -> UnknownModel:
        return UnknownModel(f"{self.name}: {sentence}")

    def get(self, *keys: str, default: Any = _ABSENT) -> Any:
        for key in keys:
            if self.values.get(key) is not None:
                return self.values[key]
        if default is _ABSENT:
            raise self.wrong(f"its configuration has no {keys[0]!r}; a config.json of this family must state it.")
        return default

    def count(self, *keys: str, default: Any = _ABSENT) -> int:
        """A whole number of at least 1."""
        value = self.get(*keys, default=default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.wrong(f"{keys[0]} is {value!r}; it must be a whole number of at least 1.")
        return value

    def number(self, *keys: str, default: Any = _ABSENT) -> float:
        """A finite number above 0."""
        value = self.get(*keys, default=default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.wrong(f"{keys[0]} is {value!r}; it must be a finite number above 0.")
        return float(value)

    def flag(self, *keys: str, default: bool) -> bool:
        value = self.get(*keys, default=default)
        if not isinstance(value, bool):
            raise self.wrong(f"{keys[0]} is {value!r}; it must be true or false.")
        return value

    def sub(self, key: str) -> Config:
        """A nested table (an empty one where absent)."""
        value = self.get(key, default={})
        if not isinstance(value, dict):
            raise self.wrong(f"{key} is {value!r}; it must be a table of fields.")
        return replace(self, values=value)

    def must(self, key: str, default: Any, *allowed: Any, why: str) -> None:
        """Refuse a field whose value this package does not describe."""
        value = self.get(key, default=default)
        if value not in allowed:
            works = " or ".join(repr(a) for a in allowed)
            raise self.wrong(f"{key} is {value!r}, {why}; {works} works.")


def rope_of(config: Config, head_dim: int) -> Rope:
    """Rotary positions from ``rope_theta`` and ``rope_scaling``, or from ``rope_parameters`` (transformers 5).

    Defaults are those of ``transformers.modeling_rope_utils``: theta 10,000, YaRN's betas 32 and 1, the original
    length equal to ``max_position_embeddings`` where nothing states it.

    Raises:
        UnknownModel: a scaling that is not described, one of its fields missing, or a partial rotary width.
    """
    scaling = config.sub("rope_scaling") if config.get("rope_scaling", default=None) else config.sub("rope_parameters")
    if any(isinstance(value, dict) for value in scaling.values.values()):
        raise config.wrong("its rope parameters differ between kinds of layers; one set for all layers works.")
    for holder in (config, scaling):
        holder.must("partial_rotary_factor", 1.0, 1.0, why="but only whole heads are rotated here")
    if head_dim % 2:
        raise config.wrong(f"head_dim is {head_dim}; rotary positions turn pairs, so an even head_dim works.")
    theta = scaling.number("rope_theta", default=config.number("rope_theta", default=10000.0))
    kind = scaling.get("rope_type", "type", default="default")
    readers = {
        "default": _plain,
        "linear": _by_factor,
        "dynamic": _by_factor,
        "yarn": _yarn,
        "llama3": _llama3,
        "longrope": _longrope,
    }
    if kind not in readers:
        raise config.wrong(f"rope scaling {kind!r} is not described here; {', '.join(readers)} work.")
    fields = readers[kind](config, scaling, head_dim)
    return Rope(theta=theta, scaling="none" if kind == "default" else kind, **fields)


def _plain(config: Config, scaling: Config, head_dim: int) -> dict[str, Any]:
    return {}


def _trained_positions(config: Config, scaling: Config) -> int:
    """The length before stretching; a field beside the table (Phi-3's way) goes before one inside it."""
    inside = scaling.count("original_max_position_embeddings", default=config.count("max_position_embeddings"))
    return config.count("original_max_position_embeddings", default=inside)


def _by_factor(config: Config, scaling: Config, head_dim: int) -> dict[str, Any]:
    return {"factor": scaling.number("factor"), "original_positions": config.count("max_position_embeddings")}


def _yarn(config: Config, scaling: Config, head_dim: int) -> dict[str, Any]:
    original = _trained_positions(config, scaling)
    optional = {k: scaling.number(k, default=1.0) for k in ("attention_factor", "mscale", "mscale_all_dim")}
    return {
        "factor": scaling.number("factor", default=config.count("max_position_embeddings") / original),
        "original_positions": original,
        "beta_fast": scaling.number("beta_fast", default=32.0),
        "beta_slow": scaling.number("beta_slow", default=1.0),
        "truncate": scaling.flag("truncate", default=True),
        **{k: v if scaling.get(k, default=None) is not None else None for k, v in optional.items()},
    }


def _llama3(config: Config, scaling: Config, head_dim: int) -> dict[str, Any]:
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    if low >= high:
        raise config.wrong(f"low_freq_factor {low} is not below high_freq_factor {high}; 1 and 4 are Llama's own.")
    return {
        "factor": scaling.number("factor"),
        "original_positions": _trained_positions(config, scaling),
        "low_freq_factor": low,
        "high_freq_factor": high,
    }


def _longrope(config: Config, scaling: Config, head_dim: int) -> dict[str, Any]:
    original = _trained_positions(config, scaling)
    attention = (
        scaling.number("attention_factor") if scaling.get("attention_factor", default=None) is not None else None
    )
    factors = {key: scaling.get(key) for key in ("short_factor", "long_factor")}
    for key, value in factors.items():
        if not isinstance(value, list) or len(value) != head_dim // 2:
            size = len(value) if isinstance(value, list) else repr(value)
            raise config.wrong(f"{key} has {size} entries; head_dim {head_dim} needs {head_dim // 2}.")
    return {
        "factor": scaling.number("factor", default=config.count("max_position_embeddings") / original),
        "original_positions": original,
        "attention_factor": attention,
        "short_factor": tuple(float(f) for f in factors["short_factor"]),
        "long_factor": tuple(float(f) for f in factors["long_factor"]),
    }
