# `make up` starts a cluster on this machine; `make test` proves this checkout; `make bench` measures it beside upstream.
# ARGS goes to `windlass up`.

.PHONY: up build test lint bench reset facts
up:
	@tools/up.sh $(ARGS)

build:
	@. tools/env.sh && need_rust && cargo build --release --locked --bin windlass

test:
	@tests/run.sh

lint:
	@. tools/env.sh && need_rust && cargo fmt --check && cargo clippy --locked --workspace --all-targets -- -D warnings

bench:
	@benches/run.sh

# Containers, links, rules, mounts and data of `make up` are gone afterwards.
reset:
	@. tools/env.sh && "$$CARGO_TARGET_DIR/release/windlass" reset --yes

# Writes src/api/facts anew from the documents that Kubernetes' Go modules ship.
facts:
	@. tools/env.sh && need_rust && cargo run --locked --quiet --package windlass-facts

SHELL := /bin/bash
