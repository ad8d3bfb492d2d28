"""The words of a layout: reading, printing, defaults and every refusal."""

from __future__ import annotations

import random
from dataclasses import fields

import pytest

from partita.facts.errors import BadInput
from partita.facts.layout import CHOICES, STATES, BadLayout, Layout
from tests import seed


def random_layout(chance: random.Random) -> Layout:
    tp = chance.choice((1, 2, 4))
    return Layout(
        dp=chance.choice((1, 2, 3, 126)),
        tp=tp,
        sp=tp > 1 and chance.random() < 0.5,
        cp=chance.choice((1, 2)),
        cp_method=chance.choice(CHOICES["cp_method"]),
        pp=chance.choice((1, 4)),
        schedule=chance.choice(("1f1b", "gpipe", "zb")),
        stages=chance.choice((1, 2)),
        ep=chance.choice((1, 8)),
        etp=chance.choice((0, 1, 2)),
        state=chance.choice(STATES),
        shard=chance.choice((0, 1, 2, 64)),
        reshard=chance.choice(("default", "all", "2")),
        wrap=chance.choice((1, 2)),
        prefetch=chance.choice((1, 3)),
        zero_sync=chance.choice(CHOICES["zero_sync"]),
        bucket_mb=chance.choice((25.0, 1.0, 0.5, 1e6, chance.uniform(0.001, 400))),
        mb=chance.choice((1, 2, 16)),
        recompute=chance.choice(("none", "full")),
        offload=chance.choice(CHOICES["offload"]),
        delay_after=chance.choice((0, 40)),
    )


@pytest.mark.parametrize("case", [0, 1, seed.value()])
def test_printing_is_canonical_and_reads_back_in_any_order(case: int) -> None:
    chance = random.Random(case)
    for _ in range(200):
        layout = random_layout(chance)
        assert Layout.parse(str(layout)) == layout
        words = str(layout).split()
        chance.shuffle(words)
        assert Layout.parse("  ".join(words)) == layout
        assert str(Layout.parse(" ".join(words))) == str(layout)
        assert Layout.parse(str(layout), layout.world) == layout


def test_every_field_is_a_word() -> None:
    chance = random.Random(1)
    seen = {w.partition("=")[0] for _ in range(300) for w in str(random_layout(chance)).split()}
    assert {f.name for f in fields(Layout)} - {"state"} <= seen


def test_defaults() -> None:
    layout = Layout.parse("")
    assert layout == Layout() and str(layout) == "dp=1 ddp" and layout.one_device
    assert (layout.state, layout.mb, layout.zero_sync, layout.bucket_mb) == ("ddp", 1, "reduce_scatter", 25.0)
    assert (layout.schedule, layout.recompute, layout.cp_method) == ("1f1b", "none", "ring")


def test_a_bare_state_means_state() -> None:
    for state in STATES:
        assert Layout.parse(state) == Layout.parse(f"state={state}") == Layout(state=state)
    assert str(Layout.parse("state=full_shard dp=4")) == "dp=4 full_shard"


def test_dp_is_what_is_left_of_the_devices() -> None:
    assert Layout.parse("tp=2 pp=4 cp=2", 64).dp == 4
    assert Layout.parse("full_shard", 8) == Layout(dp=8, state="full_shard")
    assert Layout.parse("dp=4 tp=2", 8).world == 8


def test_expert_parallelism_is_no_factor_of_the_world() -> None:
    assert Layout.parse("dp=4 tp=2 pp=3 cp=5 ep=4 etp=1").world == 4 * 2 * 3 * 5


def test_sequence_parallelism_is_on_by_default_where_there_is_tp() -> None:
    assert Layout.parse("tp=2").sp and str(Layout.parse("tp=2")) == "dp=1 tp=2 sp=on ddp"
    assert not Layout.parse("tp=2 sp=off").sp
    assert Layout.parse("tp=2 sp=on").world == 2
    assert not Layout.parse("dp=2").sp and not Layout.parse("dp=2 sp=on").sp
    assert "sp" not in str(Layout.parse("dp=2"))


