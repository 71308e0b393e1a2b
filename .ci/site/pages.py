"""Pages of the site that nobody writes by hand. Hooks of mkdocs; ``.ci/docs`` runs them."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from mkdocs.config.config_options import ExtraScriptValue
from mkdocs.structure.files import File
from pymdownx.superfences import fence_code_format

if TYPE_CHECKING:
    from google.protobuf.descriptor_pb2 import FileDescriptorProto
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
IMAGE = ROOT / "build" / "protos.binpb"
LARGEST_SHOWN = 200_000
_EVENTS = ("kvgrpc.events.config.EventsConfig", "kvgrpc.events.factory.open_publisher")
# Page of the reference -> title, what it says, and the public names it shows.
PYTHON = {
    "reference/engine.md": (
        "Engines: ranks, senders, receivers",
        "What an engine calls. `from kvgrpc.server import ...` has all of these names.",
        (
            *("kvgrpc.server.rank.rank.open_prefill", "kvgrpc.server.rank.rank.open_decode"),
            *("kvgrpc.server.config.RankConfig", "kvgrpc.server.config.settings"),
            *("kvgrpc.server.rank.rank.Rank", "kvgrpc.server.rank.end.Closed"),
            *("kvgrpc.transfer.sender.KVSender", "kvgrpc.transfer.receiver.KVReceiver"),
            *("kvgrpc.transfer.protocol.types.KVPoll", "kvgrpc.model.Layout", "kvgrpc.model.Pool"),
            *("kvgrpc.model.Region", "kvgrpc.model.ModelIdentity", "kvgrpc.transfer.aux_rows.AuxBuffer"),
            *("kvgrpc.prefetch.config.PrefetchConfig", "kvgrpc.pull.model.PullConfig"),
            *("kvgrpc.rpc.security.ServerSecurity", "kvgrpc.rpc.security.ClientSecurity"),
        ),
    ),
    "reference/client.md": (
        "Client",
        "For routers, tools and tests. `SyncClient` has the same methods, and blocks.",
        (
            *("kvgrpc.client.aio.Client", "kvgrpc.client.following.follower.EventFollower"),
            *("kvgrpc.client.following.prefix_index.PrefixIndex",),
        ),
    ),
    "reference/events.md": (
        "Events",
        "What an engine publishes, and how.",
        (
            "kvgrpc.events.base.EventPublisher",
            "kvgrpc.events.model",
            "kvgrpc.events.config.EventsConfig",
            "kvgrpc.events.factory.open_publisher",
        ),
    ),
    "reference/dataplane.md": (
        "Data planes",
        "What another data plane must do.",
        ("kvgrpc.dataplane.open_plane", "kvgrpc.dataplane.base.DataPlane"),
    ),
}
_LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?(?=\))")


# What draws the diagrams, as a file of the site; empty where .ci/docs could not get it.
DRAWING = os.environ.get("MERMAID_FILE", "")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Diagrams are drawn by the site's own copy of mermaid: the theme would otherwise load it from another host."""
    if DRAWING:
        fence = {"name": "mermaid", "class": "mermaid", "format": fence_code_format}
        config.mdx_configs.setdefault("pymdownx.superfences", {})["custom_fences"] = [fence]
        config.extra_javascript.append(ExtraScriptValue("drawing/mermaid.min.js"))
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    docs = Path(config.docs_dir)
    by_reader = files.get_file_from_path("README.md")
    if by_reader is not None:  # the navigation has the same by reader
        files.remove(by_reader)
    pages = {"index.md": (ROOT / "README.md").read_text(), "reference/rpcs.md": _rpcs()}
    for name, (title, text, names) in PYTHON.items():
        pages[name] = f"# {title}\n\n{text}\n\n" + "\n\n".join(f"::: {each}" for each in names) + "\n"
    linked: set[str] = set()
    for path in [*docs.rglob("*.md"), ROOT / "README.md"]:
        _moved(path.read_text(), str(path.relative_to(ROOT)), "", linked.add)
    shown: set[str] = set()
    while linked - shown:  # what is shown may link to more
        for name in sorted(linked - shown):
            shown.add(name)
            pages[_page_of(name)] = _shown(ROOT / name, name, linked.add)
    if DRAWING:
        files.append(File.generated(config, "drawing/mermaid.min.js", abs_src_path=DRAWING))
    for name, text in pages.items():
        moved = _moved(text, "README.md", name) if name == "index.md" else text
        files.append(File.generated(config, name, content=moved))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.file.generated_by is not None:
        return markdown
    return _moved(markdown, f"docs/{page.file.src_uri}", page.file.src_uri)


