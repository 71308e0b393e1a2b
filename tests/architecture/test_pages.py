"""Pages for readers: links lead somewhere, every word has its entry, every reason of a room says what to do."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from click import Context

from kvgrpc.cli.main import command
from kvgrpc.errors import Reason

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "kvgrpc").rglob("README.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")
WORDS = {
    *(
        "room",
        "attempt",
        "pair",
        "part",
        "rank",
        "incarnation",
        "epoch",
        "lease",
        "fence",
        "hold",
        "evidence",
        "settled",
    ),
    *("tier", "pool", "page set", "log", "digest", "source", "staging", "holder", "taker", "audience"),
}
LONGEST_LINE = 200
INSTRUCTIONS = ("Start", "Engines", "Operate", "Consume")
MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
DIARY = re.compile(rf"\btest_\w+|\d+ (?:{MONTHS})\b|\b20\d\d-\d\d-\d\d\b|busy machine|load of \d")
FAILED = (DOCS / "my-room-failed.md").read_text()
QUESTIONS = ("Means", "Retry", "Look", "Act")
# With which no room fails: those of registrations, of events, of calls without a deadline, of the cache, of stores.
NOT_OF_ROOMS = {
    *("REGISTRATION_SHAPE_CONFLICT", "EVENTS_COMPACTED", "EVENTS_SEQUENCE_IN_FUTURE", "STALE_LOG", "STREAM_NOT_FOUND"),
    *("CALL_TOO_LONG", "OPERATION_NOT_FOUND", "REQUEST_ID_REUSED", "STORAGE_FAILED", "COPY_FAILED"),
    *("PAGE_STATE_INVALID", "STORE_UNAVAILABLE"),
}


def without_code(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


@cache
def anchors(page: Path) -> frozenset[str]:
    """As GitHub makes them of headings: lower case, punctuation left out, a hyphen for each space."""
    headings = re.findall(r"^#+ (.+)$", without_code(page.read_text()), re.MULTILINE)
    found: set[str] = set()
    for slug in (re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings):
        found.add(slug if slug not in found else f"{slug}-1")
    return frozenset(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    lost = []
    for link in LINK.findall(re.sub(r"`[^`]*`", "", without_code(page.read_text()))):
        if not re.match(r"https?:|mailto:", link):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
                lost.append(link)
    assert lost == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_line_of_prose_is_long(page: Path) -> None:
    """A paragraph of one line is written to be stored, not to be read. Rows of tables cannot be broken."""
    prose = [line for line in without_code(page.read_text()).splitlines() if not line.startswith(("|", "!["))]
    assert [line[:60] for line in prose if len(line) > LONGEST_LINE] == []


def pages_of_instructions() -> list[Path]:
    """What the list by reader has under Start, Engines, Operate and Consume."""
    listed = (DOCS / "README.md").read_text()
    groups = re.findall(r"^\*\*(\w+)\*\*: (?:.|\n)*?(?=^\*\*\w+\*\*: |\Z)", listed, re.MULTILINE)
    texts = dict(zip(groups, re.split(r"^\*\*\w+\*\*: ", listed, flags=re.MULTILINE)[1:], strict=True))
    names = [link for group in INSTRUCTIONS for link in LINK.findall(texts[group])]
    return sorted({DOCS / name for name in names if re.fullmatch(r"[\w/-]+\.md", name)})


@pytest.mark.parametrize("page", pages_of_instructions(), ids=lambda page: str(page.relative_to(DOCS)))
def test_instructions_hold_no_diary(page: Path) -> None:
    """Which test shows a thing, and what was measured on which day, stands in docs/lab and docs/lessons; but for the
    table of an engine's features, of which each says what shows it.
    """
    text = re.sub(r"^## Features\n.*?(?=^## )", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert DIARY.findall(text) == []


def test_every_page_of_docs_is_in_the_list_by_reader_exactly_once() -> None:
    """A link to a part of a page is one more, and does not count."""
    listed = Counter(LINK.findall((DOCS / "README.md").read_text()))
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} - {"README.md"}
    assert {page: listed[page] for page in pages if listed[page] != 1} == {}


def rows() -> list[list[str]]:
    lines = [line for line in (DOCS / "glossary.md").read_text().splitlines() if line.startswith("| ")][1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_word_has_one_entry_in_order() -> None:
    words = [row[0] for row in rows()]
    assert set(words) >= WORDS
    assert words == sorted(set(words))


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_an_entry_is_one_sentence_about_its_word_and_names_a_page(row: list[str]) -> None:
    word, sentence, more = row
    assert sentence.endswith(".") and sentence.count(". ") == 0
    assert re.search(rf"\b{word}", sentence.lower())
    assert LINK.search(more)


def test_every_reason_with_which_a_room_may_fail_is_on_the_page_and_no_other() -> None:
    """A new reason is put here, or into NOT_OF_ROOMS."""
    entries = re.findall(r"^### ([A-Z_]{3,})$", FAILED, re.MULTILINE)
    assert len(entries) == len(set(entries))
    assert set(entries) == {reason.name for reason in Reason} - NOT_OF_ROOMS - {"UNSPECIFIED"}
    linked = re.findall(r"\[([A-Z_]+)\]\(#\w+\)", FAILED.split("\n## The request")[0])
    assert sorted(linked) == sorted(entries)


def test_reasons_that_the_hand_off_itself_gives_are_of_rooms() -> None:
    text = "".join(path.read_text() for path in (ROOT / "kvgrpc" / "transfer").rglob("*.py"))
    made = {reason.name: rf"\b{class_name(reason)}[(.]|Reason\.{reason.name}\b" for reason in Reason}
    given = {name for name, pattern in made.items() if re.search(pattern, text)}
    assert len(given) > 12 and given & NOT_OF_ROOMS == set()


def class_name(reason: Reason) -> str:
    return "".join(part.capitalize() for part in reason.name.split("_"))


@pytest.mark.parametrize("entry", FAILED.split("\n### ")[1:], ids=lambda entry: entry.splitlines()[0])
def test_a_reason_says_what_it_means_whether_to_retry_where_to_look_and_what_to_do(entry: str) -> None:
    asked = re.findall(r"^- \*\*(\w+)\*\*: \w*", entry, re.MULTILINE)
    assert tuple(asked) == QUESTIONS


def test_commands_that_the_page_names_are_there() -> None:
    code = [*re.findall(r"```\n(.*?)```", FAILED, re.DOTALL), *re.findall(r"`([^`]+)`", without_code(FAILED))]
    named = {name for text in code for name in re.findall(r"^kvgrpc ([a-z]+)", text, re.MULTILINE)}
    assert {"why", "rooms", "top"} <= named
    assert named - set(command.list_commands(Context(command))) == set()
