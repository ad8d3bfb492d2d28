"""Runs any torch.distributed program and records every rank of it, without touching the program.

    recording = run_recorded(["torchrun", "--nproc-per-node", "2", "train.py"], Path("out"))

The processes of the program find a ``sitecustomize`` of ours on ``PYTHONPATH`` (see ``hook/``), which begins a
recording when a process joins the world and writes it when the process leaves.  No torch here.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import IO

from partita.facts.errors import BadInput
from partita.observe.recording import RankRecord, Recording

HOOK = Path(__file__).resolve().parent / "hook"
PACKAGE = Path(__file__).resolve().parents[2]
MERGED = "recording.json"


class NothingRecorded(BadInput):
    """The program ran and left no recording to read; ``exit_code`` is the program's."""

    def __init__(self, sentence: str, exit_code: int) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code


def run_recorded(command: list[str], out: Path, output: IO[str] | None = None) -> Recording:
    """Runs the command to its end and writes ``out/recording.json``; returns what it holds.

    What the program prints goes where ours goes, or to ``output``; its exit code is in the recording.  Raises
    ``BadInput`` when the command cannot be run, ``NothingRecorded`` when no rank, or not every rank that began, left
    a record.
    """
    if not command:
        raise BadInput("there is no command to record; what works: partita record -- torchrun train.py")
    program = shutil.which(command[0])
    if program is None:
        raise BadInput(f"the command {command[0]!r} was not found; what works: a program on PATH, or a path to one")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"{out} cannot be a folder for the recording ({error.strerror}); name another one") from None
    with tempfile.TemporaryDirectory(prefix="ranks-", dir=out.resolve()) as folder:
        code = _run([program, *command[1:]], _environment(Path(folder)), output)
        recording = Recording(tuple(command), code, _collected(Path(folder), command, code))
    recording.save(out / MERGED)
    return recording


def _environment(folder: Path) -> dict[str, str]:
    paths = [str(HOOK), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PARTITA_RECORD_FOLDER": str(folder),
        "PARTITA_RECORD_HOME": str(PACKAGE),
    }


def _run(command: list[str], environment: dict[str, str], output: IO[str] | None) -> int:
    """Waits for the program; an interrupt from the keyboard reaches it by itself, and it may tidy up."""
    try:
        process = subprocess.Popen(command, env=environment, stdout=output)
    except OSError as error:
        raise BadInput(f"the command {command[0]!r} cannot be run ({error.strerror}); is it a program?") from None
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            print("interrupted; waiting for the program to end", file=sys.stderr)


def _collected(folder: Path, command: list[str], code: int) -> tuple[RankRecord, ...]:
    began = sorted(p.stem for p in folder.glob("*.begun"))
    if not began:
        raise NothingRecorded(
            f"{' '.join(command)!r} ended with exit code {code} and no process of it initialised torch.distributed,"
            " so there is nothing to record; what works: a program that calls init_process_group",
            code,
        )
    missing = [name for name in began if not (folder / f"{name}.json").exists()]
    if missing:
        raise NothingRecorded(
            f"{len(missing)} of {len(began)} processes that began ({', '.join(missing)}) were ended before they could"
            f" write their record; the program's exit code is {code}",
            code,
        )
    records = [RankRecord.from_json(json.loads((folder / f"{name}.json").read_text())) for name in began]
    records.sort(key=lambda r: r.rank)
    twice = [a.rank for a, b in pairwise(records) if a.rank == b.rank]
    if twice:
        raise NothingRecorded(
            f"several processes, or several worlds of one process, were rank {twice[0]}; a recording holds one world:"
            " record one run at a time",
            code,
        )
    return tuple(records)
