"""Worked examples of the textbooks, each with its published numbers, through the public functions.

Reproduced here: the bytes of plain and of fully sharded data parallelism and the volume of full sharding (1), sharded
SGD with momentum on two real ranks (2), the parts of a 70B model on 64 GPUs that data parallelism decides (9), the
world as a product (11), the counts of a sparse model (12), and accumulation (16).

Not yet, because the room that they need is not there: bytes of ZeRO-1 and ZeRO-2 and their SGD (1, 2), tensor
parallelism's MLP and its collectives (3, 4), pipelines and their bubble (5, 6), activation memory with score matrices
(7), context parallelism (8), tp, pp and ZeRO-1 together (9), the sizing sequence (10), experts (13), serving (14) and
offload (15).
"""

from __future__ import annotations

from typing import Any

import pytest

from partita.facts import flops
from partita.facts.find import find_model
from partita.facts.known import entry
from partita.facts.layout import Layout
from partita.facts.ledger import Ledger
from partita.facts.mesh import Mesh
from partita.facts.model import Model
from partita.facts.precision import PRESETS
from partita.facts.work import Training
from partita.plan.account import Account, account
from tests.pool import Pool

AT = {"pp": 0, "dp": 0, "cp": 0, "tp": 0}
GB = 10**9


def counted(text: str) -> Model:
    return find_model(text).model


def priced(model: Model, layout: str, precision: str = "bf16-master", batches: int = 1, **work: Any) -> Account:
    read = Layout.parse(layout)
    asked = Training(read.dp * read.mb * batches, 2048, PRESETS[precision], **work)
    return account(model, read, asked)


def model_state(ledger: Ledger) -> int:
    """Bytes on one rank of parameters, gradients and optimizer state; AdamW's one step counter is left out."""
    return ledger.where(owner="step").persistent_bytes(AT) - 4


# 1. ZeRO: model state of 7.5e9 parameters on 64 ranks (Rajbhandari et al. 2020, arXiv 1910.02054, figure 1)


def test_1_plain_data_parallelism_holds_16_bytes_a_parameter() -> None:
    found = model_state(priced(counted("7.5B"), "dp=64").ledger)
    assert found == 16 * 7_500_000_000 == 120 * GB


def test_1_full_sharding_holds_a_64th_of_it() -> None:
    found = model_state(priced(counted("7.5B"), "dp=64 full_shard").ledger)
    assert found == 16 * 7_500_000_000 // 64
    assert round(found / GB, 1) == 1.9


@pytest.mark.parametrize(
    ("layout", "rows"),
    [
        ("dp=64", {"parameters": 2, "gradients": 2, "master": 4, "optimizer state": 8}),
        ("dp=64 full_shard", {"parameters": 4 / 64, "gradients": 4 / 64, "optimizer state": 8 / 64}),
    ],
)
def test_1_rows_of_the_same_16_bytes(layout: str, rows: dict[str, float]) -> None:
    model = counted("7.5B")
    found = priced(model, layout).ledger.at(AT).where(owner="step", phase={"persistent", "step"}).memory
    stated = {r.object: r.bytes / model.parameter_count for r in found if r.object in rows or r.object == "master"}
    assert stated == rows


def test_1_full_sharding_moves_one_and_a_half_times_the_volume() -> None:
    """Of the blocks exactly; the root unit (embedding, head, final norm) keeps its gather and moves as much as DDP."""
    known = entry("llama-3.1-405b")
    assert known is not None
    model = known.model()
    plain, full = (priced(model, f"dp=64 {s}", "pure-bf16").ledger for s in ("ddp", "full_shard"))

    def sent(ledger: Ledger, owner: str) -> int:
        steady = [r for r in ledger.traffic if r.owner == owner and r.kind == "data" and r.phase != "init"]
        return sum(r.link_bytes(ledger.mesh) for r in steady)

    blocks = model.layers * model.spans[1].elements
    root = model.parameter_count - blocks
    expected = (3 * blocks + 2 * root) / (2 * (blocks + root))
    assert sent(full, "fsdp") / sent(plain, "ddp") == pytest.approx(expected, rel=1e-9)
    assert expected == pytest.approx(1.5, abs=0.01)


