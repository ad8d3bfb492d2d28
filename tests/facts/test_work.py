"""Training: what is asked of a step, and what is refused."""

from __future__ import annotations

import pytest

from partita.facts.errors import BadInput
from partita.facts.work import OPTIMIZERS, Training


def test_defaults() -> None:
    work = Training(8, 2048)
    assert work.precision.name == "bf16-master" and work.optimizer == "adamw" and work.clip == 1.0


def test_tensors_of_optimizer_state() -> None:
    assert (Training(1, 1).moments, Training(1, 1).scalars) == (2, 1)
    sgd = Training(1, 1, optimizer="sgd")
    assert (sgd.moments, sgd.scalars) == (1, 0)
    assert Training(1, 1, optimizer="sgd", momentum=0.0).moments == 0
    assert Training(1, 1, momentum=0.0).moments == 2, "momentum is SGD's"


@pytest.mark.parametrize("name", ["global_batch", "sequence"])
@pytest.mark.parametrize("value", [0, -3])
def test_what_must_be_positive_is_refused_by_name(name: str, value: int) -> None:
    with pytest.raises(BadInput) as caught:
        Training(**{"global_batch": 1, "sequence": 1, name: value})
    message = str(caught.value)
    assert name.replace("_", " ") in message and str(value) in message and "at least 1" in message


def test_an_unknown_optimizer_is_refused_with_those_that_work() -> None:
    with pytest.raises(BadInput, match="'adam'") as caught:
        Training(1, 1, optimizer="adam")
    assert all(name in str(caught.value) for name in OPTIMIZERS)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"clip": 0.0}, "clip"),
        ({"clip": -1.0}, "clip"),
        ({"clip": float("nan")}, "clip"),
        ({"lr": -1e-3}, "lr"),
        ({"lr": float("nan")}, "lr"),
        ({"momentum": -0.1}, "momentum"),
        ({"weight_decay": -0.1}, "weight decay"),
        ({"tokens": 0}, "tokens"),
    ],
)
def test_numbers_out_of_range_are_refused_by_name(changes: dict[str, float], said: str) -> None:
    with pytest.raises(BadInput) as caught:
        Training(1, 1, **changes)  # type: ignore[arg-type]
    (value,) = changes.values()
    assert said in str(caught.value) and str(value) in str(caught.value)


def test_no_clipping_is_said_with_none() -> None:
    assert Training(1, 1, clip=None).clip is None
