# make demo      see it work: install the core, start a broker, kill everything in the middle, compare (under 2 minutes)
# make demo-binlog   see a shop's database rebuilt in a second one, while everything is killed in turn
# make demo-cluster  see three brokers and three ZooKeeper servers be killed in turn: installs Spark, whose jars have ZooKeeper
# make demo-audit  see the audit find what was damaged: installs Spark and Java if they are missing
# make test      everything: check, unit, vectors, simulation, crashes, services, examples (some 35 minutes on two quiet cores).
#                ORDER=random|SEED: files of tests in another order; LOAD=8: beside so many busy processes
# make test-compiled  the part of it that runs compiled modules (docs/compiled.md)
# make test-mysql  the tests of databases on MySQL 9.7 and MariaDB 11.8, which Debian's mirror has in newer suites: unpacked into
#                build/, nothing is installed (about half an hour; no part of make test)
# make check     what to run before each commit (under a minute on two cores)
# make pythons   what leans on the version of Python, on each other one (3.11 to 3.14) that there is; part of make test
# make bench     every row of the budget, beside its bound, the bare limit of this machine and others (a page with drawings);
#                measures the compiled modules (docs/compiled.md), the source with COMPILED=0
# make bench-peers   txmq beside other brokers that are installed, the same work in turns (about 12 minutes): a table and drawings
# make compiled  hot modules as C extensions, into build/compiled (about two minutes)
# make wheel     into dist/: a wheel with compiled modules for each Python there is, and one of the source for all others
# make crash     CYCLES=300 XA_CYCLES=400 HOMES_CYCLES=510 TLS_CYCLES=60 GROUP_SECONDS=180 ORDERED_CYCLES=200 OUTBOX_CYCLES=200 BINLOG_CYCLES=100 SPARK_KILLS=20 FAULTS=43: kill -9
# make soak      MINUTES=10: endless mixed load; journal, memory, open files, threads, stalls of the loop stay within bounds
# make fuzz      SECONDS=300: random first bytes at a broker's door, for plaintext and TLS; others are served meanwhile.
#                Then odd values that a broker keeps for others: half the time each
# make drawn     ROWS=10000 SEED=33: rows with a drawn value of every type, in every character set, through a binlog sync: events and
#                copy as the server's own SELECT shows them
# make simulate  SEEDS=500: the same promises on a simulated disk, network and clock
# make docs      a site of all pages and the docstrings, with a search, into build/site
# make house     the layout of txmq/ in figures, the places that break its rules, and the hands that a call passes
# make clean     remove what the above made
# PY=python3.12 chooses the interpreter that .venv is made with.

BIN := .venv/bin
CYCLES ?= 300
XA_CYCLES ?= 400
HOMES_CYCLES ?= 510
TLS_CYCLES ?= 60
GROUP_SECONDS ?= 180
ORDERED_CYCLES ?= 200
OUTBOX_CYCLES ?= 200
BINLOG_CYCLES ?= 100
SPARK_KILLS ?= 20
FAULTS ?= 43
SEEDS ?= 500
MINUTES ?= 10
SECONDS ?= 300
ROWS ?= 10000
SEED ?= 33
WORKERS ?= 2
SERVICE_WORKERS ?= 5
COMPILED ?= 1
LOAD ?= 0
ORDER ?=
export PY
# Where it is set, each of a thousand short processes compiles all its modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo demo-binlog demo-cluster demo-audit test test-mysql test-compiled check pythons compiled wheel bench bench-peers crash soak fuzz drawn simulate docs house clean

.venv/.core: pyproject.toml .ci/setup
	@.ci/setup core

.venv/.spark: pyproject.toml .ci/setup
	@.ci/setup spark

.venv/.dev: pyproject.toml .ci/setup
	@.ci/setup dev

# The clients of NATS and RabbitMQ; if they cannot be had, their rows say so.
.venv/.bench: .venv/.dev
	@$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[bench]' || echo "goes on without its peers' clients"
	@touch $@

.venv/.peers: .venv/.dev
	@$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[peers]' || echo "goes on without its peers' clients"
	@$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[queues]' || echo "goes on without queues in PostgreSQL"
	@touch $@

.venv/.docs: .venv/.dev
	@$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[docs]'
	@touch $@

demo: .venv/.core
	@$(BIN)/txmq demo

demo-cluster: .venv/.spark
	@$(BIN)/python examples/cluster/demo.py

demo-binlog: .venv/.dev
	@$(BIN)/python examples/binlog_sync/demo.py

