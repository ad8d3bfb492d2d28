"""Model FLOPs utilisation (PaLM, arXiv 2204.02311): what the model needs over what the devices could do."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from partita.facts.flops import model_flops_per_step
from partita.facts.model import Model


@dataclass(frozen=True)
class Utilisation:
    """MFU of steps over ``tokens`` positions (the global batch times ``sequence``) on ``devices`` devices.

    Every position counts as work, whether or not it counts in the loss, and attention is counted over the whole
    sequence, packed documents or not.  ``peak_flops`` is one device's dense FLOP/s in the precision of the products;
    None where it is not known, and then there is no MFU.  ``convention`` says how attention counts; see
    ``partita.facts.flops``.
    """

    model: Model
    tokens: int
    sequence: int
    devices: int
    peak_flops: float | None
    convention: str = "full"

    @cached_property
    def flops_per_step(self) -> int:
        """Forward and backward FLOPs of one step, recomputation not counted."""
        return model_flops_per_step(self.model, self.tokens, self.sequence, self.convention)

    def of(self, step_s: float) -> float | None:
        """MFU (0 to 1) of a step that took ``step_s`` seconds; None where the peak is not known."""
        if self.peak_flops is None or step_s <= 0:
            return None
        return self.flops_per_step / (step_s * self.devices * self.peak_flops)
