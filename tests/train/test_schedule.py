"""Learning rates by step."""

import math

import pytest
import torch

from partita.facts.errors import BadInput
from partita.train.schedule import Schedule


def test_warm_up_rises_by_equal_amounts_to_the_peak():
    schedule = Schedule(peak=1.0, steps=100, warmup=4, kind="constant")
    assert [schedule.rate(s) for s in range(6)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    assert schedule.rate(99) == 1.0


def test_no_warm_up_starts_at_the_peak():
    for kind in ("cosine", "linear", "constant"):
        assert Schedule(3e-4, 10, kind=kind).rate(0) == 3e-4


def test_linear():
    schedule = Schedule(peak=1.0, steps=12, warmup=2, kind="linear", final=0.5)
    assert [schedule.rate(s) for s in (2, 7, 12, 50)] == pytest.approx([1.0, 0.75, 0.5, 0.5])


def test_cosine_is_torchs():
    schedule = Schedule(peak=0.3, steps=20, final=0.03)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20, eta_min=0.03)
    for step in range(20):
        assert schedule.rate(step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
        optimizer.step()
        theirs.step()
    assert schedule.rate(20) == schedule.rate(1000) == pytest.approx(0.03)


def test_cosine_after_warm_up():
    schedule = Schedule(peak=1.0, steps=30, warmup=10)
    assert schedule.rate(10) == 1.0
    assert schedule.rate(15) == pytest.approx((1 + math.cos(math.pi / 4)) / 2)
    assert schedule.rate(29) > 0
    rates = [schedule.rate(s) for s in range(31)]
    assert rates[:11] == sorted(rates[:11]) and rates[10:] == sorted(rates[10:], reverse=True)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"kind": "step"}, "'step' is not known; what works: cosine"),
        ({"peak": 0.0}, "learning rate of 0.0"),
        ({"peak": math.nan}, "learning rate of nan"),
        ({"final": 2.0}, "between 0 and the peak, 1.0"),
        ({"steps": 0}, "0 steps"),
        ({"warmup": 10}, "warm-up of 10 steps does not fit into 10 steps; use 0 to 9"),
        ({"warmup": -1}, "warm-up of -1"),
    ],
)
def test_refusals(bad, message):
    with pytest.raises(BadInput, match=message):
        Schedule(**{"peak": 1.0, "steps": 10, **bad})