demo-audit: .venv/.spark
	@$(BIN)/txmq demo-audit

check: .venv/.dev
	@echo "txmq: style, types, layers, then unit tests and vectors ..."
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -q -n $(WORKERS) --dist loadfile tests/unit tests/vectors

pythons: .venv/.dev
	@echo "tests on other Pythons ..."
	@$(BIN)/python -m tools.pythons

# tools/suite has the stages and the rules of the verdict; tests/conftest.py says in which order, and which process gets Spark.
SUITE = $(BIN)/python -m tools.suite --workers $(SERVICE_WORKERS) --load $(LOAD) $(if $(ORDER),--order $(ORDER))

test: .venv/.dev
	@$(SUITE)

test-mysql: .venv/.dev
	@$(BIN)/python -m tools.newer_databases --workers $(WORKERS)

# Compiled modules stand before the source: PYTHONSAFEPATH keeps the working directory out of the way.
BUILT := build/compiled/.done
WITH_BUILT := PYTHONSAFEPATH=1 PYTHONPATH=$(CURDIR)/build/compiled:$(CURDIR)

$(BUILT): .venv/.dev setup.py pyproject.toml $(shell find txmq -name '*.py')
	@echo "compiling hot modules (about two minutes) ..."
	@mkdir -p build && rm -rf build/compiled
	@TXMQ_COMPILE=1 $(BIN)/python setup.py -q build --build-base build/objects --build-lib build/compiled \
		>build/compile.log 2>&1 || { tail -n 30 build/compile.log; exit 1; }
	@touch $@

compiled: $(BUILT)

wheel: .venv/.dev
	@echo "building wheels (about three minutes for each Python) ..."
	@$(BIN)/python -m tools.wheels

test-compiled: .venv/.dev $(BUILT)
	@$(SUITE) compiled

ifeq ($(COMPILED),1)
bench: .venv/.dev .venv/.bench $(BUILT)
	$(WITH_BUILT) $(BIN)/python -m bench

bench-peers: .venv/.dev .venv/.peers $(BUILT)
	$(WITH_BUILT) $(BIN)/python -m bench.peers
else
bench: .venv/.dev .venv/.bench
	$(BIN)/python -m bench

bench-peers: .venv/.dev .venv/.peers
	$(BIN)/python -m bench.peers
endif

crash: .venv/.dev
	$(BIN)/python -m tools.crash --cycles $(CYCLES)
	$(BIN)/python -m tools.crash --xa --cycles $(XA_CYCLES)
	$(BIN)/python -m tools.crash --aio --cycles $(XA_CYCLES)
	$(BIN)/python -m tools.crash --homes --cycles $(HOMES_CYCLES)
	$(BIN)/python -m tools.crash --groups --seconds $(GROUP_SECONDS)
	$(BIN)/python -m tools.crash --ordered --cycles $(ORDERED_CYCLES)
	$(BIN)/python -m tools.crash --outbox --cycles $(OUTBOX_CYCLES)
	$(BIN)/python -m tools.crash --binlog --cycles $(BINLOG_CYCLES)
	$(BIN)/python -m tools.crash --spark --kills $(SPARK_KILLS)
	$(BIN)/python -m tools.crash --cluster --faults $(FAULTS)
	$(BIN)/python -m tools.crash --tls --cycles $(TLS_CYCLES)
	for one in xa aio homes ordered outbox binlog; do $(BIN)/python -m tools.crash --$$one --tls --cycles $(TLS_CYCLES) || exit 1; done
	$(BIN)/python -m tools.crash --groups --tls --seconds $(GROUP_SECONDS)
	$(BIN)/python -m tools.crash --spark --tls --kills $(SPARK_KILLS)
	$(BIN)/python -m tools.crash --cluster --tls --faults $(FAULTS)

fuzz: .venv/.dev
	$(BIN)/python -m tools.fuzz --seconds $(SECONDS)

soak: .venv/.dev
	$(BIN)/python -m tools.soak --minutes $(MINUTES) --json build/soak.json

drawn: .venv/.dev
	TXMQ_DRAWN_ROWS=$(ROWS) TXMQ_DRAWN_SEED=$(SEED) $(BIN)/pytest -q --timeout 7200 tests/services/binlog/test_drawn_values.py

simulate: .venv/.dev
	$(BIN)/python -m tools.simulation --seeds $(SEEDS)

docs: .venv/.docs
	@$(BIN)/python -m tools.docs_site

house: .venv/.dev
	@$(BIN)/python -m tools.house

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache bench-results var
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
