"""Layout: how one model is divided over many devices, as ``key=value`` words.

Words stand in any order; a bare state name (``full_shard``) means ``state=``.  Printing is canonical and
parses back.  Whether a layout suits a model is for the strategies' rooms to say, not for this file.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, fields, replace

from partita.facts.errors import BadInput

STATES = ("ddp", "zero1", "zero2", "full_shard", "shard_grad_op")
DEFAULT_BUCKET_MB = 25.0
DEFAULT_DELAY = 40  # steps: early gradients change fast, and the delayed update waits for "a few dozen" of them
LEAST_BUCKET_MB = 1e-6  # about one byte

CHOICES = {
    "state": STATES,
    "cp_method": ("ring", "ulysses", "all_gather"),
    "zero_sync": ("reduce_scatter", "all_reduce"),
    "offload": ("none", "parameters", "optimizer", "optimizer_delayed"),
}
FREE_TEXT = ("schedule", "recompute", "reshard")


class BadLayout(BadInput):
    """A layout that cannot be read, or does not fit the ranks."""


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism and the policies that go with them.

    ``dp`` data, ``tp`` tensor, ``sp`` sequence parallel over the tp ranks, ``cp`` context, ``pp`` pipeline (with
    ``schedule`` and ``stages`` per rank), ``ep`` expert, ``etp`` tensor degree inside an expert (0: as tp).
    ``state``: how model state lies over the dp x cp ranks; ``shard``: over how many of them (0: all).
    ``bucket_mb``: DDP's and ZeRO's bucket size in MiB; 25 is torch's unset default, whose first bucket is 1 MiB.
    ``reshard``: what full_shard drops after forward (``default``, ``all``, or a number of ranks that keep a copy);
    ``wrap``: blocks in one unit; ``prefetch``: units whose parameters are gathered ahead.
    ``mb``: sequences per micro-batch.
    ``offload``: what lies on the host; ``delay_after``: steps before the delayed update begins.
    """

    dp: int = 1
    tp: int = 1
    sp: bool = False
    cp: int = 1
    cp_method: str = "ring"
    pp: int = 1
    schedule: str = "1f1b"
    stages: int = 1
    ep: int = 1
    etp: int = 0
    state: str = "ddp"
    shard: int = 0
    reshard: str = "default"
    wrap: int = 1
    prefetch: int = 1
    zero_sync: str = "reduce_scatter"
    bucket_mb: float = DEFAULT_BUCKET_MB
    mb: int = 1
    recompute: str = "none"
    offload: str = "none"
    delay_after: int = DEFAULT_DELAY

    @property
    def world(self) -> int:
        """Ranks; ep borrows ranks and is no factor."""
        return self.dp * self.tp * self.cp * self.pp

    @property
    def one_device(self) -> bool:
        return self.world == 1

    @staticmethod
    def parse(text: str, devices: int | None = None) -> Layout:
        """Read a layout; ``devices`` gives ``dp`` where it is omitted, and must equal the product of the degrees.

        Raises ``BadLayout``.
        """
        words: dict[str, str] = {}
        for word in text.split():
            key, equals, value = word.partition("=")
            if not equals and key in STATES:
                key, value = "state", key
            if key in words:
                raise BadLayout(f"layout {text!r} says {key} twice ({words[key]} and {value}); keep one of them")
            words[key] = value
        values = {key: _value(text, key, value) for key, value in words.items()}
        layout = replace(Layout(), **values)  # type: ignore[arg-type]
        if "sp" not in values:
            layout = replace(layout, sp=layout.tp > 1)
        if layout.sp and layout.tp == 1:
            layout = replace(layout, sp=False)
        return layout if devices is None else _fit(text, layout, "dp" in values, devices)

    def __str__(self) -> str:
        default, out = Layout(), []
        for f in fields(self):
            v = getattr(self, f.name)
            if f.name == "sp":
                out += ["sp=" + ("on" if v else "off")] if self.tp > 1 else []
            elif f.name == "state":
                out += [v]
            elif f.name == "dp" or v != getattr(default, f.name):
                out += [f"{f.name}={repr(v).removesuffix('.0')}"] if isinstance(v, float) else [f"{f.name}={v}"]
        return " ".join(out)


KEYS = tuple(f.name for f in fields(Layout))


def _value(text: str, key: str, value: str) -> object:
    """The typed value of one word."""
    if key not in KEYS:
        raise BadLayout(f"layout {text!r} has an unknown word {key!r}; {_hint(key)}")
    if not value:
        raise BadLayout(f"layout {text!r} gives {key} no value; write {key}=VALUE")
    if key == "sp":
        if value not in ("on", "off"):
            raise BadLayout(f"layout {text!r} has sp={value}; what works: sp=on or sp=off")
        return value == "on"
    if key in CHOICES and value not in CHOICES[key]:
        raise BadLayout(f"layout {text!r} has {key}={value}; what works: {', '.join(CHOICES[key])}")
    if key in CHOICES or key in FREE_TEXT:
        return value
    return _number(text, key, value)


def _hint(key: str) -> str:
    """What may have been meant by an unknown word."""
    if key in STATES:
        return f"a state stands alone: {key}, or state={key}"
    near = difflib.get_close_matches(key, [*KEYS, *STATES], 1)
    return f"did you mean {near[0]!r}?" if near else f"words are {', '.join(KEYS)}, or a state: {', '.join(STATES)}"


def _number(text: str, key: str, value: str) -> int | float:
    """A degree, a count or a size, in plain digits."""
    kind, example = ("number", "25") if key == "bucket_mb" else ("whole number", "2")
    try:
        if "_" in value or not value.isascii():
            raise ValueError(value)
        number = float(value) if key == "bucket_mb" else int(value)
    except ValueError:
        raise BadLayout(
            f"layout {text!r} has {key}={value}, which is not a {kind}; write it as in {key}={example}"
        ) from None
    if key == "bucket_mb":
        if not LEAST_BUCKET_MB <= number < math.inf:
            raise BadLayout(
                f"layout {text!r} has {key}={value}, and {key} must be at least {LEAST_BUCKET_MB:f}, and finite"
            )
        return number
    least = 0 if key in ("shard", "etp", "delay_after") else 1
    if number < least:
        raise BadLayout(f"layout {text!r} has {key}={value}, and {key} must be at least {least}")
    return number


def _fit(text: str, layout: Layout, dp_given: bool, devices: int) -> Layout:
    """``dp`` from what is left of the devices, or a refusal that names a layout that fits."""
    rest = layout.tp * layout.cp * layout.pp
    if devices < 1:
        raise BadLayout(f"layout {text!r} is asked to fit {devices} ranks; the number of ranks must be at least 1")
    if not dp_given:
        if devices % rest:
            raise BadLayout(
                f"layout {text!r} needs a multiple of {rest} ranks (tp x cp x pp), there are {devices};"
                f" the nearest number of ranks that works is {max(rest, devices // rest * rest)}"
            )
        layout = replace(layout, dp=devices // rest)
    if layout.world != devices:
        works = f"dp={devices // rest} fits {devices} ranks" if devices % rest == 0 else f"{layout.world} ranks fit it"
        raise BadLayout(f"layout {text!r} needs {layout.world} ranks, there are {devices}; {works}")
    return layout
