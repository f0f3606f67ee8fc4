# Every target works alone on a fresh clone: it makes .venv and installs first.
# PYTHON names the interpreter that .venv is made with: 3.11 or later, found here if not given.

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
PACKAGES := $(wildcard */tierkeep*/__init__.py)
COMPILED := $(wildcard core/tierkeep/*/*.c)
SOURCES := $(sort $(foreach package,$(PACKAGES),$(firstword $(subst /, ,$(package))))) bench examples tests
BENCH ?= save

.PHONY: help install demo test test-full test-gpu test-lowest lint format bench clean
.DEFAULT_GOAL := help

help:
	@echo "make demo         train, get killed during saves, resume, compare; then read it with Orbax"
	@echo "make test         ruff, mypy, and every test that takes no special machine or patience"
	@echo "make test-full    the same, and the long laws and loops"
	@echo "make test-gpu     the tests that need a CUDA device"
	@echo "make test-lowest  the tests with the oldest dependencies pyproject.toml allows"
	@echo "make lint         ruff and mypy only;  make format  lets ruff rewrite"
	@echo "make bench        python -m bench \$$(BENCH), BENCH=save unless given"
	@echo "make clean        remove .venv, caches and built files"

# Installed again only when pyproject.toml, a package's __init__.py (the version) or what is compiled is newer than the
# installation.
install: $(STAMP)
$(STAMP): pyproject.toml $(PACKAGES) $(COMPILED)
	@if [ ! -x $(PY) ]; then \
	  for python in $(PYTHON) python3 python3.11 python3.12 python3.13 python3.14; do \
	    if $$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	      echo "making $(VENV) with $$python"; $$python -m venv $(VENV) && break; \
	    fi; \
	  done; \
	fi; \
	test -x $(PY) || { echo "no Python 3.11 or later with venv was found; name one: make PYTHON=..." >&2; exit 1; }
	$(PY) -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

demo: $(STAMP)
	$(PY) examples/survive_a_crash.py

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy $(SOURCES)

format: $(STAMP)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

test: lint
	$(PY) -m pytest -m "not full and not gpu"

test-full: lint
	$(PY) -m pytest -m "not gpu"

test-gpu: $(STAMP)
	$(PY) -m pytest -m gpu

# torch keeps its pin here too; what else is named is the lower bound in pyproject.toml.
test-lowest: .venv-lowest/.installed
	.venv-lowest/bin/python -m pytest -m "not full and not gpu"
.venv-lowest/.installed: $(STAMP) pyproject.toml
	$(PY) -m venv .venv-lowest
	$(PY) -c 'import re, tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	  print(*sorted(re.sub(r">=([^,]+).*", r"==\1", r) for r in p["dependencies"] + p["optional-dependencies"]["jax"] \
	  + p["optional-dependencies"]["safetensors"]), sep="\n")' > .venv-lowest/constraints.txt
	.venv-lowest/bin/python -m pip install --quiet --disable-pip-version-check -c .venv-lowest/constraints.txt -e '.[dev]'
	@touch $@

bench: $(STAMP)
	$(PY) -m bench $(BENCH)

clean:
	rm -rf $(VENV) .venv-lowest .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info core/tierkeep/*/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