REFUSED = [
    # text, devices, and what the sentence must say beside the layout itself
    ("dp=2 tp=0", None, ["tp=0", "at least 1"]),
    ("tp=-2", None, ["tp=-2", "at least 1"]),
    ("mb=0", None, ["mb=0", "at least 1"]),
    ("shard=-1 full_shard", None, ["shard=-1", "at least 0"]),
    ("etp=-1", None, ["etp=-1", "at least 0"]),
    ("bucket_mb=0", None, ["bucket_mb=0", "at least 0.000001"]),
    ("bucket_mb=-3", None, ["bucket_mb=-3", "at least 0.000001"]),
    ("bucket_mb=nan", None, ["bucket_mb=nan", "at least 0.000001"]),
    ("bucket_mb=1e-9", None, ["bucket_mb=1e-9", "at least 0.000001"]),
    ("full_shard=2", None, ["full_shard", "state=full_shard"]),
    ("bucket_mb=inf", None, ["bucket_mb=inf", "at least 0.000001"]),
    ("bucket_mb=big", None, ["bucket_mb=big", "number", "bucket_mb=25"]),
    ("tp=nan", None, ["tp=nan", "whole number", "tp=2"]),
    ("tp=2.0", None, ["tp=2.0", "whole number", "tp=2"]),
    ("dp=x", None, ["dp=x", "whole number"]),
    ("dp=1_0", None, ["dp=1_0", "whole number"]),
    ("dp=\u0663", None, ["dp=\u0663", "whole number"]),
    ("dp=2 tp=2 dp=4", None, ["dp twice", "2", "4", "keep one"]),
    ("ddp full_shard", None, ["state twice", "ddp", "full_shard", "keep one"]),
    ("state=ddp full_shard", None, ["state twice", "keep one"]),
    ("tp", None, ["tp", "tp=VALUE"]),
    ("tp=", None, ["tp", "tp=VALUE"]),
    ("state=", None, ["state", "state=VALUE"]),
    ("full_shard=", None, ["state=full_shard"]),
    ("=2", None, ["''", "words are dp"]),
    ("full_shart", None, ["full_shart", "full_shard"]),
    ("datapar=2", None, ["datapar", "tp", "full_shard"]),
    ("zzzz", None, ["zzzz", *STATES]),
    ("sp=yes tp=2", None, ["sp=yes", "sp=on", "sp=off"]),
    ("state=zero3", None, ["state=zero3", *STATES]),
    ("cp=2 cp_method=rng", None, ["cp_method=rng", "ring", "ulysses", "all_gather"]),
    ("zero1 zero_sync=gather", None, ["zero_sync=gather", "reduce_scatter", "all_reduce"]),
    ("offload=all", None, ["offload=all", "none", "optimizer_delayed"]),
    ("tp=4", 6, ["multiple of 4", "there are 6", "works is 4"]),
    ("tp=2 pp=4", 4, ["8", "4"]),
    ("dp=2 tp=2", 8, ["4 ranks", "8", "dp=4"]),
    ("dp=16", 8, ["16", "8", "dp=8"]),
    ("dp=3 tp=4", 6, ["12", "6", "12 ranks fit"]),
    ("ddp", 0, ["0", "at least 1"]),
    ("ddp", -4, ["-4", "at least 1"]),
]


@pytest.mark.parametrize(("text", "devices", "said"), REFUSED, ids=[f"{t}@{d}" for t, d, _ in REFUSED])
def test_refusals_are_one_sentence_that_quotes_the_layout(text: str, devices: int | None, said: list[str]) -> None:
    with pytest.raises(BadLayout) as caught:
        Layout.parse(text, devices)
    message = str(caught.value)
    assert isinstance(caught.value, BadInput)
    assert repr(text) in message and "\n" not in message
    for part in said:
        assert part in message.replace(repr(text), "", 1), message


def test_what_a_refusal_suggests_works() -> None:
    assert Layout.parse("tp=2 dp=4", 8).world == 8
    with pytest.raises(BadLayout, match="nearest number of ranks that works is 8"):
        Layout.parse("tp=4", 9)
    assert Layout.parse("tp=4", 8).dp == 2
