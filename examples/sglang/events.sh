#!/usr/bin/env bash
# One engine whose KV events kvgrpc publishes: ./events.sh MODEL [options of SGLang]; then
#   kvgrpc events tail -s 127.0.0.1:5558
set -euo pipefail
model=$1; shift
export KVGRPC_EVENTS_LISTEN=${KVGRPC_EVENTS_LISTEN:-127.0.0.1:5558}
exec python -m sglang.launch_server --model-path "$model" --kv-events-config '{
  "publisher": "kvgrpc", "endpoint": "tcp://*:'"${EVENTS_PORT:-5557}"'", "topic": "kv"}' "$@"
