"""Bucketing: what a room launches bucket by bucket while backward runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GradientRun:
    """The gradients of ``count`` alike units in the order in which a unit's backward completes them.

    ``names`` are the parameters' own words (``down``, ``attn_norm``, ``embed``), ``sizes`` their bytes.
    """

    unit: str
    count: int
    names: tuple[str, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Bucketing:
    """Buckets in launch order, and the order in which gradients fill them.

    ``payloads``: bytes of each bucket's call, padding included; ``filled``: the gradient bytes in it, which add up to
    those of ``runs``.  ``every_pass``: launched in every micro-batch's backward, not in the last one alone.
    """

    owner: str
    verb: str
    axis: tuple[str, ...]
    dtype: str
    payloads: tuple[int, ...]
    filled: tuple[int, ...]
    runs: tuple[GradientRun, ...]
    every_pass: bool = False


def word_of(parameter: str) -> str:
    """The word of a parameter in its unit: ``blocks.*.attn.q.weight`` is ``q``, ``embed.weight`` is ``embed``."""
    return parameter.rpartition(".")[0].rpartition(".")[2]
