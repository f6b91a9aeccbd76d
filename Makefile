# Everything a person types. `make` alone explains.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.PHONY: help setup build dist demo up test lint docs reference cuda-check cuda-coverage bench bench-transfer bench-handoff bench-router bench-overload bench-large-requests bench-connections bench-pools bench-policies bench-disagg bench-kernels bench-cpu bench-cpu-1b bench-serving fault-matrix soak test-clients test-aiperf test-observability test-page test-jaeger compose-up compose-down test-compose test-kube test-amx test-garbage test-docs test-strangers fuzz

help: ## This list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 18

setup: ## System packages and the model, once; says what it installs
	deploy/setup.sh

build: ## All programs, optimized
	cargo build --release --locked

dist: setup ## As one would ship them, in target/dist: optimized across crates, the router by its load as well; half an hour
	deploy/dist/build.sh

demo: setup build ## A cluster, three prompts, the timeline of the last, and a clean end
	deploy/demo.sh

up: setup build ## A local cluster until Ctrl-C
	"$$(deploy/target_dir.sh)/release/tandem" up

# COMPOSE_FILE, TANDEM_BUILD and more: deploy/compose/up.sh and compose.yaml.
compose-up: ## A cluster in containers, with Jaeger, Prometheus and Grafana; builds the images
	deploy/compose/up.sh

compose-down: ## Ends it and removes what it made; the images stay
	deploy/compose/down.sh

test: ## Format, lints, build, all tests (some start real clusters); CUDA's on an emulated driver
	deploy/setup.sh test
	cargo fmt --check
	deploy/test.sh
	# The device's kernels once more: with the checker of accesses, and in an order that a printed seed repeats.
	engine/cuda/emu/again.sh

lint: ## Format and lints; licences and advisories where cargo-deny is installed
	cargo fmt --check
	cargo clippy --profile lint --workspace --all-targets --locked -- -D warnings
	if cargo deny --version > /dev/null 2>&1; then cargo deny check; else echo "lint: cargo-deny is not installed, skipped"; fi

docs: ## The book as HTML, in target/docs/book; checks its links. Fetches mdBook once (5 MB). The pages' prose and code are part of `make test`
	python3 -B cluster-tests/docs/commands.py --list > /dev/null
	mdbook=$$(deploy/docs/mdbook.sh); python3 -B deploy/docs/book.py --mdbook "$$mdbook" $(DOCS)

reference: ## docs/reference/flags.md from the programs' own command lines
	TANDEM_WRITE_REFERENCE=1 cargo test --profile tests --locked --workspace --test reference

# As root. TEST_DOCS="--page docs/operate.md" runs one page. cluster-tests/docs/commands.py --list says what runs.
test-docs: setup build ## Every command of README and docs, in order, in a clean container
	cluster-tests/docs/run.sh $(TEST_DOCS)

# CUDA_CHECK="--out DIR" keeps the cubins, "--json FILE" the table.
cuda-check: ## CUDA kernels by nvcc and NVRTC for sm_80 and sm_90a: warnings, registers, spills. Fetches both once (192 MB)
	deploy/gpu/toolchain.sh
	python3 -B deploy/gpu/check_kernels.py --toolchain "$$(deploy/gpu/toolchain.sh --path)" $(CUDA_CHECK)

# CUDA_COVERAGE="--test kernels" runs some of the tests.
cuda-coverage: ## Lines of the CUDA kernels that no test reaches, by gcov on the emulated driver
	deploy/setup.sh test
	engine/cuda/emu/coverage.sh $(CUDA_COVERAGE)

bench: bench-transfer bench-handoff bench-router bench-overload bench-connections bench-kernels bench-cpu ## All benchmarks

bench-transfer: ## KV transfer beside memcpy, a plain socket and ucx_perftest
	deploy/setup.sh bench
	cargo run --release --locked -p tandem-kvtransfer --example bench_transfer

bench-handoff: setup build ## How much of the KV transfer hides behind the prefill; over shared memory, tcp, and a link of 1 Gbit/s (root)
	cargo run --release --locked -p tandem-cluster-tests --example bench_handoff -- $(BENCH_HANDOFF)

# BENCH_ROUTER="--compare-seen" adds what traces and logs cost: two more routers, with and without, in turns.
bench-router: setup build dist ## What the router adds to a request, beside sglang-router and vllm-router
	deploy/bench/routers.sh
	cargo run --release --locked -p tandem-cluster-tests --example bench_router -- --router "$$(deploy/target_dir.sh)/dist/tandem-router" \
	  --python "$$(deploy/bench/routers.sh --path)" $(BENCH_ROUTER)

bench-overload: setup build ## Three times what a cluster can answer, for two minutes
	cargo run --release --locked -p tandem-cluster-tests --example bench_overload -- $(BENCH_OVERLOAD)

bench-large-requests: setup build ## A hundred requests of 8 MB beside a polite client: its latencies, and the router's memory
	cargo run --release --locked -p tandem-cluster-tests --example bench_large_requests -- $(BENCH_LARGE_REQUESTS)

bench-pools: setup build ## Chats beside many long documents of the same tenant, with --pools and without
	deploy/bench/pools.py $(BENCH_POOLS)

bench-connections: setup build ## /health of a router whose port is full of connections that ask nothing
	cargo run --release --locked -p tandem-cluster-tests --example bench_connections -- $(BENCH_CONNECTIONS)

