"""The contract's guard and its options: what docs/contract.md says of both."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(300)  # each starts buf
ROOT = Path(__file__).parents[2]
PROTOS = sorted((ROOT / "protos/kvgrpc/v1").glob("*.proto"))
MODULE = re.findall(r"^module (\S+)$", (ROOT / "clients/go/go.mod").read_text(), re.MULTILINE)[0]


def breaking(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([ROOT / ".ci/breaking", folder], capture_output=True, text=True, timeout=120)


@pytest.fixture
def changed(tmp_path: Path) -> Path:
    """The protos of now, to be changed."""
    shutil.copytree(ROOT / "protos", tmp_path / "protos")
    shutil.copy(ROOT / "buf.yaml", tmp_path)
    return tmp_path


def edit(folder: Path, name: str, before: str, after: str) -> None:
    path = folder / "protos/kvgrpc/v1" / name
    text = path.read_text()
    assert text.count(before) == 1
    path.write_text(text.replace(before, after))


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("server_service.proto", "  string version = 1;", "  reserved 1;"),
        ("server_service.proto", "  string version = 1;", "  string release = 1;"),
        ("common.proto", "  uint32 pages = 4;", "  uint64 pages = 4;"),
        ("common.proto", "  ROLE_DECODE = 2;", "  ROLE_DECODE = 3;"),
        ("common.proto", 'java_package = "dev.kvgrpc.v1"', 'java_package = "org.kvgrpc.v1"'),
    ],
)
def test_a_change_that_breaks_who_generated_code_is_refused(changed: Path, name: str, before: str, after: str) -> None:
    edit(changed, name, before, after)
    refused = breaking(changed)
    assert refused.returncode == 1 and name in refused.stdout and "docs/contract.md" in refused.stderr


def test_what_is_added_is_not(changed: Path) -> None:
    edit(changed, "server_service.proto", "  string version = 1;", "  string version = 1;\n  string zone = 99;")
    edit(changed, "common.proto", "  ROLE_DECODE = 2;", "  ROLE_DECODE = 2;\n  ROLE_OTHER = 99;")
    passed = breaking(changed)
    assert passed.returncode == 0, passed.stdout + passed.stderr


@pytest.mark.parametrize("proto", PROTOS, ids=lambda path: path.stem)
def test_each_proto_says_where_its_code_goes(proto: Path) -> None:
    options = dict(re.findall(r'^option (\w+) = "?([^";]+(?:;\w+)?)"?;$', proto.read_text(), re.MULTILINE))
    assert options == {
        "csharp_namespace": "Kvgrpc.V1",
        "go_package": f"{MODULE}/kvgrpc/v1;kvgrpcv1",
        "java_multiple_files": "true",
        "java_package": "dev.kvgrpc.v1",
    }


def test_one_command_moves_the_go_module(tmp_path: Path) -> None:
    listed = ["protos", "clients/go", "docs", "CONTRIBUTING.md", ".ci"]
    tracked = subprocess.run(["git", "ls-files", *listed], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in tracked.stdout.split():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    new = "example.org/somebody/kvgrpc/clients/go"
    subprocess.run([tmp_path / ".ci/module-path", new], check=True, capture_output=True, timeout=60)
    made_anew = ("clients/go/kvgrpc/", ".ci/contract.binpb")
    left = [path for path in tmp_path.rglob("*") if path.is_file() and MODULE.encode() in path.read_bytes()]
    assert not [path for path in left if not str(path.relative_to(tmp_path)).startswith(made_anew)]
    assert f"module {new}\n" in (tmp_path / "clients/go/go.mod").read_text()
    assert f'"{new}/kvgrpc/v1;kvgrpcv1"' in (tmp_path / "protos/kvgrpc/v1/common.proto").read_text()
    refused = subprocess.run([tmp_path / ".ci/module-path", "go"], capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2 and "HOST/PATH" in refused.stderr
