"""Offload: which rows move to the host, what is refused, and whether the host has room."""

from __future__ import annotations

import pytest

from partita.facts.cluster import find_cluster
from partita.facts.errors import Refused
from partita.facts.layout import Layout
from partita.facts.model import Model
from partita.facts.precision import PRESETS
from partita.facts.work import Training
from partita.plan.account import Account, account
from partita.plan.fit import fit, host_bytes
from tests.tiny import ZOO

N = ZOO["plain"].parameter_count


def priced(layout: str, precision: str = "bf16-master", model: Model = ZOO["plain"]) -> Account:
    read = Layout.parse(layout)
    return account(model, read, Training(read.dp * read.mb, 8, PRESETS[precision]))


def persistent(found: Account) -> dict[tuple[str, str, str], int]:
    rows = [r for r in found.ledger.at({"pp": 0, "dp": 0, "cp": 0, "tp": 0}).memory if r.object != "padding"]
    rows = [r for r in rows if r.phase == "persistent" or (r.phase == "step" and r.object == "gradients")]
    return {(r.tier, r.object, r.dtype): r.bytes for r in rows if r.object != "optimizer scalars"}


def test_textbook_bytes_on_the_device_are_two_and_two() -> None:
    """2 + 2 on the device; 12 on the host, with 2 of pinned buffers (Rajbhandari et al. 2020, "ZeRO", section 3.1)."""
    assert persistent(priced("dp=1 offload=optimizer")) == {
        ("device", "parameters", "bfloat16"): 2 * N,
        ("device", "gradients", "bfloat16"): 2 * N,
        ("host", "master", "float32"): 4 * N,
        ("host", "optimizer state", "float32"): 8 * N,
        ("host", "pinned buffers", "bfloat16"): 2 * N,
    }


def test_without_a_master_the_hosts_copy_is_one() -> None:
    found = persistent(priced("dp=2 offload=optimizer_delayed", "fp32"))
    assert found["host", "master", "float32"] == found["host", "pinned buffers", "float32"] == 4 * N
    assert ("device", "optimizer state", "float32") not in found


def test_zero_divides_what_is_on_the_host() -> None:
    whole, shard = persistent(priced("dp=1 offload=optimizer")), persistent(priced("dp=4 zero1 offload=optimizer"))
    for thing in (("master", "float32"), ("optimizer state", "float32"), ("pinned buffers", "bfloat16")):
        assert shard["host", *thing] == pytest.approx(whole["host", *thing] / 4, rel=1e-3)
    assert shard["device", "parameters", "bfloat16"] == 2 * N


def test_fsdp_leaves_no_model_state_on_the_device() -> None:
    found = persistent(priced("dp=2 full_shard offload=parameters"))
    assert {tier for tier, _, _ in found} == {"host"}
    assert {thing for _, thing, _ in found} == {"parameters", "gradients", "optimizer state"}
    assert priced("dp=2 full_shard offload=parameters").ledger.traffic == priced("dp=2 full_shard").ledger.traffic


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ("dp=2 offload=parameters", ["offload=parameters", "full_shard offload=parameters", "offload=optimizer"]),
        ("dp=1 full_shard offload=parameters", ["1 ranks", "full_shard offload=parameters on 2 ranks"]),
        ("dp=2 full_shard offload=optimizer", ["full_shard offload=parameters", "zero2 offload=optimizer"]),
        ("dp=2 offload=optimizer delay_after=3", ["delay_after=3", "offload=optimizer_delayed"]),
        ("dp=2 delay_after=3", ["delay_after=3", "offload"]),
    ],
)
def test_refusals_name_what_works(layout: str, said: list[str]) -> None:
    with pytest.raises(Refused) as caught:
        priced(layout)
    for part in said:
        assert part in str(caught.value)


def test_a_scaled_loss_is_refused_with_one_reason() -> None:
    with pytest.raises(Refused, match="bf16-master") as caught:
        priced("dp=2 zero1 offload=optimizer", "fp16-master")
    assert str(caught.value).count("scal") == 1


def test_the_fit_names_both_numbers_of_a_host_that_is_too_small() -> None:
    """8 ranks of one node hold the optimizer of a 70B-sized model, whole: 14 bytes a parameter and rank."""
    from dataclasses import replace

    from partita.facts.find import find_model

    model = find_model("llama-3.1-8b").model
    found = account(model, Layout.parse("dp=8 zero1 offload=optimizer"), Training(8, 128))
    cluster = find_cluster("h100:1x8")
    need = host_bytes(found) * 8
    assert need == pytest.approx(14 * model.parameter_count, rel=1e-3)
    small = fit(found, replace(cluster, host_memory_bytes=100 * 10**9))
    assert not small.fits and f"{need / 1e9:.1f} GB" in small.sentence and "100.0 GB" in small.sentence
    large = fit(found, replace(cluster, host_memory_bytes=200 * 10**9))
    assert large.fits and "host" in large.sentence
    assert fit(found, replace(cluster, host_memory_bytes=None)).fits
