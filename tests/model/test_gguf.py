import json

import gguf as writer
import numpy as np
import pytest
import torch
import transformers

from partita.facts.errors import BadInput
from partita.facts.families import model_from_config
from partita.model import gguf, hf
from partita.model.decoder import Decoder, plain
from partita.model.tokenizer import load_tokenizer

HIDDEN, HEADS, KV_HEADS, FFN, LAYERS = 64, 4, 2, 96, 2
# Byte-level tokens: the 256 bytes in their printable form, two merges, and two control tokens.
PRINTABLE = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
BYTES = [chr(b) for b in PRINTABLE] + [chr(256 + n) for n in range(256 - len(PRINTABLE))]
TOKENS = [*BYTES, "th", "the", "<|end|>", "<|start|>"]
VOCAB = len(TOKENS)


def theirs(family, tied):
    config = transformers.AutoConfig.for_model(
        family,
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": 20000.0},
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.randn_like(p) * 0.1 + (1 if "norm" in name else 0))
    return model


def interleaved(values, heads):
    """What llama.cpp's converter does to q and k of its llama architecture."""
    return (
        values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    )


def write(path, family, model, kind=writer.GGMLQuantizationType.F32, pre="smollm", extra=(), **facts):
    out = writer.GGUFWriter(path, family)
    out.add_block_count(LAYERS)
    out.add_context_length(128)
    out.add_embedding_length(HIDDEN)
    out.add_feed_forward_length(FFN)
    out.add_head_count(HEADS)
    out.add_head_count_kv(KV_HEADS)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_rope_freq_base(20000.0)
    out.add_tokenizer_model(facts.pop("tokenizer", "gpt2"))
    out.add_tokenizer_pre(pre)
    out.add_token_list(TOKENS)
    out.add_token_types([1] * (VOCAB - 2) + [3, 3])
    out.add_token_merges(["t h", "th e"])
    out.add_eos_token_id(VOCAB - 2)
    out.add_bos_token_id(VOCAB - 1)
    for key, value in facts.items():
        (out.add_string if isinstance(value, str) else out.add_float32)(f"{family}.rope.scaling.{key}", value)
    blocks = {theirs: ours for ours, theirs in gguf._BLOCK.items()}
    for name, p in model.named_parameters():
        values = p.detach().numpy()
        if name.startswith("model.layers."):
            _, _, layer, rest = name.split(".", 3)
            stem, _, end = rest.rpartition(".")
            ours = blocks[stem]
            if family == "llama" and ours in ("attn_q", "attn_k"):
                values = interleaved(values, HEADS if ours == "attn_q" else KV_HEADS)
            name = f"blk.{layer}.{ours}.{end}"
        else:
            name = {theirs: ours for ours, theirs in gguf._OUTER.items()}[name]
        stored = kind if values.ndim == 2 else writer.GGMLQuantizationType.F32
        out.add_tensor(name, writer.quants.quantize(values, stored), raw_dtype=stored)
    for name, values in extra:
        out.add_tensor(name, values)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


def logits(folder, ids):
    model = model_from_config(json.loads((folder / "config.json").read_text()), "converted")
    decoder = Decoder(model)
    hf.load(decoder.named_parameters(), model, folder)
    with torch.no_grad():
        return decoder(ids, torch.arange(ids.shape[-1]), plain(model))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_logits_survive(tmp_path, family, tied):
    model, ids = theirs(family, tied), torch.randint(0, VOCAB, (1, 17))
    gguf.convert(write(tmp_path / "m.gguf", family, model), tmp_path / "m", torch.float32)
    with torch.no_grad():
        want = model(ids).logits
    assert want.abs().max() > 1
    assert (logits(tmp_path / "m", ids) - want).abs().max() <= 1e-4
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    with torch.no_grad():
        assert (again(ids).logits - want).abs().max() <= 1e-4


