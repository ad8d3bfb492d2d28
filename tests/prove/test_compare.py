"""Differences: the worst tensor, parts added, copies counted once, NaN never passing."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from partita.prove import compare
from partita.prove.compare import Piece, limits, pieces, relative, worst


def box(*ranges: tuple[int, int]) -> compare.Box:
    return tuple((r,) for r in ranges)


def test_a_shifted_tensor_is_measured_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "CHUNK_BYTES", 64)  # several chunks
    torch.manual_seed(3)
    a, b = torch.randn(11, 5, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    save_file({"a": a, "b": b}, tmp_path / "x.safetensors")
    found = pieces([("a", a + 1e-3), ("b", b)], tmp_path / "x.safetensors")
    difference = worst([found], 1e-9)
    assert difference.worst == "a" and not difference.holds
    assert difference.value == pytest.approx(float((a + 1e-3 - a).norm() / a.norm()), rel=1e-12)
    assert found[1].difference == 0.0


def test_shards_add_and_copies_count_once() -> None:
    left, right = Piece("w", box((0, 2)), 9.0, 50.0), Piece("w", box((2, 4)), 16.0, 50.0)
    assert worst([[left], [right]], None).value == pytest.approx(0.5)
    assert worst([[left], [right], [left], [right]], None).value == pytest.approx(0.5)
    off = Piece("w", box((0, 2)), 184.0, 50.0)  # one copy is worse than the other
    assert worst([[left], [right], [off], [right]], None).value == pytest.approx(math.sqrt(2))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_never_holds(bad: float) -> None:
    fine = Piece("v", box((0, 1)), 0.0, 1.0)
    for order in ([fine, Piece("w", box((0, 1)), bad, 1.0)], [Piece("w", box((0, 1)), bad, 1.0), fine]):
        difference = worst([order], None)
        assert difference.worst == "w" and not difference.holds
    assert not worst([[Piece("w", box((0, 1)), 1.0, 1.0)], [Piece("w", box((0, 1)), bad, 1.0)]], None).holds


def test_a_missing_gradient_and_a_gradient_where_none_should_be() -> None:
    assert worst([[Piece("w", (), missing=True)]], 1.0).worst == "w (missing)"
    assert worst([[Piece("w", box((0, 1)), 1.0, 0.0)]], 1.0).value == math.inf
    assert relative(0.0, 0.0) == 0.0 and relative(1.0, 0.0) == math.inf


def test_limits_follow_what_the_numbers_are_kept_in() -> None:
    assert limits("float64", "adamw").parameters == 1e-9
    assert (limits("float32", "sgd").parameters, limits("float32", "adamw").parameters) == (1e-5, 1e-3)
    assert (limits("bfloat16", "adamw").gradients, limits("bfloat16", "adamw").loss) == (None, 2e-2)
