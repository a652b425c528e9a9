# `make` alone prints the targets. Two do everything on a fresh machine: `make serve` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SET_UP := constraints/cpu.txt deploy/set_up.py pyproject.toml
# Files, not tests, are dealt out: many share a server.
PYTEST_ARGS ?= -n auto --dist loadfile --no-loadscope-reorder
# Each start of a server would compile our modules again where the environment says not to write them.
test test-all: export PYTHONDONTWRITEBYTECODE =

.DEFAULT_GOAL := help
.PHONY: help serve demo test test-all check lint format type arch docs site many soak fuzz qa bench gpu-test screenshot dist image-test clean

help: ## print the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/.server: $(SET_UP)
	$(PYTHON) deploy/set_up.py --venv $(VENV) --extra server
	@touch $@

$(VENV)/.dev: $(SET_UP)
	$(PYTHON) deploy/set_up.py --venv $(VENV) --extra dev
	@touch $@ $(VENV)/.server

serve: $(VENV)/.server ## install what is missing and serve; settings through TILEWIRE_… variables
	@exec $(BIN)/tilewire serve

demo: $(VENV)/.server ## a whole round against a running server, or a fresh one: upload, multiply, check, report
	@$(BIN)/tilewire demo

test: $(VENV)/.dev ## the tests, without the slow ones
	$(BIN)/python -m pytest -m "not slow" $(PYTEST_ARGS)

test-all: $(VENV)/.dev ## every test: benchmarks at a small scale, pictures, replicas, cross-compilation, load and further engines too
	$(BIN)/python -m pytest $(PYTEST_ARGS)

check: lint type arch test-all ## all that CI checks

lint: $(VENV)/.dev ## style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.dev ## mend what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

type: $(VENV)/.dev ## mypy, strict
	$(BIN)/mypy

arch: $(VENV)/.dev ## the import contracts
	$(BIN)/lint-imports

docs: $(VENV)/.dev ## write what is generated: docs/configuration.md, docs/client.md and the table of docs/worth-it.md
	$(BIN)/python -m deploy.configuration_reference > docs/configuration.md
	$(BIN)/python -m deploy.client_reference
	$(BIN)/python -m benchmarks.break_even --write docs/worth-it.md

site: $(VENV)/.dev ## the documents as a site in build/site/html; a link that leads nowhere fails
	$(BIN)/python deploy/make_site.py

many: $(VENV)/.dev ## a hundred thousand different requests, every answer compared
	MANY_REQUESTS=100000 $(BIN)/python -m pytest tests/integration/test_many_requests.py

soak: $(VENV)/.dev ## MINUTES (20) of mixed, slow and hostile clients with a kill each minute; every answer checked
	$(BIN)/python -m benchmarks.soak --minutes $(or $(MINUTES),20)

fuzz: $(VENV)/.dev ## N (1,000,000) mutated requests through sockets, parser and codecs together
	$(BIN)/python -m benchmarks.fuzz --requests $(or $(N),1000000)

qa: $(VENV)/.dev ## NVIDIA's QA, from TRITON=path of a checkout of triton-inference-server/server; needs psutil
	$(BIN)/python -m tests.support.triton_qa $(TRITON)

bench: $(VENV)/.server ## the kernel benchmark, on a GPU
	$(BIN)/tilewire bench kernels

# The contract's files, asked of a GPU.
OF_A_GPU := http_contract programs stored tensors oip oip_bad_requests bad_requests metrics versions early_answers history \
	http11_probe grpc grpc_statuses shared_memory shared_memory_rights logs

gpu-test: $(VENV)/.dev ## the tests that need a GPU, and the contract against one
	$(BIN)/python -m pytest tests/gpu
	TEST_DEVICE=cuda:0 $(BIN)/python -m pytest -n 8 --dist loadfile $(OF_A_GPU:%=tests/contract/test_%.py)

screenshot: $(VENV)/.dev ## the console's pictures in the documents, of a real run on this machine's CPU; needs Chromium
	$(BIN)/python -m tests.support.console_picture docs/console.png
	$(BIN)/python -m tests.support.console_picture docs/console-phone.png --scheme dark --phone

dist: $(VENV)/.dev ## build sdist and wheel into dist/, and try both as users get them
	$(BIN)/python deploy/make_dist.py $(DIST_ARGS)

image-test: ## build the container image with buildah and try it; root, Debian's buildah and debootstrap
	$(PYTHON) deploy/try_image.py $(IMAGE_ARGS)

clean: ## remove the environment and every cache
	rm -rf $(VENV) dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
