"""Frozen parameters: no gradient and no optimizer rows, buckets without them, and training that is one device's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from partita.facts import frozen
from partita.facts.errors import Refused
from partita.facts.layout import Layout
from partita.facts.precision import PRESETS
from partita.facts.work import Training
from partita.plan.account import Account, account
from partita.plan.laws import check
from tests.strategies.proving import Prover, proof
from tests.tiny import ZOO, tiny_model

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def prove(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Prover:
    return Prover(ranks, tmp_path_factory)


def priced(layout: str, *patterns: str, precision: str = "fp32", name: str = "plain") -> Account:
    read = Layout.parse(layout)
    return account(ZOO[name], read, Training(2 * read.dp * read.mb, 8, PRESETS[precision], frozen=patterns))


# Spans


def test_alike_blocks_stay_together() -> None:
    model = tiny_model(layers=126)
    spans = frozen.spans(model, ("embed.*", "blocks.[0-3].*", "blocks.*.attn.q.weight"))
    assert [s.name for s in spans] == ["first", "blocks.0..3", "blocks.4..125", "last"]
    assert all(p.frozen for p in spans[0].parameters + spans[1].parameters)
    assert [p.name for p in spans[2].parameters if p.frozen] == ["blocks.*.attn.q.weight"]
    assert not any(p.frozen for p in spans[3].parameters)
    assert sum(s.count * s.elements for s in spans) == model.parameter_count


def test_nothing_frozen_is_the_model_as_it_is() -> None:
    assert frozen.spans(ZOO["plain"], ()) is ZOO["plain"].spans


@pytest.mark.parametrize(
    ("patterns", "name", "said"),
    [
        (("embd.*",), "plain", ["embd.*", "embed.weight"]),
        (("blocks.7.*",), "plain", ["blocks.7.*", "blocks."]),
        (("head.*",), "tied", ["head.*", "embed.weight"]),
        (("*",), "plain", ["none of the", "freeze fewer"]),
    ],
)
def test_patterns_that_cannot_work_are_refused(patterns: tuple[str, ...], name: str, said: list[str]) -> None:
    with pytest.raises(Refused) as caught:
        priced("dp=2", *patterns, name=name)
    for part in said:
        assert part in str(caught.value)


# Rows


def of(found: Account, thing: str) -> int:
    rows = found.ledger.at({"pp": 0, "dp": 0, "cp": 0, "tp": 0}).memory
    return sum(r.bytes for r in rows if r.object == thing and r.phase in ("persistent", "step") and r.owner == "step")


@pytest.mark.parametrize("layout", ["dp=1", "dp=2", "dp=2 zero1", "dp=2 zero2", "dp=2 full_shard"])
def test_what_is_frozen_has_parameters_and_nothing_else(layout: str) -> None:
    """101 x 40 of the embedding: 4 bytes each, where 16 were."""
    every, less = priced(layout), priced(layout, "embed.*")
    elements = 101 * 40 if layout in ("dp=1", "dp=2") else 51 * 40
    assert of(every, "parameters") == of(less, "parameters")
    if layout in ("dp=1", "dp=2", "dp=2 full_shard"):
        assert of(every, "gradients") - of(less, "gradients") == 4 * elements
        assert of(every, "optimizer state") - of(less, "optimizer state") == 8 * elements
        assert of(every, "optimizer scalars") - of(less, "optimizer scalars") == 4
    assert {g.parameters for g in every.ledger.gradients} - {g.parameters for g in less.ledger.gradients} == (
        set() if layout == "dp=1" else {"embed.weight"}
    )
    assert all(f.holds is not False for f in check(less))


def test_blocks_frozen_from_the_input_on_keep_nothing_for_backward() -> None:
    found = priced("dp=2 full_shard", "embed.*", "blocks.[01].*")
    assert [(u.name, u.backward) for u in found.case.units] == [
        ("first", 0),
        ("blocks.0..1", 0),
        ("blocks.2", 2),
        ("last", 2),
    ]
    kept = [r.unit for r in found.ledger.memory if r.object == "activations" and "per block" in r.why]
    assert set(kept) == {"blocks.2"}
    again = {r.unit for r in found.ledger.traffic if r.verb == "all_gather" and r.phase == "backward"}
    assert again == {"blocks.2"}


# On real ranks

CASES = [
    ("ddp", "plain", 3, ("embed.*", "blocks.0.*"), {}),
    ("ddp bucket_mb=0.02", "tied", 2, ("blocks.1.*", "*.q.weight"), {"optimizer": "sgd"}),
    ("zero1 bucket_mb=0.02", "tied", 2, ("blocks.1.*", "*.q.weight"), {}),
    ("zero2", "plain", 2, ("embed.*", "blocks.[01].*"), {}),
    ("full_shard", "plain", 3, ("embed.*", "blocks.[01].*"), {}),
    ("full_shard", "tied", 2, ("blocks.1.*", "*.q.weight"), {"optimizer": "sgd"}),
    ("full_shard reshard=all wrap=2", "four_layers", 3, ("embed.*", "blocks.[02].*"), {}),
    ("full_shard prefetch=2", "four_layers", 2, ("embed.*", "blocks.[02].*"), {}),
    ("full_shard recompute=full", "plain", 2, ("embed.*", "blocks.0.*"), {}),
    ("shard_grad_op", "plain", 3, ("embed.*", "head.*", "norm.*", "blocks.0.*"), {}),
]


@pytest.mark.parametrize("layout, name, each, patterns, more", CASES, ids=[f"{c[0]} {' '.join(c[3])}" for c in CASES])
def test_two_ranks_train_as_one_device(
    prove: Prover, layout: str, name: str, each: int, patterns: tuple[str, ...], more: dict[str, Any]
) -> None:
    """Rows, bytes, loss, norm, gradients and parameters; one device is frozen in the same way."""
    report = prove(proof(layout, 2, ZOO[name], each=each, frozen=patterns, **more))
    assert report.verdict == "agrees", report.reasons


@pytest.mark.parametrize("layout", ["ddp", "zero1", "full_shard"])
def test_rows_with_a_master(prove: Prover, layout: str) -> None:
    report = prove(proof(layout, 2, ZOO["plain"], precision="bf16-master", frozen=("embed.*", "blocks.1.*")))
    assert report.verdict == "agrees", report.reasons


def test_frozen_values_stay_and_the_norm_is_of_the_rest() -> None:
    """One device: the norm counts only what trains, and what is frozen keeps its bits."""
    from partita.model.init import fill
    from partita.train.build import build
    from partita.train.data import SyntheticDataset, micro_batches
    from partita.train.step import train_step

    model = ZOO["two_layers"]
    work = Training(2, 8, PRESETS["fp64"], lr=1e-2, clip=0.5, frozen=("embed.*", "blocks.1.*"))
    case = account(model, Layout(mb=2), work).case
    step = build(case, None, lambda named: fill(named, model, 0))
    before = {n: p.detach().clone() for n, p in step.named()}
    seen: list[float] = []

    class Watch:
        def phase(self, name: str) -> Any:
            from contextlib import nullcontext

            if name == "step":
                trained = [p.grad for _, p in step.named() if p.grad is not None]
                seen.append(float(torch.stack([g.square().sum() for g in trained]).sum().sqrt()))
            return nullcontext()

    result = train_step(step, micro_batches(SyntheticDataset(model.vocab, 8), 0, 2, 2), case, None, [Watch()])
    assert result.norm is not None and float(result.norm) == pytest.approx(seen[0], rel=1e-12)
    for name, p in step.named():
        held = name.startswith(("embed.", "blocks.1."))
        assert torch.equal(p, before[name]) == held and p.requires_grad != held


def saved(rank: int, world: int, layout: str, run: str) -> tuple[list[str], float]:
    """Keys of optimizer state in a checkpoint, and how far a second step that opens it is from the first."""
    from partita.model.init import fill
    from partita.strategies.groups import Groups
    from partita.train import checkpoint
    from partita.train.build import build
    from partita.train.data import SyntheticDataset, micro_batches
    from partita.train.step import train_step

    model = ZOO["two_layers"]
    work = Training(4, 8, PRESETS["fp64"], frozen=("embed.*", "blocks.0.*"))
    case = account(model, Layout.parse(layout, world), work).case
    groups, data = Groups(case.mesh), SyntheticDataset(model.vocab, 8)
    first, second = (build(case, groups, lambda named, seed=s: fill(named, model, seed)) for s in (0, 1))
    train_step(first, micro_batches(data, 0, 4, 1, rank, world), case, groups)
    first.optimizer.zero_grad()
    checkpoint.save(first, checkpoint.Meta(1, {"layout": layout}), Path(run), 1)
    checkpoint.load(second, checkpoint.latest(Path(run)), {"layout": layout})
    losses = [
        float(train_step(s, micro_batches(data, 1, 4, 1, rank, world), case, groups).loss) for s in (first, second)
    ]
    keys = [k for k in checkpoint.state_of(first) if k.startswith("optimizer.")]
    return keys, abs(losses[0] - losses[1])


@pytest.mark.parametrize("layout", ["ddp", "zero1", "full_shard"])
def test_a_checkpoint_has_state_of_what_trains(ranks: Any, tmp_path: Path, layout: str) -> None:
    for keys, off in ranks(2).run(saved, layout, str(tmp_path)):
        assert off < 1e-12
        assert keys and not [k for k in keys if ".embed." in k or ".blocks.0." in k]
