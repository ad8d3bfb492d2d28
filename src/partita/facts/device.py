"""Devices and links: their figures, each with its source, and the catalog that ships with the package.

Rates are per second and in one direction, memory is in int bytes, FLOP/s are dense (no sparsity).  A figure that
nobody published or measured is ``None`` or absent; it is never made up.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from partita.facts.errors import BadInput

CATALOG = Path(__file__).parent / "catalog"
PRECISIONS = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp4")
LINK_KINDS = ("nvlink", "xgmi", "pcie", "infiniband", "ethernet", "memory")
DEVICE_KINDS = ("gpu", "cpu")
WORDS = ("base", "name", "title", "kind", "source", "note")
T = TypeVar("T")


class UnknownCluster(BadInput):
    """A cluster that cannot be described; the message is one sentence for the user."""


@dataclass(frozen=True)
class Frozen(Mapping[str, T], Generic[T]):
    """A mapping that cannot change and can be hashed."""

    pairs: tuple[tuple[str, T], ...] = ()

    @staticmethod
    def of(mapping: Mapping[str, T]) -> Frozen[T]:
        return Frozen(tuple(mapping.items()))

    def __getitem__(self, key: str) -> T:
        for k, v in self.pairs:
            if k == key:
                return v
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        return (k for k, _ in self.pairs)

    def __len__(self) -> int:
        return len(self.pairs)


@dataclass(frozen=True)
class Link:
    """A kind of link.  ``bytes_per_s`` is what one port sends in one direction.

    Inside a node a port is everything that leaves one device; between nodes it is one NIC.  ``pair_bytes_per_s``
    is set where each pair of devices has a link of its own (no switch): a small group then reaches only the links
    between its members.  ``latency_s`` is what one hop adds to a small message.  ``sustained_bytes_per_s`` is a
    measured ceiling (bus bandwidth of a large ring collective).  ``sources`` says where each figure is from.
    """

    name: str
    kind: str
    title: str = ""
    bytes_per_s: float | None = None
    latency_s: float | None = None
    sustained_bytes_per_s: float | None = None
    pair_bytes_per_s: float | None = None
    sources: Frozen[str] = field(default_factory=Frozen)

    def rate(self, size: int) -> float | None:
        """Bytes per second that one port sends within a group of ``size`` ports."""
        if self.bytes_per_s is None or self.pair_bytes_per_s is None:
            return self.bytes_per_s
        return min(self.bytes_per_s, max(1, size - 1) * self.pair_bytes_per_s)

    def describe(self) -> str:
        rate = "rate not measured" if self.bytes_per_s is None else f"{self.bytes_per_s / 1e9:g} GB/s"
        return f"{self.title or self.name} ({rate})"


@dataclass(frozen=True)
class Device:
    """One accelerator, or one rank's share of a CPU.

    ``memory_bytes`` is what a process can see (the driver's total before any context); ``nominal_memory_bytes``
    is the capacity that the datasheet prints.  ``peak_flops`` and ``sustained_flops`` (the best measured matrix
    product) map a precision to FLOP/s.  ``compute_units`` counts SMs, compute units, or cores.
    ``sources`` says where each figure is from (``peak_flops.bf16``), ``note`` what is to be known beside the figures.
    """

    name: str
    memory_bytes: int
    title: str = ""
    kind: str = "gpu"
    nominal_memory_bytes: int | None = None
    memory_bytes_per_s: float | None = None
    sustained_memory_bytes_per_s: float | None = None
    compute_units: int | None = None
    peak_flops: Frozen[float] = field(default_factory=Frozen)
    sustained_flops: Frozen[float] = field(default_factory=Frozen)
    host_link: Link | None = None
    note: str = ""
    sources: Frozen[str] = field(default_factory=Frozen)

    def peak(self, precision: str) -> float:
        """Dense FLOP/s in ``precision``; raises ``UnknownCluster`` where no figure is known."""
        if precision in self.peak_flops:
            return self.peak_flops[precision]
        if precision not in PRECISIONS:
            raise UnknownCluster(f"{precision!r} is not a precision; the precisions are {', '.join(PRECISIONS)}.")
        if not self.peak_flops:
            raise UnknownCluster(
                f"The rates of {self.title or self.name} are not measured; `partita calibrate` measures them."
            )
        raise UnknownCluster(
            f"No {precision} rate is known for {self.title or self.name}; known are {', '.join(self.peak_flops)}."
        )


DEVICE_FIGURES: dict[str, type] = {
    "memory_bytes": int,
    "nominal_memory_bytes": int,
    "memory_bytes_per_s": float,
    "sustained_memory_bytes_per_s": float,
    "compute_units": int,
}
LINK_FIGURES: dict[str, type] = dict.fromkeys(
    ("bytes_per_s", "latency_s", "sustained_bytes_per_s", "pair_bytes_per_s"), float
)
NODE_FIGURES: dict[str, type] = {"devices": int, "nics": int, "host_memory_bytes": int}
FLOPS_FIGURES: dict[str, type] = dict.fromkeys(PRECISIONS, float)


@dataclass(frozen=True)
class Figure:
    """A number and where it is from."""

    value: Any
    source: str


def near(word: str, known: Iterable[str]) -> str:
    """`` Did you mean ...?`` or nothing, to be put behind an error's sentence."""
    import difflib

    close = difflib.get_close_matches(word.lower(), sorted(known), n=3, cutoff=0.6)
    return f" (did you mean {' or '.join(close)}?)" if close else ""


def check_keys(table: object, known: Iterable[str], where: str) -> None:
    """Refuse what is no table, a key that nobody reads (a misspelt figure must not be ignored), words that are none."""
    if not isinstance(table, Mapping):
        raise UnknownCluster(f"{where} must be a table, not {table!r}.")
    known = tuple(known)
    for key, value in table.items():
        if key in WORDS and not isinstance(value, str):
            raise UnknownCluster(f"{where}.{key} must be a text, not {value!r}.")
        if key not in known:
            raise UnknownCluster(f"{where} has an unknown key {key!r}{near(key, known)}; known: {', '.join(known)}.")


def number(raw: object, kind: type, where: str) -> Any:
    """``raw`` as a positive finite ``kind``; raises ``UnknownCluster``."""
    fine = isinstance(raw, int | float) and not isinstance(raw, bool) and math.isfinite(raw) and raw > 0
    if not fine or (kind is int and raw != int(raw)):  # type: ignore[call-overload]
        wanted = "a positive whole number" if kind is int else "a positive number"
        raise UnknownCluster(f"{where} must be {wanted}, not {raw!r}.")
    return kind(raw)


def read_figures(
    table: Mapping[str, Any], kinds: Mapping[str, type], cite: Callable[[str], str], where: str
) -> dict[str, Figure]:
    """The figures of a table: ``{value, source[, note]}``, or plain numbers with the source of the table."""
    out = {}
    for name, kind in kinds.items():
        if name not in table:
            continue
        raw = table[name]
        entry = raw if isinstance(raw, Mapping) else {"value": raw}
        check_keys(entry, ("value", "source", "note"), f"{where}.{name}")
        source = cite(str(entry.get("source", table.get("source", ""))))
        note = f" ({entry['note']})" if entry.get("note") else ""
        out[name] = Figure(number(entry.get("value"), kind, f"{where}.{name}"), source + note)
    return out


def write_figures(values: Mapping[str, Any], sources: Mapping[str, str], prefix: str = "") -> dict[str, Any]:
    """The inverse of ``read_figures``."""
    return {
        name: {"value": value, "source": sources[prefix + name]} if sources.get(prefix + name) else value
        for name, value in values.items()
        if value is not None
    }


@dataclass(frozen=True)
class Node:
    """The node a device usually stands in."""

    link: str
    nic: str
    figures: dict[str, Figure]


@dataclass(frozen=True)
class Catalog:
    """Named devices and links.  ``cite`` turns the short name of a source into its text."""

    devices: Mapping[str, Mapping[str, Any]]
    links: Mapping[str, Mapping[str, Any]]
    cite_device: Callable[[str], str]
    cite_link: Callable[[str], str]

    @functools.cached_property
    def aliases(self) -> dict[str, str]:
        """Every name and alias of a device."""
        return _aliases(self.devices)

    @functools.cached_property
    def link_aliases(self) -> dict[str, str]:
        return _aliases(self.links)

    def find(self, name: str) -> str:
        """The catalog's own name of a device; raises ``UnknownCluster`` with near misses."""
        found = self.aliases.get(name.lower().replace("_", "-"))
        if found is None:
            raise UnknownCluster(
                f"Unknown device {name!r}{near(name, self.aliases)}; known are {', '.join(self.devices)},"
                " or the path of a TOML file."
            )
        return found

    def device(self, name: str) -> Device:
        name = self.find(name)
        return read_device(self.devices[name], self, self.cite_device, name, f"device {name}")

    def link(self, name: str) -> Link:
        found = self.link_aliases.get(name.lower().replace("_", "-"))
        if found is None:
            raise UnknownCluster(
                f"Unknown link {name!r}{near(name, self.link_aliases)}; known are {', '.join(self.links)}."
            )
        return read_link(self.links[found], self, self.cite_link, found, f"link {found}")

    def node(self, name: str) -> Node:
        """The usual node of a catalog device; a device with a ``base`` changes its base's node key by key."""
        table = self.devices[self.find(name)]
        own = table.get("node", {})
        where = f"device {name}.node"
        check_keys(own, ("source", "link", "nic", *NODE_FIGURES), where)
        figures = read_figures(own, NODE_FIGURES, self.cite_device, where)
        base = self.node(table["base"]) if "base" in table else Node("", "", {})
        return Node(own.get("link", base.link), own.get("nic", base.nic), {**base.figures, **figures})


def _aliases(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    return {alias: name for name, t in tables.items() for alias in (name, *t.get("aliases", ()))}


def read_link(
    raw: Mapping[str, Any] | str, catalog: Catalog, cite: Callable[[str], str], name: str, where: str
) -> Link:
    """A link from the catalog's name or from a table, whose ``base`` may name one of the catalog."""
    if isinstance(raw, str):
        return catalog.link(raw)
    check_keys(raw, ("base", "name", "title", "aliases", "kind", "source", *LINK_FIGURES), where)
    base = catalog.link(raw["base"]) if "base" in raw else None
    figures = _inherit(base, LINK_FIGURES) | read_figures(raw, LINK_FIGURES, cite, where)
    kind = raw.get("kind", base.kind if base else "")
    if kind not in LINK_KINDS:
        raise UnknownCluster(f"{where}.kind must be one of {', '.join(LINK_KINDS)}, not {kind!r}.")
    return Link(
        name=raw.get("name") or name or (base.name if base else kind),
        kind=kind,
        title=raw.get("title", base.title if base else ""),
        sources=_sources(figures),
        **{k: f.value for k, f in figures.items()},
    )


def read_device(
    raw: Mapping[str, Any] | str, catalog: Catalog, cite: Callable[[str], str], name: str, where: str
) -> Device:
    """A device from the catalog's name or from a table, whose ``base`` may name one of the catalog."""
    if isinstance(raw, str):
        return catalog.device(raw)
    check_keys(raw, (*WORDS, "aliases", "node", "host_link", "peak_flops", "sustained_flops", *DEVICE_FIGURES), where)
    base = catalog.device(raw["base"]) if "base" in raw else None
    figures = _inherit(base, DEVICE_FIGURES) | read_figures(raw, DEVICE_FIGURES, cite, where)
    if "memory_bytes" not in figures:
        raise UnknownCluster(f"{where} needs memory_bytes: the bytes of memory that one device has.")
    flops = {}
    for key in ("peak_flops", "sustained_flops"):
        table = raw.get(key)
        if table is None:
            flops[key] = _inherit_flops(base, key)
            continue
        check_keys(table, ("source", *FLOPS_FIGURES), f"{where}.{key}")
        flops[key] = read_figures({"source": raw.get("source", ""), **table}, FLOPS_FIGURES, cite, f"{where}.{key}")
    kind = raw.get("kind", base.kind if base else "gpu")
    if kind not in DEVICE_KINDS:
        raise UnknownCluster(f"{where}.kind must be one of {', '.join(DEVICE_KINDS)}, not {kind!r}.")
    host = base.host_link if base else None
    if "host_link" in raw:
        host = read_link(raw["host_link"], catalog, cite, "", f"{where}.host_link")
    sources = dict(_sources(figures))
    for key, table in flops.items():
        sources |= {f"{key}.{k}": f.source for k, f in table.items() if f.source}
    return Device(
        name=raw.get("name") or name or (base.name if base else kind),
        title=raw.get("title", base.title if base else ""),
        kind=kind,
        host_link=host,
        note=raw.get("note", base.note if base else ""),
        sources=Frozen.of(sources),
        peak_flops=Frozen.of({k: f.value for k, f in flops["peak_flops"].items()}),
        sustained_flops=Frozen.of({k: f.value for k, f in flops["sustained_flops"].items()}),
        **{k: f.value for k, f in figures.items()},
    )


def _sources(figures: Mapping[str, Figure]) -> Frozen[str]:
    return Frozen.of({k: f.source for k, f in figures.items() if f.source})


def _inherit(base: Device | Link | None, kinds: Mapping[str, type]) -> dict[str, Figure]:
    values = {k: getattr(base, k, None) for k in kinds} if base else {}
    return {k: Figure(v, base.sources.get(k, "")) for k, v in values.items() if base and v is not None}


def _inherit_flops(base: Device | None, key: str) -> dict[str, Figure]:
    table: Mapping[str, float] = getattr(base, key) if base else {}
    return {k: Figure(v, base.sources.get(f"{key}.{k}", "")) for k, v in table.items() if base}


def device_table(device: Device) -> dict[str, Any]:
    """A device as a table that ``read_device`` reads back."""
    flops = {
        key: write_figures(getattr(device, key), device.sources, f"{key}.") for key in ("peak_flops", "sustained_flops")
    }
    words = {"name": device.name, "title": device.title, "kind": device.kind, "note": device.note}
    numbers = write_figures({k: getattr(device, k) for k in DEVICE_FIGURES}, device.sources)
    host = {"host_link": link_table(device.host_link)} if device.host_link else {}
    return words | numbers | flops | host


def link_table(link: Link) -> dict[str, Any]:
    """A link as a table that ``read_link`` reads back."""
    words = {"name": link.name, "title": link.title, "kind": link.kind}
    return words | write_figures({k: getattr(link, k) for k in LINK_FIGURES}, link.sources)


@functools.cache
def shipped() -> Catalog:
    """The catalog of the package (two TOML files, read once, a few milliseconds)."""
    import tomllib

    devices = tomllib.loads((CATALOG / "devices.toml").read_text(encoding="utf-8"))
    links = tomllib.loads((CATALOG / "links.toml").read_text(encoding="utf-8"))
    # A missing source is a fault of the catalog, so it raises KeyError instead of passing silently.
    return Catalog(devices["device"], links["link"], devices["source"].__getitem__, links["source"].__getitem__)
