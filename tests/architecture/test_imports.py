"""Who may load what. import-linter keeps the arrows between our own packages (pyproject.toml)."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for path in (ROOT / "kvgrpc").rglob("*.py") if "v1" not in path.relative_to(ROOT).parts)

# Heavy or replaceable: each has its places. A folder ends with a slash.
IMPORTERS = {
    "torch": [
        "kvgrpc/prefetch/pools/",
        "kvgrpc/prefetch/copies/",
        "kvgrpc/prefetch/agreement/gloo.py",
        "kvgrpc/demo/",
        "kvgrpc/engines/",
    ],
    "transformers": [],
    "sglang": ["kvgrpc/engines/"],
    "vllm": ["kvgrpc/engines/"],
    "mooncake": [
        "kvgrpc/dataplane/mooncake/",
        "kvgrpc/prefetch/storage/mooncake/child.py",
    ],
    "nixl": ["kvgrpc/prefetch/storage/nixl/agent.py"],
    "zmq": [
        "kvgrpc/events/live/",
        "kvgrpc/client/following/live.py",
        "kvgrpc/demo/processes/live_events.py",
    ],
    "prometheus_client": ["kvgrpc/observability/"],
    "opentelemetry": ["kvgrpc/observability/tracing.py"],
    "tenacity": ["kvgrpc/rpc/"],
    "xxhash": ["kvgrpc/prefetch/storage/file/"],
    "click": ["kvgrpc/cli/"],
    "rich": ["kvgrpc/cli/", "kvgrpc/demo/"],
    "google.rpc": ["kvgrpc/rpc/"],
}
# Without clock, thread, socket or framework: a folder ends with a slash. They import the standard library, each other,
# and what PURE_MAY_IMPORT names.
PURE = (
    *(
        "kvgrpc/errors.py",
        "kvgrpc/fields.py",
        "kvgrpc/arrays.py",
        "kvgrpc/model.py",
        "kvgrpc/net.py",
        "kvgrpc/paging.py",
        "kvgrpc/hashing.py",
    ),
    *("kvgrpc/transfer/protocol/", "kvgrpc/transfer/layout/", "kvgrpc/registry/model.py", "kvgrpc/registry/engine.py"),
    *("kvgrpc/registry/table.py", "kvgrpc/registry/acceptance.py", "kvgrpc/registry/departures.py"),
    "kvgrpc/dataplane/base.py",
    *(
        "kvgrpc/events/log/journal.py",
        "kvgrpc/events/model.py",
        "kvgrpc/events/codec/",
        "kvgrpc/events/log/snapshot.py",
    ),
    *("kvgrpc/events/log/digest.py", "kvgrpc/events/following/index.py", "kvgrpc/events/following/contents.py"),
    *(
        "kvgrpc/events/following/follower.py",
        "kvgrpc/events/following/groups.py",
        "kvgrpc/events/following/messages.py",
        "kvgrpc/events/following/prompts.py",
        "kvgrpc/events/following/saved.py",
        "kvgrpc/events/following/sources.py",
    ),
    *("kvgrpc/prefetch/tree/prefix_tree.py", "kvgrpc/prefetch/model.py"),
    "kvgrpc/prefetch/protocol/",
    "kvgrpc/pull/model.py",
    *("kvgrpc/prefetch/storage/keys.py", "kvgrpc/prefetch/storage/file/formats.py"),
)
PURE_MAY_IMPORT = ("numpy", "msgspec", "xxhash")
HEAVY = (
    *("torch", "mooncake", "zmq", "grpc", "google.protobuf", "numpy"),
    *("prometheus_client", "opentelemetry", "tenacity", "rich", "click"),
)


def test_importing_kvgrpc_loads_nothing_heavy() -> None:
    assert loaded_by("import kvgrpc, kvgrpc.errors, kvgrpc.model") == []


def test_the_client_needs_neither_torch_nor_mooncake_nor_zmq() -> None:
    core = {"grpc", "google.protobuf", "numpy", "prometheus_client", "tenacity"}
    assert set(loaded_by("import kvgrpc.client")) <= core


@pytest.mark.parametrize("package", IMPORTERS)
def test_a_heavy_package_is_imported_in_its_places_only(package: str) -> None:
    elsewhere = [
        f"{path}:{line}"
        for path in SOURCES
        for name, line in imports(path)
        if within(name, package) and not placed(path, IMPORTERS[package])
    ]
    assert elsewhere == []


def test_pure_files_import_only_pure_ones() -> None:
    impure = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in pure_sources()
        for name, line in imports(path)
        if name.split(".")[0] not in sys.stdlib_module_names
        and not any(within(name, allowed) for allowed in PURE_MAY_IMPORT)
        and not is_pure_module(name)
    ]
    assert impure == []


def test_loading_the_pure_modules_loads_no_framework() -> None:
    """With the packages around them, whose ``__init__`` is loaded too."""
    frameworks = ("asyncio", "grpc", "google.protobuf", "zmq", "torch")
    script = f"""
import importlib, sys
for module in {[module_of(path) for path in pure_sources()]!r}:
    importlib.import_module(module)
    loaded = [name for name in {frameworks!r} if name in sys.modules]
    if loaded:
        sys.exit(f"{{module}} loads {{loaded}}")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_pure_files_start_no_thread_and_open_no_socket() -> None:
    # A lock is none of these: the journal is extended by one thread and read by others, and its lock makes it safe.
    active = {"asyncio", "threading", "queue", "socket", "selectors", "multiprocessing", "concurrent", "subprocess"}
    found = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in pure_sources()
        for name, line in imports(path)
        if name.split(".")[0] in active and name != "threading.Lock"
    ]
    assert found == []


def pure_sources() -> list[Path]:
    return [path for path in SOURCES if placed(path, PURE)]


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def loaded_by(statement: str) -> list[str]:
    """Which heavy packages a fresh interpreter holds after the statement."""
    script = f"{statement}\nimport sys\nprint([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr
    names = ast.literal_eval(done.stdout)
    assert isinstance(names, list)
    return names


@cache
def imports(path: Path) -> tuple[tuple[str, int], ...]:
    """Every absolute import of a file, also those inside functions, but not those for type checkers only."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    found: list[tuple[str, int]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found += [(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]
    return tuple(found)


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def placed(path: Path, places: Sequence[str]) -> bool:
    here = path.relative_to(ROOT).as_posix()
    return any(here.startswith(place) if place.endswith("/") else here == place for place in places)


def is_pure_module(name: str) -> bool:
    """Whether ``name`` is a pure file of ours, or something in one."""
    parts = name.split(".")
    files = [ROOT.joinpath(*parts[:end]).with_suffix(".py") for end in range(2, len(parts) + 1)]
    packages = [ROOT.joinpath(*parts[:end], "__init__.py") for end in range(2, len(parts) + 1)]
    return any(path.is_file() and placed(path, PURE) for path in files + packages)
