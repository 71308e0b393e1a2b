#!/usr/bin/env bash
# The engine that decodes: ./decode.sh MODEL [vllm serve options]
set -euo pipefail
export VLLM_HOST_IP=${VLLM_HOST_IP:-127.0.0.1} CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-1}
exec vllm serve "$@" --port "${DECODE_PORT:-8200}" --kv-transfer-config '{
  "kv_connector": "KvGrpcConnector",
  "kv_connector_module_path": "kvgrpc.engines.vllm",
  "kv_role": "kv_consumer"
}'
