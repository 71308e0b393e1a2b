"""How deploy/ starts kvgrpc: each command line is taken by the command itself, each probe asks for what is answered."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

import kvgrpc.server
from kvgrpc.cli.main import command
from kvgrpc.observability.http import StatusServer
from kvgrpc.server.config import KINDS
from kvgrpc.settings import PREFIX

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "docker" / "Dockerfile").read_text()
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
MANIFESTS = [
    each for file in sorted((DEPLOY / "kubernetes").glob("*.yaml")) for each in yaml.safe_load_all(file.read_text())
]
PODS = [each["spec"]["template"] for each in MANIFESTS if each["kind"] in ("Deployment", "StatefulSet")]
CONTAINERS = [container for pod in PODS for container in pod["spec"]["containers"]]

Line = tuple[str, list[str], dict[str, str]]


def instruction(name: str, stage: str = "kvgrpc") -> list[str]:
    """Of the stage that becomes this image."""
    (lines,) = re.findall(rf"^FROM \S+ AS {stage}\n(.*?)(?=^FROM |\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL)
    (found,) = re.findall(rf"^{name} (\[.*\])$", lines, re.MULTILINE)
    words = json.loads(found)
    assert isinstance(words, list)
    return words


def lines() -> Iterator[Line]:
    """(where, arguments of kvgrpc, its environment) of each command line."""
    yield "Dockerfile", instruction("CMD"), {}
    for name, service in COMPOSE.items():
        if service["image"] == "kvgrpc":
            yield f"compose {name}", service["command"], {}
            if name != "view":  # a page, which answers no call
                shell, program, *arguments = service["healthcheck"]["test"]
                assert (shell, program) == ("CMD", "kvgrpc")
                yield f"compose {name} health", arguments, {}
    for unit in UNITS:
        text = unit.read_text()
        environment = dict(
            pair.split("=", 1)
            for words in re.findall(r"^Environment=(.*)$", text, re.MULTILINE)
            for pair in words.split()
        )
        (started,) = re.findall(r"^ExecStart=/opt/kvgrpc/bin/kvgrpc (.*)$", text, re.MULTILINE)
        yield unit.name, shlex.split(started), environment
    for container in CONTAINERS:
        if container["image"] == "kvgrpc":
            yield f"kubernetes {container['name']}", container["args"], {}


LINES = list(lines())


def test_there_are_command_lines_of_all_kinds() -> None:
    assert instruction("ENTRYPOINT") == ["kvgrpc"] and DOCKERFILE.rstrip().endswith("\nFROM kvgrpc")
    assert [where for where, _, _ in LINES] == [
        *("Dockerfile", "compose registry", "compose registry health", "compose index", "compose index health"),
        *("compose index-2", "compose index-2 health"),
        *("compose relay", "compose relay health", "compose view"),
        *("kvgrpc-index.service", "kvgrpc-registry.service", "kubernetes index", "kubernetes registry"),
    ]


@pytest.mark.parametrize("line", LINES, ids=[where for where, _, _ in LINES])
def test_the_command_takes_each_line(line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsed by the command, made into a server, and that server may listen where it is told."""
    where, arguments, environment = line
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    secret = tmp_path / "file"
    secret.write_text("0123456789abcdef0123456789abcdef\n")
    here = [re.sub(r"(?<==)/(tls|tokens|etcd|run)/.*", str(secret), word) for word in arguments]
    served: list[Any] = []
    monkeypatch.setattr(kvgrpc.server, "serve", lambda server, _say: served.append(server))

    found: click.Command = command
    while isinstance(found, click.Group):
        name, *here = here
        below = found.get_command(click.Context(found), name)
        assert below is not None, name
        found = below
    with found.make_context(name, here) as context:
        if where.endswith("health") or where == "compose view":
            assert context.params
            return
        found.invoke(context)
    (server,) = served
    alone = getattr(server, "_server", server)  # a relay has its server inside
    for address in alone._listen:
        alone._security.check(address)


def test_every_setting_of_an_engine_is_one() -> None:
    engines = [container for container in CONTAINERS if container["image"] != "kvgrpc"]
    names = {each["name"] for container in engines for each in container["env"] if each["name"].startswith(PREFIX)}
    assert len(names) > 5
    assert {name for name in names if name.removeprefix(PREFIX).lower() not in KINDS} == set()


def test_probes_ask_for_what_is_answered_at_the_port_of_the_metrics() -> None:
    status = StatusServer("127.0.0.1:0", live=lambda: {"loop": True}, ready=lambda: {"service": True})
    try:
        for container in CONTAINERS:
            settings = {each["name"]: each.get("value") for each in container.get("env", ())}
            told = settings.get("KVGRPC_METRICS_LISTEN") or next(
                word.split("=")[1] for word in container["args"] if word.startswith("--metrics-listen=")
            )
            ports = {port["name"]: port["containerPort"] for port in container["ports"]}
            assert told == f"0.0.0.0:{ports['metrics']}"
            for probe, path in (("startup", "/livez"), ("liveness", "/livez"), ("readiness", "/readyz")):
                asked = container[f"{probe}Probe"]["httpGet"]
                assert asked == {"path": path, "port": "metrics"}
                with urllib.request.urlopen(f"http://{status.address}{asked['path']}", timeout=5) as answer:
                    assert answer.status == 200
    finally:
        status.close()


