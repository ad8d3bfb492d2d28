"""Full sharding on real ranks: every recorded row and byte is the predicted one, and the training is one device's."""

from __future__ import annotations

from typing import Any

import pytest

from partita.facts.layout import Layout
from partita.plan.account import account
from partita.prove.prove import Report
from tests.strategies.proving import Prover, peaks, proof
from tests.tiny import ZOO, tiny_model

pytest.importorskip("torch")

EVEN = tiny_model(name="even", vocab=104, ffn=56)
"""Every dim 0 divides by 4, so that nothing is padded."""


@pytest.fixture(scope="module")
def prove(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Prover:
    return Prover(ranks, tmp_path_factory)


def steady_link_bytes(report: Report) -> int:
    """What one rank sends in a steady step by the recording, the step's own few numbers aside."""
    lines = [t for t in report.table.traffic if t.phase in ("forward", "backward") and t.dtype == "float64"]
    return sum(t.link_bytes(t.counts.recorded) or 0 for t in lines)


TWO = [
    ("full_shard reshard=all", "plain", 2, {}),
    ("full_shard reshard=all", "tied", 1, {}),
    ("full_shard wrap=2", "plain", 2, {"optimizer": "sgd"}),
    ("full_shard wrap=3 reshard=all", "qk_norm", 1, {}),
    ("full_shard prefetch=3", "four_layers", 2, {}),
    ("full_shard prefetch=2 wrap=2", "four_layers", 1, {}),
    ("shard_grad_op wrap=2", "tied", 3, {}),
    ("shard_grad_op mb=2", "plain", 1, {"optimizer": "sgd", "clip": None}),
]
FOUR = [
    ("full_shard reshard=2", "plain", 2, {}),
    ("full_shard reshard=2 wrap=2", "tied", 1, {"optimizer": "sgd"}),
    ("full_shard reshard=all", "all_biases", 1, {}),
    ("full_shard shard=2", "plain", 1, {}),
    ("full_shard shard=2 reshard=all wrap=2", "qk_norm", 3, {}),
    ("shard_grad_op shard=2", "tied", 3, {"optimizer": "sgd"}),
]


@pytest.mark.parametrize("layout, name, each, more", TWO, ids=[f"{c[0]} {c[1]} x{c[2]}" for c in TWO])
def test_two_ranks_train_as_one_device(prove: Prover, layout: str, name: str, each: int, more: dict[str, Any]) -> None:
    report = prove(proof(layout, 2, ZOO[name], each=each, **more))
    assert report.verdict == "agrees", report.reasons


@pytest.mark.parametrize("layout, name, each, more", FOUR, ids=[f"{c[0]} {c[1]} x{c[2]}" for c in FOUR])
def test_four_ranks_train_as_one_device(prove: Prover, layout: str, name: str, each: int, more: dict[str, Any]) -> None:
    """101 rows over 4 and over 2 ranks leave short shards; copies sum what their shards hold."""
    report = prove(proof(layout, 4, ZOO[name], each=each, **more))
    assert report.verdict == "agrees", report.reasons


@pytest.mark.parametrize("layout", ["full_shard reshard=all", "full_shard wrap=2", "full_shard prefetch=2"])
@pytest.mark.parametrize("precision", ["fp32", "bf16-master", "pure-bf16", "autocast-bf16"])
def test_rows_in_every_precision(prove: Prover, layout: str, precision: str) -> None:
    report = prove(proof(layout, 2, ZOO["plain"], precision=precision))
    assert report.verdict == "agrees", report.reasons


def test_link_bytes_are_one_and_a_half_times_those_of_ddp(prove: Prover) -> None:
    """Where every unit, the root included, is gathered twice and reduced once, in one dtype (Rajbhandari et al. 2020,
    "ZeRO", section 7.2.2); on recorded bytes."""
    ddp = steady_link_bytes(prove(proof("ddp", 2, EVEN, each=1)))
    assert steady_link_bytes(prove(proof("full_shard reshard=all", 2, EVEN, each=1))) * 2 == ddp * 3
    kept = steady_link_bytes(prove(proof("full_shard", 2, EVEN, each=1)))
    root = 8 * (2 * 104 * 40 + 40) // 2  # one gather of the root unit, half of which each of two ranks sends
    assert (kept + root) * 2 == ddp * 3


@pytest.mark.parametrize("layout", ["full_shard", "shard_grad_op"])
def test_nothing_is_reduced_before_the_last_micro_batch(prove: Prover, layout: str) -> None:
    """Three micro-batches: one reduction a unit, of their sum; shard_grad_op gathers once for all three."""
    report = prove(proof(layout, 2, ZOO["plain"], each=3))
    assert report.verdict == "agrees", report.reasons
    counts = {(t.verb, t.phase, t.bytes): t.counts.recorded for t in report.table.traffic if t.dtype == "float64"}
    reduced = [n for (verb, _, _), n in counts.items() if verb == "reduce_scatter"]
    gathered = [n for (verb, phase, _), n in counts.items() if (verb, phase) == ("all_gather", "forward")]
    assert sorted(reduced) == [1, 3]  # the root, and three blocks
    assert sorted(gathered) == ([1, 3] if layout == "shard_grad_op" else [3, 9])


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_what_is_gathered_ahead_raises_the_peak(prove: Prover, depth: int) -> None:
    """On a model whose blocks are most of it; predicted within 3 % of tracked."""
    model = tiny_model(name="deep", layers=6, vocab=23)
    report = prove(proof(f"full_shard prefetch={depth}", 2, model, each=1))
    assert report.verdict == "agrees", report.reasons
    off = peaks(report)
    assert abs(off["forward"]) < 0.03 and abs(off["backward"]) < 0.03, off
    from partita.plan.peak import peaks as predicted

    one = account(model, Layout.parse("full_shard", 2), report.proof.work).ledger
    origin = {"pp": 0, "dp": 0, "cp": 0, "tp": 0}
    before, here = ({p.phase: p.bytes for p in predicted(ledger, origin)} for ledger in (one, report.account.ledger))
    if depth > 1:  # one unit ahead in forward is for streams alone, and costs nothing on a CPU
        assert here["forward"] > before["forward"] and here["backward"] > before["backward"]
