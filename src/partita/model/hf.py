"""Hugging Face folders: config.json beside safetensors, read slice by slice and written back.

Everything is checked against the files' headers before a value is read, so that a wrong or truncated
checkpoint is refused at once, by name.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from partita.facts.errors import BadInput
from partita.facts.model import Model
from partita.model import shards
from partita.model.init import check_known

READ_BYTES = 64 * 2**20
"""Most bytes of one read; larger slices are read by rows."""

FILE_BYTES = 5 * 10**9
"""Most bytes of one written file, as transformers' ``save_pretrained`` has it."""

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

_PARTS = {
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    **{f"attn.{p}": f"self_attn.{p}_proj" for p in "qkvo"},
    **{f"attn.{p}_norm": f"self_attn.{p}_norm" for p in "qk"},
    **{f"mlp.{p}": f"mlp.{p}_proj" for p in ("gate", "up", "down")},
}
_OUTER = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
# Buffers that older checkpoints carry; they follow from the configuration.
_BUFFERS = re.compile(r"(^|\.)(rotary_emb\.inv_freq|attn\.masked_bias|attn\.bias)$")


class BadCheckpoint(BadInput):
    """A checkpoint that cannot be used; the message names file, tensor, what was expected and found."""


@dataclass(frozen=True)
class Entry:
    """A tensor in a file."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def hf_name(name: str) -> str:
    """``blocks.3.attn.q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``."""
    stem, _, kind = name.rpartition(".")
    if stem in _OUTER:
        return f"{_OUTER[stem]}.{kind}"
    _, index, part = stem.split(".", 2)
    return f"model.layers.{index}.{_PARTS[part]}.{kind}"


@torch.no_grad()
def load(
    parameters: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    model: Model,
    folder: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
) -> None:
    """Fill parameters in place from a Hugging Face folder; a DTensor reads the slices of its own shard alone.

    Args:
        parameters: global names and tensors (``decoder.named_parameters()``, or a stage's part of them).
        model: the whole model; the folder must hold exactly its tensors.
        folder: holds model.safetensors, or model.safetensors.index.json and its files.
        dtype: if given, every parameter must have it (values are cast to each parameter's dtype).

    Raises:
        BadCheckpoint: a missing, extra or wrongly shaped tensor, a truncated file, a dtype that is not a float.
        ValueError: a parameter that the model does not have, or that cannot take values.
    """
    entries = inspect(folder, model)
    known = {p.name: p for p in model.parameters}
    items = list(parameters.items() if isinstance(parameters, Mapping) else parameters)
    for name, tensor in items:
        check_known(name, tensor, known.get(name), model)
        if dtype not in (None, tensor.dtype):
            raise ValueError(f"{name} is {tensor.dtype}, but the checkpoint was asked for in {dtype}")
    with _Files() as files:
        _check_tie(entries, model, files)
        for name, tensor in items:
            mine, held = shards.local(tensor)
            if mine.numel():
                _read(files, hf_name(name), entries[hf_name(name)], mine, held)


def inspect(folder: str | os.PathLike[str], model: Model) -> dict[str, Entry]:
    """The tensors of a folder by name, checked against ``model`` from the headers alone (raises BadCheckpoint)."""
    entries = {n: e for n, e in _entries(Path(folder)).items() if not _BUFFERS.search(n)}
    expected = {hf_name(p.name): p.shape for p in model.parameters}
    if model.tied and "lm_head.weight" in entries:
        expected["lm_head.weight"] = (model.vocab, model.hidden)
    missing = [n for n in expected if n not in entries]
    if missing:
        raise BadCheckpoint(
            f"{folder} has no tensor {missing[0]}{_and_more(missing)}, which {model.name} needs with shape "
            f"{expected[missing[0]]}; its config.json and its files must be of one model"
        )
    extra = [n for n in entries if n not in expected]
    if extra:
        first = entries[extra[0]]
        raise BadCheckpoint(
            f"{first.file} holds {extra[0]} of shape {first.shape}{_and_more(extra)}, which {model.name} does not "
            "have; its config.json and its files must be of one model"
        )
    for name, shape in expected.items():
        entry = entries[name]
        if entry.shape != shape:
            raise BadCheckpoint(f"{entry.file}: {name} has shape {entry.shape}, but {model.name} needs {shape}")
        if entry.dtype not in _DTYPES:
            raise BadCheckpoint(
                f"{entry.file}: {name} is stored as {entry.dtype}; what can be read is {', '.join(_DTYPES)}"
            )
    return entries


def header(file: Path) -> dict[str, Entry]:
    """The tensors of one safetensors file, whose length must be what its header says (raises BadCheckpoint)."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > size - 8:
                raise BadCheckpoint(
                    f"{file} is truncated: it has {size} bytes and its header alone needs {8 + length}; copy it again"
                )
            table = json.loads(stream.read(length))
        table.pop("__metadata__", None)
        end = 8 + length + max((t["data_offsets"][1] for t in table.values()), default=0)
        found = {n: Entry(file, tuple(t["shape"]), t["dtype"]) for n, t in table.items()}
    except OSError as error:
        raise BadCheckpoint(f"{file} cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, BadCheckpoint):
            raise
        raise BadCheckpoint(f"{file} has no safetensors header; it is damaged or of another format") from None
    if size != end:
        kind = "is truncated" if size < end else "has bytes beyond its tensors"
        raise BadCheckpoint(f"{file} {kind}: its header describes {end} bytes and it has {size}; copy it again")
    return found


def _entries(folder: Path) -> dict[str, Entry]:
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if not index.exists():
        if not single.exists():
            raise BadCheckpoint(
                f"{folder} holds neither model.safetensors nor model.safetensors.index.json; "
                "only safetensors are read (transformers' save_pretrained writes them)"
            )
        return header(single)
    try:
        where = dict(json.loads(index.read_text())["weight_map"])
    except (OSError, ValueError, KeyError, TypeError):
        raise BadCheckpoint(f"{index} has no readable weight_map; copy it again") from None
    files = {}
    for name in sorted({str(n) for n in where.values()}):
        if Path(name).name != name:
            raise BadCheckpoint(f"{index} points to {name!r}; its files must lie beside it")
        files[name] = header(folder / name)
    out = {}
    for tensor, name in where.items():
        if tensor not in files[name]:
            raise BadCheckpoint(f"{folder / name} has no tensor {tensor}, where {index.name} says that it is")
        out[tensor] = files[name][tensor]
    unlisted = [(t, e) for f in files.values() for t, e in f.items() if t not in out]
    return out | dict(unlisted)


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


class _Files:
    """Files opened once each, closed at the end."""

    def __init__(self) -> None:
        self._open: dict[Path, Any] = {}

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._open.values():
            file.__exit__(None, None, None)

    def get(self, entry: Entry, name: str) -> Any:
        """A slice object of the tensor, to be indexed by ranges."""
        from safetensors import safe_open

        if entry.file not in self._open:
            self._open[entry.file] = safe_open(entry.file, framework="pt").__enter__()
        return self._open[entry.file].get_slice(name)


def _read(files: _Files, name: str, entry: Entry, out: Tensor, held: shards.Box) -> None:
    """Copy the elements ``held`` of a stored tensor to ``out``, run by run, a bounded number of rows at a time."""
    source = files.get(entry, name)
    offsets = [_offsets(runs) for runs in held]
    for runs in product(*offsets):
        (at, start, end), rest = runs[0], runs[1:]
        width = math.prod(b - a for _, a, b in rest) * _DTYPES[entry.dtype].itemsize
        step = max(READ_BYTES // max(width, 1), 1)
        columns = tuple(slice(a, b) for _, a, b in rest)
        into = tuple(slice(o, o + b - a) for o, a, b in rest)
        for row in range(start, end, step):
            stop = min(row + step, end)
            values = source[(slice(row, stop), *columns)]
            out[(slice(at + row - start, at + stop - start), *into)].copy_(values)


def _offsets(runs: shards.Runs) -> list[tuple[int, int, int]]:
    """Each run with the place in the local tensor where it begins."""
    out, at = [], 0
    for start, end in runs:
        out.append((at, start, end))
        at += end - start
    return out


def _check_tie(entries: Mapping[str, Entry], model: Model, files: _Files) -> None:
    """A tied model may store its head too, but then it must be the embedding."""
    if not model.tied or "lm_head.weight" not in entries:
        return
    head, embed = (files.get(entries[n], n) for n in ("lm_head.weight", "model.embed_tokens.weight"))
    step = max(READ_BYTES // (8 * model.hidden), 1)
    for row in range(0, model.vocab, step):
        if not torch.equal(head[row : row + step], embed[row : row + step]):
            raise BadCheckpoint(
                f"{entries['lm_head.weight'].file}: lm_head.weight differs from model.embed_tokens.weight, but "
                f"{model.name} ties them; set tie_word_embeddings to false in its config.json if the head is its own"
            )


def config(model: Model) -> dict[str, Any]:
    """The fields of a ``config.json`` that describe ``model`` (a family that the decoder runs)."""
    kind = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[model.family]
    out: dict[str, Any] = {
        "architectures": [f"{kind}ForCausalLM"],
        "model_type": model.family,
        "hidden_act": "silu",
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab,
        "max_position_embeddings": model.max_positions,
        "rms_norm_eps": model.eps,
        "rope_theta": model.rope.theta,
        "rope_scaling": _rope_scaling(model),
        "tie_word_embeddings": model.tied,
    }
    if model.family in ("llama", "qwen3"):
        out["attention_bias"] = model.qkv_bias
    if model.family == "llama":
        out["mlp_bias"] = model.mlp_bias
    else:
        out["sliding_window"] = model.sliding_window
    if model.family.startswith("qwen"):
        out |= {"use_sliding_window": model.sliding_window is not None, "max_window_layers": 0}
    return out


def _rope_scaling(model: Model) -> dict[str, Any] | None:
    rope, trained = model.rope, model.rope.original_positions or model.max_positions
    fields = {
        "none": (),
        "linear": ("factor",),
        "dynamic": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
        "yarn": ("factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
        "longrope": ("factor", "attention_factor", "short_factor", "long_factor"),
    }[rope.scaling]
    if not fields:
        return None
    out: dict[str, Any] = {"rope_type": rope.scaling}
    if rope.scaling in ("llama3", "yarn", "longrope"):
        out["original_max_position_embeddings"] = trained
    values = {f: getattr(rope, f) for f in fields}
    return out | {f: list(v) if isinstance(v, tuple) else v for f, v in values.items() if v is not None}


def save(
    state: Mapping[str, Tensor],
    model: Model,
    folder: str | os.PathLike[str],
    like: str | os.PathLike[str] | None = None,
) -> None:
    """Write a Hugging Face folder: config.json and safetensors, under a temporary name first.

    Args:
        state: whole (not sharded) tensors by global name, exactly those of the model; a tied head may be there too.
        folder: must not exist yet, or be empty.
        like: a folder whose tokenizer files are copied and whose other config.json fields are kept.

    Raises:
        BadInput: the folder is not empty; ValueError: the state is not the model's.
    """
    known = {p.name: p for p in model.parameters}
    extra = [n for n in state if n not in known and not (model.tied and n == "head.weight")]
    for name in [*known, *extra]:
        if name not in state:
            raise ValueError(f"the state has no {name!r}, which {model.name} needs")
        check_known(name, state[name], known.get(name), model)
    with fresh_folder(Path(folder)) as draft:
        write_tensors({hf_name(n): state[n].detach() for n in known}, draft)
        fields = config(model) | {"torch_dtype": str(state["embed.weight"].dtype).removeprefix("torch.")}
        if like is not None:
            fields = _copy_companions(Path(like), draft) | fields
        (draft / "config.json").write_text(json.dumps(fields, indent=2) + "\n")


@contextmanager
def fresh_folder(target: Path) -> Iterator[Path]:
    """A folder to write into that becomes ``target`` at the end, or vanishes if anything fails."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise BadInput(f"{target} exists and is not empty; give a folder that does not exist yet")
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield draft
        draft.chmod(0o755)  # mkdtemp's folders are private
        draft.replace(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def write_tensors(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """model.safetensors, or several files of at most FILE_BYTES and their index."""
    from safetensors.torch import save_file

    groups: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.itemsize
        if groups[-1] and filled + size > FILE_BYTES:
            groups.append({})
            filled = 0
        groups[-1][name] = tensor
        filled += size
    names = [f"model-{i + 1:05}-of-{len(groups):05}.safetensors" for i in range(len(groups))]
    names = ["model.safetensors"] if len(groups) == 1 else names
    for name, group in zip(names, groups, strict=True):
        save_file({n: t.cpu().contiguous() for n, t in group.items()}, folder / name, metadata={"format": "pt"})
    if len(groups) > 1:
        where = {n: name for name, group in zip(names, groups, strict=True) for n in group}
        total = sum(t.numel() * t.itemsize for t in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _copy_companions(source: Path, draft: Path) -> dict[str, Any]:
    """Copy the tokenizer's files; returns the source's config.json."""
    for file in sorted(source.iterdir()):
        if re.match(r"(tokenizer|special_tokens|generation_config|vocab|merges|chat_template|added_tokens)", file.name):
            shutil.copyfile(file, draft / file.name)
    fields = source / "config.json"
    kept = dict(json.loads(fields.read_text())) if fields.exists() else {}
    return {k: v for k, v in kept.items() if k not in ("rope_parameters", "dtype", "layer_types")}