def of_kind(*kinds: str) -> list[dict[str, Any]]:
    return [each for each in MANIFESTS if each["kind"] in kinds]


def selected(labels: dict[str, str]) -> list[dict[str, Any]]:
    return [pod for pod in PODS if labels.items() <= pod["metadata"]["labels"].items()]


def test_what_selects_pods_finds_some() -> None:
    for service in of_kind("Service"):
        assert selected(service["spec"]["selector"]), service["metadata"]
    for each in of_kind("PodDisruptionBudget", "PodMonitor", "Deployment", "StatefulSet"):
        assert selected(each["spec"]["selector"]["matchLabels"]), each["metadata"]
    for policy in of_kind("NetworkPolicy"):
        assert selected(policy["spec"]["podSelector"]["matchLabels"]), policy["metadata"]


def test_no_policy_lets_everybody_to_a_port() -> None:
    for policy in of_kind("NetworkPolicy"):
        for rule in policy["spec"]["ingress"]:
            assert rule["from"] and all(each.get("podSelector") for each in rule["from"]), policy["metadata"]


def test_services_and_monitors_name_ports_that_are_there() -> None:
    reached = [service for service in of_kind("Service") if service["spec"].get("clusterIP") != "None"]
    (scraped,) = (endpoint["port"] for each in of_kind("ServiceMonitor") for endpoint in each["spec"]["endpoints"])
    assert len(reached) == 2
    for service in reached:
        assert scraped in {port["name"] for port in service["spec"]["ports"]}
        for pod in selected(service["spec"]["selector"]):
            (container,) = pod["spec"]["containers"]
            assert {each["targetPort"] for each in service["spec"]["ports"]} <= {
                port["name"] for port in container["ports"]
            }


def test_containers_of_kvgrpc_are_nobody_and_write_nowhere() -> None:
    assert re.findall(r"^USER (.*)$", DOCKERFILE, re.MULTILINE) == ["10001:10001", "root", "10001:10001"]
    for pod in PODS:
        for container in pod["spec"]["containers"]:
            if container["image"] == "kvgrpc":
                assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
                rights = container["securityContext"]
                assert rights["readOnlyRootFilesystem"] and not rights["allowPrivilegeEscalation"]
                assert rights["capabilities"] == {"drop": ["ALL"]}
    for service in COMPOSE.values():
        if service["image"].startswith("kvgrpc"):
            assert service["read_only"] and service["cap_drop"] == ["ALL"]
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))


@pytest.mark.skipif(not (ROOT / "requirements.lock").exists(), reason="a source archive has no lock files")
def test_what_the_image_copies_is_there_and_not_ignored() -> None:
    copied = [
        word for words in re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.MULTILINE) for word in words.split()
    ]
    ignored = (DEPLOY / "docker" / "Dockerfile.dockerignore").read_text().splitlines()
    assert len(copied) == 7 and ignored[0] == "*"
    assert [word for word in copied if not (ROOT / word).exists() or f"!{word}" not in ignored] == []


def test_what_compose_mounts_is_there() -> None:
    mounted = [volume.split(":")[0] for each in COMPOSE.values() for volume in each.get("volumes", ())]
    paths = [path for path in mounted if path.startswith("./")]
    assert len(paths) == 3 and [path for path in paths if not (DEPLOY / path).exists()] == []
    scraped = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"][0]
    for target in scraped["static_configs"][0]["targets"]:
        host, port = target.split(":")
        assert f"0.0.0.0:{port}" in " ".join(COMPOSE[host]["command"])
    (found,) = scraped["dns_sd_configs"]
    for name in found["names"]:
        assert COMPOSE[name]["environment"]["KVGRPC_METRICS_LISTEN"] == f"0.0.0.0:{found['port']}"


def tool(name: str, *arguments: str) -> str:
    there = shutil.which(name)
    if there is None:
        pytest.skip(f"no {name}")
    done = subprocess.run([there, *arguments], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("unit", UNITS, ids=[unit.name for unit in UNITS])
def test_systemd_takes_each_unit(unit: Path, tmp_path: Path) -> None:
    """And finds it exposed less than 2 of 10; with the command where it is here."""
    here = tmp_path / unit.name
    here.write_text(unit.read_text().replace("/opt/kvgrpc/bin/kvgrpc", str(Path(sys.executable).parent / "kvgrpc")))
    assert tool("systemd-analyze", "verify", str(here)) == ""
    tool("systemd-analyze", "security", "--offline=yes", "--threshold=20", "--no-pager", str(here))


def test_kustomize_renders_all_but_the_example() -> None:
    rendered = list(yaml.safe_load_all(tool("kubectl", "kustomize", str(DEPLOY / "kubernetes"))))
    listed = yaml.safe_load((DEPLOY / "kubernetes" / "kustomization.yaml").read_text())["resources"]
    documents = [each for file in listed for each in yaml.safe_load_all((DEPLOY / "kubernetes" / file).read_text())]
    assert {(each["kind"], each["metadata"]["name"]) for each in rendered} == {
        (each["kind"], each["metadata"]["name"]) for each in documents
    }
    assert {each["metadata"].get("namespace") for each in rendered if each["kind"] != "Namespace"} == {"kvgrpc"}
    files = {file.name for file in (DEPLOY / "kubernetes").glob("*.yaml")}
    assert files - set(listed) == {"kustomization.yaml", "engines.yaml"}
