#!/usr/bin/env bash
# One engine whose hierarchical cache keeps pages in files: ./hicache.sh MODEL [options of SGLang]
set -euo pipefail
model=$1; shift
exec python -m sglang.launch_server --model-path "$model" --enable-hierarchical-cache --hicache-mem-layout page_first \
  --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{
    "backend_name": "kvgrpc", "module_path": "kvgrpc.engines.sglang.hicache", "class_name": "KvGrpcStorage",
    "interface_v1": 1, "storage": "file",
    "storage_config": {"path": "'"${CACHE_PATH:-/var/cache/kv}"'", "max_bytes": "'"${CACHE_BYTES:-200GB}"'"}}' "$@"
