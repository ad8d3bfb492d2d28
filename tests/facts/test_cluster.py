"""Clusters: the text form, the catalog and its sources, and files."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from partita.facts import device as device_module
from partita.facts.cluster import PRECISIONS, Cluster, Device, Link, UnknownCluster, find_cluster
from partita.facts.device import CATALOG, Catalog, shipped
from partita.facts.errors import BadInput

NAMES = [
    "v100-16",
    "v100-32",
    "a100-40",
    "a100-80",
    "h100",
    "h100-pcie",
    "h800",
    "h20",
    "h200",
    "b200",
    "b300",
    "gb200",
    "gb300",
    "l40s",
    "rtx4090",
    "rtx-pro-6000",
    "mi300x",
]


def refusal(text: str) -> str:
    with pytest.raises(UnknownCluster) as e:
        find_cluster(text)
    message = str(e.value)
    assert "\n" not in message and message.endswith(".")
    return message


# --- the text form


def test_nodes_by_devices() -> None:
    c = find_cluster("h100:8x4")
    assert (c.nodes, c.devices_per_node, c.world, c.name) == (8, 4, 32, "h100:8x4")
    one = find_cluster("h100:8")
    assert (one.nodes, one.devices_per_node, one.world, one.name) == (1, 8, 8, "h100:8")
    assert find_cluster(" H100:8 ") == one


def test_every_figure_of_an_h100_node() -> None:
    c = find_cluster("h100:8x8")
    assert c.device.peak("bf16") == 989.4e12
    assert c.device.sustained_flops["bf16"] == 794.5e12
    assert c.device.memory_bytes_per_s == 3350e9
    assert c.device.compute_units == 132
    assert (c.link.kind, c.link.bytes_per_s) == ("nvlink", 450e9)
    assert c.nic is not None and (c.nic.kind, c.nic.bytes_per_s) == ("infiniband", 400e9 / 8)
    assert c.nics_per_node == 8
    assert c.device.host_link is not None and c.device.host_link.kind == "pcie"
    assert [name for name, _ in c.levels] == ["host", "node", "network"]
    assert [name for name, _ in find_cluster("h100:1").levels] == ["host"]


def test_nvl72_is_one_node() -> None:
    c = find_cluster("gb200:2x72")
    assert c.crossing((1, 72)).level == "node"
    assert c.crossing((1, 144)).level == "network"


def test_a_part_of_a_node_has_its_share() -> None:
    whole, half = find_cluster("h100:2x8"), find_cluster("h100:2x4")
    assert half.nics_per_node == 4
    assert half.host_memory_bytes is not None and half.host_memory_bytes * 2 == whole.host_memory_bytes
    assert "share of 4 of 8" in half.sources["host_memory_bytes"]
    assert find_cluster("rtx4090:2x2").nics_per_node == 1


def test_aliases() -> None:
    assert find_cluster("a100:8").device.name == "a100-80"
    assert find_cluster("v100:8").device.name == "v100-32"
    assert find_cluster("rtx_4090:2").device.name == "rtx4090"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "names no device"),
        (":8", "names no device"),
        ("h100", "h100:8"),
        ("gb200:", "gb200:72"),
        ("local", "local:2"),
        ("h10:8", "h100"),
        ("mi30x:8", "mi300x"),
        ("tpu:8", "known are v100-16"),
        ("h100:0", "at least 1"),
        ("h100:0x8", "at least 1"),
        ("h100:-1", "'-1'"),
        ("h100:8.5", "'8.5'"),
        ("h100:eight", "'eight'"),
        ("h100:8x8x8", "'8x8x8'"),
        ("h100:8x", "'8x'"),
        ("h100:\u0663", "NODESxDEVICES"),
        ("h100:999999x8", "at most 1000000"),
        ("h100:" + "9" * 40, "NODESxDEVICES"),
        ("h100:16", "h100:2x8"),
        ("h100:9", "at most 8"),
        ("gb200:144", "gb200:2x72"),
        ("local:0", "at least 1"),
        ("local:2x2", "local:4"),
        ("local:5000", "1024"),
        ("no/such.toml", "no/such.toml"),
    ],
)
def test_refusals(text: str, says: str) -> None:
    assert says in refusal(text)


def test_mixed_devices_are_refused_naming_both() -> None:
    message = refusal("h100:8+a100:8")
    assert "h100" in message and "a100" in message and "mixes" in message
    assert "mixes" in refusal("h100:8, h200:8")
    assert "h100:2x8" in refusal("h100:8+h100:8")


def test_errors_are_bad_input() -> None:
    assert issubclass(UnknownCluster, BadInput) and issubclass(UnknownCluster, ValueError)


# --- this machine


def test_local_divides_this_machine() -> None:
    one, three = find_cluster("local:1"), find_cluster("local:3")
    assert three.world == 3 and three.nodes == 1 and three.device.kind == "cpu"
    assert three.device.memory_bytes == one.device.memory_bytes // 3
    assert three.host_memory_bytes == one.device.memory_bytes
    total = int(next(w for w in Path("/proc/meminfo").read_text().splitlines() if w.startswith("MemTotal")).split()[1])
    assert one.device.memory_bytes <= total * 1024
    assert one.device.title and one.device.compute_units and one.device.compute_units >= 1


def test_local_invents_no_rates() -> None:
    c = find_cluster("local:2")
    assert c.device.memory_bytes_per_s is None and not c.device.peak_flops and not c.device.sustained_flops
    assert c.link.bytes_per_s is None and c.crossing((1, 2)).bytes_per_s is None
    assert "partita calibrate" in c.device.note
    with pytest.raises(UnknownCluster, match="partita calibrate"):
        c.device.peak("fp32")
    assert "not measured" in c.describe()


# --- the catalog


def numbers(table: dict[str, Any], source: str | None, path: str = "") -> Iterator[tuple[str, str | None]]:
    """Every number below ``table`` with its source's short name: its own, or that of the table it stands in."""
    own = table.get("source", source if "value" in table else None)
    for key, value in table.items():
        here = f"{path}.{key}"
        if isinstance(value, dict):
            yield from numbers(value, table.get("source"), here)
        elif isinstance(value, list):
            assert all(isinstance(v, str) for v in value), here
        elif not isinstance(value, str):
            yield here, own


