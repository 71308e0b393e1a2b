#!/usr/bin/env bash
# The engine that decodes, on the second GPU: ./decode.sh MODEL [options of SGLang]
set -euo pipefail
model=$1; shift
exec python -m sglang.launch_server --model-path "$model" --port "${DECODE_PORT:-30001}" \
  --base-gpu-id "${BASE_GPU_ID:-1}" --disaggregation-mode decode --disaggregation-transfer-backend "${TRANSFER_BACKEND:-kvgrpc}" "$@"
