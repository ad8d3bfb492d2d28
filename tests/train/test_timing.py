"""The arithmetic of step times and shares."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace

import pytest

from partita.train.timing import Ledger, PhaseTimer, exposed, times_of


def test_the_watch_adds_up_each_phase_and_starts_anew():
    timer = PhaseTimer()
    for _ in range(2):
        with timer.phase("forward"):
            time.sleep(0.01)
    taken = timer.taken()
    assert 0.02 <= taken["forward"] < 0.2 and taken["backward"] == 0
    assert timer.taken()["forward"] == 0


def test_exposed_parts_of_phases():
    calls = [
        SimpleNamespace(phase="forward", exposed_s=0.1),
        SimpleNamespace(phase="backward", exposed_s=None),
        SimpleNamespace(phase="backward", exposed_s=0.2),
    ]
    recorder = SimpleNamespace(calls=calls, tails=[SimpleNamespace(exposed_s=0.3)])
    phases = {"forward": 1.0, "backward": 2.0, "step": 0.0, "data": 0.1}
    assert exposed(recorder, phases, False) == {"data": 0, "forward": 0.1, "backward": 0.1, "step": 0}
    assert exposed(recorder, phases, True)["backward"] == 0.25


def test_shares_take_the_exposed_part_off_each_phase():
    ledger = Ledger()
    for seconds in (9.0, 9.0, 1.0, 3.0, 2.0):  # the first two are left out
        ledger.add(seconds, {"data": 0.1 * seconds, "forward": 0.3 * seconds, "backward": 0.4 * seconds, "step": 0.0})
    ledger.exposed = {"forward": 0.5, "backward": 0.25}
    told = times_of(3, ledger.row())
    assert (told.rank, told.min_s, told.median_s, told.max_s) == (3, 1.0, 2.0, 3.0)
    assert told.shares == pytest.approx(
        {"data": 0.1, "forward": 0.15, "backward": 0.3, "exposed communication": 0.25, "optimizer": 0, "other": 0.2}
    )


def test_without_a_sampled_step_nothing_is_claimed():
    ledger = Ledger()
    ledger.add(2.0, {"forward": 1.0, "backward": 0.5})
    told = times_of(0, ledger.row())
    assert told.shares["exposed communication"] is None and told.shares["forward"] == 0.5
    assert times_of(0, Ledger().row()) is None and math.isnan(Ledger().row()[0])
