#!/usr/bin/env bash
# The engine that computes prompts: ./prefill.sh MODEL [vllm serve options]
set -euo pipefail
export VLLM_HOST_IP=${VLLM_HOST_IP:-127.0.0.1}
exec vllm serve "$@" --port "${PREFILL_PORT:-8100}" --kv-transfer-config '{
  "kv_connector": "KvGrpcConnector",
  "kv_connector_module_path": "kvgrpc.engines.vllm",
  "kv_role": "kv_producer",
  "kv_connector_extra_config": {"bootstrap_port": '"${BOOTSTRAP_PORT:-8998}"'}
}'
