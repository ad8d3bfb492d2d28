"""Parts of the training step that can be told from outside a run."""

from __future__ import annotations

import pytest
import torch

from partita.train.step import ROW, squares


@pytest.mark.parametrize("elements", [0, 1, ROW - 1, ROW, 5 * ROW + 7])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_squares_of_every_element_count_once(elements: int, dtype: torch.dtype) -> None:
    t = torch.randn(elements, generator=torch.Generator().manual_seed(0)).to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    found = squares(t, wide)
    assert found.dtype == wide and found.shape == ()
    assert found.item() == pytest.approx(t.double().square().sum().item(), rel=1e-6)


def test_squares_of_a_large_tensor_do_not_drown_in_their_sum() -> None:
    """One after another in float32, eight million squares lose digits, and two layouts would clip differently."""
    t = torch.randn(8192, 1024, generator=torch.Generator().manual_seed(0)) * 1e-3
    want = t.double().square().sum().item()
    naive = torch.linalg.vector_norm(t, dtype=torch.float32).square().item()
    assert squares(t, torch.float32).item() == pytest.approx(want, rel=1e-7)
    assert abs(naive - want) / want > 1e-5


def test_squares_of_a_transposed_tensor() -> None:
    t = torch.randn(300, 70, generator=torch.Generator().manual_seed(0)).t()
    assert squares(t, torch.float32).item() == pytest.approx(t.double().square().sum().item(), rel=1e-6)