@pytest.mark.parametrize("name", ["devices", "links"])
def test_every_number_has_a_source(name: str) -> None:
    catalog = tomllib.loads((CATALOG / f"{name}.toml").read_text())
    sources = catalog.pop("source")
    found = list(numbers(catalog, None))
    assert len(found) > 40
    for path, source in found:
        assert source in sources, f"{path} has no source"
    assert {s for _, s in found} == set(sources), "a source is listed that nothing uses"
    assert all(len(text) > 15 for text in sources.values())


def test_a_number_without_a_source_is_found() -> None:
    bad = {"device": {"x": {"memory_bytes": 1, "peak_flops": {"source": "a", "bf16": 1.0}}}}
    assert dict(numbers(bad, None)) == {".device.x.memory_bytes": None, ".device.x.peak_flops.bf16": "a"}


def test_the_sources_reach_the_figures() -> None:
    for name in NAMES:
        c = find_cluster(f"{name}:1")
        for field in ("memory_bytes", "nominal_memory_bytes", "memory_bytes_per_s"):
            assert c.device.sources[field], (name, field)
        for precision in c.device.peak_flops:
            assert c.device.sources[f"peak_flops.{precision}"]
        assert c.link.sources["bytes_per_s"] and c.sources["host_memory_bytes"] and c.sources["nics_per_node"]
    assert "DGX H100" not in find_cluster("h200:8").sources["nics_per_node"]


def test_the_catalog_is_complete() -> None:
    assert set(shipped().devices) == {*NAMES, "local"}
    for kind in ("nvlink2", "nvlink3", "nvlink4", "nvlink5", "pcie3", "pcie4", "pcie5", "infinity-fabric"):
        assert shipped().link(kind).bytes_per_s
    for kind in ("infiniband", "ethernet"):
        rates = [shipped().link(f"{kind}-{gb}").bytes_per_s for gb in (100, 200, 400, 800)]
        assert rates == [gb * 1e9 / 8 for gb in (100, 200, 400, 800)]
    assert shipped().link("roce-400") == shipped().link("ethernet-400")


@pytest.mark.parametrize("name", NAMES)
def test_usable_memory_lies_at_the_nominal_capacity(name: str) -> None:
    """Datasheets print GiB as GB, and the driver keeps a little: the usable bytes lie between the two readings."""
    d = find_cluster(f"{name}:1").device
    assert d.nominal_memory_bytes is not None
    assert 0.99 * d.nominal_memory_bytes < d.memory_bytes <= d.nominal_memory_bytes / 1e9 * 2**30


@pytest.mark.parametrize(
    ("name", "gigabytes", "usable_gib"),
    [
        ("v100-16", 16, 15.75),
        ("v100-32", 32, 31.74),
        ("a100-40", 40, 39.39),
        ("a100-80", 80, 79.15),
        ("h100", 80, 79.18),
        ("h800", 80, 79.18),
        ("h20", 96, 95.00),
        ("h200", 141, 139.80),
        ("b200", 180, 178.35),
        ("b300", 270, 267.69),
        ("gb200", 186, 184.31),
        ("gb300", 279, 276.50),
        ("l40s", 48, 44.39),
        ("rtx4090", 24, 23.64),
        ("rtx-pro-6000", 96, 94.97),
        ("mi300x", 192, 191.69),
    ],
)
def test_memory_of_each_device(name: str, gigabytes: int, usable_gib: float) -> None:
    d = find_cluster(f"{name}:1").device
    assert d.nominal_memory_bytes == gigabytes * 10**9
    assert abs(d.memory_bytes / 2**30 - usable_gib) < 0.01


