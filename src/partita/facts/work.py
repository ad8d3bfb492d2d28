"""Work: what the user wants done with a model."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from partita.facts.errors import BadInput
from partita.facts.precision import PRESETS, Precision

OPTIMIZERS = {"adamw": 2, "sgd": 1}  # tensors of optimizer state per parameter


@dataclass(frozen=True)
class Training:
    """One training step's terms, and how many steps.

    ``global_batch`` in sequences, ``sequence`` in tokens, ``clip``: the largest global gradient norm (None: the norm is
    neither measured nor clipped).  ``momentum`` is SGD's; without it SGD keeps no state.  ``weight_decay`` applies to
    matrices alone.  ``packed``: several documents may share a sequence, so that attention carries a mask.
    ``frozen``: patterns of global names (``embed.*``) that get no gradient.
    """

    global_batch: int
    sequence: int
    precision: Precision = field(default_factory=lambda: PRESETS["bf16-master"])
    optimizer: str = "adamw"
    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    momentum: float = 0.9
    clip: float | None = 1.0
    tokens: int | None = None
    packed: bool = False
    frozen: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "frozen", tuple(self.frozen))  # a list where it comes from JSON
        for name in ("global_batch", "sequence"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name.replace('_', ' ')} is {getattr(self, name)}, and must be at least 1")
        if self.optimizer not in OPTIMIZERS:
            raise BadInput(f"optimizer {self.optimizer!r} is not known; what works: {', '.join(OPTIMIZERS)}")
        for name in ("lr", "eps", "weight_decay", "momentum"):
            if not 0 <= getattr(self, name) < math.inf:
                raise BadInput(f"{name.replace('_', ' ')} is {getattr(self, name)}, and must be finite and at least 0")
        if self.clip is not None and not 0 < self.clip <= math.inf:
            raise BadInput(f"clip is {self.clip}, and must be above 0; leave the norm unmeasured with no clip at all")
        if self.tokens is not None and self.tokens < 1:
            raise BadInput(f"tokens is {self.tokens}, and the token budget must be at least 1")

    @property
    def moments(self) -> int:
        """Tensors of optimizer state per parameter."""
        return 0 if self.optimizer == "sgd" and not self.momentum else OPTIMIZERS[self.optimizer]

    @property
    def scalars(self) -> int:
        """Scalars of optimizer state per parameter: AdamW's step counter."""
        return 1 if self.optimizer == "adamw" else 0
