"""The order of samples under every layout and after resuming, what is held out, and how samples are shown."""

import hashlib

import numpy as np
import pytest
import torch

from partita.train.data import IGNORE, BadData, HeldOut, held_out_batches, micro_batches, preview
from tests.train.texts import Bytes, maker


@pytest.fixture
def make(tmp_path):
    return maker(tmp_path)


def plain(dataset, sample):
    """(ids, targets, positions, documents) of a sample as lists."""
    rows = dataset.fixed([sample])
    return [a[0].tolist() for a in (rows.ids, rows.targets, rows.positions, rows.documents)]


# --- order, layouts, resuming ---------------------------------------------------------------------------------


@pytest.fixture
def numbered(make):
    """23 samples of 2 positions in one document of distinct tokens: a sample is known by its first token."""

    class Numbers(Bytes):
        eos = 1000

        def encode_batch(self, texts):
            return [list(range(46)) for _ in texts]

    dataset = make("x", 2, "data.txt", tokenizer=Numbers(), seed=3)
    assert len(dataset) == 23
    return dataset


def seen(dataset, steps, global_batch, mb, ranks):
    """Sample numbers drawn in the given steps, in row order."""
    out = []
    for step in steps:
        rows = {}
        for rank in range(ranks):
            for k, batch in enumerate(micro_batches(dataset, step, global_batch, mb, rank, ranks)):
                for j, row in enumerate(batch.ids):
                    rows[rank + ranks * (k * mb + j)] = int(row[0]) // 2
        out += [rows[i] for i in range(global_batch)]
    return out


def test_a_run_resumed_under_other_layouts_sees_each_sample_once_an_epoch(numbered):
    whole = seen(numbered, range(46), 4, 4, 1)  # 184 samples: 8 epochs, whose borders lie inside global batches
    layouts = [(1, 1), (1, 4), (2, 2), (2, 1), (4, 1), (1, 2)]
    pieces, step = [], 0
    for i, (mb, ranks) in enumerate(layouts):
        until = 46 if i == len(layouts) - 1 else step + 3 + i
        pieces += seen(numbered, range(step, until), 4, mb, ranks)
        step = until
    assert pieces == whole
    for epoch in range(8):
        assert sorted(whole[epoch * 23 : epoch * 23 + 23]) == list(range(23))
    assert len({tuple(whole[e * 23 : e * 23 + 23]) for e in range(8)}) == 8, "epochs have orders of their own"


def test_a_global_batch_that_changes_on_resuming_loses_nothing(numbered):
    """8 steps of 4 are 32 samples; 2 steps of 16 are too, so step 2 of 16 goes on where step 8 of 4 would."""
    assert seen(numbered, range(8, 12), 4, 1, 1) == seen(numbered, [2], 16, 4, 2)


def test_the_order_is_written_down():
    """Orders must stay what they are in every version: a resumed run depends on them."""
    from partita.train.data import permutation

    assert permutation(0, 0, 8).tolist() == [0, 2, 1, 5, 4, 3, 6, 7]
    assert sorted(permutation(1, 2, 100).tolist()) == list(range(100))
    digest = hashlib.sha256(permutation(7, 3, 1000).astype(np.int64).tobytes()).hexdigest()
    assert digest.startswith("5dd4a4a3c0ab66a3")


def test_seed_and_shuffle(numbered, make):
    from dataclasses import replace

    assert seen(replace(numbered, seed=4), range(5), 4, 4, 1) != seen(numbered, range(5), 4, 4, 1)
    straight = seen(replace(numbered, shuffle=False), range(7), 4, 4, 1)
    assert straight == [i % 23 for i in range(28)]
    with pytest.raises(BadData, match="seed -1"):
        make("abc", 2, "data.txt", seed=-1)


# --- held out ------------------------------------------------------------------------------------------------


def test_the_last_samples_are_held_out(numbered):
    kept, held = numbered.split(0.2)
    assert (len(kept), len(held)) == (18, 5)
    assert set(seen(kept, range(18), 4, 4, 1)) == set(range(18))
    firsts = [int(b.ids[0, 0]) // 2 for b in held_out_batches(held, 1)]
    assert firsts == [18, 19, 20, 21, 22]
    assert "the last 5 held out" in kept.describe()
    assert len(numbered.split(0.0001)[1]) == 1


@pytest.mark.parametrize(("mb", "ranks"), [(1, 1), (2, 1), (1, 2), (3, 1), (2, 2), (1, 4), (4, 4)])
@pytest.mark.parametrize("limit", [None, 3])
def test_evaluation_is_the_same_under_every_layout(numbered, mb, ranks, limit):
    _, held = numbered.split(0.2)
    per_rank = [list(held_out_batches(held, mb, r, ranks, limit)) for r in range(ranks)]
    assert len({len(batches) for batches in per_rank}) == 1, "ranks that share collectives run equally many"
    assert {b.ids.shape for batches in per_rank for b in batches} == {(mb, 2)}
    counted = [r for batches in per_rank for b in batches for r in b.targets.tolist() if r != [IGNORE] * 2]
    expected = [b.targets[0].tolist() for b in held_out_batches(held, 1, limit=limit)]
    assert sorted(counted) == sorted(expected)
    assert len(expected) == (limit or 5)
    total = sum(b.counted for batches in per_rank for b in batches)
    assert total == sum(b.counted for b in held_out_batches(held, 1, limit=limit))


def test_a_file_may_be_held_out_whole(numbered):
    assert len(list(held_out_batches(numbered.held_out(), 1))) == 23


def test_splits_are_checked(make, numbered):
    with pytest.raises(BadData, match="not between 0 and 1"):
        numbered.split(1.0)
    with pytest.raises(BadData, match="1 sample of sequence 5, of which 1 cannot be held out"):
        make("abcde", 5, "data.txt").split(0.1)


def test_synthetic_data_has_held_out_samples_of_its_own():
    from partita.train.data import SyntheticDataset

    data = SyntheticDataset(97, 9, seed=1)
    held = data.held_out(5)
    assert isinstance(held, HeldOut)
    one = torch.cat([b.ids for b in held_out_batches(held, 1)])
    two = torch.cat([b.ids for b in held_out_batches(held, 5)])
    assert torch.equal(one, two)
    assert not torch.equal(two[0], data.batch(0, [0], 5).ids[0])


# --- shown samples -------------------------------------------------------------------------------------------


def test_a_preview_shows_what_counts_and_where_documents_end(make):
    dataset = make([{"prompt": "ab", "completion": "cd"}, {"prompt": "ef", "completion": "g"}], 8, shuffle=False)
    batch = dataset.batch(0, [0], 1)
    assert preview(batch, 0, Bytes().decode) == "[ab]cd$|[ef]g"
    assert preview(batch, 0, Bytes().decode, tokens=3) == "[ab]c"


def test_the_marker_is_the_loss_marker():
    from partita.model import loss

    assert loss.IGNORE == IGNORE
