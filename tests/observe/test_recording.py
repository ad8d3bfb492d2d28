"""A recording of several ranks: merged rows, steady steps, disagreements, messages. Plain data, no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from partita.facts.errors import BadInput
from partita.facts.mesh import EVERY
from partita.observe.calls import Call, Tail
from partita.observe.recording import RankRecord, Recording


def call(step: int, verb: str = "all_reduce", size: int = 8, ranks: tuple[int, ...] = (0, 1), **values: Any) -> Call:
    axis = ("world",) if len(ranks) == 2 else ("{" + ",".join(map(str, ranks)) + "}",)
    plain: dict[str, Any] = {
        "step": step, "phase": "forward", "verb": verb, "axis": axis, "dtype": "float32", "bytes": size,
        "kind": "data", "reason": "", "ranks": ranks, "group": "", "peer": None, "op": "", "caller": "",
        "begin_s": 0.0, "end_s": None, "exposed_s": None,
    }  # fmt: skip
    return Call(**{**plain, **values})


def recording(*calls: list[Call], steps: int = 5) -> Recording:
    records = [
        RankRecord(i, len(calls), "gloo", "2.13", steps, tuple(mine), (Tail(2, 0.5, 0.75),))
        for i, mine in enumerate(calls)
    ]
    return Recording(("python", "x.py"), 0, tuple(records))


def test_ranks_that_did_the_same_share_a_row() -> None:
    both = [call(s) for s in range(5)]
    found = recording([*both, call(2, "broadcast")], both)
    assert [(r.verb, r.count, str(r.ranks)) for r in found.steady] == [
        ("all_reduce", 1, "all"),
        ("broadcast", 1, "world=0"),
    ]
    assert found.steady[0].ranks == EVERY
    assert found.ledger().link_bytes() == 8 + 4


def test_init_is_apart_and_the_third_step_is_the_first_steady_one() -> None:
    start = call(0, phase="init")
    calls = [start, call(0), call(1, size=4), call(2, size=16), call(3, size=16), call(4, size=16)]
    found = recording(calls, calls)
    assert [(r.phase, r.bytes) for r in found.init] == [("init", 8)]
    assert [r.bytes for r in found.steady] == [16]
    assert found.varying == ()
    assert recording(calls, calls, steps=2).steady == ()


def test_steady_steps_that_differ_are_named() -> None:
    calls = [call(s) for s in range(5)] + [call(3, size=4)]
    found = recording(calls, calls)
    assert found.varying[0] == (
        "rank 0: all_reduce of 4 bytes of float32 over world in forward ran 0, 1, 0 times in steps 2 on"
    )
    assert len(found.varying) == 2


def test_times_are_means_of_what_is_known() -> None:
    timed = {"begin_s": 1.0, "end_s": 2.0, "exposed_s": 0.25}
    calls = [call(0, exposed_s=9.0), call(2, **timed), call(3, **{**timed, "exposed_s": 0.75}), call(4), call(5)]
    found = recording(calls, [])
    (times,) = found.times.values()
    assert (times.calls, times.known, times.exposed_s, times.hidden_s) == (3, 2, 0.5, 0.5)
    assert found.tail_s == 0.25
    assert recording([], [], steps=2).tail_s is None


def test_the_order_of_every_group_is_compared() -> None:
    a, b = call(0), call(0, "broadcast")
    assert recording([a, b], [a, b]).disagreements == ()
    assert recording([a, b], [b, a]).disagreements == (
        "in the group of ranks [0, 1] call 0 is all_reduce of float32 (8 bytes) on rank 0"
        " and broadcast of float32 (8 bytes) on rank 1",
    )
    assert recording([a, b], [a]).disagreements == (
        "in the group of ranks [0, 1] rank 0 issued 2 collectives and rank 1 1",
    )
    assert recording([a], [call(0, size=4)]).disagreements
    # The parts of an all-to-all may differ.
    assert recording([call(0, "all_to_all")], [call(0, "all_to_all", size=4)]).disagreements == ()


def test_what_is_sent_must_be_received() -> None:
    send, receive = call(0, "send", peer=1), call(0, "recv", peer=0)
    assert recording([send], [receive]).disagreements == ()
    assert recording([send, send], [receive]).disagreements == (
        "1 messages of 8 bytes from rank 0 to rank 1 were sent and not received",
    )
    assert recording([send], [call(0, "recv", peer=None)]).disagreements == ()


def test_json_round_trip(tmp_path: Path) -> None:
    found = recording([call(0), call(2, "send", peer=1)], [call(0), call(2, "recv", peer=0)])
    path = tmp_path / "recording.json"
    found.save(path)
    assert Recording.load(path) == found
    assert [p.name for p in tmp_path.iterdir()] == ["recording.json"]
    path.write_text("{}")
    with pytest.raises(BadInput, match="is no recording that can be read"):
        Recording.load(path)
