"""Which rooms a layout has, in which order, and what no room would do."""

from __future__ import annotations

import pytest

from partita.facts.errors import Refused
from partita.facts.layout import Layout
from partita.facts.work import Training
from partita.plan.account import account
from partita.strategies.order import NAMES, names, predictors, unclaimed
from tests.tiny import tiny_model


@pytest.mark.parametrize(
    ("layout", "rooms"),
    [
        ("dp=1", ["step"]),
        ("dp=1 full_shard", ["step"]),
        ("dp=4", ["ddp", "step"]),
        ("dp=4 full_shard", ["fsdp", "step"]),
        ("dp=4 shard_grad_op shard=2", ["fsdp", "step"]),
    ],
)
def test_rooms_of_a_layout(layout: str, rooms: list[str]) -> None:
    assert names(Layout.parse(layout)) == rooms


def test_every_room_comes_after_those_that_it_names() -> None:
    for layout in (Layout(dp=d, state=s) for d in (1, 4) for s in ("ddp", "full_shard", "shard_grad_op")):
        found = predictors(layout)
        for i, (_, room) in enumerate(found):
            assert not set(room.AFTER) & {n for n, _ in found[i:]}


def test_rooms_name_each_other_rightly() -> None:
    for layout in (Layout(dp=4), Layout(dp=4, state="full_shard")):
        for _, room in predictors(layout):
            assert set(room.AFTER) <= set(NAMES)


@pytest.mark.parametrize(
    "layout",
    ["dp=4", "dp=4 mb=2", "dp=4 bucket_mb=10", "dp=4 full_shard shard=2", "dp=1 full_shard", "dp=4 shard_grad_op"],
)
def test_words_that_a_room_answers_for(layout: str) -> None:
    assert list(unclaimed(Layout.parse(layout))) == []


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ("dp=4 full_shard bucket_mb=10", ["bucket_mb=10", "belongs to", "ddp", "leave it out"]),
        ("dp=4 shard=2", ["shard=2", "belongs to", "fsdp", "leave it out"]),
        ("dp=4 schedule=wild", ["schedule=wild"]),
    ],
)
def test_a_word_that_no_room_would_do_is_a_sentence(layout: str, said: list[str]) -> None:
    (sentence,) = unclaimed(Layout.parse(layout))
    assert f"'{Layout.parse(layout)}'" in sentence and "\n" not in sentence
    for part in said:
        assert part in sentence
    with pytest.raises(Refused) as caught:
        account(tiny_model(), Layout.parse(layout), Training(4, 8))
    assert sentence in str(caught.value)


def test_a_state_without_a_room_is_refused_and_not_priced_as_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no room is there for a state, nothing is assumed in its place."""
    from partita.strategies import order

    monkeypatch.setattr(order, "NAMES", ("ddp", "step"))
    (sentence,) = unclaimed(Layout.parse("dp=4 full_shard"))
    assert "state=full_shard" in sentence and "ddp" in sentence and "leave it out" not in sentence


def test_every_reason_is_given_at_once() -> None:
    with pytest.raises(Refused) as caught:
        account(tiny_model(), Layout.parse("dp=6 full_shard shard=4 bucket_mb=10"), Training(7, 8))
    message = str(caught.value)
    assert all(part in message for part in ("bucket_mb=10", "shard=4", "global batch of 7"))
