# A thin index of the `cargo xtask` commands; nothing needs `just` to be installed.

# List the commands
default:
    @just --list --unsorted

# Build everything and show it at work, on private Postgres and RabbitMQ
demo *arguments:
    cargo xtask demo {{ arguments }}

# Build everything and keep it running until Ctrl-C
dev *arguments:
    cargo xtask dev {{ arguments }}

# Run every test: [--full] [--suite NAME] [-- filters]
test *arguments:
    cargo xtask test {{ arguments }}

# Measure, beside floors of the same run: [relay] [--quick] [--json FILE] [--strict]
bench *arguments:
    cargo xtask bench {{ arguments }}

# Send the API thousands of requests made from its own description: [--seed N] [--examples N]
fuzz-api *arguments:
    cargo xtask fuzz-api {{ arguments }}

# Check form: formatting, lints, dependency rules, documentation, generated files
check *steps:
    cargo xtask check {{ steps }}

# Write docs/reference from the daemons' own --help
generate:
    cargo xtask generate

# Renew .sqlx from the migrations
prepare:
    cargo xtask prepare

# Stop the private Postgres and RabbitMQ
down:
    cargo xtask down
