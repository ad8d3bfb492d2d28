"""Frozen parameters: those whose global names match a pattern (``embed.*``, ``blocks.0.*``, ``blocks.[0-3].*.q.*``).

A run of blocks is cut where what is frozen changes, so that accounting still does not grow with the number of layers.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from partita.facts.model import Model, Span


def spans(model: Model, patterns: Sequence[str]) -> tuple[Span, ...]:
    """The model's spans with ``frozen`` set; alike blocks stay together."""
    if not patterns:
        return model.spans
    match = _matcher(patterns)
    return tuple(part for span in model.spans for part in _cut(span, match))


def refuse(model: Model, patterns: Sequence[str]) -> Iterator[str]:
    """Sentences about patterns that match nothing, and about a model of which nothing is left to train."""
    if not patterns:
        return
    names = (
        [p.name for p in model.parameters] if not model.bare else [p.name for s in model.spans for p in s.parameters]
    )
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            tied = next((p for s in model.spans for p in s.parameters if p.tie), None)
            near = difflib.get_close_matches(pattern, names, 1, 0.3) or names[:1]
            if tied and tied.tie and fnmatch.fnmatchcase(tied.tie, pattern):
                near = [tied.name]
            yield f"--freeze {pattern} matches no parameter of {model.name}; its names are such as {near[0]}"
    if all(any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns) for name in names):
        yield f"--freeze {' '.join(patterns)} leaves none of the {len(names)} parameters to train; freeze fewer"


def is_frozen(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _matcher(patterns: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{fnmatch.translate(p)})" for p in patterns))


def _cut(span: Span, match: re.Pattern[str]) -> Iterator[Span]:
    """A span in parts of which every block has the same parameters frozen."""
    if not span.is_blocks:
        yield _marked(span, tuple(bool(match.match(p.name)) for p in span.parameters))
        return
    names = [p.name.split("*", 1) for p in span.parameters]
    at, before = span.first, None
    for i in range(span.first, span.end):
        here = tuple(bool(match.match(f"{head}{i}{rest}")) for head, rest in names)
        if before is not None and here != before:
            yield _marked(span.cut(at, i), before)
            at = i
        before = here
    if before is not None:
        yield _marked(span.cut(at, span.end), before)


def _marked(span: Span, frozen: tuple[bool, ...]) -> Span:
    marked = (replace(p, frozen=True) if f else p for p, f in zip(span.parameters, frozen, strict=True))
    return replace(span, parameters=tuple(marked))
