#!/usr/bin/env bash
# SGLang's router in front of both engines: ./router.sh [options of the router]
set -euo pipefail
exec python -m sglang_router.launch_router --pd-disaggregation \
  --prefill "http://127.0.0.1:${PREFILL_PORT:-30000}" "${BOOTSTRAP_PORT:-8998}" \
  --decode "http://127.0.0.1:${DECODE_PORT:-30001}" --host 127.0.0.1 --port "${ROUTER_PORT:-8000}" "$@"
