"""Samples are the same under every layout, and count what they should."""

import pytest
import torch

from partita.train.data import IGNORE, BadData, SyntheticDataset, micro_batches, row_groups

LAYOUTS = [(mb, ranks) for ranks in (1, 2, 3, 4, 6) for mb in (1, 2, 3, 4, 6, 12) if 12 % (mb * ranks) == 0]


def gathered(dataset, step, global_batch, mb, ranks):
    """(ids, targets) of the whole global batch in row order, put together from what each data rank gets."""
    rows = {}
    for rank in range(ranks):
        groups = row_groups(global_batch, mb, rank, ranks)
        for batch, group in zip(micro_batches(dataset, step, global_batch, mb, rank, ranks), groups, strict=True):
            assert batch.ids.shape == batch.targets.shape == (mb, dataset.sequence)
            assert batch.counted == int((batch.targets != IGNORE).sum())
            for i, row in enumerate(group):
                assert row not in rows
                rows[row] = torch.stack([batch.ids[i], batch.targets[i]])
    return torch.stack([rows[i] for i in range(global_batch)])


@pytest.mark.parametrize(("mb", "ranks"), LAYOUTS)
def test_synthetic_samples_do_not_depend_on_the_layout(mb, ranks):
    dataset = SyntheticDataset(vocab=97, sequence=9, seed=5)
    assert torch.equal(gathered(dataset, 7, 12, mb, ranks), gathered(dataset, 7, 12, 12, 1))


def test_synthetic_counts_are_uneven():
    batch = SyntheticDataset(vocab=97, sequence=9).batch(0, range(6), 6)
    assert (batch.targets != IGNORE).sum(1).tolist() == [0, 7, 6, 8, 7, 6]
    assert batch.counted == 34
    assert torch.equal(
        batch.ids[1:, 1:7], batch.targets[1:, :6].where(batch.targets[1:, :6] != IGNORE, batch.ids[1:, 1:7])
    )
    assert batch.documents is None and batch.positions.tolist() == list(range(9))


def test_synthetic_depends_on_seed_and_step():
    one = SyntheticDataset(97, 16, seed=0).batch(0, range(2), 2).ids
    assert not torch.equal(one, SyntheticDataset(97, 16, seed=1).batch(0, range(2), 2).ids)
    assert not torch.equal(one, SyntheticDataset(97, 16, seed=0).batch(1, range(2), 2).ids)
    assert int(one.min()) >= 0 and int(one.max()) < 97


def test_synthetic_single_sample_counts_something():
    assert SyntheticDataset(97, 9).batch(3, [0], 1).counted == 8
    assert SyntheticDataset(97, 9, ignore="none").batch(3, [0], 2).counted == 9


def test_synthetic_refusals():
    with pytest.raises(BadData, match="use 'uneven' or 'none'"):
        SyntheticDataset(97, 9, ignore="some")
    with pytest.raises(BadData, match="use 4 or more"):
        SyntheticDataset(97, 3)


def test_a_global_batch_that_does_not_divide_is_refused():
    with pytest.raises(BadData, match=r"global batch of 10 .* micro-batches of 4 on 2 .* global batch of 8 would"):
        row_groups(10, 4, 0, 2)
    with pytest.raises(BadData, match="data rank 2"):
        row_groups(8, 4, 2, 2)
    with pytest.raises(BadData, match=r"rows \[5\]"):
        SyntheticDataset(97, 9).batch(0, [5], 4)
