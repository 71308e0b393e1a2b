"""What a rank says of its settings: those in force, where each comes from, and no secret."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvgrpc.model import Role
from kvgrpc.rpc.security import ClientSecurity
from kvgrpc.server.config import RankConfig, settings
from kvgrpc.server.port.description import settings_in_force, versions
from kvgrpc.transfer.protocol.types import Timing
from kvgrpc.v1 import server_service_pb2 as pb


def told(environment: dict[str, str], **keywords: Any) -> dict[str, tuple[str, int]]:
    given = {"engine": "P", "role": "prefill", **keywords}
    config = RankConfig(pools=(), **settings(given, environment))
    return {each.name: (each.value, each.source) for each in settings_in_force(config, environment)}


def test_each_setting_says_where_it_comes_from(tmp_path: Path) -> None:
    file = tmp_path / "kvgrpc.toml"
    file.write_text('listen = "127.0.0.1:7001"\nlease_ttl = 7.0\nverify = true\n')
    environment = {"KVGRPC_CONFIG": str(file), "KVGRPC_LEASE_TTL": "8", "KVGRPC_REGISTRY": "127.0.0.1:8998"}
    found = told(environment, silent_timeout="30")
    assert found["listen"] == ("127.0.0.1:7001", pb.SETTING_SOURCE_FILE)
    assert found["verify"] == ("True", pb.SETTING_SOURCE_FILE)
    assert found["lease_ttl"] == ("8.0", pb.SETTING_SOURCE_ENVIRONMENT), "the environment stands above the file"
    assert found["registry"] == ("127.0.0.1:8998", pb.SETTING_SOURCE_ENVIRONMENT)
    assert found["silent_timeout"] == ("30.0", pb.SETTING_SOURCE_ENGINE)
    assert found["resolve_timeout"] == ("30.0", pb.SETTING_SOURCE_DEFAULT)


def test_a_table_is_told_part_by_part() -> None:
    found = told({}, timing=Timing(idle_timeout=100))
    assert found["timing.idle_timeout"] == ("100", pb.SETTING_SOURCE_ENGINE)
    assert found["bounds.rooms"][1] == pb.SETTING_SOURCE_DEFAULT


def test_no_secret_is_told() -> None:
    environment = {"KVGRPC_TOKEN": "a-secret-of-twenty-bytes", "KVGRPC_TOKENS_FILE": "/etc/kvgrpc/tokens"}
    found = told(environment)
    assert found["token"] == ("set", pb.SETTING_SOURCE_ENVIRONMENT)
    assert found["tokens_file"] == ("/etc/kvgrpc/tokens", pb.SETTING_SOURCE_ENVIRONMENT)
    assert "a-secret-of-twenty-bytes" not in str(found)
    config = RankConfig(engine="P", role=Role.PREFILL, pools=(), client_security=ClientSecurity(token="hidden-secret"))
    assert "hidden-secret" not in str(settings_in_force(config, {}))


def test_what_an_engine_keeps_in_memory_is_only_said_to_be_there() -> None:
    config = RankConfig(engine="P", role=Role.PREFILL, pools=(), events=object())
    assert {each.name: each.value for each in settings_in_force(config, {})}["events"] == "set"


def test_versions_are_those_of_what_is_loaded() -> None:
    import grpc

    assert versions()["grpcio"] == grpc.__version__
    assert {"python", "protobuf"} <= versions().keys()
