"""Cluster: which devices there are, how they are linked, and what a group of ranks crosses.

Three levels: ``host`` (a device and its host memory), ``node`` (devices of one node, or of one NVLink rack) and
``network`` (between nodes).  Ranks fill nodes in order.  ``find_cluster`` reads the text form: ``h100:8x8`` is
8 nodes of 8 devices, ``local:2`` is 2 ranks on this machine, and a path is a TOML file.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from partita.facts.device import (
    PRECISIONS,
    Catalog,
    Device,
    Figure,
    Frozen,
    Link,
    UnknownCluster,
    check_keys,
    device_table,
    link_table,
    number,
    read_device,
    read_figures,
    read_link,
    shipped,
    write_figures,
)
from partita.facts.topology import Crossing, Dim, Spread, cross, spread

__all__ = ["PRECISIONS", "Cluster", "Crossing", "Device", "Link", "UnknownCluster", "find_cluster"]

MAX_DEVICES = 1_000_000
MAX_LOCAL_RANKS = 1024
CLUSTER_FIGURES: dict[str, type] = {"nics_per_node": int, "host_memory_bytes": int}
CLUSTER_KEYS = ("name", "nodes", "devices_per_node", "source", "device", "link", "nic", *CLUSTER_FIGURES)


@dataclass(frozen=True)
class Cluster:
    """``nodes`` equal nodes of ``devices_per_node`` equal devices.

    ``link`` joins the devices of a node, ``nic`` (with ``nics_per_node`` of them) joins nodes.
    ``host_memory_bytes`` is the memory of one node's hosts, ``None`` where unknown.
    """

    name: str
    device: Device
    devices_per_node: int
    nodes: int
    link: Link
    nic: Link | None = None
    nics_per_node: int = 0
    host_memory_bytes: int | None = None
    sources: Frozen[str] = field(default_factory=Frozen)

    def __post_init__(self) -> None:
        number(self.devices_per_node, int, f"devices_per_node of {self.name}")
        number(self.nodes, int, f"nodes of {self.name}")
        if self.world > MAX_DEVICES:
            raise UnknownCluster(f"{self.name} has {self.world} devices; at most {MAX_DEVICES} are accepted.")
        if self.nodes > 1 and (self.nic is None or self.nics_per_node < 1):
            raise UnknownCluster(
                f"{self.name} has {self.nodes} nodes but no NIC between them; give nic and nics_per_node."
            )

    @property
    def world(self) -> int:
        """Devices in all, one rank for each."""
        return self.devices_per_node * self.nodes

    @property
    def levels(self) -> tuple[tuple[str, Link], ...]:
        """The links that exist, nearest first: ``host``, ``node`` and ``network``."""
        out = [("host", self.device.host_link), ("node", self.link if self.devices_per_node > 1 else None)]
        out.append(("network", self.nic if self.nodes > 1 else None))
        return tuple((name, link) for name, link in out if link is not None)

    def node_of(self, rank: int) -> int:
        """The node in which ``rank`` stands; raises ``UnknownCluster`` for a rank outside the world."""
        if not 0 <= rank < self.world:
            raise UnknownCluster(f"Rank {rank} is not in {self.name}, whose ranks are 0 to {self.world - 1}.")
        return rank // self.devices_per_node

    def link_between(self, a: int, b: int) -> Link | None:
        """The link that ranks ``a`` and ``b`` use, ``None`` for a rank and itself."""
        return self.crossing_of((a, b)).link

    def crossing(self, *dims: Dim) -> Crossing:
        """What the groups of a mesh axis cross.

        ``dims`` are (stride, size) pairs, one for each part of the axis: ``crossing((8, 8))`` on ``h100:8x8`` is the
        data axis behind a tensor axis of 8.  The groups tile the world; the cost does not grow with their size as
        long as sizes and nodes divide each other.
        """
        size = math.prod(n for _, n in dims)
        lie = spread(self.devices_per_node, self.world, dims)
        return cross(lie, size, self.devices_per_node, self.link, self.nic, self.nics_per_node)

    def crossing_of(self, ranks: Sequence[int]) -> Crossing:
        """What one group of explicit ``ranks`` crosses while nobody else sends."""
        nodes: dict[int, int] = {}
        for rank in set(ranks):
            node = self.node_of(rank)
            nodes[node] = nodes.get(node, 0) + 1
        lie = Spread(max(nodes.values()), min(nodes.values()), len(nodes), 1 if len(nodes) > 1 else 0)
        return cross(lie, sum(nodes.values()), self.devices_per_node, self.link, self.nic, self.nics_per_node)

    def describe(self) -> str:
        """One line for people."""
        d = self.device
        memory = f"{d.memory_bytes / 1e9:.1f} GB each"
        out = f"{self.nodes} node{'s' * (self.nodes > 1)} of {self.devices_per_node} x {d.title or d.name} ({memory})"
        if self.devices_per_node > 1:
            out += f", {self.link.describe()} inside a node"
        if self.nodes > 1 and self.nic is not None:
            out += f", {self.nics_per_node} x {self.nic.describe()} between nodes"
        if self.host_memory_bytes is not None:
            out += f", {self.host_memory_bytes / 1e9:.0f} GB of host memory a node"
        return f"{self.name}: {out}"

    def to_dict(self) -> dict[str, Any]:
        """A table that ``from_dict`` reads back, with the sources of all figures."""
        nic = {"nic": link_table(self.nic)} if self.nic else {}
        figures = {"nics_per_node": self.nics_per_node or None, "host_memory_bytes": self.host_memory_bytes}
        return (
            {"name": self.name, "nodes": self.nodes, "devices_per_node": self.devices_per_node}
            | write_figures(figures, self.sources)
            | {"device": device_table(self.device), "link": link_table(self.link)}
            | nic
        )

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False)

    def to_toml(self) -> str:
        """The text of a cluster file that describes this cluster completely."""
        return "\n".join(_toml_lines(self.to_dict(), ())) + "\n"

    @staticmethod
    def from_dict(table: Mapping[str, Any], cite: Callable[[str], str] = str, where: str = "The cluster") -> Cluster:
        """A cluster from a table; what it leaves out comes from the usual node of its catalog device.

        ``cite`` turns what a figure names as its source (perhaps nothing) into a text.
        Raises ``UnknownCluster``.
        """
        return _from_dict(_join_devices(table, where), shipped(), cite, where)

    @staticmethod
    def from_json(text: str) -> Cluster:
        try:
            table = json.loads(text)
        except ValueError as e:
            raise UnknownCluster(f"The cluster is not valid JSON: {e}.") from None
        return Cluster.from_dict(table)

    @staticmethod
    def from_toml(text: str, cite: Callable[[str], str] = str, where: str = "The cluster") -> Cluster:
        import tomllib

        try:
            table = tomllib.loads(text)
        except tomllib.TOMLDecodeError as e:
            raise UnknownCluster(f"{where} is not valid TOML: {e}.") from None
        return Cluster.from_dict(table, cite, where)


def find_cluster(text: str) -> Cluster:
    """The cluster that ``text`` names.

    ``DEVICE:N`` is one node of N devices, ``DEVICE:NxM`` is N nodes of M devices (``h100:8x8``), ``local:N`` is N
    ranks on this machine, anything else that is a file or ends with ``.toml`` is read as a cluster file.
    Raises ``UnknownCluster``.
    """
    text = text.strip()
    if text.endswith(".toml") or os.sep in text or (text and Path(text).is_file()):
        return _read_file(Path(text))
    parts = [p.strip() for p in re.split(r"[+,]", text)]
    if len(parts) > 1:
        _refuse_mixed([p.partition(":")[0] for p in parts], text)
    name, colon, shape = text.partition(":")
    if not name:
        raise UnknownCluster(
            f"{text!r} names no device; write for example h100:8x8, local:2 or the path of a TOML file."
        )
    if name.lower() != "local":
        name = shipped().find(name)
    if not colon or not shape:
        usual = shipped().node(name).figures.get("devices") if name.lower() != "local" else None
        example = f"{name}:{usual.value if usual else 2}"
        raise UnknownCluster(f"{text!r} does not say how many devices; write for example {example}.")
    nodes, devices = _shape(text, shape)
    return _local(text, nodes, devices) if name.lower() == "local" else _usual(name, nodes, devices)


def _shape(text: str, shape: str) -> tuple[int, int]:
    """``8`` is (1, 8); ``4x8`` is 4 nodes of 8 devices."""
    match = re.fullmatch(r"(?:([0-9]{1,9})x)?([0-9]{1,9})", shape.strip().lower())
    if match is None:
        raise UnknownCluster(
            f"{shape!r} in {text!r} is no number of devices; write N for one node or NODESxDEVICES, such as 8x8."
        )
    nodes, devices = int(match[1] or 1), int(match[2])
    if nodes < 1 or devices < 1:
        raise UnknownCluster(f"{text!r} has {nodes} x {devices} devices; both numbers must be at least 1.")
    if nodes * devices > MAX_DEVICES:
        raise UnknownCluster(f"{text!r} has {nodes * devices} devices; at most {MAX_DEVICES} are accepted.")
    return nodes, devices


def _refuse_mixed(names: Sequence[str], text: str) -> None:
    """All parts of a sum are one kind of device or the cluster is refused, naming both."""
    kinds = list(dict.fromkeys(shipped().aliases.get(n.lower(), n.lower()) for n in names))
    if len(kinds) > 1:
        raise UnknownCluster(
            f"{text!r} mixes {kinds[0]} and {kinds[1]}; a cluster has one kind of device, so plan each kind by itself."
        )
    raise UnknownCluster(
        f"{text!r} lists {kinds[0]} more than once; write nodes x devices instead, such as {kinds[0]}:2x8."
    )


def _usual(name: str, nodes: int, devices: int) -> Cluster:
    """Nodes of the usual kind; a part of a node has its share of NICs and host memory."""
    return _from_dict({"device": name, "nodes": nodes, "devices_per_node": devices}, shipped(), str, name)


def _from_dict(table: Mapping[str, Any], catalog: Catalog, cite: Callable[[str], str], where: str) -> Cluster:
    check_keys(table, CLUSTER_KEYS, where)
    if "device" not in table:
        raise UnknownCluster(f'{where} names no device; give device = "h100" or a [device] table.')
    raw = table["device"]
    device = read_device(raw, catalog, cite, "", f"{where}: device")
    usual = catalog.aliases.get(raw.lower() if isinstance(raw, str) else raw.get("base", "").lower())
    node = catalog.node(usual) if usual else None
    nodes = number(table.get("nodes", 1), int, f"{where}: nodes")
    most = node.figures["devices"].value if node and "devices" in node.figures else None
    if "devices_per_node" not in table and most is None:
        raise UnknownCluster(f"{where} must give devices_per_node.")
    per_node = number(table.get("devices_per_node", most), int, f"{where}: devices_per_node")
    if most is not None and per_node > most and "link" not in table:
        many = f"write {usual}:{per_node // most}x{most}" if per_node % most == 0 else f"write {usual}:{most}"
        raise UnknownCluster(
            f"{per_node} devices do not stand in one {usual} node, which has at most {most}; {many},"
            " or describe your node in a TOML file."
        )
    link = node.link if node else None
    if "link" in table or link is None:
        if "link" not in table:
            raise UnknownCluster(f'{where} must give the link inside a node, such as link = "nvlink4".')
        intra = read_link(table["link"], catalog, cite, "", f"{where}: link")
    else:
        intra = catalog.link(link)
    nic = None
    if "nic" in table:
        nic = read_link(table["nic"], catalog, cite, "", f"{where}: nic")
    elif node and node.nic:
        nic = catalog.link(node.nic)
    figures = _share(node.figures, per_node) if node else {}
    figures |= read_figures(table, CLUSTER_FIGURES, cite, where)
    count = figures.get("nics_per_node")
    memory = figures.get("host_memory_bytes")
    shape = f"{nodes}x{per_node}" if nodes > 1 else str(per_node)
    return Cluster(
        name=table.get("name", f"{device.name}:{shape}"),
        device=device,
        devices_per_node=per_node,
        nodes=nodes,
        link=intra,
        nic=nic,
        nics_per_node=count.value if count else 0,
        host_memory_bytes=memory.value if memory else None,
        sources=Frozen.of({k: f.source for k, f in figures.items() if f.source}),
    )


def _share(node: Mapping[str, Figure], devices: int) -> dict[str, Figure]:
    """What ``devices`` devices have of a node's NICs (at least one) and host memory."""
    whole = node["devices"].value if "devices" in node else devices
    out = {}
    for name, key in (("nics", "nics_per_node"), ("host_memory_bytes", "host_memory_bytes")):
        if name in node:
            part = max(1, node[name].value * devices // whole)
            note = "" if devices == whole else f" (the share of {devices} of {whole} devices)"
            out[key] = Figure(part, node[name].source + note)
    return out


def _join_devices(table: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A file may list groups of nodes as ``[[device]]``; they must be of one kind and are added up."""
    if not isinstance(table, Mapping):
        raise UnknownCluster(f"{where} must be a table of keys, not {type(table).__name__}.")
    table = dict(table)
    groups = table.get("device")
    if not isinstance(groups, list):
        return table
    if not groups or not all(isinstance(g, Mapping) and isinstance(g.get("name"), str) for g in groups):
        raise UnknownCluster(f'{where}: every [[device]] needs a name, such as name = "h100".')
    for group in groups:
        check_keys(group, ("name", "nodes", "devices_per_node"), f"{where}: [[device]]")
    kinds = list(dict.fromkeys(shipped().find(g["name"]) for g in groups))
    if len(kinds) > 1:
        raise UnknownCluster(
            f"{where} mixes {kinds[0]} and {kinds[1]}; a cluster has one kind of device, so plan each kind by itself."
        )
    sizes = list(dict.fromkeys(g.get("devices_per_node") for g in groups))
    if len(sizes) > 1:
        raise UnknownCluster(f"{where} mixes nodes of {sizes[0]} and of {sizes[1]} devices; nodes must be alike.")
    table["nodes"] = sum(number(g.get("nodes", 1), int, f"{where}: nodes") for g in groups)
    if sizes[0] is not None:
        table["devices_per_node"] = sizes[0]
    return table | {"device": kinds[0]}


def _read_file(path: Path) -> Cluster:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UnknownCluster(f"There is no cluster file {str(path)!r}.") from None
    except (OSError, UnicodeDecodeError) as e:
        raise UnknownCluster(f"The cluster file {str(path)!r} cannot be read: {e}.") from None
    return Cluster.from_toml(text, lambda source: source or f"given in {path.name}", str(path))


def _toml_lines(table: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    """Plain keys first, then tables; a figure with its source is an inline table."""
    lines, tables = [], []
    for key, value in table.items():
        if isinstance(value, Mapping) and "value" not in value:
            tables += ["", f"[{'.'.join((*path, key))}]", *_toml_lines(value, (*path, key))]
        elif isinstance(value, Mapping):
            lines.append(f"{key} = {{value = {value['value']!r}, source = {_toml_string(value['source'])}}}")
        else:
            lines.append(f"{key} = {_toml_string(value) if isinstance(value, str) else repr(value)}")
    return lines + tables


def _toml_string(text: str) -> str:
    # A JSON string is a TOML basic string, but for the one control character that JSON leaves as it is.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _local(text: str, nodes: int, ranks: int) -> Cluster:
    """This machine's CPU, its memory divided over the ranks; rates are unknown until they are measured."""
    if nodes > 1:
        raise UnknownCluster(
            f"{text!r} asks for {nodes} nodes, but local is this one machine; write local:{nodes * ranks}."
        )
    if ranks > MAX_LOCAL_RANKS:
        raise UnknownCluster(
            f"{text!r} asks for {ranks} ranks on this machine; at most {MAX_LOCAL_RANKS} are accepted."
        )
    memory, source = _machine_memory()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = Figure(memory // ranks, f"{source}, divided over {ranks} rank{'s' * (ranks > 1)}")
    sources = {"memory_bytes": share.source, "compute_units": "cores that this process may use, shared by all ranks"}
    link = shipped().link("shared-memory")
    device = Device(
        name="local",
        memory_bytes=share.value,
        title=_cpu_model(),
        kind="cpu",
        compute_units=cores,
        host_link=link,
        note="rates are not measured; `partita calibrate` measures them",
        sources=Frozen.of(sources),
    )
    return Cluster(
        f"local:{ranks}",
        device,
        ranks,
        1,
        link,
        host_memory_bytes=memory,
        sources=Frozen.of({"host_memory_bytes": source}),
    )


def _machine_memory() -> tuple[int, str]:
    """Bytes of memory that this process may use, and where the number is from."""
    found: list[tuple[int, str]] = []
    try:
        match = re.search(r"^MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
        if match:
            found.append((int(match[1]) * 1024, "MemTotal of /proc/meminfo"))
    except OSError:
        pass
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            found.append((int(Path(limit).read_text()), limit))
        except (OSError, ValueError):
            continue  # no such control group, or "max": no limit
    if not found and hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        found.append((os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "sysconf SC_PHYS_PAGES"))
    if not found:
        raise UnknownCluster("The memory of this machine cannot be read; describe it in a TOML file instead of local.")
    return min(found)


def _cpu_model() -> str:
    """The CPU's own name, or the architecture where the system does not say."""
    import platform

    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if match:
            return match[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "CPU"
