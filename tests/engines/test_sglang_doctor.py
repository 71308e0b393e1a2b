"""What kvgrpc doctor says beside the published wheel of SGLang."""

from __future__ import annotations

import pytest

from tests.engines.doctor import finds_all_features

pytestmark = pytest.mark.timeout(700)


def test_doctor_says_that_every_feature_works_with_the_engine_that_is_here() -> None:
    finds_all_features("sglang")
