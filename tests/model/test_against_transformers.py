"""Logits equal those of transformers within 1e-4 in float32, through a saved folder."""

import json

import pytest
import torch
import transformers

from partita.facts.families import model_from_config
from partita.model import hf, smollm2
from partita.model.decoder import Decoder, plain
from partita.model.loss import vocabulary_loss

LIMIT = 1e-4

SIZES = {
    "vocab_size": 97,
    "hidden_size": 36,
    "intermediate_size": 50,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
# What each family adds; Qwen's window begins at layer 0 here, because one window for all layers is described.
FAMILIES = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True},
    "llama biased": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 7},
    "mistral without window": {"sliding_window": None},
    "qwen2": {"head_dim": 6},
    "qwen2 window": {"head_dim": 6, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},
    "qwen3": {},
    "qwen3 tied": {"tie_word_embeddings": True, "attention_bias": True},
}
FACTORS = [1.0, 1.5, 2.5, 4.0]
SCALINGS = {
    "theta": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "yarn mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale": 1.2,
        "mscale_all_dim": 0.7,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": FACTORS,
    },
}


def random_model(family, folder, **changes):
    """A tiny transformers model with weights large enough to tell models apart, saved to ``folder``."""
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **changes})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.randn_like(p) * 0.2 + (1 if "norm" in name else 0))
    model.save_pretrained(folder)
    return model


def ours(folder, dtype=torch.float32):
    model = model_from_config(json.loads((folder / "config.json").read_text()), folder.name)
    decoder = Decoder(model).to(dtype)
    hf.load(decoder.named_parameters(), model, folder)
    return model, decoder


def compare(folder, theirs, length, rows=2):
    model, decoder = ours(folder)
    ids = torch.randint(0, model.vocab, (rows, length), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = theirs(ids).logits
        got = decoder(ids, torch.arange(length), plain(model))
    assert want.abs().max() > 1, "a comparison of zeros says nothing"
    assert (got - want).abs().max() <= LIMIT
    return want


@pytest.mark.parametrize("case", FAMILIES)
def test_families(tmp_path, case):
    theirs = random_model(case.split()[0], tmp_path, **FAMILIES[case])
    compare(tmp_path, theirs, 23)


@pytest.mark.parametrize("length", [11, 90])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_rope_scalings(tmp_path, scaling, length):
    """Also beyond the trained and beyond the allowed length, where dynamic and longrope change."""
    theirs = random_model("llama", tmp_path, rope_parameters={"rope_theta": 10000.0, **SCALINGS[scaling]})
    compare(tmp_path, theirs, length)


def test_scalings_differ_from_none(tmp_path):
    """The comparison above would see a scaling that is left out."""
    outs = []
    for name, scaling in {"none": {"rope_type": "default"}, **SCALINGS}.items():
        theirs = random_model("llama", tmp_path / name, rope_parameters={"rope_theta": 10000.0, **scaling})
        outs.append(compare(tmp_path / name, theirs, 90))
    for i, a in enumerate(outs):
        assert all((a - b).abs().max() > 100 * LIMIT for b in outs[:i])


def test_gradients(tmp_path):
    theirs = random_model("qwen3", tmp_path).double()
    model, decoder = ours(tmp_path, torch.float64)
    ids = torch.randint(0, 97, (2, 14))
    out = theirs(ids, labels=ids)
    (out.loss * 26).backward()  # transformers gives the mean over 2 x 13 shifted targets
    vocabulary_loss(decoder(ids, torch.arange(14), plain(model))[:, :-1], ids[:, 1:]).backward()
    want = {n: p.grad for n, p in theirs.named_parameters()}
    for name, p in decoder.named_parameters():
        # 1e-6: transformers' norms and rotary tables are float32 even in a float64 model.
        other = want[hf.hf_name(name)]
        assert (p.grad - other).norm() <= 1e-6 * other.norm(), name


@pytest.mark.parametrize("case", ["llama biased", "mistral", "qwen2 window", "qwen3 tied"])
def test_export_is_read_by_transformers(tmp_path, case):
    random_model(case.split()[0], tmp_path / "in", **FAMILIES[case])
    model, decoder = ours(tmp_path / "in")
    hf.save(decoder.state_dict(), model, tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    compare(tmp_path / "out", theirs, 23)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_export_keeps_the_rope(tmp_path, scaling):
    theirs = random_model("llama", tmp_path / "in", rope_parameters={"rope_theta": 10000.0, **SCALINGS[scaling]})
    model, decoder = ours(tmp_path / "in")
    hf.save(decoder.state_dict(), model, tmp_path / "out")
    back, _ = ours(tmp_path / "out")
    assert back.rope == model.rope
    compare(tmp_path / "out", theirs, 40)


@pytest.mark.smollm2
def test_smollm2():
    folder = smollm2.folder()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model, _ = ours(folder)
    assert model.parameter_count == 134_515_008
    compare(folder, theirs, 48, rows=1)
