#!/usr/bin/env bash
# One engine that offloads its KV cache to host memory, and from there to files: ./offloading.sh MODEL [vllm serve options]
set -euo pipefail
exec vllm serve "$@" --kv-transfer-config '{
  "kv_connector": "OffloadingConnector",
  "kv_role": "kv_both",
  "kv_connector_extra_config": {
    "spec_name": "TieringOffloadingSpec",
    "cpu_bytes_to_use": '"${HOST_BYTES:-17179869184}"',
    "secondary_tiers": [{
      "type": "KvGrpcTier", "module_path": "kvgrpc.engines.vllm.tier", "storage": "file",
      "storage_config": {"path": "'"${CACHE_PATH:-/var/cache/kv}"'", "max_bytes": "'"${CACHE_BYTES:-200GB}"'"}
    }]
  }
}'
