# make demo | test | check | docs | lock | clean. The interpreter: make demo PYTHON=python3.12
PYTHON ?= python3
export PYTHON
.DEFAULT_GOAL := help
.PHONY: help demo test check docs lock clean venv

help:
	@echo "make demo    set up .venv and translate some sentences with two of the models that ship with hasten"
	@echo "make test    the whole test suite (ARGS='-k name' selects)"
	@echo "make check   lint, format, types, strict documentation build"
	@echo "make docs    serve the documentation on this machine"
	@echo "make venv    set up .venv for development"
	@echo "make lock    renew requirements.lock"
	@echo "make clean   remove .venv and all that was built"

demo:
	@scripts/setup run
	@.venv/bin/hasten demo

test:
	@scripts/setup test
	@.venv/bin/python -m pytest -n auto --dist worksteal $(ARGS)

check: venv
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/pyright
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict --quiet

docs: venv
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs serve

venv:
	@scripts/setup dev

lock:
	@scripts/lock

clean:
	rm -rf .venv site build dist src/*.egg-info .pytest_cache .ruff_cache .hypothesis
