"""Decode's pages run out: SGLang keeps copies of some requests in host memory, and goes on with these when others are
through. kvgrpc handed their prompts over, and has no part in what follows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.engine import PAGE, Pair
from tests.engines.hierarchical import PLUGIN
from tests.engines.model import Reference

pytestmark = pytest.mark.timeout(900)
# SGLang's defaults, with a prefix cache at decode and without.
BACKUPS: dict[str, dict[str, Any]] = {
    "cpu_tensor": {"disaggregation_decode_enable_radix_cache": True},
    "host_pool": {"hicache_io_backend": "direct", "hicache_mem_layout": "page_first_direct"},
}
PROMPT, TOKENS, REQUESTS = 2 * PAGE + 1, 60, 8


@pytest.fixture(scope="module", params=BACKUPS)
def pair(request: pytest.FixtureRequest, folder: Path, reference: Reference) -> Iterator[Pair]:
    own = {
        "disaggregation_decode_retraction_backup": request.param,
        "num_reserved_decode_tokens": PAGE,  # so requests begin that cannot all end
        "max_total_tokens": 512,
        **BACKUPS[request.param],
    }
    pair = Pair(folder, reference.path, environment=PLUGIN, decode=own)
    pair.wait_ready()
    yield pair
    pair.close()


def test_requests_that_decode_has_no_room_for_go_on_later(pair: Pair, reference: Reference) -> None:
    pair.check_at_once([reference.case(PROMPT + number, new_tokens=TOKENS) for number in range(REQUESTS)])
    counts = re.findall(r"KV cache pool is full\. Retract requests\. #retracted_reqs: (\d+)", pair.decode.log())
    assert sum(map(int, counts)) > 0