def _moved(text: str, source: str, page: str, outside: Callable[[str], Any] = lambda name: None) -> str:
    """``text`` of the repository's file ``source`` with links as they must be on ``page``; code stays as it is.

    Links to a file outside docs/ lead to the page that shows it; ``outside`` hears of each.
    """

    def replaced(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[1]))
        anchor = match[2] or ""
        if target in ("docs/README.md", "README.md", "docs"):
            found = "index.md"
        elif target.startswith("docs/"):
            found = target.removeprefix("docs/")
        elif (ROOT / target).exists():
            outside(target)
            found = _page_of(target)
        else:
            return match[0]  # mkdocs says that it leads nowhere
        return posixpath.relpath(found, posixpath.dirname(page) or ".") + anchor

    parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else _LINK.sub(replaced, part) for part in parts)


def _page_of(name: str) -> str:
    return f"source/{name}" if name.endswith(".md") else f"source/{name.rstrip('/')}.md"


def _shown(path: Path, name: str, outside: Callable[[str], Any]) -> str:
    """A file of the repository as a page: markdown as it is, a folder as its list, the rest as code."""
    hidden = "---\nsearch:\n  exclude: true\n---\n"
    if path.is_dir():
        if (path / "README.md").exists():
            outside(f"{name}/README.md")
        entries = sorted(each for each in path.iterdir() if not each.name.startswith((".", "_")))
        listed = "\n".join(f"- `{each.name}{'/' if each.is_dir() else ''}`" for each in entries)
        readme = f"[README]({path.name}/README.md)\n\n" if (path / "README.md").exists() else ""
        return f"{hidden}# {name}\n\n{readme}{listed}\n"
    text = path.read_text(errors="replace")[:LARGEST_SHOWN]
    if name.endswith(".md"):
        return _moved(text, name, _page_of(name), outside)
    language = path.suffix.lstrip(".").replace("proto", "protobuf").replace("yml", "yaml")
    return f"{hidden}# {name}\n\n~~~~{language}\n{text}\n~~~~\n"


def _rpcs() -> str:
    """Every service with its methods and their messages, from the comments in the protos."""
    image = FileDescriptorSet.FromString(IMAGE.read_bytes())
    lines = [
        "# RPCs\n",
        "From the comments in [the protos](../source/protos/kvgrpc/v1.md). Reasons are in [errors.md](../errors.md).\n",
    ]
    for file in (each for each in image.file if each.package == "kvgrpc.v1" and each.service):
        comments = {tuple(at.path): _cleaned(at.leading_comments) for at in file.source_code_info.location}
        for index, service in enumerate(file.service):
            lines += [f"## {service.name}\n", comments.get((6, index), ""), ""]
            for number, method in enumerate(service.method):
                arrow = f"{_flow(method.client_streaming, method.input_type)} → "
                arrow += _flow(method.server_streaming, method.output_type)
                lines += [f"### {service.name}.{method.name}\n", f"{arrow}\n"]
                lines += [comments.get((6, index, 2, number), ""), ""]
        lines += _messages(file, comments)
    return "\n".join(lines)


def _messages(file: FileDescriptorProto, comments: dict[tuple[int, ...], str]) -> list[str]:
    lines = []
    for index, message in enumerate(file.message_type):
        lines += [f"#### {message.name} {{#{message.name}}}\n", comments.get((4, index), ""), ""]
        if message.field:
            lines += ["| field | type | |", "|---|---|---|"]
        for number, field in enumerate(message.field):
            said = comments.get((4, index, 2, number), "").replace("\n", " ").replace("|", "\\|")
            many = "repeated " if field.label == field.LABEL_REPEATED else ""
            lines.append(f"| `{field.name}` | {many}{_type(field)} | {said} |")
        lines.append("")
    for index, enum in enumerate(file.enum_type):
        lines += [
            f"#### {enum.name} {{#{enum.name}}}\n",
            comments.get((5, index), ""),
            "",
            "| value | | |",
            "|---|---|---|",
        ]
        for number, value in enumerate(enum.value):
            said = comments.get((5, index, 2, number), "").replace("\n", " ").replace("|", "\\|")
            lines.append(f"| `{value.name}` | {value.number} | {said} |")
        lines.append("")
    return lines


def _flow(streams: bool, name: str) -> str:
    return f"{'stream of ' if streams else ''}[{name.rpartition('.')[2]}](#{name.rpartition('.')[2]})"


def _type(field: Any) -> str:
    name: str = field.type_name.rpartition(".")[2]
    if field.type_name.startswith(".kvgrpc.v1.") and field.type_name.count(".") == 3:
        return f"`{name}`"
    return f"`{name or field.Type.Name(field.type).removeprefix('TYPE_').lower()}`"


def _cleaned(comment: str) -> str:
    return "\n".join(line.removeprefix(" ") for line in comment.strip("\n").splitlines())
