# Every target brings uv itself where it is missing; uv brings the packages (and Python where there is none).
UV_VERSION := 0.13.9
UV := $(or $(shell command -v uv 2>/dev/null),.tools/bin/uv)
RUN := $(UV) run --frozen --no-sync
PYTEST := $(RUN) pytest

.PHONY: setup demo check test format lint types clean

setup: .venv/.synced

.tools/bin/uv:
	@echo "uv is not installed: bringing uv $(UV_VERSION) into .tools"
	@python3 -m venv .tools && .tools/bin/pip install --quiet "uv==$(UV_VERSION)"

.venv/.synced: pyproject.toml uv.lock | $(filter .tools/bin/uv,$(UV))
	@echo "installing the locked packages into .venv (the first time about 3 GB are downloaded)"
	UV_COMPILE_BYTECODE=1 $(UV) sync --frozen
	@touch $@

demo: setup ## the main job on this machine
	$(RUN) finetune local training/jobs/demo.yaml --set run.path=runs/demo --set run.resume=false

check: setup lint types ## the quick part: lint, types, and the tests that need no real system
	$(PYTEST) -n 2 -m "not slow and not engine and not rig and not gpu"

test: setup lint types ## everything
	$(RUN) python tests/gotools/build.py all
# What fails beside other tests runs once more, alone: only what fails again fails. Both runs stay in the output.
	$(PYTEST) -n 2 --dist loadgroup --durations 20 -m "not rig and not gpu" || $(PYTEST) --last-failed --last-failed-no-failures none
	$(PYTEST) -m rig --durations 20 || $(PYTEST) -m rig --last-failed --last-failed-no-failures none

format: setup
	$(RUN) ruff format .
	$(RUN) ruff check --fix .

lint: setup
	$(RUN) ruff format --check .
	$(RUN) ruff check .

types: setup
	$(RUN) basedpyright

clean:
	rm -rf .venv .tools runs

include tests/rig/rig.mk
