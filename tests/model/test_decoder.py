"""The decoder alone; equality with transformers is in test_against_transformers.py."""

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from partita.facts.model import Model, Rope, UnknownModel
from partita.model.attention import causal
from partita.model.decoder import Calls, Decoder, plain
from partita.model.loss import vocabulary_loss


def tiny(**changes):
    base = Model("tiny", "llama", layers=2, hidden=20, ffn=28, heads=4, kv_heads=2, head_dim=6, vocab=37)
    return replace(base, **changes)


def build(model, dtype=torch.float64):
    torch.manual_seed(0)
    return Decoder(model).to(dtype)


@pytest.mark.parametrize(
    "changes",
    [{}, {"tied": True}, {"qkv_bias": True}, {"qk_norm": True, "kv_heads": 4}, {"mlp_bias": True, "o_bias": True}],
)
def test_names_and_shapes_are_those_of_the_facts(changes):
    model = tiny(**changes)
    built = [(n, tuple(p.shape)) for n, p in Decoder(model).named_parameters()]
    assert sorted(built) == sorted((p.name, p.shape) for p in model.parameters)


def test_tied_head_is_the_embedding():
    decoder = Decoder(tiny(tied=True))
    assert decoder.head.weight is decoder.embed.weight
    assert len(list(decoder.parameters())) == len(tiny(tied=True).parameters)


def test_leading_dims_are_free():
    model, ids = tiny(), torch.randint(0, 37, (3, 9))
    decoder, positions = build(model), torch.arange(9)
    batch = decoder(ids, positions, plain(model))
    assert batch.shape == (3, 9, 37)
    torch.testing.assert_close(decoder(ids[1], positions, plain(model)), batch[1])
    torch.testing.assert_close(decoder(ids[None], positions.expand(1, 3, 9), plain(model))[0], batch)


def test_head_on_selected_rows():
    model, ids = tiny(), torch.randint(0, 37, (2, 5))
    decoder = build(model)
    everything = decoder(ids, torch.arange(5), plain(model))
    some = decoder(ids, torch.arange(5), plain(model), rows=torch.tensor([9, 0, 4]))
    torch.testing.assert_close(some, everything.flatten(0, 1)[[9, 0, 4]])


@pytest.mark.parametrize("window", [None, 3])
def test_documents_in_one_row_equal_documents_apart(window):
    model = tiny(sliding_window=window)
    decoder, ids = build(model), torch.randint(0, 37, (2, 11))
    documents = torch.tensor([[0] * 4 + [1] * 7, [0] * 10 + [3]])
    positions = torch.tensor([[*range(4), *range(7)], [*range(10), 0]])
    packed = decoder(ids, positions, plain(model, documents))
    for row, start, end in ((0, 0, 4), (0, 4, 11), (1, 0, 10), (1, 10, 11)):
        apart = decoder(ids[row, start:end], torch.arange(end - start), plain(model))
        torch.testing.assert_close(packed[row, start:end], apart)


def test_window_hides_what_is_behind_it():
    model = tiny(layers=1, sliding_window=3)
    decoder, ids = build(model), torch.randint(0, 36, (8,))
    other = ids.clone()
    other[2] += 1
    a, b = (decoder(i, torch.arange(8), plain(model)) for i in (ids, other))
    changed = (a - b).abs().amax(-1) > 0
    assert changed.tolist() == [False, False, True, True, True, False, False, False]


def test_attention_without_the_models_window_is_refused():
    model = tiny(sliding_window=3)
    with pytest.raises(ValueError, match="a window of 3 positions and the sequence has 4"):
        build(model)(torch.zeros(4, dtype=torch.int64), torch.arange(4), Calls(causal()))
    build(model)(torch.zeros(3, dtype=torch.int64), torch.arange(3), Calls(causal()))


def test_documents_of_another_length_are_refused():
    with pytest.raises(ValueError, match="documents name 3 positions, but the sequence has 4"):
        build(tiny())(torch.zeros(4, dtype=torch.int64), torch.arange(4), plain(tiny(), torch.zeros(3)))


def test_the_mask_is_built_once():
    model, attend = tiny(layers=3), causal(torch.tensor([0, 0, 1, 1]))
    seen = []

    def spy(layer, q, k, v):
        out = attend(layer, q, k, v)
        seen.append((layer, attend.mask(q.transpose(0, 1)[None])))
        return out

    build(model)(torch.zeros(4, dtype=torch.int64), torch.arange(4), Calls(spy))
    assert [layer for layer, _ in seen] == [0, 1, 2] and len({id(mask) for _, mask in seen}) == 1


@pytest.mark.parametrize("scaling", ["none", "dynamic", "llama3"])
def test_fake_and_meta(scaling):
    model = tiny(tied=True, rope=Rope(scaling=scaling, factor=2.0, original_positions=8), sliding_window=4)
    with torch.device("meta"):
        decoder = Decoder(model)
        assert all(p.is_meta for p in decoder.parameters())
        ids = torch.zeros(2, 9, dtype=torch.int64)
        vocabulary_loss(decoder(ids, torch.arange(9), plain(model)), ids).backward()
        assert all(p.grad is not None for p in decoder.parameters())
    with FakeTensorMode(allow_non_fake_inputs=False):
        decoder, ids = Decoder(model), torch.zeros(2, 9, dtype=torch.int64)
        vocabulary_loss(decoder(ids, torch.arange(9), plain(model, ids)), ids).backward()
        assert all(p.grad.shape == p.shape for p in decoder.parameters())


def test_internal_upcasts():
    """bfloat16 stays near float32; float64 is exact to float64, nothing casts down on its way."""
    model, ids = tiny(), torch.randint(0, 37, (2, 9))
    decoder = build(model)
    exact = decoder(ids, torch.arange(9), plain(model))
    assert exact.dtype == torch.float64
    half = build(model, torch.bfloat16)(ids, torch.arange(9), plain(model))
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.double(), exact, atol=0.03, rtol=0.03)
    single = build(model, torch.float32)(ids, torch.arange(9), plain(model)).double()
    assert 1e-9 < (single - exact).abs().max() < 1e-5


def test_gradients():
    model = tiny(layers=1, hidden=6, ffn=5, heads=2, kv_heads=1, head_dim=2, vocab=5, qk_norm=True)
    decoder, ids = build(model), torch.tensor([[1, 2, 4]])
    names, values = zip(*decoder.named_parameters(), strict=True)

    def run(*given):
        state = dict(zip(names, given, strict=True))
        return torch.func.functional_call(decoder, state, (ids, torch.arange(3), plain(model)))

    assert torch.autograd.gradcheck(run, [v.detach().clone().requires_grad_() for v in values])


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"runs": False, "family": "gpt2"}, "family gpt2, which can be planned but not run"),
        ({"norm": "layernorm"}, r"\(norm=layernorm\)"),
        ({"layers": 0}, "parameter count alone"),
        ({"kv_heads": 3}, "multiple of the KV heads"),
        ({"head_dim": 5}, "head_dim must be even"),
    ],
)
def test_refusals(changes, words):
    with pytest.raises(UnknownModel, match=words):
        Decoder(tiny(**changes))
