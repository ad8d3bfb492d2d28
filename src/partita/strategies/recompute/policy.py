"""The policies of recomputation, as words of a layout and as names of tensors that are kept."""

from __future__ import annotations

from dataclasses import dataclass

from partita.facts.case import Saving
from partita.facts.layout import Layout
from partita.facts.model import Model

# Tensors by the names that the inventory of saved tensors gives them.
BLOCK_INPUT = "block input"
ATTENTION = ("attention output", "log-sum-exp")
# What a block's matrix products make, in the order in which they run; q, k and the outputs into the stream are not
# what backward needs (they are rotated, or added), so a kept product of theirs is a tensor more.
PRODUCTS = ("q product", "k product", "v", "o product", "gate", "up", "down product")
POLICIES = {
    "full": "keeps a block's input",
    "selective": "makes the attention core again",
    "ops": "keeps every second matrix product, attention outputs and collectives",
}


@dataclass(frozen=True)
class Policy:
    """A policy and the blocks it is for; ``blocks`` None is all of them."""

    name: str
    blocks: tuple[tuple[int, int], ...] | None

    def runs(self, layers: int) -> list[tuple[int, int, bool]]:
        """All blocks as runs (first, end, whether the policy is for them), in order."""
        chosen = [(0, layers)] if self.blocks is None else sorted(self.blocks)
        out, at = [], 0
        for first, end in chosen:
            if first > at:
                out.append((at, first, False))
            out.append((first, end, True))
            at = end
        return [*out, (at, layers, False)] if at < layers else out

    def covers(self, block: int) -> bool:
        return self.blocks is None or any(first <= block < end for first, end in self.blocks)


def read(layout: Layout) -> Policy | str:
    """The policy that a layout names, or the sentence that refuses it."""
    name, colon, listed = layout.recompute.partition(":")
    if name not in POLICIES:
        works = ", ".join(f"{n} ({what})" for n, what in POLICIES.items())
        return f"recompute={layout.recompute} is not known; what works: none, {works}"
    if not colon:
        return Policy(name, None)
    blocks = []
    for word in listed.split(","):
        first, dash, last = word.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            return f"recompute={layout.recompute} has the block list {listed!r}; write for example {name}:0-15,20"
        blocks.append((int(first), int(last if dash else first) + 1))
    blocks.sort()
    for (a, b), (c, d) in zip([(0, 0), *blocks], blocks, strict=False):
        if c < b or d <= c:
            return f"recompute={layout.recompute} names blocks twice or backwards near {a}-{b - 1} and {c}-{d - 1}"
    return Policy(name, tuple(blocks))


def saving(policy: Policy, model: Model) -> Saving:
    """What a block under the policy keeps, and makes again."""
    if policy.name == "selective":
        return Saving(dropped=("log-sum-exp",), again=ATTENTION)
    if policy.name == "full":
        return Saving(only=(BLOCK_INPUT,))
    products = [p for p in PRODUCTS if p != "gate" or model.mlp == "swiglu"]
    return Saving(only=(BLOCK_INPUT, *ATTENTION, *products[::2]))
