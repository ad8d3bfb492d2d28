"""The decoder, written once for one device.

It knows no strategy.  A strategy changes it from outside: it replaces parameters and wraps modules, and
it gives other ``Calls``.  The names of the parameters are those of ``Model.parameters``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partita.facts.model import Model, UnknownModel
from partita.model import rope
from partita.model.attention import causal


@dataclass(frozen=True)
class Calls:
    """What a strategy may replace in a forward pass.

    ``attend(layer, q, k, v)``: see ``partita.model.attention``.  ``length``: the length of the sequence
    where this process holds only some of its positions (see ``rope.tables``).
    """

    attend: Callable[[int, Tensor, Tensor, Tensor], Tensor]
    length: int | None = None


def plain(model: Model, documents: Tensor | None = None) -> Calls:
    """The calls of a single device: causal attention with the model's window, inside ``documents`` [..., T]."""
    return Calls(causal(documents, model.sliding_window))


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dim (arXiv 1910.07467); bfloat16 is computed in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention; the number of heads is read from the projections, which may be cut."""

    def __init__(self, model: Model, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, model.head_dim
        self.q = nn.Linear(model.hidden, model.q_width, bias=model.qkv_bias)
        self.k = nn.Linear(model.hidden, model.kv_width, bias=model.qkv_bias)
        self.v = nn.Linear(model.hidden, model.kv_width, bias=model.qkv_bias)
        self.q_norm = RMSNorm(model.head_dim, model.eps) if model.qk_norm else None
        self.k_norm = RMSNorm(model.head_dim, model.eps) if model.qk_norm else None
        self.o = nn.Linear(model.q_width, model.hidden, bias=model.o_bias)

    def forward(self, x: Tensor, table: rope.Table, calls: Calls) -> Tensor:
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.q, self.k, self.v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        out = calls.attend(self.layer, rope.rotate(q, table), rope.rotate(k, table), v)
        return self.o(out.flatten(-2))


class MLP(nn.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.gate = nn.Linear(model.hidden, model.ffn, bias=model.mlp_bias)
        self.up = nn.Linear(model.hidden, model.ffn, bias=model.mlp_bias)
        self.down = nn.Linear(model.ffn, model.hidden, bias=model.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Norm, attention, norm, MLP, each pair with its residual."""

    def __init__(self, model: Model, layer: int) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(model.hidden, model.eps)
        self.attn = Attention(model, layer)
        self.mlp_norm = RMSNorm(model.hidden, model.eps)
        self.mlp = MLP(model)

    def forward(self, x: Tensor, table: rope.Table, calls: Calls) -> Tensor:
        """``x`` [..., T, hidden] -> the same shape; ``table`` from ``rope.tables``."""
        x = x + self.attn(self.attn_norm(x), table, calls)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """A decoder language model: ``embed``, ``blocks``, ``norm``, ``head`` (one storage with ``embed`` if tied).

    Values after construction are torch's defaults; ``init.fill`` or ``hf.load`` gives the real ones.
    Raises UnknownModel for families that the decoder does not run.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        refuse(model)
        self.model = model
        self.embed = nn.Embedding(model.vocab, model.hidden)
        self.blocks = nn.ModuleList(Block(model, i) for i in range(model.layers))
        self.norm = RMSNorm(model.hidden, model.eps)
        self.head = nn.Linear(model.hidden, model.vocab, bias=False)
        if model.tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, positions: Tensor, calls: Calls, rows: Tensor | None = None) -> Tensor:
        """Logits of ``ids``.

        Args:
            ids: [..., T] int64; leading dims are free ([B, T], or [T] for a packed sequence).
            positions: [T] or the shape of ``ids``.
            calls: what a strategy replaced; ``plain(model)`` for one device.
            rows: int64 [R]; the head runs on these rows of the flattened hidden states alone.

        Returns:
            [..., T, vocab], or [R, vocab] with ``rows``.
        """
        x = self.hidden(ids, positions, calls)
        return self.head(x if rows is None else x.flatten(0, -2).index_select(0, rows))

    def hidden(self, ids: Tensor, positions: Tensor, calls: Calls) -> Tensor:
        """Hidden states after the final norm, [..., T, hidden]."""
        self._check_window(ids.shape[-1], calls)
        x = self.embed(ids)
        table = rope.tables(self.model, positions, x.dtype, calls.length)
        for block in self.blocks:
            x = block(x, table, calls)
        return self.norm(x)

    def _check_window(self, length: int, calls: Calls) -> None:
        window = self.model.sliding_window
        if window is None or max(length, calls.length or 0) <= window:
            return
        given = getattr(calls.attend, "window", None)
        if given != window:
            raise ValueError(
                f"{self.model.name} attends over a window of {window} positions and the sequence has {length}, but the "
                f"attention given honours {'no window' if given is None else f'a window of {given}'}; "
                "build it with causal(documents, window=model.sliding_window)"
            )


def refuse(model: Model) -> None:
    """Raise UnknownModel, in one sentence, for a model that this decoder cannot run."""
    if model.bare:
        raise UnknownModel(
            f"{model.name} is known by its parameter count alone and cannot be run; give its config.json or folder"
        )
    wanted = (("norm", "rmsnorm"), ("mlp", "swiglu"), ("positions", "rope"))
    other = [f"{key}={getattr(model, key)}" for key, value in wanted if getattr(model, key) != value]
    other += [key for key in ("norm_bias", "embed_norm") if getattr(model, key)]
    if other or not model.runs:
        clash = f" ({', '.join(other)})" if other else ""
        raise UnknownModel(
            f"{model.name} is of family {model.family}{clash}, which can be "
            "planned but not run; the decoder runs RMSNorm, SwiGLU and rotary positions (Llama, Mistral, Qwen2, Qwen3)"
        )
    if model.head_dim % 2 or model.heads % model.kv_heads:
        raise UnknownModel(
            f"{model.name} has head_dim {model.head_dim}, {model.heads} heads and {model.kv_heads} KV heads; "
            "head_dim must be even and the heads a multiple of the KV heads"
        )
