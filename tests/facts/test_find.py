"""What a user may type to name a model, and what is said where nothing of that name is there."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from partita.facts.errors import NotInstalled
from partita.facts.find import cache_folder, find_model, parse_count
from partita.facts.model import UnknownModel

CONFIG = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
}


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test sees the machine's own cache, and none can reach the hub."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hf" / "hub"


def write_model(folder: Path, weights: bool = False, **fields: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **fields}))
    if weights:
        (folder / "model.safetensors").write_bytes(b"")
    return folder


def write_cached(cache: Path, hub_id: str, revision: str, main: bool = True, **kind: Any) -> Path:
    root = cache / f"models--{hub_id.replace('/', '--')}"
    if main:
        (root / "refs").mkdir(parents=True, exist_ok=True)
        (root / "refs" / "main").write_text(revision)
    return write_model(root / "snapshots" / revision, **kind)


def fake_hub(monkeypatch: pytest.MonkeyPatch, answer: Any) -> list[dict[str, Any]]:
    """Stands in for ``huggingface_hub``; notes each call and answers with a folder or raises."""
    calls: list[dict[str, Any]] = []

    def snapshot_download(repo_id: str, **options: Any) -> str:
        calls.append({"repo_id": repo_id, **options})
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    module = types.ModuleType("huggingface_hub")
    module.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return calls


def test_a_folder_and_its_config(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "mine")
    for text in (str(folder), str(folder / "config.json"), "./mine", "mine"):
        found = find_model(text)
        assert found.source == "folder" and found.model.name == "mine" and found.model.hidden == 24
        assert found.folder is not None and found.folder.resolve() == folder


def test_a_folder_goes_before_the_catalog_only_if_it_has_a_config(tmp_path: Path) -> None:
    (tmp_path / "gpt2").mkdir()
    assert find_model("gpt2").source == "catalog"
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps(CONFIG))
    assert find_model("gpt2").source == "folder"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("./nothing", "./nothing does not exist; a folder with a config.json"),
        ("./empty", "./empty has no config.json"),
        ("nothing/config.json", "does not exist"),
        ("model.gguf", "is a GGUF file"),
        ("./broken", "broken/config.json cannot be read as JSON"),
        ("./binary", "binary/config.json cannot be read as JSON"),
        ("", "No model is named"),
        ("   ", "No model is named"),
        ("lama-3.1-8b", r"'lama-3.1-8b' is not a known model \(the nearest are Llama-3.1-8B"),
        ("zzzzz", "nothing known resembles it"),
        ("../../etc/passwd", "does not exist"),
        ("a/../b", "is not a known model"),
    ],
)
def test_refusals(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "empty").mkdir()
    for name, content in (("broken", b'{"model_type": '), ("binary", b"\xff\xfe\x00\x01")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_bytes(content)
    with pytest.raises(UnknownModel, match=sentence) as caught:
        find_model(text)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


@pytest.mark.parametrize("text", ["llama-3.1-8b", "Llama-3.1-8B", "meta-llama/Llama-3.1-8B", "LLAMA 3.1 8b"])
def test_names_of_the_catalog(text: str) -> None:
    found = find_model(text)
    assert found.source == "catalog" and found.folder is None
    assert found.model.parameter_count == 8_030_261_248
    assert found.where.startswith("https://huggingface.co/meta-llama")


@pytest.mark.parametrize(
    ("text", "total", "active"),
    [
        ("7.5B", 7_500_000_000, 7_500_000_000),
        ("7500000000", 7_500_000_000, 7_500_000_000),
        ("7_500_000_000", 7_500_000_000, 7_500_000_000),
        ("7,500,000,000", 7_500_000_000, 7_500_000_000),
        ("135m", 135_000_000, 135_000_000),
        ("1.04T", 1_040_000_000_000, 1_040_000_000_000),
        ("236B:21B", 236_000_000_000, 21_000_000_000),
    ],
)
def test_bare_counts(text: str, total: int, active: int) -> None:
    found = find_model(text)
    assert found.source == "count" and found.model.bare and not found.model.runs
    assert (found.model.parameter_count, found.model.active_count) == (total, active)


@pytest.mark.parametrize("text", ["0", "0B", "1B:2B", "1B:0", "1.23456789K"])
def test_impossible_counts(text: str) -> None:
    with pytest.raises(UnknownModel, match="parameters"):
        find_model(text)


def test_what_is_no_count() -> None:
    assert parse_count("8x7B") is None and parse_count("1B:2B:3B") is None and parse_count("B") is None


def test_the_cache_is_read_without_its_package(empty_cache: Path) -> None:
    folder = write_cached(empty_cache, "someone/odd-llama", "abc")
    found = find_model("someone/odd-llama")
    assert (found.source, found.folder, found.model.name) == ("cache", folder, "someone/odd-llama")


def test_main_goes_before_other_revisions_of_the_cache(empty_cache: Path) -> None:
    write_cached(empty_cache, "someone/odd-llama", "main-one", hidden_size=36)
    write_cached(empty_cache, "someone/odd-llama", "newer", main=False, hidden_size=48)
    assert find_model("someone/odd-llama").model.hidden == 36


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder() == tmp_path / "hf" / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "direct"))
    assert cache_folder() == tmp_path / "direct"
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "huggingface" / "hub"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path("~/.cache/huggingface/hub").expanduser()


def test_a_catalog_name_brings_the_cached_weights(empty_cache: Path) -> None:
    folder = write_cached(empty_cache, "HuggingFaceTB/SmolLM2-135M", "abc", weights=True)
    found = find_model("smollm2-135m")
    assert (found.source, found.folder) == ("catalog", folder)
    assert found.model.parameter_count == 134_515_008


def test_cached_configuration_alone_is_no_weights(empty_cache: Path) -> None:
    write_cached(empty_cache, "HuggingFaceTB/SmolLM2-135M", "abc")
    assert find_model("smollm2-135m", weights=True).folder is None


def test_an_absent_hub_id_names_the_folder_and_the_option(empty_cache: Path) -> None:
    with pytest.raises(UnknownModel, match="--download fetches it") as caught:
        find_model("someone/absent")
    assert str(empty_cache / "models--someone--absent") in str(caught.value)


def test_nothing_is_fetched_unless_asked(empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_hub(monkeypatch, write_model(tmp_path / "fetched", weights=True))
    with pytest.raises(UnknownModel):
        find_model("someone/absent")
    find_model("llama-3.1-8b", weights=True)
    find_model("llama-3.1-8b", download=True)  # the catalog describes it; no weights are wanted
    assert calls == []


def test_download(empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path / "fetched", weights=True)
    calls = fake_hub(monkeypatch, folder)
    found = find_model("someone/absent", download=True)
    assert (found.source, found.folder, found.model.name) == ("hub", folder, "someone/absent")
    assert calls[0]["repo_id"] == "someone/absent" and calls[0]["cache_dir"] == empty_cache
    assert calls[0]["allow_patterns"] == ["config.json"]
    assert find_model("smollm2-135m", download=True, weights=True).folder == folder
    assert calls[1]["repo_id"] == "HuggingFaceTB/SmolLM2-135M" and "*.safetensors" in calls[1]["allow_patterns"]
    assert not any(pattern.endswith((".bin", ".pt", ".pkl")) for pattern in calls[1]["allow_patterns"])


@pytest.mark.parametrize("value", ["1", "true", "YES", "on"])
def test_offline_is_obeyed(value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_hub(monkeypatch, write_model(tmp_path / "fetched"))
    monkeypatch.setenv("HF_HUB_OFFLINE", value)
    with pytest.raises(UnknownModel, match="HF_HUB_OFFLINE is set; unset it, or place the model in"):
        find_model("someone/absent", download=True)
    assert calls == []


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("GatedRepoError", "its owner must grant you access"),
        ("RepositoryNotFoundError", "the hub has no such model"),
        ("ConnectError", r"could not be reached or refused \(ConnectError\)"),
    ],
)
def test_a_failed_download_is_one_sentence(kind: str, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_hub(monkeypatch, type(kind, (Exception,), {})("403\nmany\nlines"))
    with pytest.raises(UnknownModel, match=sentence) as caught:
        find_model("someone/absent", download=True)
    assert "\n" not in str(caught.value) and "models--someone--absent" in str(caught.value)


def test_the_hub_package_is_needed_only_for_a_download() -> None:
    with pytest.raises(NotInstalled, match="pip install huggingface_hub"):
        find_model("someone/absent", download=True)


def test_a_model_without_published_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_hub(monkeypatch, tmp_path)
    with pytest.raises(UnknownModel, match="no published weights"):
        find_model("gpt-3-175b", download=True, weights=True)
