"""Recomputation: refusals, what blocks keep (against the storages that are really alive), and unchanged numbers."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from partita.facts.case import Case
from partita.facts.errors import Refused
from partita.facts.layout import Layout
from partita.facts.precision import PRESETS
from partita.facts.work import Training
from partita.model.init import fill
from partita.plan.account import account
from partita.plan.peak import highest
from partita.strategies.step.activations import kept_and_again
from partita.train.build import build
from partita.train.data import Batch, SyntheticDataset, micro_batches
from partita.train.step import train_step
from tests.tiny import tiny_model

MODEL = tiny_model(layers=3)
NORMED = tiny_model(layers=3, qk_norm=True)
WORDS = ("none", "full", "selective", "ops", "full:0", "ops:1-2", "selective:2")


def case_of(model: Any, word: str, precision: str = "fp64", state: str = "ddp") -> Case:
    work = Training(2, 16, PRESETS[precision])
    return account(model, Layout.parse(f"mb=2 recompute={word}"), work).case


def batch() -> Batch:
    return micro_batches(SyntheticDataset(101, 16), 0, 2, 2)[0]


class Storages(TorchDispatchMode):
    """Every storage that an operation made and that is still there, those of ``parameters`` aside."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.known = {p.untyped_storage()._cdata for p in parameters}
        self.live: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.untyped_storage()._cdata not in self.known:
                self.live[t.untyped_storage()._cdata] = t.untyped_storage()
        return out

    def bytes(self) -> int:
        return sum(s.nbytes() for s in self.live.values())


def kept_per_block(case: Case) -> list[int]:
    """Bytes by which live storages grow over each block's forward."""
    step = build(case, None, lambda named: fill(named, case.model, 0))
    b, storages, seen = batch(), Storages(step.module.parameters()), []
    for module in (*step.module.blocks, step.module.norm):  # type: ignore[misc, union-attr]
        module.register_forward_pre_hook(lambda *_: seen.append(storages.bytes()))
    with storages:
        step.module(b.ids, b.positions, step.calls(b))
    return [after - before for before, after in itertools.pairwise(seen)]


@pytest.mark.parametrize("precision", ["fp64", "fp32", "pure-bf16"])
@pytest.mark.parametrize("model", [MODEL, NORMED], ids=["plain", "qk_norm"])
@pytest.mark.parametrize("word", WORDS)
def test_blocks_keep_what_the_inventory_says(model: Any, word: str, precision: str) -> None:
    case = case_of(model, word, precision)
    want = [kept_and_again(case, u)[0] * case.tokens for u in case.units if u.is_blocks for _ in range(u.count)]
    assert kept_per_block(case) == want


@pytest.mark.parametrize("word", WORDS[1:])
def test_numbers_do_not_change(word: str) -> None:
    results = []
    for recompute in ("none", word):
        case = case_of(MODEL, recompute)
        step = build(case, None, lambda named: fill(named, MODEL, 0))
        result = train_step(step, [batch()], case, None)
        results.append((result.loss, result.norm, [p.detach().clone() for p in step.module.parameters()]))
    (loss, norm, before), (again, norm_again, after) = results
    assert torch.equal(loss, again)
    assert torch.equal(norm, norm_again)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_units_are_cut_where_the_policy_ends() -> None:
    units = [(u.name, u.replay, u.saving is not None) for u in case_of(MODEL, "full:1").units if u.is_blocks]
    assert units == [("blocks.0", 0, False), ("blocks.1", 1, True), ("blocks.2", 0, False)]


def test_full_recomputation_lowers_the_peak_and_keeps_the_traffic() -> None:
    work = Training(4, 64, PRESETS["fp32"])
    plain = account(MODEL, Layout.parse("full_shard", 2), work)
    full = account(MODEL, Layout.parse("full_shard recompute=full", 2), work)
    origin = plain.case.mesh.coordinate(0)
    assert highest(full.ledger, origin).bytes < highest(plain.ledger, origin).bytes
    key = lambda a: sorted((t.key, t.count) for t in a.ledger.traffic)  # noqa: E731
    assert key(full) == key(plain)  # gathers are there for backward anyway: they do not repeat


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("all", "recompute=all is not known"),
        ("full:", "write for example full:0-15,20"),
        ("full:a", "write for example full:0-15,20"),
        ("full:0-7", "names block 7, and"),
        ("full:1-0", "backwards"),
        ("full:0,0", "twice"),
    ],
)
def test_refusals_name_what_works(word: str, says: str) -> None:
    with pytest.raises(Refused, match=r"^layout '.*recompute=") as refused:
        account(MODEL, Layout.parse(f"recompute={word}"), Training(2, 16))
    assert says in str(refused.value)


def test_a_bare_count_has_no_blocks_to_replay() -> None:
    from partita.facts.find import find_model

    with pytest.raises(Refused, match=r"give its config\.json"):
        account(find_model("7.5B").model, Layout.parse("recompute=full"), Training(2, 16))
