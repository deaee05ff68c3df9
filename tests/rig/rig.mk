# The rig: a real Kubernetes on this machine (docs/rig.md). Included by the main Makefile, which defines RUN and PYTEST.

.PHONY: rig-up rig-down rig-status rig-test engine

rig-up: setup
	$(RUN) python -m tests.rig up

rig-down: setup
	$(RUN) python -m tests.rig down

rig-status: setup
	$(RUN) python -m tests.rig status

rig-test: setup
	$(PYTEST) tests/rig

engine: setup
	$(RUN) python tests/gotools/build.py pulumi