@pytest.mark.parametrize("name", NAMES)
def test_peaks_are_dense_and_ordered(name: str) -> None:
    d = find_cluster(f"{name}:1").device
    peaks = [d.peak_flops[p] for p in PRECISIONS if p in d.peak_flops and p != "bf16"]
    assert peaks == sorted(peaks) and set(d.peak_flops) <= set(PRECISIONS)
    if "fp8" in d.peak_flops:  # half the width, twice the rate; with sparsity in one of them it would be four times
        assert 1.99 < d.peak_flops["fp8"] / d.peak_flops["bf16"] < 2.03
    for precision, rate in d.sustained_flops.items():
        assert 0.4 < rate / d.peak_flops[precision] < 0.9
    assert ("bf16" in d.peak_flops) == (not name.startswith("v100"))


def test_sustained_link_rates_stay_below_the_port() -> None:
    for name in shipped().links:
        link = shipped().link(name)
        assert link.sustained_bytes_per_s is None or (
            link.bytes_per_s and 0.6 < link.sustained_bytes_per_s / link.bytes_per_s < 1
        )


def test_an_unknown_precision_names_the_known() -> None:
    with pytest.raises(UnknownCluster, match="fp64, fp32, fp16"):
        find_cluster("v100:8").device.peak("bf16")
    with pytest.raises(UnknownCluster, match="not a precision"):
        find_cluster("h100:8").device.peak("int3")


def test_loading_is_fast() -> None:
    text = (CATALOG / "devices.toml").read_text()

    def once() -> float:
        start = time.perf_counter()
        tomllib.loads(text)
        return time.perf_counter() - start

    assert min(once() for _ in range(20)) < 0.005


def test_a_catalog_without_a_source_does_not_load() -> None:
    broken = Catalog({"x": {"memory_bytes": 1}}, {}, {}.__getitem__, {}.__getitem__)
    with pytest.raises(KeyError):
        broken.device("x")


# --- files


@pytest.mark.parametrize("text", [*(f"{n}:2x1" for n in NAMES), "h100:8x8", "gb200:4x72", "local:2"])
def test_json_and_toml_give_the_same_cluster(text: str) -> None:
    c = find_cluster(text)
    assert Cluster.from_json(c.to_json()) == c
    assert Cluster.from_toml(c.to_toml()) == c
    assert pickle.loads(pickle.dumps(c)) == c and hash(c) == hash(find_cluster(text))


def test_json_bytes_are_integers() -> None:
    table = json.loads(find_cluster("h100:8x8").to_json())
    assert table["device"]["memory_bytes"]["value"] == 85_017_493_504
    assert isinstance(table["host_memory_bytes"]["value"], int)


def test_odd_texts_survive_toml() -> None:
    d = Device('a"b\\c\n\x7f\u00e9', 10)
    c = Cluster("x\ty", d, 1, 1, Link("l", "pcie"))
    assert Cluster.from_toml(c.to_toml()) == c


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_file_changes_a_catalog_device(tmp_path: Path) -> None:
    path = write(
        tmp_path / "mine.toml",
        """
        name = "mine"
        nodes = 4
        nics_per_node = 4
        [device]
        base = "h100"
        name = "h100-500w"
        [device.sustained_flops]
        bf16 = 600e12
        [nic]
        base = "roce-400"
        sustained_bytes_per_s = {value = 40e9, source = "my benchmark", note = "of May"}
        """,
    )
    c = find_cluster(str(path))
    assert (c.name, c.nodes, c.devices_per_node, c.nics_per_node) == ("mine", 4, 8, 4)
    assert c.device.name == "h100-500w" and c.device.peak("bf16") == 989.4e12
    assert c.device.sources["sustained_flops.bf16"] == "given in mine.toml"
    assert "H100" in c.device.sources["peak_flops.bf16"]
    assert c.link.name == "nvlink4"
    assert c.nic is not None and c.nic.sustained_bytes_per_s == 40e9 and c.nic.bytes_per_s == 50e9
    assert c.nic.sources["sustained_bytes_per_s"] == "my benchmark (of May)"


