"""How long the command line takes to start and to answer: median of five warm runs, in seconds.

    python bench/startup.py

Beside each command stands its ratio to an interpreter that imports nothing, measured in the same run.  The aims are
under 0.3 s to start and under 0.5 s to answer, without torch.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

COMMANDS = {
    "an empty interpreter": ["-c", "pass"],
    "partita --help": ["-m", "partita", "--help"],
    "partita explain --help": ["-m", "partita", "explain", "--help"],
    "partita explain (70B, 64 ranks)": [
        "-m", "partita", "explain", "llama-3.1-70b", "--cluster", "h100:8x8", "--layout", "dp=64 full_shard",
    ],
    "partita explain --json": [
        "-m", "partita", "explain", "llama-3.1-70b", "--cluster", "h100:8x8", "--layout", "dp=64 full_shard", "--json",
    ],
}  # fmt: skip
RUNS = 5


def seconds(arguments: list[str]) -> float:
    begin = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def main() -> None:
    medians = {}
    for name, arguments in COMMANDS.items():
        seconds(arguments)  # warm: files in the page cache, bytecode written
        medians[name] = statistics.median(seconds(arguments) for _ in range(RUNS))
    bare = medians["an empty interpreter"]
    for name, median in medians.items():
        print(f"{name:34} {median:6.3f} s   {median / bare:5.1f} x an empty interpreter")


if __name__ == "__main__":
    main()
