# Everything a developer or CI runs. `make test` works on a bare Debian: it installs what is missing first.
SHELL := /bin/bash
VENV ?= .venv
BIN := $(VENV)/bin
# Most tests wait for a disk, a server or a clock: two at once take little more than half of the time.
JOBS ?= 2
SHARED := -n $(JOBS) --dist loadfile

.PHONY: help setup system frameworks test test-slow test-slow-daemon-served test-daemon-served test-all exercise check demo clean

help:
	@echo "make setup       system packages (when root or sudo) and a virtual environment in $(VENV)"
	@echo "make test        setup, then every test that takes seconds"
	@echo "make test-slow   setup, then those that take minutes"
	@echo "make test-daemon-served   every quick test without passthrough"
	@echo "make test-all    frameworks, then every test there is, with passthrough and without, and exercise: many hours"
	@echo "make exercise S=7200   random operations on mounts, for so many seconds each (the default is an hour)"
	@echo "make check       ruff and mypy"
	@echo "make frameworks  PyTorch, JAX and others for the framework tests, which are skipped without them"
	@echo "make demo        setup, then a tour: save, vanish, resume"

setup: system $(VENV)/.test-installed

system:
	@.ci/system-packages

$(VENV)/bin/python:
	python=$$(.ci/find-python) && $$python -m venv $(VENV)

$(VENV)/.test-installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[test]'
	touch $@

$(VENV)/.dev-installed: pyproject.toml | $(VENV)/.test-installed
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

frameworks: setup
	$(BIN)/pip install --quiet --disable-pip-version-check --prefer-binary -e '.[frameworks]'

# What programs see must be the same whoever serves the bytes: those tests run without passthrough too.
test: setup
	CKPTFS_PASSTHROUGH=off $(BIN)/python -m pytest $(SHARED) -m 'not slow' tests/posix tests/frameworks
	$(BIN)/python -m pytest $(SHARED) -m 'not slow'

test-slow: setup
	$(BIN)/python -m pytest -m slow

test-slow-daemon-served: setup
	CKPTFS_PASSTHROUGH=off $(BIN)/python -m pytest -m slow

test-daemon-served: setup
	CKPTFS_PASSTHROUGH=off $(BIN)/python -m pytest $(SHARED) -m 'not slow'

# Random operations, each kind of test for $(S) seconds, with passthrough and without.
S ?= 3600
exercise: setup
	for mode in auto off; do CKPTFS_EXERCISE_S=$(S) CKPTFS_PASSTHROUGH=$$mode $(BIN)/python -m pytest -m slow \
	    tests/posix/test_random_operations.py tests/posix/test_data_exerciser.py || exit 1; done

# One after the other, whatever -j says: each loads the machine by itself.
test-all: frameworks
	for each in test test-daemon-served test-slow test-slow-daemon-served exercise; do \
	    $(MAKE) $$each || exit 1; done

check: setup $(VENV)/.dev-installed
	$(BIN)/ruff check .
	$(BIN)/mypy

demo: setup
	$(BIN)/python bench/demo.py

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