def test_a_file_describes_an_own_device(tmp_path: Path) -> None:
    path = write(
        tmp_path / "own.toml",
        """
        devices_per_node = 4
        [device]
        name = "x1"
        memory_bytes = 32e9
        [link]
        kind = "pcie"
        bytes_per_s = 10e9
        """,
    )
    c = find_cluster(str(path))
    assert c.name == "x1:4" and c.device.memory_bytes == 32_000_000_000 and c.nic is None
    assert c.crossing((1, 4)).bytes_per_s == 10e9


def test_a_list_of_devices_is_added_up(tmp_path: Path) -> None:
    two = '[[device]]\nname = "h100"\nnodes = 3\n[[device]]\nname = "h100-sxm"\n'
    assert find_cluster(str(write(tmp_path / "a.toml", two))) == find_cluster("h100:4x8")
    mixed = '[[device]]\nname = "h100"\n[[device]]\nname = "a100"\n'
    message = refusal(str(write(tmp_path / "b.toml", mixed)))
    assert "mixes h100 and a100-80" in message
    sizes = '[[device]]\nname = "h100"\n[[device]]\nname = "h100"\ndevices_per_node = 4\n'
    assert "alike" in refusal(str(write(tmp_path / "c.toml", sizes)))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nodes = ", "not valid TOML"),
        ("", "names no device"),
        ('device = "h100"\nnodez = 2', "nodes"),
        ('device = "h100"\nnodes = 0', "positive whole number"),
        ('device = "h100"\nnodes = 1.5', "positive whole number"),
        ('device = "h100"\nnodes = true', "positive whole number"),
        ('device = "h100"\ndevices_per_node = 16', "h100:2x8"),
        ('device = "h100"\nnic = "infiniband-401"\nnodes = 2', "infiniband-400"),
        ("device = 3", "must be a table"),
        ('[device]\nname = "x"', "memory_bytes"),
        ('[device]\nname = "x"\nmemory_bytes = 1\n', "devices_per_node"),
        ('devices_per_node = 2\n[device]\nname = "x"\nmemory_bytes = 1\n', "link"),
        ('[device]\nbase = "h100"\nmemory_byte = 1', "memory_bytes"),
        ('[device]\nbase = "h100"\nmemory_bytes = inf', "positive whole number"),
        ('[device]\nbase = "h100"\nmemory_bytes_per_s = "fast"', "positive number"),
        ("[device]\nbase = 1", "must be a text"),
        ('[device]\nbase = "h100"\npeak_flops = 3', "must be a table"),
        ('[device]\nbase = "h100"\n[device.peak_flops]\nbf61 = 1e12', "bf16"),
        ('[device]\nbase = "h100"\nkind = "tpu"', "gpu, cpu"),
        ('device = "h100"\nlink = {kind = "wifi"}', "nvlink"),
        ('nodes = 2\ndevices_per_node = 1\nlink = "pcie4"\n[device]\nmemory_bytes = 1', "no NIC"),
        ("device = []", "[[device]]"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, says: str) -> None:
    assert says in refusal(str(write(tmp_path / "bad.toml", text)))


def test_unreadable_files(tmp_path: Path) -> None:
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    assert "cannot be read" in refusal(str(tmp_path / "binary.toml"))
    assert "cannot be read" in refusal(str(tmp_path) + "/")
    with pytest.raises(UnknownCluster, match="JSON"):
        Cluster.from_json("{")
    with pytest.raises(UnknownCluster, match="table"):
        Cluster.from_json("[1]")


def test_the_page_of_clusters_is_true(tmp_path: Path) -> None:
    """Every TOML example of the page loads, every text form too, and the page's table is the catalog's."""
    page = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text()
    blocks = page.split("```toml\n")[1:]
    assert len(blocks) >= 2
    for i, block in enumerate(blocks):
        find_cluster(str(write(tmp_path / f"{i}.toml", block.split("```")[0])))
    for name in NAMES:
        d = find_cluster(f"{name}:1").device
        row = next(line for line in page.splitlines() if line.startswith(f"| `{name}`"))
        cells = [c.strip() for c in row.strip("|").split("|")]
        assert cells[1] == (d.title or d.name)
        assert cells[2] == f"{d.memory_bytes / 1e9:.1f}"
        assert d.memory_bytes_per_s is not None and cells[3] == f"{d.memory_bytes_per_s / 1e12:.3g}"
        assert cells[4] == (f"{d.peak_flops['bf16'] / 1e12:.4g}" if "bf16" in d.peak_flops else "-")


def test_no_torch_and_no_numpy() -> None:
    code = (
        "import sys\n"
        "for m in ('torch', 'numpy', 'psutil'): sys.modules[m] = None\n"
        "from partita.facts.cluster import find_cluster\n"
        "print(find_cluster('h100:8x8').describe(), find_cluster('local:2').world)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert "h100:8x8: 8 nodes of 8 x NVIDIA H100" in run.stdout
    assert device_module.__doc__
