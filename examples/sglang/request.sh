#!/usr/bin/env bash
# One request through the router: ./request.sh JSON, as SGLang's /generate takes it
set -euo pipefail
curl -sS "http://127.0.0.1:${ROUTER_PORT:-8000}/generate" -H 'Content-Type: application/json' -d "$1"
