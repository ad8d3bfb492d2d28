"""What all tests share: the header, the seed of the changing part, and the pool of ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

# Before anything imports torch: one thread a process, and nothing reaches for a network.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest

from tests import pool, seed


def pytest_report_header() -> list[str]:
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "not installed"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return [f"partita: torch {torch}, {cores} cores, PARTITA_SEED={seed.value()} (set it to repeat the changing part)"]


@pytest.fixture(scope="session")
def ranks() -> Iterator[pool.Pool]:
    """Real ranks: `ranks(2).run(function, *args)` gives the list of what `function(rank, world, *args)` returned."""
    with pool.opened() as shared:
        yield shared
