"""Checkpoints: a training run on disk, complete or not there, and opened again under the same layout.

Tensors are keyed by global name (``parameters.blocks.0.attn.q.weight``, ``optimizer.NAME.exp_avg``) and written by
``torch.distributed.checkpoint``, each shard by the rank that holds it.  ``meta.json`` says what run it is and lists
every file with its size and checksum; it is written last, and then the folder gets its name.  A folder without it, or
still called ``.tmp``, is no checkpoint.

Nothing is unpickled freely: tensors are read with ``weights_only``, and the index that torch pickles is read by an
unpickler that knows the classes of such an index and nothing else.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from partita.facts.errors import BadInput
from partita.strategies.parallelize import Step
from partita.strategies.step.optimizer import MasterOptimizer
from partita.strategies.step.state import named_state_shards

META = "meta.json"
FORMAT = 1
_NAME = re.compile(r"step-(\d{8})")
_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.planner")
_CLASSES = {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}


class BadRun(BadInput):
    """A checkpoint that cannot be gone on from; the message is one sentence."""


@dataclass(frozen=True)
class Meta:
    """What run a checkpoint belongs to, and what it holds.

    ``step`` steps are done; the position in the data follows from it.  ``same`` must be equal for a run to go on
    (layout, model, precision, ...).  ``files``: name -> [bytes, crc32].
    """

    step: int
    same: dict[str, Any]
    about: dict[str, Any] = field(default_factory=dict)
    files: dict[str, list[int]] = field(default_factory=dict)
    format: int = FORMAT


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def complete(run: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    if not run.is_dir():
        return []
    return sorted(p for p in run.iterdir() if _NAME.fullmatch(p.name) and (p / META).is_file())


def broken(run: Path) -> list[Path]:
    """Folders that an interrupted save left behind; they are never opened."""
    if not run.is_dir():
        return []
    named = [p for p in run.iterdir() if p.is_dir() and _NAME.match(p.name)]
    return sorted(p for p in named if p.name.endswith(".tmp") or not (p / META).is_file())


def latest(run: Path) -> Path:
    """The newest complete checkpoint; raises BadRun where there is none."""
    found = complete(run)
    if not found:
        left = broken(run)
        half = f" ({left[-1].name} was never finished)" if left else ""
        raise BadRun(f"{run} holds no complete checkpoint{half}; start without --resume, or name another --out")
    return found[-1]


def state_of(step: Step) -> dict[str, Tensor]:
    """Every tensor of the run by its key, as it lies here (DTensors stay shards); missing optimizer state is made."""
    out: dict[str, Tensor] = {}
    optimizer = step.optimizer
    if step.scaling is not None:
        out |= {f"scaling.{key}": value for key, value in step.scaling.state().items()}
    if step.host is not None:
        step.settle()
        out |= {f"offload.{key}": value for key, value in step.host.state().items()}
    if step.owned:  # state that lies flat: its keys carry the ranges of elements
        out |= {f"parameters.{name}": p.detach() for name, p in step.named()}
        for shard in named_state_shards(step):
            where = f"[{shard.begin}:{shard.end}]" if shard.tensor.dim() else ""
            out[f"optimizer.{shard.name}.{shard.key}{where}"] = shard.tensor
        return out
    for name, p in step.named():
        out[f"parameters.{name}"] = p.detach()
        if not p.requires_grad:
            continue
        holder = p
        if isinstance(optimizer, MasterOptimizer):
            holder = optimizer.masters[p]
            out[f"optimizer.{name}.master"] = holder.detach()
        for key, value in _optimizer_state(optimizer, holder).items():
            if isinstance(value, Tensor):
                out[f"optimizer.{name}.{key}"] = value
    return out


def _optimizer_state(optimizer: Any, p: torch.nn.Parameter) -> dict[str, Any]:
    """State of one parameter; before its first step, what that step would start from."""
    state: dict[str, Any] = optimizer.state[p]
    inner = optimizer.inner if isinstance(optimizer, MasterOptimizer) else optimizer
    if state:
        return state
    if isinstance(inner, torch.optim.AdamW):
        state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
        state |= {key: torch.zeros_like(p, memory_format=torch.preserve_format) for key in ("exp_avg", "exp_avg_sq")}
    elif any(g["momentum"] for g in inner.param_groups):
        state["momentum_buffer"] = torch.zeros_like(p)
    return state


def save(step: Step, meta: Meta, run: Path, keep: int) -> Path:
    """Write a checkpoint on all ranks; returns its folder.  The last ``keep`` stay."""
    final = run / name_of(meta.step)
    draft = final.with_name(final.name + ".tmp")
    rank, world = _rank()
    if rank == 0:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
    _barrier()
    state = {**state_of(step), **_random_state(rank)}
    dcp.save(state, storage_writer=FileSystemWriter(draft), no_dist=world == 1)
    files = _described(draft, rank)
    if rank == 0:
        whole = Meta(meta.step, meta.same, meta.about, files)
        _write(draft / META, json.dumps(asdict(whole), indent=1))
        shutil.rmtree(final, ignore_errors=True)
        draft.rename(final)
        for old in complete(run)[:-keep]:
            shutil.rmtree(old, ignore_errors=True)
    _barrier()
    return final


def load(step: Step, folder: Path, same: Mapping[str, Any]) -> Meta:
    """Give the run the state of a checkpoint, in place; raises BadRun for another layout, model, or damaged files."""
    meta = read_meta(folder)
    refuse_other(folder, meta, same)
    rank, world = _rank()
    check_files(folder, meta, rank, world)
    _barrier()  # every rank has seen its part of the files before any reads them
    random = _random_state(rank)
    state = {**state_of(step), **random}
    try:
        dcp.load(state, storage_reader=Reader(folder), no_dist=world == 1)
    except BadRun:
        raise
    except Exception as error:  # torch raises many kinds, and wraps those of every rank in one of its own
        fault = " ".join(str(error).split())[:200]
        raise BadRun(f"the checkpoint {folder} cannot be read ({type(error).__name__}: {fault})") from error
    torch.set_rng_state(random[f"random.{rank}.cpu"])
    if f"random.{rank}.cuda" in random:
        torch.cuda.set_rng_state(random[f"random.{rank}.cuda"])
    return meta


def read_meta(folder: Path) -> Meta:
    """What a checkpoint says of itself (raises BadRun)."""
    file = folder / META
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        meta = Meta(int(data["step"]), dict(data["same"]), dict(data["about"]), dict(data["files"]), data["format"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadRun(f"{file} is damaged ({type(error).__name__}); resume from an older checkpoint") from None
    if meta.format != FORMAT:
        raise BadRun(f"{file} is of format {meta.format}, and this version reads format {FORMAT}")
    return meta


def refuse_other(folder: Path, meta: Meta, same: Mapping[str, Any]) -> None:
    """One sentence for the first thing in which this run differs from the one that was saved."""
    if meta.same.get("layout") != same["layout"]:
        raise BadRun(
            f"{folder} was written under the layout '{meta.same.get('layout')}' and cannot be resumed under "
            f"'{same['layout']}'; the same layout works"
        )
    for key, value in json.loads(json.dumps(dict(same))).items():
        if meta.same.get(key) != value:
            raise BadRun(
                f"{folder} was written with {key} {_short(meta.same.get(key))} and cannot be resumed with "
                f"{_short(value)}; the same {key} works"
            )


def check_files(folder: Path, meta: Meta, rank: int = 0, world: int = 1) -> None:
    """Sizes of all files, and the checksums of this rank's share of them."""
    for i, (name, (size, checksum)) in enumerate(sorted(meta.files.items())):
        file = folder / name
        if not file.is_file():
            raise BadRun(f"{file} is missing; resume from another checkpoint, or copy it again")
        found = file.stat().st_size
        if found != size:
            kind = "is truncated" if found < size else "is too long"
            raise BadRun(f"{file} {kind}: {found} bytes in place of {size}; copy it again, or resume from another one")
        if i % world == rank and _crc(file) != checksum:
            raise BadRun(f"{file} is damaged: its checksum is not that of meta.json; copy it again")


