# Every target brings uv itself where it is missing; uv brings Python and the packages.
UV_VERSION := 0.13.9
TOOLS := .tools
UV := $(or $(shell command -v uv 2>/dev/null),$(TOOLS)/bin/uv)
RUN := $(UV) run --frozen --no-sync
PYTEST := $(RUN) pytest

.PHONY: setup demo check test lint types clean

setup: .venv/.synced

$(TOOLS)/bin/uv:
	@echo "uv is missing: installing it into $(TOOLS)"
	@python3 -m venv $(TOOLS) && $(TOOLS)/bin/pip install --quiet "uv==$(UV_VERSION)"

.venv/.synced: pyproject.toml uv.lock | $(filter $(TOOLS)/bin/uv,$(UV))
	$(UV) sync --frozen
	@touch $@
