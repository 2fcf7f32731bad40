# make setup | check | test | test-kernels | test-gpu | test-engines | quality | demo. PYTHON chooses the interpreter (3.10-3.12); without make see tools/*.sh.
BIN := .venv/bin
PYTEST_ARGS ?=

.PHONY: setup check test test-kernels test-gpu test-engines quality format demo clean

setup:
	@bash tools/setup_venv.sh

check: setup
	@bash tools/check.sh $(PYTEST_ARGS)

test:
	@bash tools/test.sh $(PYTEST_ARGS)

test-kernels:
	@bash tools/test_kernels.sh $(PYTEST_ARGS)

test-gpu:
	python3 -m pytest -q -m gpu tests

# Loads exports into vLLM and speculators, installed once into environments of their own (several GB, 10 minutes).
test-engines: setup
	@bash tools/setup_engines.sh
	$(BIN)/python -m pytest -q -m engine tests/engine $(PYTEST_ARGS)

quality: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

demo:
	bash examples/post_training/train_eagle3_and_export.sh

clean:
	rm -rf .venv .cache runs build *.egg-info
