# Every target works in a fresh clone without a virtual environment.
#
#   make install   create .venv with the pinned torch and the development tools
#   make demo      train a small model on this machine's CPU cores
#   make test      the default test run             (PYTEST_ARGS="..." is passed on; TEST_WORKERS=0: one process)
#   make check     ruff and mypy
#   make soak      long stress runs
#   make dist      wheel and sdist in dist/
#   make cluster-packages   SLURM and Open MPI for tests/cluster (Debian or Ubuntu, as root)
#   make clean     remove what was built and cached; .venv, logs and checkpoints stay
#
# Another interpreter: make PYTHON=/path/to/python3.12 install

PYTHON ?= python3
PYTEST_ARGS ?=
TEST_WORKERS ?= auto
BIN := .venv/bin
STAMP := .venv/.odcengine-installed

CLUSTER_PACKAGES := slurm-wlm munge openmpi-bin libopenmpi-dev iproute2
# A new machine may update itself just now, and a mirror may not answer at once.
APT_GET := DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300 -o Acquire::Retries=5

.PHONY: install demo test check soak dist cluster-packages clean

install: $(STAMP)

$(STAMP): setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "odcengine needs Python 3.10 or newer; '$(PYTHON)' is not. Name another: make PYTHON=python3.12" >&2; \
	  exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "'$(PYTHON)' has no venv module. Install it (Debian, Ubuntu: apt-get install python3-venv)," >&2; \
	  echo "or name another interpreter: make PYTHON=/path/to/python3" >&2; \
	  exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt torch
	DS_BUILD_OPS=0 $(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	touch $@

demo: install
	$(BIN)/python examples/demo/run.py

test: install
	$(BIN)/python -m pytest -q -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy odcengine launcher/odc_launcher tools/odc_tools

soak: install
	$(BIN)/odc selftest --soak
	$(BIN)/python -m pytest -q -m "soak and not gpu and not multi_gpu" $(PYTEST_ARGS)

dist: install
	$(BIN)/python -m build --outdir dist .

cluster-packages:
	@dpkg -s $(CLUSTER_PACKAGES) >/dev/null 2>&1 || for pause in 15 60 0; do \
	  $(APT_GET) update; \
	  $(APT_GET) install -y --no-install-recommends $(CLUSTER_PACKAGES) >/dev/null \
	    && exit 0; \
	  sleep $$pause; \
	done; dpkg -s $(CLUSTER_PACKAGES) >/dev/null

clean:
	rm -rf build dist demo_out grpo_out *.egg-info launcher/*.egg-info tools/*.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./.venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
