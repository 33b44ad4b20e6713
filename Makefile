# The two commands of the README, `make demo` and `make test`, and what contributors use besides.
# Everything is built by CMake: `cmake --list-presets` for the other builds.

JOBS ?= $(shell nproc)
BUILD := build
SECONDS ?= 600

.PHONY: help demo test test-all soak mutants fuzz bench gpu-test gpu-bench format lint clean build setup-build setup-test setup-bench

help:
	@echo "make demo      install what is missing, build, and run an MoE layer over four processes"
	@echo "make test      the same set-up, then every test this machine can run"
	@echo "make test-all  make test, with the tests that run for many minutes"
	@echo "make soak      long runs, some 25 minutes: random configurations, ranks that fail, decode; SOAK='--seed 2'"
	@echo "make mutants   break the source one rule at a time; a test must notice each"
	@echo "make fuzz      generated input to plan and route, SECONDS=$(SECONDS) each, under sanitizers"
	@echo "make bench     Wherry and MPI in turns, some ten minutes; writes results/cpu and the tables"
	@echo "make gpu-test  on a machine with a GPU: the CUDA exchange against the CPU's, faults, graphs, soak, sanitizers"
	@echo "make gpu-bench on a machine with a GPU: times beside the floor; writes results/h200"
	@echo "make format    clang-format 19 on every source"
	@echo "make lint      clang-tidy 19 on every source"
	@echo "make clean     remove $(BUILD)/"
	@echo "JOBS=$(JOBS) of everything at once; set JOBS=n to change it."

setup-build:
	@scripts/install_packages.sh build

setup-test:
	@scripts/install_packages.sh build test
	@scripts/python_venv.sh

setup-bench:
	@scripts/install_packages.sh build bench

build:
	@cmake --preset release
	@cmake --build $(BUILD) -j $(JOBS)

demo: setup-build
	@$(MAKE) --no-print-directory build
	$(BUILD)/bin/wherry layer --ranks 4 --model deepseek-v3 --tokens 64

test: setup-test
	@$(MAKE) --no-print-directory build
	@scripts/run_tests.sh $(BUILD) -LE soak -j $(JOBS)

test-all: setup-test
	@$(MAKE) --no-print-directory build
	@scripts/run_tests.sh $(BUILD) -j $(JOBS)

soak: setup-test
	@$(MAKE) --no-print-directory build
	$(BUILD)/tests/wherry_soak $(SOAK)

mutants: setup-test
	@python3 tests/mutants.py

fuzz:
	@scripts/fuzz.sh $(SECONDS) $(JOBS)

bench: setup-bench
	@$(MAKE) --no-print-directory build
	bench/run.py --build $(BUILD); status=$$?; scripts/readme_tables.py; exit $$status

gpu-test:
	@scripts/gpu_test.sh

gpu-bench:
	@scripts/gpu_bench.sh; status=$$?; scripts/readme_tables.py; exit $$status

format:
	@scripts/format.sh

lint:
	@scripts/lint.sh $(JOBS)

clean:
	rm -rf $(BUILD)
