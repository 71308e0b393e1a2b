"""What an index page shows of the package: links that lead somewhere, once the address of the repository is known."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
ADDRESS = "https://git.example/team/kvgrpc"


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    pytest.importorskip("hatchling")
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def metadata_with(hook: ModuleType, address: str) -> dict[str, object]:
    metadata: dict[str, object] = {}
    hook.LinksOfThePackage(str(ROOT), {"address": address}).update(metadata)
    return metadata


@pytest.mark.skipif(not (ROOT / "examples").exists(), reason="a source archive has not all of the repository")
def test_every_link_of_the_readme_leads_to_a_file_of_the_repository(hook: ModuleType) -> None:
    readme = metadata_with(hook, f"{ADDRESS}/")["readme"]
    assert isinstance(readme, dict)
    targets = re.findall(r"\]\(([^)]+)\)", readme["text"])
    assert len(targets) > 20 and [target for target in targets if not re.match("https?://|#|mailto:", target)] == []
    ours = [target.removeprefix(ADDRESS) for target in targets if target.startswith(ADDRESS)]
    files = [target.partition("#")[0] for target in ours if target.startswith(("/blob/HEAD/", "/raw/HEAD/"))]
    assert [each for each in files if not (ROOT / each.split("/HEAD/")[1]).exists()] == []
    assert f"{ADDRESS}/raw/HEAD/docs/images/demo.svg" in targets and f"{ADDRESS}/blob/HEAD/docs/start.md" in targets


def test_project_urls_follow_from_the_address(hook: ModuleType) -> None:
    urls = metadata_with(hook, ADDRESS)["urls"]
    assert isinstance(urls, dict)
    assert urls["Source"] == ADDRESS and all(url.startswith(ADDRESS) for url in urls.values())


def test_without_an_address_the_readme_is_as_it_stands(hook: ModuleType) -> None:
    metadata = metadata_with(hook, "")
    assert metadata["urls"] == {}
    assert metadata["readme"] == {"content-type": "text/markdown", "text": (ROOT / "README.md").read_text()}
