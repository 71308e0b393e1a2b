"""What vLLM's own classes name the blocks of random prompts, beside ours."""

from __future__ import annotations

import os
import random

import pytest

from tests.support.engine_hashes import numbers_of, our_numbers, random_case

pytestmark = pytest.mark.timeout(600)


def test_random_prompts_have_the_same_names_here_and_there() -> None:
    seed = int.from_bytes(os.urandom(4), "big")
    rng, theirs, compared = random.Random(seed), numbers_of("vllm"), 0
    while compared < 1000:
        case = random_case(rng, "vllm")
        names = theirs(case)
        assert our_numbers("vllm", case) == names, f"seed {seed}: {case}"
        compared += bool(names)
