"""Settings come from a mapping and from the environment, with the same keys."""

from __future__ import annotations

import pytest

from kvgrpc.errors import InvalidRequest
from kvgrpc.model import Role
from kvgrpc.rpc.security import ClientSecurity, ServerSecurity
from kvgrpc.server import settings


def test_the_mapping_wins_over_the_environment() -> None:
    environment = {"KVGRPC_LISTEN": "127.0.0.1:1", "KVGRPC_REGISTRY": "10.0.0.1:8998", "KVGRPC_FOREIGN": "x"}
    assert settings({"listen": "127.0.0.1:2"}, environment) == {"listen": "127.0.0.1:2", "registry": "10.0.0.1:8998"}


def test_text_becomes_what_the_field_is() -> None:
    found = settings({"bootstrap_allow": "10.0.0.0/8, host-a", "start_timeout": "2.5", "dp": 1}, {})
    assert found == {"bootstrap_allow": ("10.0.0.0/8", "host-a"), "start_timeout": 2.5, "dp": 1}


def test_flat_keys_make_both_securities() -> None:
    files = {"cert_file": "c", "key_file": "k", "client_ca_file": "a", "tokens_file": "t", "insecure": "yes"}
    assert settings(files, {}) == {
        "server_security": ServerSecurity("c", "k", "a", (), "t", True),
        "client_security": ClientSecurity(insecure=True),
    }
    found = settings({"ca_file": "a", "token_file": "t", "server_name": "p"}, {"KVGRPC_CERT_FILE": "c"})
    assert found["client_security"] == ClientSecurity(ca_file="a", cert_file="c", token_file="t", server_name="p")


@pytest.mark.parametrize(
    "wrong", [{"lissten": "x"}, {"start_timeout": "soon"}, {"insecure": "perhaps"}, {"role": "router"}]
)
def test_what_cannot_be_read_is_named(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        settings(wrong, {})
    assert caught.value.metadata["field"] == next(iter(wrong))
    assert caught.value.metadata["rule"] and caught.value.metadata["value"]


@pytest.mark.parametrize("text", ["prefill", "PREFILL", " Prefill "])
def test_a_role_may_be_text(text: str) -> None:
    assert settings({"role": text}, {})["role"] is Role.PREFILL
    assert settings({}, {"KVGRPC_ROLE": "decode"})["role"] is Role.DECODE