# 2. Sharded SGD with momentum, on two real ranks


def momentum_step(rank: int, world: int, state: str, micro_batches: int) -> dict[str, list[float]]:
    """One step on parameters [1, 2, 3, 4], with gradients as each rank's contribution, averaged over the ranks."""
    import torch
    from torch import nn
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    from partita.facts.model import counted
    from partita.strategies.groups import Groups
    from partita.strategies.parallelize import parallelize

    class Four(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parameters_ = nn.Parameter(torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64))
            self.blocks = nn.ModuleList()

        def forward(self, contribution: torch.Tensor) -> torch.Tensor:
            return (contribution * self.parameters_).sum()

    work = Training(world * micro_batches, 1, PRESETS["fp64"], optimizer="sgd", lr=0.1, momentum=0.9, weight_decay=0.0)
    case = account(counted("four", 4), Layout(dp=world, state=state), work).case
    step = parallelize(Four(), lambda batch: batch, Groups(case.mesh), case)
    (parameter,) = step.module.parameters()
    momentum = torch.tensor([0.5, -0.5, 1.0, -1.0], dtype=torch.float64)
    if isinstance(parameter, DTensor):
        momentum = distribute_tensor(momentum, parameter.device_mesh, [Shard(0)])
    step.optimizer.state[parameter]["momentum_buffer"] = momentum

    def local(tensor: Any) -> list[float]:
        if tensor is None:
            return []
        return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().tolist()

    contribution = torch.tensor([[1.0, 2.0, 3.0, 4.0], [3.0, 6.0, 9.0, 12.0]], dtype=torch.float64)[rank]
    seen = []
    for i in range(micro_batches):
        with step.contexts[0](i, micro_batches):
            (step.parts[0](contribution) / (world * micro_batches)).backward()
        seen.append(local(parameter.grad))
    step.optimizer.step()
    held = step.optimizer.state[parameter]["momentum_buffer"]
    return {
        "first gradient": seen[0],
        "gradient": seen[-1],
        "momentum": local(held),
        "parameters": local(parameter),
    }


MOMENTUM = [2.45, 3.55, 6.9, 7.1]
PARAMETERS = [0.755, 1.645, 2.31, 3.29]


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("state", ["ddp", "full_shard", "shard_grad_op"])
def test_2_sgd_with_momentum_on_two_ranks(ranks: Pool, state: str, micro_batches: int) -> None:
    found = ranks(2).run(momentum_step, state, micro_batches)
    for rank, result in enumerate(found):
        mine = slice(2 * rank, 2 * rank + 2) if state != "ddp" else slice(0, 4)
        assert result["gradient"] == pytest.approx([2, 4, 6, 8][mine], rel=1e-12)
        assert result["momentum"] == pytest.approx(MOMENTUM[mine], rel=1e-12)
        assert result["parameters"] == pytest.approx(PARAMETERS[mine], rel=1e-12)


def test_16_only_the_last_micro_batch_synchronises(ranks: Pool) -> None:
    """After the first of two, DDP's ranks have gradients of their own; FSDP's have no shard of any yet."""
    own = [result["first gradient"] for result in ranks(2).run(momentum_step, "ddp", 2)]
    assert own == [[0.25, 0.5, 0.75, 1.0], [0.75, 1.5, 2.25, 3.0]]
    for state in ("full_shard", "shard_grad_op"):
        assert [result["first gradient"] for result in ranks(2).run(momentum_step, state, 2)] == [[], []]


@pytest.mark.parametrize("state", ["ddp", "full_shard", "shard_grad_op"])
def test_16_accumulation_reduces_as_often_as_one_micro_batch(state: str) -> None:
    known = entry("llama-3.1-8b")
    assert known is not None

    def reductions(batches: int) -> list[tuple[str, int, int]]:
        found = priced(known.model(), f"dp=8 {state}", batches=batches).ledger
        return [(r.verb, r.bytes, r.count) for r in found.traffic if r.phase == "backward" and r.verb != "all_gather"]

    assert reductions(1) == reductions(4) != []