class Reader(FileSystemReader):
    """Reads the index of a checkpoint without running anything that it names."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / ".metadata"
        try:
            with path.open("rb") as stream:
                metadata = _Index(stream).load()
        except BadRun:
            raise
        except Exception as error:  # a damaged pickle can raise nearly anything
            raise BadRun(f"{path} is damaged ({type(error).__name__}); resume from another checkpoint") from None
        if not isinstance(metadata, Metadata):
            raise BadRun(f"{path} holds no index of a checkpoint; resume from another checkpoint")
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Index(pickle.Unpickler):
    """An unpickler for the index alone: its own classes, dtypes, and nothing that can be called to any effect."""

    def find_class(self, module: str, name: str) -> Any:
        found = None
        if module in _MODULES or (module, name) in _CLASSES:
            found = super().find_class(module, name)
        elif module == "torch" and isinstance(getattr(torch, name, None), (torch.dtype, torch.layout)):
            found = getattr(torch, name)
        allowed = isinstance(found, (type, torch.dtype, torch.layout)) or name == "_get_layout"
        if found is None or not allowed:
            raise BadRun(f"the index of the checkpoint names {module}.{name}, which no index needs; it is not opened")
        return found


def _random_state(rank: int) -> dict[str, Tensor]:
    out = {f"random.{rank}.cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        out[f"random.{rank}.cuda"] = torch.cuda.get_rng_state()
    return out


def _described(draft: Path, rank: int) -> dict[str, list[int]]:
    """Size and checksum of every file, each read by the rank that wrote it; on rank 0 of all ranks."""
    mine = {f.name: [f.stat().st_size, _crc(f)] for f in _files(draft, rank)}
    if not dist.is_initialized():
        return mine
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return {name: facts for part in everyone for name, facts in part.items()}


def _files(draft: Path, rank: int) -> Iterator[Path]:
    yield from sorted(draft.glob(f"__{rank}_*.distcp"))
    if rank == 0:
        yield draft / ".metadata"


def _crc(file: Path) -> int:
    value = 0
    with file.open("rb") as stream:
        while chunk := stream.read(1 << 22):
            value = zlib.crc32(chunk, value)
    return value


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())


def _rank() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _short(value: Any, most: int = 80) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= most else text[: most - 3] + "..."
