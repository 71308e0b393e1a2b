#!/usr/bin/env bash
# One request to both engines, as a router would send it: ./direct.sh JSON; the answer is decode's
set -euo pipefail
ask() { curl -sS "http://127.0.0.1:$1/generate" -H 'Content-Type: application/json' -d "$body"; }
body=$(python3 -c '
import json, random, sys
room = random.randrange(1, 1 << 62)
where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": int(sys.argv[2]), "bootstrap_room": room}
print(json.dumps({**json.loads(sys.argv[1]), **where}))' "$1" "${BOOTSTRAP_PORT:-8998}")
ask "${PREFILL_PORT:-30000}" >/dev/null &
ask "${DECODE_PORT:-30001}"
wait
