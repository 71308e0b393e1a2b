#!/usr/bin/env bash
# One engine whose KV events kvgrpc publishes: ./events.sh MODEL [vllm serve options]; then
#   kvgrpc events tail -s 127.0.0.1:5558
set -euo pipefail
export KVGRPC_EVENTS_LISTEN=${KVGRPC_EVENTS_LISTEN:-127.0.0.1:5558}
exec vllm serve "$@" --kv-events-config '{
  "enable_kv_cache_events": true, "endpoint": "tcp://*:'"${EVENTS_PORT:-5557}"'", "topic": "kv"}'
