"""A few combinations of the matrix, drawn anew by the seed of the day; ``make prove-all`` runs all of them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests import matrix, seed
from tests.pool import Pool

EVERY = list(matrix.combinations())
DRAWN = random.Random(seed.value()).sample(EVERY, 3)


@pytest.mark.parametrize("combination", DRAWN, ids=str)
def test_a_drawn_combination_agrees(ranks: Pool, tmp_path: Path, combination: matrix.Combination) -> None:
    assert matrix.prove(ranks, combination, {}, str(tmp_path))["reasons"] == []


def test_the_matrix_has_every_state_with_every_kind_of_recomputation() -> None:
    assert len(set(EVERY)) == len(EVERY)
    for ranks, states in matrix.STATES.items():
        for state in states:
            for recompute in matrix.RECOMPUTE:
                text = f"{state} recompute={recompute}".removesuffix(" recompute=none")
                assert {c.each for c in EVERY if (c.ranks, c.layout) == (ranks, text)} == {1, 3}
