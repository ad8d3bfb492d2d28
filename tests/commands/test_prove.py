"""The verbs ``prove`` and ``dryrun`` as a user meets them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from partita.commands.dryrun import command as dryrun
from partita.commands.prove import command as prove
from partita.model import hf, init
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with weights."""
    import torch

    model = tiny_model(family="llama", head_dim=10)
    target = tmp_path_factory.mktemp("models") / "tiny"
    state = {p.name: init.initial(p.name, p, 7, model.layers, torch.float32) for p in model.parameters}
    hf.save(state, model, target)
    return target


def run(command: object, *words: str) -> Result:
    return CliRunner().invoke(command, words)  # type: ignore[arg-type]


def test_prove_of_two_layouts_of_a_model_with_weights(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    words = [str(folder), "--layout", "ddp", "--layout", "full_shard", "--ranks", "2", "--sequence", "8"]
    result = run(prove, *words, "--no-dry", "--out", str(out))
    assert result.exit_code == 0, result.output
    for text in ("agrees", "all_gather dp", "reduce_scatter dp", "Not asked: dry run", "Step time: min", "coverage"):
        assert text in result.output, text
    assert max(map(len, result.output.splitlines())) <= 100 + len(str(folder))
    document = json.loads(out.read_text())
    assert [x["layout"] for x in document["layouts"]] == ["dp=2 ddp", "dp=2 full_shard"]
    assert document["verdict"] == "agrees"
    assert document["assumed"]["global-batch"] == "4"
    assert str(folder) in document["assumed"]["initial values"]


def test_dryrun_prints_and_answers_in_json(folder: Path) -> None:
    result = run(dryrun, str(folder), "--layout", "full_shard", "--world", "3", "--sequence", "8", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.output)
    assert (document["verdict"], document["ranks"]) == ("agrees", [0, 2])
    assert all(t["predicted"] == t["dry"] and t["recorded"] is None for t in document["traffic"])


@pytest.mark.parametrize(
    ("command", "words", "says"),
    [
        (prove, ["--ranks", "2", "--layout", "tp=3"], "needs a multiple of 3 ranks"),
        (prove, ["--ranks", "2", "--steps", "2"], "no steady one"),
        (prove, ["--ranks", "2", "--global-batch", "3"], "no multiple of dp x mb"),
        (dryrun, ["--world", "4", "--rank", "4"], "rank 4 does not exist in a world of 4"),
        (dryrun, ["--world", "4", "--precision", "int3"], "precision 'int3' is not known"),
    ],
)
def test_bad_input_is_one_sentence(folder: Path, command: object, words: list[str], says: str) -> None:
    result = run(command, str(folder), *words, "--sequence", "8")
    assert result.exit_code == 2
    assert says in result.output and "Traceback" not in result.output
    assert len([line for line in result.output.splitlines() if line.startswith("partita: ")]) == 1


def test_a_model_that_cannot_run_is_refused(folder: Path) -> None:
    result = run(prove, "7.5B", "--ranks", "2")
    assert result.exit_code == 2 and "parameter count alone" in result.output
    result = run(prove, "Llama-3.1-8B", "--ranks", "2", "--data", str(folder / "config.json"))
    assert result.exit_code == 2 and "needs the tokenizer" in result.output