def test_quantised_and_cast(tmp_path):
    model = theirs("llama", True)
    gguf.convert(write(tmp_path / "m.gguf", "llama", model, writer.GGMLQuantizationType.Q8_0), tmp_path / "m")
    from safetensors.torch import load_file

    stored = load_file(tmp_path / "m/model.safetensors")
    assert {t.dtype for t in stored.values()} == {torch.bfloat16}
    for name, p in model.named_parameters():
        # Q8_0 rounds to 1/254 of a block's largest value, bfloat16 to 1/256 of each.
        assert (stored[name].float() - p).abs().max() <= p.abs().max() * (1 / 254 + 1 / 256), name


@pytest.mark.parametrize("pre", ["smollm", "qwen2", "llama-bpe", "gpt-2"])
def test_tokenizer(tmp_path, pre):
    gguf.convert(write(tmp_path / "m.gguf", "llama", theirs("llama", True), pre=pre), tmp_path / "m")
    tokenizer = load_tokenizer(tmp_path / "m")
    assert (tokenizer.size, tokenizer.eos) == (VOCAB, VOCAB - 2)
    text = "the 1234 theatre’s ä\n<|end|>"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and ids[0] == TOKENS.index("the") and ids[-1] == tokenizer.eos


def test_scalings(tmp_path):
    def rope(**kw):
        folder = tmp_path / f"m{len(list(tmp_path.iterdir()))}"
        gguf.convert(write(tmp_path / "m.gguf", "llama", theirs("llama", True), **kw), folder)
        return model_from_config(json.loads((folder / "config.json").read_text()), "m").rope

    assert rope().scaling == "none"
    assert (rope(type="linear", factor=4.0).scaling, rope(type="yarn", factor=8.0).factor) == ("linear", 8.0)
    with pytest.raises(BadInput, match="'su'"):
        rope(type="su", factor=4.0)
    with pytest.raises(BadInput, match=r"does not say llama\.rope.scaling.factor"):
        rope(type="linear")
    # Llama 3.1's divisors at theta 20000, from its config.json's numbers and its published code.
    wave = 2 * np.pi * 20000.0 ** (np.arange(0, 16, 2) / 16)
    factors = []
    for w in wave:
        smooth = (8192 / w - 1) / 3
        factors.append(1.0 if w < 2048 else 8.0 if w > 8192 else 1 / ((1 - smooth) / 8 + smooth))
    assert 8.0 in factors and 1.0 in factors and len(set(factors)) > 2
    found = rope(extra=[("rope_freqs.weight", np.array(factors, np.float32))])
    assert (found.scaling, found.factor, found.original_positions) == ("llama3", 8.0, 8192)
    with pytest.raises(BadInput, match="rope factors that are not those of Llama"):
        rope(extra=[("rope_freqs.weight", np.array(factors, np.float32) * 1.5)])


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"tokenizer": "llama"}, "tokenizer 'llama'"),
        ({"pre": "unheard-of"}, "with 'unheard-of'"),
        ({"extra": [("blk.0.odd.weight", np.zeros(3, np.float32))]}, "a tensor blk.0.odd.weight"),
    ],
)
def test_refusals(tmp_path, changes, words):
    source = write(tmp_path / "m.gguf", "llama", theirs("llama", True), **changes)
    with pytest.raises(BadInput, match=words):
        gguf.convert(source, tmp_path / "m")
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


def test_other_architectures(tmp_path):
    out = writer.GGUFWriter(tmp_path / "m.gguf", "mamba")
    out.add_tensor("a", np.zeros(3, np.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    with pytest.raises(BadInput, match="architecture 'mamba'; what can be converted is llama, qwen2"):
        gguf.convert(tmp_path / "m.gguf", tmp_path / "m")


@pytest.mark.parametrize("keep", [0, 4, 1000, 0.5, -100])
def test_damaged_files(tmp_path, keep):
    source = write(tmp_path / "m.gguf", "llama", theirs("llama", True))
    data = source.read_bytes()
    source.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    with pytest.raises(BadInput, match="is not a whole GGUF file") as found:
        gguf.convert(source, tmp_path / "m")
    assert "\n" not in str(found.value)


def test_no_file(tmp_path):
    with pytest.raises(BadInput, match="No such file"):
        gguf.convert(tmp_path / "m.gguf", tmp_path / "m")
