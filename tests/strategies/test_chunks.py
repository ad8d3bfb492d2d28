"""Chunks of the master optimizer: which parameters go together, and the largest sum."""

from __future__ import annotations

import random

import pytest

from partita.strategies.step.chunks import chunks, largest
from tests import seed


def test_a_chunk_ends_before_it_would_pass_the_limit() -> None:
    assert chunks([4, 4, 4, 4], 8) == [range(2), range(2, 4)]
    assert chunks([4, 5, 4], 8) == [range(1), range(1, 2), range(2, 3)]
    assert chunks([20, 1, 1], 8) == [range(1), range(1, 3)], "one larger than the limit stands by itself"
    assert chunks([], 8) == [] and chunks([0, 0], 8) == [range(2)]


@pytest.mark.parametrize("draw", [0, 1, seed.value()])
def test_chunks_hold_every_index_once_within_the_limit(draw: int) -> None:
    chance = random.Random(draw)
    for _ in range(100):
        sizes, limit = [chance.randint(0, 30) for _ in range(chance.randint(0, 40))], chance.randint(1, 60)
        found = chunks(sizes, limit)
        assert [i for run in found for i in run] == list(range(len(sizes)))
        sums = [sum(sizes[i] for i in run) for run in found]
        assert all(s <= limit or sum(sizes[i] > 0 for i in run) == 1 for s, run in zip(sums, found, strict=True))
        assert largest([(sizes, 1)], limit) == max(sums, default=0)


@pytest.mark.parametrize("draw", [0, 1, seed.value()])
def test_alike_units_are_as_their_parameters_one_by_one(draw: int) -> None:
    chance = random.Random(draw)
    for _ in range(200):
        runs = [
            ([chance.randint(0, 30) for _ in range(chance.randint(0, 9))], chance.choice((1, 1, 2, 40)))
            for _ in range(chance.randint(0, 4))
        ]
        flat = [n for sizes, count in runs for _ in range(count) for n in sizes]
        limit = chance.randint(1, 200)
        assert largest(runs, limit) == max((sum(flat[i] for i in run) for run in chunks(flat, limit)), default=0)
