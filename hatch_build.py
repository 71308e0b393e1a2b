"""What an index page shows of the package: its links, once the address of the repository is known (pyproject.toml).

hatchling runs it when it builds.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_RELATIVE = re.compile(r"(!?)\[([^]]*)\]\((?!https?://|#|mailto:)([^)]+)\)")


class LinksOfThePackage(MetadataHookInterface):
    """Sets ``readme`` and ``urls``. Without an address the README is as it stands, and its links lead nowhere there."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        address = str(self.config["address"]).rstrip("/")
        text = (Path(self.root) / "README.md").read_text()
        metadata["readme"] = {"content-type": "text/markdown", "text": with_whole_links(text, address)}
        metadata["urls"] = urls(address) if address else {}


def urls(address: str) -> dict[str, str]:
    """By the names that indexes know."""
    return {
        "Source": address,
        "Documentation": f"{address}/blob/HEAD/docs/README.md",
        "Changelog": f"{address}/blob/HEAD/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }


def with_whole_links(text: str, address: str) -> str:
    """Links to files of the repository lead there from anywhere; pictures are the files themselves."""
    if not address:
        return text

    def whole(link: re.Match[str]) -> str:
        mark, words, path = link.groups()
        return f"{mark}[{words}]({address}/{'raw' if mark else 'blob'}/HEAD/{path})"

    return _RELATIVE.sub(whole, text)
