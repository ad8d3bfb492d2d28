"""Plain tables of rows."""

from partita.facts import tables
from partita.facts.layout import Layout
from partita.facts.precision import PRESETS
from partita.facts.work import Training
from partita.plan.account import account
from tests.tiny import tiny_model

LEDGER = account(tiny_model(), Layout.parse("full_shard", 4), Training(4, 8, PRESETS["fp32"])).ledger


def test_a_table_has_a_line_for_every_row_and_numbers_stand_right() -> None:
    for table, rows in (
        (tables.memory(LEDGER.memory), LEDGER.memory),
        (tables.traffic(LEDGER), LEDGER.traffic),
        (tables.gradients(LEDGER.gradients), LEDGER.gradients),
    ):
        lines = str(table).splitlines()
        assert len(lines) == len(rows) + 1
        for i in table.numbers:
            end = max(len(row[i]) for row in (table.columns, *table.rows))
            assert all(len(row[i]) <= end for row in table.rows)
    text = str(tables.traffic(LEDGER)).splitlines()
    places = {line.find(" dp ") for line in text[1:]}
    assert len(places) == 1


def test_link_bytes_stand_beside_the_payload() -> None:
    table = tables.traffic(LEDGER)
    gather = next(r for r in LEDGER.traffic if r.verb == "all_gather")
    row = table.rows[LEDGER.traffic.index(gather)]
    assert row[7:9] == (f"{gather.bytes:,}", f"{gather.bytes * gather.count * 3 // 4:,}")


def test_an_empty_table_is_its_heads() -> None:
    assert str(tables.gradients(())).split() == ["parameters", "axis", "relation", "reduction", "divisor", "owner"]
