# Two commands on a fresh machine: `make demo` trains a model, `make test` proves the code. Everything lives in .venv and runs/.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# Everything is checked against the hashes in locks/, but torch: which build of it a machine takes differs (locks/make.py).
# Nothing else is fetched: not by a dependency that was forgotten, which `pip check` names, nor in order to build this package.
define INSTALL_LOCKED
	$(PIP_INSTALL) --require-hashes --no-deps -r $(1)
	$(PIP_INSTALL) torch
	$(PIP_INSTALL) --no-deps --no-build-isolation -e .
	$(BIN)/python -m pip check
endef

# Tests start thousands of processes, and each would compile all source again where this forbids to keep what was compiled.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install demo test test-again lint types soak mutate bench clean tools lock

help:
	@echo "make demo     install, train a small GPT on two processes, evaluate it, print a sample"
	@echo "make install  make .venv with everything that the tests need"
	@echo "make test     the tests            make lint    ruff            make types   mypy, strict"
	@echo "make lock     the hashes of what is installed, anew"
	@echo "make soak     the long sweeps      make bench   the benchmarks  make clean   remove .venv and caches, keep runs/"
	@echo "make mutate   break the source, one line at a time, and see the tests fail"

# Stamps: pip runs again only when what is asked for has changed. What the tests need includes what a run needs.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Shoal needs Python 3.11 or newer; try make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt locks/run.txt | $(BIN)/python
	$(call INSTALL_LOCKED,locks/run.txt)
	@touch $@

$(VENV)/.installed-test: pyproject.toml constraints.txt locks/test.txt | $(BIN)/python
	$(call INSTALL_LOCKED,locks/test.txt)
	@touch $(VENV)/.installed $@

# What the benchmarks compare with is pinned and has no hashes: some of it is built on the spot.
$(VENV)/.installed-bench: $(VENV)/.installed
	$(PIP_INSTALL) -e '.[bench]'
	@touch $@

install: $(VENV)/.installed-test tools

# After a change of constraints.txt or of what pyproject.toml asks for; needs the network, and what it locks installed.
lock:
	$(BIN)/python locks/make.py

# Programs that some tests look with, and launchers that some run under. Without them those tests skip and say why, so this never
# fails. Ray is 240 MB and for `make soak` alone: .venv/bin/pip install -c constraints.txt ray
tools:
	@missing=""; lean=""; \
	command -v strace >/dev/null 2>&1 || missing="$$missing strace"; \
	command -v ss >/dev/null 2>&1 || missing="$$missing iproute2"; \
	command -v sbatch >/dev/null 2>&1 && command -v slurmctld >/dev/null 2>&1 && command -v slurmd >/dev/null 2>&1 \
		|| missing="$$missing slurmctld slurmd slurm-client munge"; \
	command -v mpirun.openmpi >/dev/null 2>&1 || missing="$$missing openmpi-bin"; \
	command -v mpirun.mpich >/dev/null 2>&1 || lean="$$lean mpich"; \
	PATH="$$PATH:/usr/sbin" command -v sshd >/dev/null 2>&1 || [ -d /run/systemd/system ] || lean="$$lean openssh-server"; \
	command -v chromium >/dev/null 2>&1 || command -v google-chrome >/dev/null 2>&1 || missing="$$missing chromium fonts-dejavu-core"; \
	if [ -n "$$missing$$lean" ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then \
		apt-get update -qq >/dev/null 2>&1; export DEBIAN_FRONTEND=noninteractive; \
		[ -z "$$missing" ] || { apt-get install -y -qq $$missing >/dev/null 2>&1 && missing=""; }; \
		[ -z "$$lean" ] || { apt-get install -y -qq --no-install-recommends $$lean >/dev/null 2>&1 && lean=""; }; \
	fi; \
	missing="$$missing$$lean"; \
	if ! command -v promtool >/dev/null 2>&1 && [ ! -x $(VENV)/promtool/usr/bin/promtool ]; then \
		mkdir -p $(VENV)/promtool && (cd $(VENV)/promtool && apt-get download -qq prometheus && dpkg -x prometheus_*.deb . \
			&& rm -f prometheus_*.deb usr/bin/prometheus) >/dev/null 2>&1 || missing="$$missing promtool"; \
	fi; \
	if [ -n "$$missing" ]; then echo "missing:$$missing; tests that need them will skip" >&2; fi

demo: $(VENV)/.installed
	@set -e; number=1; while [ -e runs/demo-$$number ]; do number=$$((number + 1)); done; run=runs/demo-$$number; \
	$(BIN)/shoal train recipes/gpt.toml --run-dir $$run; \
	$(BIN)/shoal eval $$run --split test; \
	$(BIN)/shoal sample $$run --prompt "def "; \
	echo "run directory: $$run"

# Three at a time on two cores, a file to each: half of the time tests wait, and a file's tests share what they build. The longest
# files come first (tests/support/session/order.json), so that all end together; the twenty slowest tests are printed.
PYTEST_FILES := $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

test: install
	$(PYTEST_FILES) -m "not soak"

# What failed in the run before, one after the other; it fails where nothing is known to have failed.
test-again: install
	$(BIN)/python -m pytest --last-failed --last-failed-no-failures none -m "not soak"

lint: $(VENV)/.installed-test
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(VENV)/.installed-test
	$(BIN)/mypy

# SHOAL_CHAOS_MINUTES says how long the mix of faults lasts. No test may take longer than --timeout.
soak: install
	$(PYTEST_FILES) -m soak --timeout 3600

# Breaks the source, one line at a time, in a copy; the table of what was caught is in tests/README.md.
mutate: install
	$(BIN)/python tests/mutate/run.py

bench: $(VENV)/.installed-bench
	@set -e; for main in benchmarks/*/main.py; do echo "== $$main"; $(BIN)/python $$main; done

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis dist build
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
