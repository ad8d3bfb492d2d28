import json

import pytest

from partita.facts.errors import BadInput
from partita.model.tokenizer import ByteTokenizer, load_tokenizer

tokenizers = pytest.importorskip("tokenizers")


def write(folder, **configs):
    model = tokenizers.models.WordLevel({"a": 0, "b": 1, "<end>": 2}, unk_token="a")
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(["<end>", "<new>"])
    inner.post_processor = tokenizers.processors.TemplateProcessing(single="<new> $A", special_tokens=[("<new>", 3)])
    inner.enable_truncation(2)
    inner.save(str(folder / "tokenizer.json"))
    for name, content in configs.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_bytes():
    tokenizer = ByteTokenizer()
    text = "Zoë, 東京\n"
    ids = tokenizer.encode(text)
    assert max(ids) < 256 and tokenizer.decode([*ids, tokenizer.eos]) == text
    assert tokenizer.size == 257 and tokenizer.eos == 256
    assert tokenizer.decode([0xC3]) == "�"


@pytest.mark.parametrize(
    "configs",
    [
        {"tokenizer_config": {"eos_token": "<end>"}, "config": {"eos_token_id": 1}},
        {"tokenizer_config": {"eos_token": {"content": "<end>"}}},
        {"generation_config": {"eos_token_id": [2, 0]}, "config": {"eos_token_id": 1}},
        {"tokenizer_config": {"eos_token": None}, "config": {"eos_token_id": 2}},
    ],
)
def test_end_token(tmp_path, configs):
    tokenizer = load_tokenizer(write(tmp_path, **configs))
    assert (tokenizer.eos, tokenizer.size) == (2, 4)


def test_text_alone_and_whole(tmp_path):
    """Neither the template's start token nor the file's truncation touches training text."""
    tokenizer = load_tokenizer(write(tmp_path, config={"eos_token_id": 2}))
    assert tokenizer.encode("b b b a <end>") == [1, 1, 1, 0, 2]
    assert tokenizer.decode([1, 2]) == "b <end>"


@pytest.mark.parametrize(
    "configs, words",
    [
        ({}, "names no end-of-text token"),
        ({"tokenizer_config": {"eos_token": "<gone>"}}, "'<gone>', which tokenizer.json lacks"),
        ({"tokenizer_config": ["list"]}, "is not a JSON object"),
    ],
)
def test_bad_configurations(tmp_path, configs, words):
    with pytest.raises(BadInput, match=words):
        load_tokenizer(write(tmp_path, **configs))


def test_no_tokenizer(tmp_path):
    with pytest.raises(BadInput, match=r"has no tokenizer.json; .* ask for the byte tokenizer by name"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(BadInput, match="is not a readable"):
        load_tokenizer(tmp_path)
