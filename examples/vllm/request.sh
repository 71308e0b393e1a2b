#!/usr/bin/env bash
# One completion through the proxy: ./request.sh MODEL PROMPT
set -euo pipefail
curl -sS "http://127.0.0.1:${PROXY_PORT:-8000}/v1/completions" -H 'Content-Type: application/json' \
  -d "$(python3 -c 'import json, sys; print(json.dumps({"model": sys.argv[1], "prompt": sys.argv[2], "max_tokens": 16}))' "$1" "$2")"
