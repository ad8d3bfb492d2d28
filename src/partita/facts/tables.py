"""Plain tables of a ledger's rows: columns and cells as text, for people and for other programs to lay out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from partita.facts.ledger import Gradient, Ledger, Memory, Traffic


@dataclass(frozen=True)
class Table:
    """Columns and rows of text; ``numbers`` are the columns that stand right."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: frozenset[int] = frozenset()

    def __str__(self) -> str:
        widths = [max(map(len, cells)) for cells in zip(self.columns, *self.rows, strict=True)]

        def line(cells: Iterable[str]) -> str:
            return "  ".join(
                c.rjust(w) if i in self.numbers else c.ljust(w)
                for i, (c, w) in enumerate(zip(cells, widths, strict=True))
            ).rstrip()

        return "\n".join(line(cells) for cells in (self.columns, *self.rows))


def memory(rows: Iterable[Memory]) -> Table:
    """Memory rows, in bytes."""
    columns = ("phase", "tier", "object", "unit", "dtype", "bytes", "ranks", "owner", "why")
    cells = ((r.phase, r.tier, r.object, r.unit, r.dtype, f"{r.bytes:,}", str(r.ranks), r.owner, r.why) for r in rows)
    return Table(columns, tuple(cells), frozenset({5}))


def traffic(ledger: Ledger) -> Table:
    """Traffic rows: calls a step, payload bytes of one call, and link bytes that one rank sends in all of them."""
    columns = (
        "phase",
        "kind",
        "verb",
        "axis",
        "unit",
        "dtype",
        "calls",
        "payload",
        "link bytes",
        "ranks",
        "owner",
        "why",
    )

    def cells(r: Traffic) -> tuple[str, ...]:
        numbers = (f"{r.count:,}", f"{r.bytes:,}", f"{r.link_bytes(ledger.mesh):,}")
        axis = " x ".join(r.axis)
        return (r.phase, r.kind, r.verb, axis, r.unit, r.dtype, *numbers, str(r.ranks), r.owner, r.why)

    return Table(columns, tuple(map(cells, ledger.traffic)), frozenset({6, 7, 8}))


def gradients(rows: Iterable[Gradient]) -> Table:
    """How the ranks along an axis relate, for the parameters that match a pattern."""
    columns = ("parameters", "axis", "relation", "reduction", "divisor", "owner")
    cells = ((r.parameters, " x ".join(r.axis), r.relation, r.reduction, r.divisor, r.owner) for r in rows)
    return Table(columns, tuple(cells))
