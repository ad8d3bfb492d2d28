import json
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from partita.facts.errors import BadInput
from partita.facts.families import model_from_config
from partita.facts.model import Model
from partita.model import hf
from partita.model.decoder import Decoder
from partita.model.hf import BadCheckpoint
from partita.model.init import fill

MODEL = Model("tiny", "llama", layers=2, hidden=20, ffn=28, heads=4, kv_heads=2, head_dim=6, vocab=37, max_positions=99)
TIED = Model(
    "tied", "qwen3", layers=1, hidden=20, ffn=28, heads=4, kv_heads=2, head_dim=6, vocab=37, tied=True, qk_norm=True
)


def filled(model, dtype=torch.float32):
    decoder = Decoder(model).to(dtype)
    fill(decoder.named_parameters(), model, 0)
    return decoder


def write(model, folder, dtype=torch.float32):
    hf.save(dict(filled(model, dtype).named_parameters()), model, folder)
    return folder / "model.safetensors"


def rewrite(file, change):
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def read(model, folder, dtype=torch.float32):
    decoder = Decoder(model).to(dtype)
    for p in decoder.parameters():
        p.data.fill_(float("nan"))
    hf.load(decoder.named_parameters(), model, folder)
    return decoder


def equal(a, b):
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("model", [MODEL, TIED])
def test_round_trip(tmp_path, model):
    write(model, tmp_path / "m")
    assert equal(read(model, tmp_path / "m"), filled(model))
    back = model_from_config(json.loads((tmp_path / "m/config.json").read_text()), model.name)
    assert back == model


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_dtypes_are_cast(tmp_path, stored, wanted):
    write(MODEL, tmp_path / "m", stored)
    assert equal(read(MODEL, tmp_path / "m", wanted), filled(MODEL, stored).to(wanted))


def test_small_reads(tmp_path, monkeypatch):
    write(TIED, tmp_path / "m")
    monkeypatch.setattr(hf, "READ_BYTES", 3 * 20 * 4)
    assert equal(read(TIED, tmp_path / "m"), filled(TIED))


def test_a_stage_reads_its_part(tmp_path):
    write(MODEL, tmp_path / "m")
    decoder, want = Decoder(MODEL), filled(MODEL)
    hf.load({n: p for n, p in decoder.named_parameters() if n.startswith("blocks.1.")}, MODEL, tmp_path / "m")
    assert equal(decoder.blocks[1], want.blocks[1])


def test_only_the_needed_slices_are_read(tmp_path, monkeypatch):
    write(MODEL, tmp_path / "m")
    read_shapes = []

    class Spy:
        def __init__(self, inner):
            self.inner = inner

        def __getitem__(self, index):
            values = self.inner[index]
            read_shapes.append(tuple(values.shape))
            return values

    get = hf._Files.get
    monkeypatch.setattr(hf._Files, "get", lambda files, entry, name: Spy(get(files, entry, name)))
    out, held = torch.empty(7, 6), (((1, 4), (20, 24)), ((3, 9),))
    entries = hf.inspect(tmp_path / "m", MODEL)
    with hf._Files() as files:
        hf._read(files, "lm_head.weight", entries["lm_head.weight"], out, held)
    assert read_shapes == [(3, 6), (4, 6)]
    assert torch.equal(out, filled(MODEL).head.weight[[1, 2, 3, 20, 21, 22, 23], 3:9])


def test_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr(hf, "FILE_BYTES", 9000)
    write(MODEL, tmp_path / "m")
    files = sorted(f.name for f in (tmp_path / "m").glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert equal(read(MODEL, tmp_path / "m"), filled(MODEL))
    cut = tmp_path / "m" / files[1]
    cut.write_bytes(cut.read_bytes()[:-1])
    with pytest.raises(BadCheckpoint, match=rf"{files[1]} is truncated"):
        read(MODEL, tmp_path / "m")
    cut.unlink()
    with pytest.raises(BadCheckpoint, match=rf"{files[1]} cannot be read: No such file"):
        read(MODEL, tmp_path / "m")


def test_index_that_points_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setattr(hf, "FILE_BYTES", 9000)
    write(MODEL, tmp_path / "m")
    index = tmp_path / "m/model.safetensors.index.json"
    table = json.loads(index.read_text())
    names = sorted(set(table["weight_map"].values()))
    wrong = dict.fromkeys(table["weight_map"], names[0])
    index.write_text(json.dumps({"weight_map": wrong}))
    with pytest.raises(BadCheckpoint, match=r"where model.safetensors.index.json says that it is"):
        read(MODEL, tmp_path / "m")
    index.write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))
    with pytest.raises(BadCheckpoint, match=r"must lie beside it"):
        read(MODEL, tmp_path / "m")
    index.write_text("{")
    with pytest.raises(BadCheckpoint, match=r"no readable weight_map"):
        read(MODEL, tmp_path / "m")