def test_16_shard_grad_op_keeps_full_parameters_through_accumulation() -> None:
    known = entry("llama-3.1-8b")
    assert known is not None
    found = priced(known.model(), "dp=8 shard_grad_op", batches=4).ledger.at(AT)
    gathered = [r for r in found.memory if r.object == "gathered parameters" and r.phase == "forward"]
    assert sum(r.bytes for r in gathered) >= 2 * known.model().parameter_count


# 9. 70B on 64 H100 (tp 8, pp 2, dp 4): what the data ranks of one stage's shard of 4.375e9 parameters hold and send


def test_9_four_data_ranks_are_left_and_run_16_micro_batches() -> None:
    layout = Layout.parse("tp=8 pp=2 zero1", 64)
    assert layout.dp == 4 and layout.world == 64
    assert 70_000_000_000 // (layout.tp * layout.pp) == counted("4.375B").parameter_count
    assert priced(counted("4.375B"), "dp=4", batches=16).case.micro_batches == 16


def test_9_weights_and_gradients_are_17_5_gb() -> None:
    found = priced(counted("4.375B"), "dp=4").ledger.at(AT).where(owner="step")
    held = {r.object: r.bytes for r in found.memory if r.phase in ("persistent", "step")}
    assert held["parameters"] + held["gradients"] == 17.5 * GB
    assert (held["master"] + held["optimizer state"]) / 4 == pytest.approx(13.1 * GB, rel=0.005)


def test_9_a_ring_all_reduce_of_8_75_gb_over_4_replicas_sends_13_1_gb() -> None:
    found = priced(counted("4.375B"), "dp=4").ledger
    steady = found.where(owner="ddp", phase="backward", kind="data")
    assert steady.payload_bytes() == 8.75 * GB
    assert steady.link_bytes() == 13.125 * GB


def test_9_a_reduce_scatter_and_a_gather_send_6_6_gb_each() -> None:
    found = priced(counted("4.375B"), "dp=4 full_shard", "pure-bf16").ledger
    sent = {r.verb: r.link_bytes(found.mesh) for r in found.traffic if r.owner == "fsdp"}
    assert sent == {"all_gather": 6.5625 * GB, "reduce_scatter": 6.5625 * GB}


def test_9_the_alternative_shards_8_75e9_parameters_over_8() -> None:
    assert model_state(priced(counted("8.75B"), "dp=8 full_shard").ledger) == 17.5 * GB


# 11. Layouts do not multiply blindly


@pytest.mark.parametrize(
    ("text", "world"),
    [
        ("dp=4 tp=8 pp=2", 64),
        ("dp=4 tp=8 pp=2 cp=3", 192),
        ("dp=8 ep=8", 8),
        ("dp=8 tp=2 ep=8 etp=1", 16),
        ("dp=8 tp=2 sp=on", 16),
        ("dp=8 pp=2 stages=4", 16),
    ],
)
def test_11_the_world_is_dp_tp_pp_cp_and_experts_are_no_factor(text: str, world: int) -> None:
    layout = Layout.parse(text)
    assert layout.world == Mesh.of(layout).world == world
    assert Layout.parse(text, world) == layout


# 12. DeepSeek-V2: 236e9 parameters, 21e9 of them active (arXiv 2405.04434)


def test_12_weights_in_bfloat16_are_472_gb_and_need_six_gpus_of_80_gb() -> None:
    model = counted("236B:21B")
    assert (model.parameter_count, model.active_count) == (236_000_000_000, 21_000_000_000)

    def weights(gpus: int) -> int:
        found = priced(model, f"dp={gpus} full_shard", "pure-bf16").ledger.at(AT).where(object="parameters")
        return sum(r.bytes for r in found.memory)

    assert weights(1) == 472 * GB
    assert min(n for n in range(1, 9) if weights(n) <= 80 * GB) == 6


def test_12_a_token_costs_42_gflop_where_a_dense_model_costs_472() -> None:
    assert flops.forward(counted("236B:21B"), 1, 1).total == 42 * GB
    assert flops.forward(counted("236B"), 1, 1).total == 472 * GB
