"""The pages that say where things are name files and functions that exist."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

EXPORTING = ("kvgrpc.client", "kvgrpc.server", "kvgrpc.events", "kvgrpc.transfer")
ROOT = Path(__file__).parents[2]
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
TRANSFER = (ROOT / "kvgrpc" / "transfer" / "README.md").read_text()
MOST_FILES = 12
FILE = re.compile(r"`([\w/]+\.py)`")


def walks() -> list[tuple[str, str, list[str]]]:
    """(what is walked, the folder it begins in, the files of its table)."""
    found = []
    for section in re.split(r"^## ", ARCHITECTURE, flags=re.MULTILINE):
        base = re.search(r"file \(below `([\w/]+)`\)", section)
        if base is not None:
            table = "\n".join(line for line in section.splitlines() if line.startswith("|"))
            found.append((section.split(",")[0], base.group(1), FILE.findall(table)))
    return found


def test_each_capability_is_walked() -> None:
    assert [name for name, _, _ in walks()] == ["A room", "An event", "A registration", "A prefetch", "A pull"]


@pytest.mark.parametrize(("name", "base", "files"), walks(), ids=lambda value: value if isinstance(value, str) else "")
def test_a_walk_has_at_most_twelve_files_and_they_exist(name: str, base: str, files: list[str]) -> None:
    assert [file for file in files if not ((ROOT / base / file).exists() or (ROOT / file).exists())] == []
    assert len(set(files)) <= MOST_FILES


def listed_rules() -> list[tuple[str, str]]:
    """(number, where the rule is) of each line in the list of docs/session.md."""
    return re.findall(r"^\| (\d+) \| \[[^]]+\]\(([^)]+)\)", (ROOT / "docs" / "session.md").read_text(), re.MULTILINE)


def test_each_rule_of_a_session_stands_once_under_its_number() -> None:
    """Comments cite rules by number and name, so a number never changes its rule."""
    headings = {
        heading: f"session/{page.name}"
        for page in (ROOT / "docs" / "session").glob("*.md")
        for heading in re.findall(r"^## (\d+\. .+)$", page.read_text(), re.MULTILINE)
    }
    listed = [number for number, _ in listed_rules()]
    assert listed == [str(number) for number in range(1, 17)]
    assert sorted(int(heading.split(".")[0]) for heading in headings) == list(range(1, 17))
    by_number = {heading.split(".")[0]: page for heading, page in headings.items()}
    assert [(number, place.split("#")[0]) for number, place in listed_rules()] == [
        (number, by_number[number]) for number in listed
    ]


def test_every_rule_of_a_session_is_found_from_the_readme_of_transfer() -> None:
    """By file, and by a function or class that is there."""
    table = re.split(r"^## ", TRANSFER.split("## Where each rule is")[1], flags=re.MULTILINE)[0]
    rules = re.findall(r"^\| (\d+), ", table, re.MULTILINE)
    assert rules == [number for number, _ in listed_rules()]
    for names in re.findall(r"`([\w/]+\.py)`((?: \(?(?:a )?`\w+`,?)*)", table):
        file, functions = names
        bases = ("kvgrpc/transfer/protocol", "kvgrpc/transfer", "kvgrpc")
        path = next((ROOT / base / file for base in bases if (ROOT / base / file).exists()), None)
        assert path is not None, file
        for function in re.findall(r"`(\w+)`", functions):
            assert re.search(rf"\b{function}\b", path.read_text()), f"{file} has no {function}"


def test_files_that_the_readme_of_transfer_names_exist() -> None:
    bases = ("kvgrpc/transfer/protocol", "kvgrpc/transfer/layout", "kvgrpc/transfer", "kvgrpc", "")
    missing = {file for file in FILE.findall(TRANSFER) if not any((ROOT / base / file).exists() for base in bases)}
    assert missing == set()


def test_tests_that_the_pages_of_events_name_exist() -> None:
    """Above all those of its table of the engines' defects: a promise without its test is none."""
    page = "".join((ROOT / "docs" / place / "events.md").read_text() for place in ("", "lab", "lessons"))
    tests = {path: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    named = set(re.findall(r"`(test_\w+)`", page))
    defined = {name for text in tests.values() for name in re.findall(r"def (test_\w+)\(", text)}
    assert len(named) > 30 and named - defined == set()
    assert set(re.findall(r"test_\w+\.py", page)) - {path.name for path in tests} == set()


def test_each_defect_of_others_names_tests_that_exist() -> None:
    table = (ROOT / "docs" / "lessons.md").read_text().split("## ")[0]
    rows = [line.split("|")[4] for line in table.splitlines() if re.match(r"\| (\d+|-) \|", line)]
    assert len(rows) > 25
    for row in rows:
        assert_names_tests_that_exist(row)


def test_each_thing_that_the_seed_had_not_names_its_tests_or_is_not_built() -> None:
    table = (ROOT / "docs" / "lessons.md").read_text().split("## What the seed's connector did not have")[1]
    rows = [line.split("|")[2:4] for line in table.split("\n## ")[0].splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 20
    for here, tests in rows:
        if tests.strip() == "-":
            assert here.startswith(" not built"), here
        else:
            assert_names_tests_that_exist(tests)


def assert_names_tests_that_exist(cell: str) -> None:
    """By file and function, `file.py::test_x`, then `test_y` of the same file; and by nothing else."""
    named = re.findall(r"`(?:([\w/]+\.py)::)?(test_\w+)`", cell)
    assert named and named[0][0] and cell.count("`") == 2 * len(named), cell
    file = ""
    for with_file, function in named:
        file = with_file or file
        assert re.search(rf"def {function}\(", (ROOT / "tests" / file).read_text()), f"{file} has no {function}"


def test_each_defect_of_the_prefetching_seed_names_tests_that_exist() -> None:
    """By a letter for their files, or a file's name, and for each of these by a part of the name of a test or class."""
    section = (ROOT / "docs" / "lessons" / "prefetch.md").read_text().split("## What the seed did, and what we do")[1]
    before, table = section.split("\n## ")[0].split("| # |")
    paths = sorted((ROOT / "tests").rglob("test_*.py"), key=lambda path: "prefetch" in str(path.relative_to(ROOT)))
    files = {path.name: path for path in paths}  # of two with one name that of prefetch
    letters = {
        letter: [files[name] for name in re.findall(r"test_\w+\.py", legend)]
        for letter, legend in re.findall(r"\b([A-Z]):\s(.*?)(?=\b[A-Z]:\s|\Z)", before, re.DOTALL)
    }
    rows = [line.split("|")[4] for line in table.splitlines() if re.match(r"\| \d+ \|", line)]
    assert len(rows) == 34 and len(letters) == 7
    for row in rows:
        places = re.findall(r"(?<![\w`])([A-Z]|test_\w+\.py) ((?:`[\w…]+`(?:, )?)+)", row)
        assert places and row.count("`") - row.count(".py`") * 2 == sum(named.count("`") for _, named in places), row
        for place, named in places:
            text = "".join(path.read_text() for path in (letters[place] if place in letters else [files[place]]))
            for part in re.findall(r"`([\w…]+)`", named):
                begins = re.escape(part.rstrip("…"))
                assert re.search(rf"(def test_\w*|class ){begins}", text), f"{place} has no test of {part}: {row}"


def test_each_case_of_a_session_names_its_tests() -> None:
    cases = (ROOT / "docs" / "session" / "cases.md").read_text()
    rows = [line for line in cases.splitlines() if line.startswith("| ")][1:]
    text = "".join(
        (ROOT / "tests" / "simulation" / file).read_text()
        for file in ("test_cases.py", "test_rules.py", "test_hostile.py")
    )
    named = [re.findall(r"`(test_\w+)`", row) for row in rows]
    assert len(rows) > 20 and [row for row, tests in zip(rows, named, strict=True) if not tests] == []
    assert [test for tests in named for test in tests if f"def {test}(" not in text] == []


def test_each_rule_of_a_pull_says_what_goes_wrong_without_it_and_is_switched_off_in_the_simulation() -> None:
    page, cases = (ROOT / "docs" / "session" / "pulls.md").read_text().split("## Cases")
    rows = re.findall(r"^\| \*\*(.+)\*\* \| (.+) \| \"(.+)\" \|$", page, re.MULTILINE)
    assert [(name, said) for name, _, said in rows] == switched_off()
    tests = re.findall(r"^\| .+ \| .+ \| (`.+`) \|$", cases, re.MULTILINE)
    assert len(tests) > 10
    for cell in tests:
        assert_names_tests_that_exist(cell)


def switched_off() -> list[tuple[str, str]]:
    """Each rule of a pull that the simulation goes without, and what it says then."""
    module = ast.parse((ROOT / "tests" / "simulation" / "pull_rules.py").read_text())
    (rules,) = (node.value for node in module.body if isinstance(node, ast.AnnAssign))
    assert isinstance(rules, ast.Dict)
    return [
        (ast.literal_eval(name), ast.literal_eval(rule.elts[1]))
        for name, rule in zip(rules.keys, rules.values, strict=True)
        if name is not None and isinstance(rule, ast.Tuple)
    ]


def test_every_exported_name_is_explained_and_none_by_what_users_never_saw() -> None:
    """This project grew from seeds, of which its users know nothing."""
    wrong = []
    for module in map(importlib.import_module, EXPORTING):
        for name in module.__all__:
            exported = getattr(module, name)
            if inspect.isclass(exported) or inspect.isfunction(exported):
                members = vars(exported).values() if inspect.isclass(exported) else ()
                texts = [inspect.getdoc(exported) or "seed", *(each.__doc__ or "" for each in members)]
                wrong += [f"{module.__name__}.{name}" for text in texts if re.search(r"\bseeds?\b", text)]
    assert not wrong
    assert "the seed" not in (ROOT / "docs" / "settings.md").read_text()


FEATURES = {name: ROOT / "docs" / "engines" / f"{name}.md" for name in ("sglang", "vllm")}


def features(engine: str) -> list[list[str]]:
    """The cells of each row of the engine's table, groups left out: feature, its own connector, kvgrpc, tests."""
    section = FEATURES[engine].read_text().split("\n## Features\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if re.match(r"\| (?!\*\*|Feature )", line)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("engine", FEATURES)
def test_each_feature_of_an_engine_is_shown_by_tests_that_exist_or_was_not_run(engine: str) -> None:
    """A file alone, or with the begin of names of its functions. What is refused, or served, has a test."""
    rows = features(engine)
    assert len(rows) > 40 and {len(row) for row in rows} == {4}
    for feature, theirs, ours, tests in rows:
        assert feature and theirs and ours, feature
        if tests == "-":
            assert ours.startswith(("not run", "not built", "no:")), f"{feature}: {ours}"
            continue
        named = re.findall(r"`(?:([\w/]+\.py)(?:::)?)?(test_\w+)?…?`", tests)
        assert named and named[0][0] and tests.count("`") == 2 * len(named), tests
        path = ROOT
        for file, function in named:
            path = ROOT / "tests" / (file if "/" in file else f"engines/{file}") if file else path
            assert path.exists(), f"{feature}: {path}"
            assert re.search(rf"def {function or 'test_'}", path.read_text()), f"{path.name} has no {function}"


@pytest.mark.parametrize("engine", FEATURES)
def test_each_setting_that_an_adapter_refuses_is_in_the_engines_table(engine: str) -> None:
    table = "\n".join(" ".join(row) for row in features(engine))
    words = {word for text in refusals(engine) for word in re.findall(r"--[a-z][\w-]+|\b[A-Z]+(?:_[A-Z]+)+\b", text)}
    assert len(words) > 2 and {word for word in words if word not in table} == set()


def refusals(engine: str) -> list[str]:
    """What the limits of an engine's adapter name, and what its other refusals say."""
    found = []
    for path in (ROOT / "kvgrpc" / "engines" / engine).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if path.name == "limits.py" and isinstance(node, ast.Tuple) and len(node.elts) == 4:
                found.append(texts(node.elts[1]))
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "_refused":
                found.append(texts(node.args[0]))
    return found


def texts(node: ast.AST) -> str:
    return " ".join(str(each.value) for each in ast.walk(node) if isinstance(each, ast.Constant))
