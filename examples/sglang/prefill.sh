#!/usr/bin/env bash
# The engine that computes prompts: ./prefill.sh MODEL [options of SGLang]
set -euo pipefail
model=$1; shift
exec python -m sglang.launch_server --model-path "$model" --port "${PREFILL_PORT:-30000}" \
  --disaggregation-mode prefill --disaggregation-transfer-backend "${TRANSFER_BACKEND:-kvgrpc}" \
  --disaggregation-bootstrap-port "${BOOTSTRAP_PORT:-8998}" "$@"
