# Partita. Each target sets up what it needs in .venv by itself; see scripts/setup.py for what that is.
#
#   make demo       the ledger of a 70B model on 64 H100, then three layouts proven on a real model on this machine
#   make test       lint, types and tests
#   make prove-all  every combination of strategies on tiny models; resumable, writes docs/prove-all.md
#   make lint       only lint and types
#   make clean      removes .venv, caches and build outputs
#
# PYTHON=...        the Python (3.11 or newer) that .venv is made with
# PARTITA_SEED=...  repeats the part of the tests that changes; every run prints its seed

PYTHON ?=
CANDIDATES = python3 python3.14 python3.13 python3.12 python3.11
BIN = .venv/bin
READY = .venv/.ready

.PHONY: demo test prove-all lint clean
.DEFAULT_GOAL = test

demo: $(READY)
	$(BIN)/partita explain llama-3.1-70b --cluster h100:8x8 --layout "dp=64 full_shard mb=1" --sequence 2048
	$(BIN)/partita prove SmolLM2-135M --layout ddp --layout full_shard --layout shard_grad_op --ranks 2 \
		--data examples/data/pride_and_prejudice.txt

test: lint
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest

prove-all: $(READY)
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m tests.matrix

lint: $(READY)
	$(BIN)/python -m ruff check
	$(BIN)/python -m ruff format --check
	$(BIN)/python -m mypy

clean:
	rm -rf .venv .pytest_cache .ruff_cache .mypy_cache build dist
	find src tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +

# A PYTHON that was named must be the one used; otherwise the first candidate that is new enough.
$(READY): pyproject.toml scripts/setup.py
	@for python in $(if $(PYTHON),$(PYTHON),$(CANDIDATES)); do \
		if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
			exec "$$python" scripts/setup.py; \
		fi; \
	done; \
	echo "setup: Partita needs Python 3.11 or newer, and none was found among:" \
		"$(if $(PYTHON),$(PYTHON),$(CANDIDATES)). Name one: make PYTHON=/path/to/python3.11 test" >&2; exit 1
