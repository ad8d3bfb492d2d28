"""Attention of one device through ``scaled_dot_product_attention``.

An attention callable takes ``(layer, q, k, v)`` with q [..., T, H, D] and k, v [..., T, Hkv, D] and
returns [..., T, H, D].  It declares the sliding window that it honours in an attribute ``window``
(the decoder refuses a callable that would silently attend beyond the model's window).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def causal(documents: Tensor | None = None, window: int | None = None) -> Causal:
    """Causal attention of a whole sequence, inside its documents and its window.

    Args:
        documents: [..., T] integers; a position sees earlier positions of the same document alone
            (block-diagonal).  Padding may have an id of its own.  None: one document.
        window: a position sees itself and the ``window`` - 1 positions before it (Mistral's
            ``sliding_window``).  None: everything before it.
    """
    return Causal(documents, window)


class Causal:
    """See ``causal``.  The mask is built at the first layer and serves all layers of the step."""

    def __init__(self, documents: Tensor | None, window: int | None) -> None:
        self.documents, self.window = documents, window
        self._mask: Tensor | None = None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        lead = q.shape[:-3]
        # The fused kernels want [B, H, T, D]; a packed sequence has no B, other leading dims are one.
        q, k, v = (t.reshape(-1, *t.shape[-3:]).transpose(1, 2) for t in (q, k, v))
        mask = self.mask(q)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.transpose(1, 2).reshape(*lead, *out.transpose(1, 2).shape[1:])

    def mask(self, q: Tensor) -> Tensor | None:
        """What is added to the scores [B or 1, 1, T, T] (0 or -inf), or None where plain causal is enough."""
        length = q.shape[-2]
        if self.documents is None and (self.window is None or self.window >= length):
            return None
        if self._mask is None or self._mask.dtype != q.dtype or self._mask.shape[-1] != length:
            # Additive and in q's dtype: a boolean mask would be converted anew in every layer.
            hidden = self._seen(length, q.device).logical_not_()
            self._mask = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device)
            self._mask.masked_fill_(hidden, float("-inf"))
        return self._mask

    def _seen(self, length: int, device: torch.device) -> Tensor:
        step = torch.arange(length, device=device)
        back = step[:, None] - step
        seen = (back >= 0)[None, None]
        if self.window is not None:
            seen = seen & (back < self.window)
        if self.documents is not None:
            if self.documents.shape[-1] != length:
                raise ValueError(
                    f"documents name {self.documents.shape[-1]} positions, but the sequence has {length}; "
                    "give one document id per position"
                )
            ids = self.documents.reshape(-1, length)[:, None]
            seen = seen & (ids[..., :, None] == ids[..., None, :])
        return seen
