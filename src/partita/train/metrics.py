"""Where the numbers of a run go: JSON lines always, TensorBoard where installed, wandb where asked for.

Only the process that shows the run (rank 0) makes a ``Metrics``.
"""

from __future__ import annotations

import json
import math
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from partita.facts.errors import BadInput, NotInstalled

FILE = "metrics.jsonl"


class Sink(Protocol):
    """One place to which values go."""

    def write(self, step: int, values: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


class Metrics:
    """Logs values under their step to every sink.

    ``folder``: the run's folder, in which ``metrics.jsonl`` and ``tensorboard/`` are kept.  ``first_step``: the step
    that comes next (0, or the one resumed from): what an interrupted run wrote from there on is taken back, so
    that every step stands there once.  ``tensorboard``: None writes it where the package is installed, True insists,
    False leaves it out.  ``wandb``: the project's name, or None; ``WANDB_MODE`` and the rest of its environment
    hold.  Raises NotInstalled for a package that is asked for and missing.
    """

    def __init__(
        self,
        folder: str | Path,
        first_step: int = 0,
        *,
        tensorboard: bool | None = None,
        wandb: str | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        folder = Path(folder)
        if tensorboard is None:
            tensorboard = find_spec("tensorboard") is not None
        elif tensorboard:
            _needs("tensorboard")
        if wandb is not None:
            _needs("wandb")
        folder.mkdir(parents=True, exist_ok=True)
        self._sinks: list[Sink] = [JsonLines(folder / FILE, first_step)]
        if tensorboard:
            self._sinks.append(TensorBoard(folder / "tensorboard", first_step))
        if wandb is not None:
            self._sinks.append(Wandb(wandb, folder, config or {}))

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Write ``values`` (numbers, strings, lists, and mappings of these; one-element tensors are read)."""
        made = {key: plain(value) for key, value in values.items()}
        for sink in self._sinks:
            sink.write(step, made)

    def close(self) -> None:
        """Flush and close every sink; safe to call again."""
        while self._sinks:
            self._sinks.pop().close()

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class JsonLines:
    """One JSON object a call, ``step`` first, flushed so that whoever reads the file sees it at once.

    Numbers that JSON does not have are the strings "NaN", "Infinity" and "-Infinity".  A new run (``first_step`` 0) in
    a folder with an older file moves that aside (``metrics.1.jsonl``); a resumed one keeps the lines before
    ``first_step``.
    """

    def __init__(self, path: Path, first_step: int = 0) -> None:
        if path.exists() and path.stat().st_size:
            _take_back(path, first_step) if first_step else _move_aside(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        record = {"step": step, **_finite(dict(values))}
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Scalars as event files; a resumed run hides what was written from ``first_step`` on."""

    def __init__(self, folder: Path, first_step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder), purge_step=first_step or None)  # type: ignore[no-untyped-call]

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        for name, value in scalars(values):
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A run of Weights & Biases, continued under its own id when the run's folder is resumed."""

    def __init__(self, project: str, folder: Path, config: Mapping[str, Any]) -> None:
        import wandb

        kept = folder / "wandb-id"
        if not kept.exists():
            temporary = kept.with_name(f"{kept.name}.{os.getpid()}.tmp")
            temporary.write_text(uuid.uuid4().hex[:12])
            temporary.rename(kept)
        try:
            self._run: Any = wandb.init(
                project=project, dir=str(folder), config=dict(config), id=kept.read_text().strip(), resume="allow"
            )
            # Its own step counter only goes up, which a run resumed from an earlier step would not.
            self._run.define_metric("*", step_metric="step")
        except wandb.Error as error:
            fault = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise BadInput(f"wandb does not start ({fault}); log in, or set WANDB_MODE=offline") from None

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log({"step": step, **dict(scalars(values))})

    def close(self) -> None:
        self._run.finish()


def read(path: str | Path) -> list[dict[str, Any]]:
    """The objects of a ``metrics.jsonl``; a last line cut off by a crash is left out."""
    return [record for _, record in _lines(Path(path))]


def scalars(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """(name, number) of every number; members of a mapping are named ``outer/inner``."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from scalars(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{key}", value


def plain(value: Any) -> Any:
    """Tensors and numpy numbers of one element as Python numbers; lists and mappings likewise, inside."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, str | bytes):
        return value
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Sequence):
        return [plain(v) for v in value]
    return value


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            whole = isinstance(record, dict) and isinstance(record.get("step"), int)
        except json.JSONDecodeError:
            whole = False
        if whole:
            yield line.rstrip("\n") + "\n", record
        elif number < len(lines):
            raise BadInput(f'{path} line {number} is not an object with a "step"; move the file away to go on')


def _take_back(path: Path, first_step: int) -> None:
    kept = [line for line, record in _lines(path) if record["step"] < first_step]
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text("".join(kept), encoding="utf-8")
    temporary.replace(path)


def _move_aside(path: Path) -> None:
    number = 1
    while (aside := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    path.rename(aside)


def _needs(package: str) -> None:
    if find_spec(package) is None:
        raise NotInstalled(f"writing to {package} was asked for and it is not installed; pip install {package}")