# BENCH_POLICIES="--trace FILE": a trace of Mooncake's; the project ships none.
bench-policies: setup build ## The router's policies on a production trace, simulated nodes with measured costs
	python3 deploy/bench/policies.py $(BENCH_POLICIES)

bench-disagg: setup build ## Disaggregated and aggregated serving on the same cores, real nodes
	python3 deploy/bench/disagg.py $(BENCH_DISAGG)

bench-kernels: ## Each CPU kernel alone, beside the bandwidth and the multiply-adds of the machine
	cargo bench --locked -p tandem-engine --bench kernels

# PEERS=mistralrs: 16 requests at once beside it as well. BENCH_CPU: further flags, see deploy/bench/bench_cpu.py --help.
bench-cpu: setup ## Prefill and decode beside llama.cpp in one run; builds it once
	deploy/bench/peers.sh $(PEERS)
	cargo build --release --locked -p tandem-engine --example bench_cpu
	$(if $(PEERS),cargo build --release --locked)
	python3 deploy/bench/bench_cpu.py --peers "$(PEERS)" $(BENCH_CPU)

bench-cpu-1b: setup ## The same with a model of Llama-3.2-1B's shape in Q4_K_M, Q8_0 and BF16, random weights
	deploy/bench/peers.sh 1b
	cargo build --release --locked -p tandem-engine --example bench_cpu
	models=$${TANDEM_CACHE:-$$HOME/.cache/tandem}/peers/llama-3.2-1b; \
	  python3 deploy/bench/bench_cpu.py --model "$$models-Q4_K_M.gguf,$$models-Q8_0.gguf,$$models-BF16.gguf" \
	  --rows prefill512,decode1x256,decode8x256,decode32x256,decode16x1024 --threads 2 --rounds 3 $(BENCH_CPU)

bench-serving: setup build ## `tandem up` without flags beside llama.cpp's server, over HTTP; builds it once
	deploy/bench/peers.sh llama-server
	python3 deploy/bench/bench_serving.py $(BENCH_SERVING)

# FAULT_MATRIX="--rounds 20" repeats it; "--transports tcp SIGSTOP/decode" takes some cells.
fault-matrix: setup build ## Every fault, victim and moment over real processes; prints the table
	cargo test --release --locked -p tandem-cluster-tests --test fault_matrix -- $(FAULT_MATRIX)

soak: setup build ## 20 minutes under load with a kill every 10 s; prints what came of it and writes a plot
	cargo run --release --locked -p tandem-cluster-tests --example soak -- $(SOAK)

test-clients: setup build ## openai-python, gRPC clients in Python and JavaScript, gRPC reflection, and every program of examples/
	cluster-tests/clients/run.sh

# TEST_JAEGER="--simulated": nodes without a model; "--keep": Jaeger stays until Ctrl-C.
test-jaeger: setup build ## Fifty mixed requests beside a real Jaeger, which is built once from Go modules (4 minutes)
	python3 cluster-tests/jaeger/run.py $(TEST_JAEGER)

# AIPERF_REQUESTS, AIPERF_RATE (a second) and AIPERF_OSL change the profile.
test-aiperf: setup build ## aiperf's chat and completions profiles, `tandem bench` beside them; fetches aiperf once
	cluster-tests/clients/aiperf.sh

# TEST_OBSERVABILITY="--prometheus URL" asks that one, which scrapes a loaded cluster; "--write" writes what is generated.
test-observability: setup build ## Dashboards, rules and alerts: every query against a real Prometheus and a loaded cluster
	python3 deploy/observability/check.py $(or $(TEST_OBSERVABILITY),--live)

# PAGE_TEST=page or load runs one part; SCREENSHOTS=1 writes the pictures in docs/page.
test-page: setup build ## The live page in Chromium: nodes, a waterfall, a killed node; then 100 nodes and 1,000 traces. Needs chromium, node, npm
	cluster-tests/page/run.sh

# As root. TANDEM_TEST_BUILD=dist: the programs are built in the image, from source, as users build them.
test-compose: setup build ## The compose file as shipped, in a docker engine of its own
	cluster-tests/compose/run.sh

# AMX_TESTS="tiles::" runs those whose names have one of these words.
test-amx: ## The kernels' tests on an emulated processor with AMX, for machines without; Debian only, builds Bochs once
	engine/tests/amx/run.sh

test-garbage: ## 10,000 garbled tickets and hellos against each KV backend, under AddressSanitizer and valgrind
	kvtransfer/tests/garbage.sh

# TEST_STRANGERS="--full smuggling" runs some of the attacks; "--answers 200" the short form, as in docs/benchmarks/strangers.md.
test-strangers: setup build ## Attacks at every door of a cluster, with ten thousand connections; prints the table
	cargo test --release --locked -p tandem-cluster-tests --test attacks -- $(or $(TEST_STRANGERS),--full --answers 200)

# SECONDS=600 for each of them; FUZZ="gguf spans" runs some. 600 takes 95 minutes on two cores.
fuzz: setup ## Every parser that strangers reach, by libFuzzer with AddressSanitizer, one a core; prints the table
	fuzz/run.sh $(or $(SECONDS),60) $(FUZZ)

test-kube: ## The Helm chart against a real API server; builds helm and kube-apiserver once
	cluster-tests/kube/run.sh