def test_stored_head_of_a_tied_model(tmp_path):
    file = write(TIED, tmp_path / "m")
    rewrite(file, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert equal(read(TIED, tmp_path / "m"), filled(TIED))
    rewrite(file, lambda t: t["lm_head.weight"][36].add_(1))
    with pytest.raises(BadCheckpoint, match=r"differs from model.embed_tokens.weight, but tied ties them"):
        read(TIED, tmp_path / "m")


def test_head_that_an_untied_model_lacks(tmp_path):
    rewrite(write(MODEL, tmp_path / "m"), lambda t: t.pop("lm_head.weight"))
    with pytest.raises(BadCheckpoint, match=r"no tensor lm_head.weight, which tiny needs with shape \(37, 20\)"):
        read(MODEL, tmp_path / "m")


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda t: t.pop("model.norm.weight"), "no tensor model.norm.weight"),
        (
            lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.zeros(28, 20)}),
            r"holds model.layers.2.mlp.up_proj.weight of shape \(28, 20\), which tiny does not have",
        ),
        (
            lambda t: t.update({"model.layers.1.mlp.up_proj.weight": torch.zeros(20, 28)}),
            r"model.layers.1.mlp.up_proj.weight has shape \(20, 28\), but tiny needs \(28, 20\)",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(20, dtype=torch.int8)}),
            "model.norm.weight is stored as I8; what can be read is F64, F32, F16, BF16",
        ),
    ],
)
def test_wrong_tensors(tmp_path, change, words):
    file = write(MODEL, tmp_path / "m")
    rewrite(file, change)
    with pytest.raises(BadCheckpoint, match=words) as found:
        read(MODEL, tmp_path / "m")
    assert str(tmp_path / "m") in str(found.value) and "\n" not in str(found.value)


def test_rotary_buffers_of_older_checkpoints_are_no_tensors(tmp_path):
    file = write(MODEL, tmp_path / "m")
    rewrite(file, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(3)}))
    assert equal(read(MODEL, tmp_path / "m"), filled(MODEL))


@pytest.mark.parametrize(
    "damage, words",
    [
        (lambda b: b[:-1], "is truncated: its header describes"),
        (lambda b: b[:200], "is truncated: it has 200 bytes and its header alone needs"),
        (lambda b: b[:5], "is truncated"),
        (lambda b: b"", "is truncated"),
        (lambda b: b + b"\0", "has bytes beyond its tensors"),
        (lambda b: struct.pack("<Q", 4) + b"oops", "has no safetensors header"),
        (lambda b: struct.pack("<Q", 2) + b"[]", "has no safetensors header"),
        (lambda b: b"version https://git-lfs.github.com/spec/v1\n", "is truncated"),
    ],
)
def test_damaged_files(tmp_path, damage, words):
    file = write(MODEL, tmp_path / "m")
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(BadCheckpoint, match=words) as found:
        read(MODEL, tmp_path / "m")
    assert str(file) in str(found.value) and "\n" not in str(found.value)


def test_nothing_is_written_before_the_check(tmp_path):
    file = write(MODEL, tmp_path / "m")
    rewrite(file, lambda t: t.pop("model.norm.weight"))
    decoder = filled(MODEL)
    with pytest.raises(BadCheckpoint):
        hf.load(decoder.named_parameters(), MODEL, tmp_path / "m")
    assert equal(decoder, filled(MODEL))


def test_folders_without_weights(tmp_path):
    with pytest.raises(BadCheckpoint, match=r"only safetensors are read"):
        read(MODEL, tmp_path)


def test_parameters_that_cannot_be_loaded(tmp_path):
    write(MODEL, tmp_path / "m")
    with pytest.raises(ValueError, match=r"materialise it first"):
        hf.load(Decoder(MODEL).to("meta").named_parameters(), MODEL, tmp_path / "m")
    with pytest.raises(ValueError, match=r"no parameter named 'other'"):
        hf.load({"other": torch.zeros(1)}, MODEL, tmp_path / "m")
    with pytest.raises(ValueError, match=r"asked for in torch.bfloat16"):
        hf.load(Decoder(MODEL).named_parameters(), MODEL, tmp_path / "m", torch.bfloat16)


def test_save_takes_a_tied_head_and_refuses_a_wrong_state(tmp_path):
    state = filled(TIED).state_dict()
    assert "head.weight" in state
    hf.save(state, TIED, tmp_path / "m")
    assert "lm_head.weight" not in load_file(tmp_path / "m/model.safetensors")
    del state["norm.weight"]
    with pytest.raises(ValueError, match=r"the state has no 'norm.weight'"):
        hf.save(state, TIED, tmp_path / "n")
    with pytest.raises(BadInput, match=r"is not empty"):
        hf.save(filled(TIED).state_dict(), TIED, tmp_path / "m")
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_a_failed_save_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(hf, "config", lambda model: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        hf.save(filled(TIED).state_dict(), TIED, tmp_path / "m")
    assert not list(tmp_path.iterdir())


def test_companions_are_copied(tmp_path):
    write(TIED, tmp_path / "a")
    (tmp_path / "a/tokenizer.json").write_text("{}")
    fields = json.loads((tmp_path / "a/config.json").read_text())
    (tmp_path / "a/config.json").write_text(json.dumps(fields | {"eos_token_id": 7, "vocab_size": 1}))
    hf.save(filled(TIED).state_dict(), TIED, tmp_path / "b", like=tmp_path / "a")
    written = json.loads((tmp_path / "b/config.json").read_text())
    assert (written["eos_token_id"], written["vocab_size"]) == (7, 37)
    assert (tmp_path / "b/tokenizer.json").exists()
