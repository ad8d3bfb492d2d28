"""Calls and steps: plain data, no torch."""

from __future__ import annotations

import json

import pytest

from partita.facts.mesh import Ranks
from partita.observe.calls import Call, finished_steps, rows_of, split_steps


def call(phase: str = "forward", size: int = 8, **values: object) -> Call:
    plain: dict[str, object] = {
        "step": 0, "phase": phase, "verb": "all_reduce", "axis": ("dp",), "dtype": "float32", "bytes": size,
        "kind": "data", "reason": "", "ranks": (0, 1), "group": "", "peer": None, "op": "allreduce_", "caller": "",
        "begin_s": 1.0, "end_s": 3.0, "exposed_s": 0.5,
    }  # fmt: skip
    return Call(**{**plain, **values})  # type: ignore[arg-type]


def test_rows_count_calls_of_one_key() -> None:
    rows = rows_of([call(), call("backward"), call(), call(size=4), call(kind="control")], Ranks.of("dp", 1))
    assert [(r.phase, r.bytes, r.count, r.kind) for r in rows] == [
        ("forward", 8, 2, "data"),
        ("backward", 8, 1, "data"),
        ("forward", 4, 1, "data"),
        ("forward", 8, 1, "control"),
    ]
    assert all(r.owner == "-" and r.why == "recorded" and str(r.ranks) == "dp=1" for r in rows)


def test_hidden_time_is_what_the_caller_did_not_stand_still_for() -> None:
    assert call().hidden_s == 1.5
    assert call(end_s=None).hidden_s is None
    assert call(exposed_s=None).hidden_s is None


def test_json_round_trip() -> None:
    one = call(peer=3, group="ep", axis=("dp", "cp"))
    assert Call.from_json(json.loads(json.dumps(one.json()))) == one


@pytest.mark.parametrize(
    ("ends", "expected", "finished"),
    [
        ([], [0, 0, 0, 0, 0, 0], 0),
        ([(2, 7), (4, 7)], [0, 0, 1, 1, 2, 2], 2),
        # Two optimizers, each once a step: the step ends with the second.
        ([(1, 7), (2, 8), (4, 7), (5, 8)], [0, 0, 1, 1, 1, 2], 2),
        # The second one steps every other time only.
        ([(1, 7), (2, 7), (3, 8), (5, 7)], [0, 1, 1, 2, 2, 3], 3),
    ],
)
def test_steps_end_before_an_optimizer_steps_again(
    ends: list[tuple[int, int]], expected: list[int], finished: int
) -> None:
    assert split_steps(6, ends) == expected
    assert finished_steps(ends) == finished
