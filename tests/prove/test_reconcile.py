"""The join: nothing is dropped on any side, and a witness that was not asked is no zero."""

from __future__ import annotations

from dataclasses import replace

import pytest

from partita.facts.layout import Layout
from partita.facts.ledger import Memory, Traffic
from partita.facts.mesh import EVERY
from partita.facts.work import Training
from partita.plan.account import Account, account
from partita.prove.reconcile import Counts, PeakLine, reconcile
from partita.prove.witness import Witness
from tests.tiny import tiny_model


@pytest.fixture
def planned() -> Account:
    return account(tiny_model(), Layout.parse("full_shard", 2), Training(4, 8))


def faithful(planned: Account, name: str, rank: int = 0) -> Witness:
    """A witness that says what the ledger says."""
    here = planned.ledger.at(planned.case.mesh.coordinate(rank))
    steady = tuple(t for t in here.traffic if t.phase in ("forward", "backward", "step"))
    stands = tuple(m for m in here.memory if m.phase == "persistent" or m.object == m.unit == "gradients" or
                   (m.phase == "step" and "gradients" in (m.object, m.unit)))  # fmt: skip
    return Witness(name, rank, 2, (), (steady, steady, steady), stands, {"forward": 10, "backward": 10, "step": 10})


def test_faithful_witnesses_agree(planned: Account) -> None:
    recorded = [faithful(planned, "recorded", r) for r in (0, 1)]
    table = reconcile(planned.case, planned.ledger, [faithful(planned, "dry")], recorded)
    assert table.clashes == ()
    assert {t.ranks for t in table.traffic} == {(0, 1)}
    assert {t.counts.dry for t in table.traffic} == {t.counts.recorded for t in table.traffic}


def test_a_witness_that_was_not_asked_is_empty_and_has_no_vote(planned: Account) -> None:
    table = reconcile(planned.case, planned.ledger, [faithful(planned, "dry")], [])
    assert table.clashes == ()
    assert {t.counts.recorded for t in table.traffic} == {None} == {m.counts.recorded for m in table.memory}


def test_an_unknown_call_a_missing_call_and_another_count_are_lines(planned: Account) -> None:
    good = faithful(planned, "recorded")
    strange = Traffic("-", "all_to_all", ("dp",), EVERY, "float32", 64, 2, "backward", None, "recorded")
    more = replace(good.steady[0], count=good.steady[0].count + 1)
    bad = replace(good, steps=(*good.steps[:2], (strange, more, *good.steady[2:])))
    clashes = reconcile(planned.case, planned.ledger, [], [bad]).clashes
    said = {(c.counts.predicted, c.counts.recorded) for c in clashes}
    assert (0, 2) in said and (more.count - 1, more.count) in said and (good.steady[1].count, 0) in said


def test_one_byte_is_a_clash(planned: Account) -> None:
    good = faithful(planned, "recorded")
    memory = tuple(replace(m, bytes=m.bytes + (m.object == "parameters")) for m in good.memory)
    clashes = reconcile(planned.case, planned.ledger, [], [replace(good, memory=memory)]).clashes
    assert [c.counts.recorded - c.counts.predicted for c in clashes if c.counts.recorded] == [1]


def test_an_object_that_nobody_predicted_is_a_clash(planned: Account) -> None:
    good = faithful(planned, "recorded")
    extra = Memory("-", "master", "persistent", "device", EVERY, "float32", 4, "recorded")
    clashes = reconcile(planned.case, planned.ledger, [], [replace(good, memory=(*good.memory, extra))]).clashes
    assert [(getattr(c, "object", ""), c.counts) for c in clashes] == [("master", Counts(0, None, 4))]


def test_ranks_that_differ_have_lines_of_their_own(planned: Account) -> None:
    first, second = faithful(planned, "recorded"), faithful(planned, "recorded", 1)
    more = replace(second.steady[0], count=second.steady[0].count + 5)
    second = replace(second, steps=(*second.steps[:2], (more, *second.steady[1:])))
    table = reconcile(planned.case, planned.ledger, [faithful(planned, "dry")], [first, second])
    assert [c.ranks for c in table.clashes] == [(1,)]
    same = [t.ranks for t in table.traffic if (t.phase, t.verb, t.bytes) == (more.phase, more.verb, more.bytes)]
    assert same == [(0,), (1,)]


def test_early_rows_are_what_the_first_steps_send_beyond_a_steady_one(planned: Account) -> None:
    good = faithful(planned, "recorded")
    whole = Traffic("-", "all_reduce", ("dp",), EVERY, "float32", 4000, 1, "backward", None, "recorded")
    witness = replace(good, steps=((whole,), (*good.steady, replace(whole, bytes=8)), good.steady))
    assert {(t.phase, t.bytes, t.count, t.kind) for t in witness.early} == {
        ("early", 4000, 1, "control"),
        ("early", 8, 1, "control"),
    }


def test_a_peak_is_measured_against_the_run_and_else_the_dry_run() -> None:
    assert PeakLine("step", Counts(105, 90, 100), "").off == pytest.approx(0.05)
    assert PeakLine("step", Counts(105, 90, None), "").within is False
    assert PeakLine("step", Counts(105, None, None), "").off is None
