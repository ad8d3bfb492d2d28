import math
from itertools import product

import numpy as np
import pytest
import torch

from partita.facts.model import Model, Parameter
from partita.model import init, shards
from partita.model.decoder import Decoder
from partita.model.init import fill, initial

MODEL = Model("tiny", "llama", layers=2, hidden=20, ffn=28, heads=4, kv_heads=2, head_dim=6, vocab=37, qkv_bias=True)


def parameter(shape, role="q"):
    return Parameter("any", shape, role, "blocks.0")


@pytest.mark.parametrize("chunk", [64, 1 << 16])
@pytest.mark.parametrize("shape", [(211,), (37, 20), (5, 7, 6)])
def test_every_slice_equals_the_slice_of_the_whole(monkeypatch, shape, chunk):
    monkeypatch.setattr(init, "CHUNK", chunk)
    whole = initial("a.weight", parameter(shape), 3, 2)
    rng = np.random.default_rng(0)
    for _ in range(100):
        ends = [sorted(rng.choice(n + 1, 2, replace=False).tolist()) for n in shape]
        part = initial("a.weight", parameter(shape), 3, 2, ranges=shards.box(*map(tuple, ends)))
        assert torch.equal(part, whole[tuple(slice(a, b) for a, b in ends)])


def test_chunks_do_not_change_values(monkeypatch):
    one = initial("a.weight", parameter((300, 70)), 3, 2)
    monkeypatch.setattr(init, "CHUNK", 192)
    assert torch.equal(initial("a.weight", parameter((300, 70)), 3, 2), one)


def test_runs_of_a_strided_shard():
    whole = initial("a.weight", parameter((11, 4)), 0, 2)
    part = initial("a.weight", parameter((11, 4)), 0, 2, ranges=(((1, 3), (7, 11)), ((0, 4),)))
    assert torch.equal(part, whole[[1, 2, 7, 8, 9, 10]])


def test_empty_part():
    assert initial("a.weight", parameter((11, 4)), 0, 2, ranges=shards.box((11, 11), (0, 4))).shape == (0, 4)


def test_names_seeds_and_elements_are_unrelated():
    n = 100_000
    draws = [initial(name, parameter((n,)), seed, 2) for name, seed in (("a", 0), ("b", 0), ("a", 1), ("a", 2**40))]
    draws.append(draws[0].roll(1))
    for i, j in product(range(len(draws)), repeat=2):
        if i < j:
            assert abs(torch.corrcoef(torch.stack([draws[i], draws[j]]))[0, 1]) < 5 / math.sqrt(n)


def test_statistics():
    x = initial("embed.weight", parameter((1000, 1000)), 0, 2).double() / init.STD
    n = x.numel()
    # Five standard errors of each moment of a normal sample.
    assert abs(x.mean()) < 5 / math.sqrt(n)
    assert abs(x.var() - 1) < 5 * math.sqrt(2 / n)
    assert abs((x**3).mean()) < 5 * math.sqrt(15 / n)
    assert abs((x**4).mean() - 3) < 5 * math.sqrt(96 / n)
    ordered = x.flatten().sort().values
    cdf = torch.special.ndtr(ordered)
    assert (cdf - torch.arange(n) / n).abs().max() < 1.95 / math.sqrt(n)  # Kolmogorov-Smirnov at 0.1 %


def test_roles():
    spreads = {role: init.spread(role, 30) for role in ("norm", "qk_norm", "norm_bias", "q_bias", "gate", "o", "down")}
    scaled = 0.02 / math.sqrt(60)
    assert spreads == {
        "norm": None, "qk_norm": None, "norm_bias": 0, "q_bias": 0, "gate": 0.02, "o": scaled, "down": scaled,
    }  # fmt: skip


def test_values_do_not_drift():
    """A changed generator would silently start other models from the same seed."""
    got = initial("blocks.0.attn.q.weight", parameter((2, 3)), 7, 2).double().flatten() / init.STD
    key1, key2 = init._keys(7, "blocks.0.attn.q.weight")
    want = []
    for i in range(6):
        z = (key1 + i * 0x9E3779B97F4A7C15) % 2**64
        z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) % 2**64 ^ key2
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) % 2**64
        z ^= z >> 31
        u, v = ((z >> 32) + 0.5) / 2**32, (z % 2**32) / 2**32
        want.append(math.sqrt(-2 * math.log(u)) * math.cos(2 * math.pi * v))
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), atol=2e-6, rtol=0)
    assert (key1, key2) == (10593006997826540019, 5087612113792188267)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes_are_roundings_of_one_value(dtype):
    a = initial("a", parameter((50,)), 0, 2)
    assert torch.equal(initial("a", parameter((50,)), 0, 2, dtype), a.to(dtype))


def test_fill():
    decoder = Decoder(MODEL)
    fill(decoder.named_parameters(), MODEL, seed=5)
    for p in MODEL.parameters:
        assert torch.equal(decoder.get_parameter(p.name).detach(), initial(p.name, p, 5, MODEL.layers))
    assert decoder.get_parameter("blocks.1.attn.q.bias").eq(0).all() and decoder.norm.weight.eq(1).all()
    assert decoder.blocks[0].attn.o.weight.std() < 0.8 * decoder.blocks[0].attn.q.weight.std()


def test_a_transposed_store_is_filled_too():
    p = MODEL.parameters[0]
    turned = torch.empty(p.shape[::-1]).T
    fill({p.name: turned}, MODEL, seed=5)
    assert torch.equal(turned, initial(p.name, p, 5, MODEL.layers))


def test_fill_refuses():
    with pytest.raises(ValueError, match=r"no parameter named 'blocks.2.norm'"):
        fill({"blocks.2.norm": torch.empty(1)}, MODEL, 0)
    with pytest.raises(ValueError, match=r"embed.weight has shape \(1,\), but tiny says \(37, 20\)"):
        fill({"embed.weight": torch.empty(1)}, MODEL, 0)
    with pytest.raises(ValueError, match="materialise it first"):
        fill(Decoder(MODEL).to("meta").named_parameters(), MODEL, 0)
