"""The catalog: every entry has a source, describes itself, and has the size that is published."""

from __future__ import annotations

from dataclasses import replace

import pytest

from partita.facts.families import model_from_config
from partita.facts.known import Entry, entries, entry, key, near
from partita.facts.model import Model

ENTRIES = list(entries())

# llm-foundry, scripts/train/benchmarking/README.md: parameters by model and sequence length (position rows count).
FOUNDRY = [
    ("125M", 1024, 124_525_056),
    ("125M", 32768, 148_904_448),
    ("350M", 512, 354_412_544),
    ("350M", 65536, 420_997_120),
    ("760M", 4096, 763_616_256),
    ("1B", 8192, 1_328_533_504),
    ("3B", 16384, 2_688_537_600),
    ("7B", 512, 6_652_567_552),
    ("13B", 32768, 13_011_240_960),
    ("30B", 8192, 30_019_254_272),
    ("70B", 2048, 64_862_437_376),
]

# Measured models by the labels under which their figures were published; each must lead to an entry.
MEASURED = """DeepSeekV4 Flash;GPT L12 h1024;GPT L12 h2048;GPT L16 h1024;GPT L16 h2048;GPT L20 h1024;GPT L20 h2048;
GPT L24 h1024;GPT L24 h2048;GPT L30 h3072;GPT L40 h6144;GPT L48 h8192;GPT L96 h12288;GPT-1.3B;GPT-1.7B;GPT-145B;GPT-18B;
GPT-1T;GPT-291B;GPT-3.6B;GPT-39B;GPT-530B;GPT-7.5B;GPT-76B;MPT-125m;MPT-13b;MPT-1b;MPT-30b;MPT-350m;MPT-3b;MPT-70b;
MPT-760m;MPT-7b;Nemotron_3_5_Lightning;Nemotron_3_Nano;Nemotron_3_Super;deepseek-v2-cut;deepseek-v3;
deepseek-v3 (without MTP);deepseek-v3-cut;gpt-oss-120b;gpt3-175B;gpt3-175b;gpt3-20b;gpt3-5b;kimi-k2;llama2-13b;
llama2-13b-lora;llama2-70b;llama2-70b-lora;llama2-7b;llama2-7b-lora;llama3-70b;llama3-70b-cut;llama3-70b-lora;llama3-8b;
llama3.1-405b;llama3.1-405b-cut(simumax padded: kv_heads 16);megatron-1T;megatron-22B;moonlight-16b-a3b;nemotron-22b;
nemotron-340b;nemotron-8b;qwen3-235b-a22b;qwen3-30b-a3b;turing-530B""".replace("\n", "").split(";")


def named(text: str) -> Model:
    found = entry(text)
    assert found is not None, text
    return found.model()


@pytest.mark.parametrize("known", [e for e in ENTRIES if not e.experts], ids=lambda e: e.name)
def test_published_parameter_count(known: Entry) -> None:
    model = known.model()
    count = model.parameter_count
    if known.counts == "block matrices":
        count = sum(s.count * p.elements for s in model.spans if s.is_blocks for p in s.parameters if len(p.shape) == 2)
    if known.tolerance == 0:
        assert count == known.parameters
    else:
        assert count == pytest.approx(known.parameters, rel=known.tolerance)


@pytest.mark.parametrize("known", ENTRIES, ids=lambda e: e.name)
def test_every_entry_is_sourced_and_found_by_its_names(known: Entry) -> None:
    assert known.source.startswith("https://")
    for name in (known.name, known.name.upper(), *known.aliases, *known.hub):
        assert entry(name) == known
    assert known.counts in ("all", "block matrices")
    if known.experts:
        assert 0 < known.active < known.parameters and not known.config
        assert known.model().family == "experts"


def test_no_two_entries_share_a_name() -> None:
    names = [n for e in ENTRIES for n in e.names()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("label", MEASURED)
def test_measured_models_are_known(label: str) -> None:
    assert entry(label) is not None


@pytest.mark.parametrize(("size", "sequence", "published"), FOUNDRY)
def test_foundry_counts_by_sequence(size: str, sequence: int, published: int) -> None:
    model = named(f"foundry-mpt-{size}")
    assert replace(model, max_positions=sequence, position_rows=sequence).parameter_count == published


def test_cut_models_are_the_whole_ones_with_fewer_layers() -> None:
    whole, cut = named("llama-3-70b"), named("llama-3-70b-cut")
    assert whole.parameter_count - cut.parameter_count == 68 * whole.spans[1].elements
    assert named("llama-3.1-405b-cut").kv_heads == 16


@pytest.mark.parametrize(
    ("name", "layers", "hidden", "dense", "dense_ffn", "experts", "top", "shared", "ffn", "vocab"),
    [  # config.json of DeepSeek-V2 and V3; the shortened ones keep one dense layer
        ("deepseek-v2", 60, 5120, 1, 12288, 160, 6, 2, 1536, 102400),
        ("deepseek-v3", 61, 7168, 3, 18432, 256, 8, 1, 2048, 129280),
        ("deepseek-v2-cut", 4, 5120, 1, 12288, 160, 6, 2, 1536, 102400),
        ("deepseek-v3-cut", 4, 7168, 1, 18432, 256, 8, 1, 2048, 129280),
    ],
)
def test_deepseek_totals_from_their_dimensions(
    name: str,
    layers: int,
    hidden: int,
    dense: int,
    dense_ffn: int,
    experts: int,
    top: int,
    shared: int,
    ffn: int,
    vocab: int,
) -> None:
    q_rank, kv_rank, heads, plain, rotary = 1536, 512, 128, 128, 64
    query = hidden * q_rank + q_rank + q_rank * heads * (plain + rotary)
    cached = hidden * (kv_rank + rotary) + kv_rank + kv_rank * heads * 2 * plain
    attention = query + cached + heads * plain * hidden + 2 * hidden
    router = experts * hidden + (experts if "v3" in name else 0)  # V3 has one correction bias per expert

    def total(used: int) -> int:
        sparse = router + (used + shared) * 3 * hidden * ffn
        blocks = layers * attention + dense * 3 * hidden * dense_ffn + (layers - dense) * sparse
        return blocks + 2 * vocab * hidden + hidden

    model = named(name)
    assert model.parameter_count == total(experts)
    assert model.active_count == pytest.approx(total(top), rel=0.02)


def test_rope_of_llama_3_1() -> None:
    rope = named("Llama-3.1-8B").rope
    assert (rope.theta, rope.scaling, rope.factor, rope.original_positions) == (500000.0, "llama3", 8.0, 8192)
    assert named("Llama-3.2-1B").rope.factor == 32.0


def test_runs_or_predicts() -> None:
    assert all(named(n).runs for n in ("smollm2-135m", "llama-2-7b", "mistral-7b", "qwen2.5-7b", "qwen3-8b"))
    assert not any(named(n).runs for n in ("gpt2", "bloom-560m", "mpt-7b", "opt-125m", "nemotron-8b", "mixtral-8x7b"))


def test_names_without_case_and_separators() -> None:
    assert key("Llama 3.1 8B") == key("llama3.1-8b") == "llama3.18b"
    assert entry("") is None and entry("--") is None


def test_near_misses() -> None:
    assert "Llama-3.1-8B" in near("lama-3.1-8b")
    assert "Qwen2.5-7B" in near("Qwen/Qwen-2.5-7")
    assert near("zzzzzz") == []


def test_an_entry_is_its_configuration() -> None:
    known = entry("smollm2-135m")
    assert known is not None and known.model() == model_from_config(known.config, "SmolLM2-135M")
