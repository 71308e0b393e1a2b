"""Habits that the text of the code shows: tests wait for conditions, and background work has a supervisor."""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


@cache
def sources(folder: str) -> tuple[tuple[Path, str], ...]:
    return tuple((path, path.read_text()) for path in sorted((ROOT / folder).rglob("*.py")))


@cache
def parsed(path: Path, text: str) -> ast.Module:
    return ast.parse(text)


def sleeps(path: Path, text: str) -> Iterator[tuple[int, str]]:
    """Sleeps outside of a loop that looks for something: (line, the functions around it)."""

    def look(node: ast.AST, around: tuple[str, ...], looping: bool) -> Iterator[tuple[int, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield from look(child, (*around, child.name), False)
                continue
            if isinstance(child, ast.Call) and not looping:
                call = ast.unparse(child)
                if call.startswith(("time.sleep(", "asyncio.sleep(")) and not call.endswith("(0)"):
                    yield child.lineno, ".".join(around)
            yield from look(child, around, looping or isinstance(child, ast.While))

    if ".sleep(" in text:
        yield from look(parsed(path, text), (), False)


def test_a_fixed_sleep_in_a_test_says_what_it_is() -> None:
    """Never a guess at how long something takes: a slow part or an outage that is the test's subject, or a while in
    which something must not happen. Whatever must happen is waited for, with a deadline."""
    unsaid = []
    for path, text in sources("tests"):
        lines = text.splitlines()
        unsaid += [f"{path}:{line} {where}" for line, where in sleeps(path, text) if "  # " not in lines[line - 1]]
    assert not unsaid, "\n".join(unsaid)


def waits_for_what_it_is_given(function: ast.AST) -> bool:
    """Whether it looks again and again at a condition that it was given."""
    if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    given = {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)}
    looks = (node for loop in ast.walk(function) if isinstance(loop, ast.While) for node in ast.walk(loop.test))
    return any(isinstance(look, ast.Call) and ast.unparse(look.func) in given for look in looks)


def test_one_place_waits_for_conditions() -> None:
    """tests/support/waiting.py: its deadline is one that a busy machine keeps, and its failure says how long it was."""
    private = [
        f"{path}:{function.name}"  # type: ignore[attr-defined]  # it is a function
        for path, text in sources("tests")
        if "while" in text and path.name != "waiting.py"
        for function in parsed(path, text).body
        if waits_for_what_it_is_given(function)
    ]
    assert not private, private


# Programs with tests of their own elsewhere, and what runs engines: what serves these stays beside them.
REACHED_FROM_ELSEWHERE = {"support", "soak", "mutants", "fuzz", "engines"}
THEIR_OWN_TESTS = {"architecture/test_reruns.py": "conftest", "unit/rpc/test_tokens.py": "conformance"}


def test_what_two_folders_of_tests_share_lies_in_support() -> None:
    """And nobody imports a module of tests for what it has beside them."""
    wrong = []
    for path, text in sources("tests"):
        name = path.relative_to(ROOT / "tests")
        for node in ast.walk(parsed(path, text)):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("tests."):
                continue
            where = str(node.module).split(".")
            at_home = tuple(where[1:-1]) == name.parent.parts or where[1] == THEIR_OWN_TESTS.get(name.as_posix())
            if where[-1].startswith("test_") or not (at_home or where[1] in REACHED_FROM_ELSEWHERE):
                wrong.append(f"{path}:{node.lineno} {'.'.join(where)}")
    assert not wrong, "\n".join(wrong)


# A test that reaches into an object breaks when its owner is made anew. There are fewer each time.
MOST_REACHED_INTO = 650


def test_private_members_are_reached_only_where_nothing_public_says_it() -> None:
    """tests/support reaches once for many: what is served, what waits, whom a taker would ask."""
    reached = [
        f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}"
        for path, text in sources("tests")
        for node in ast.walk(parsed(path, text))
        if isinstance(node, ast.Attribute) and re.fullmatch(r"_(?!_|replace$|asdict$|fields$)\w+", node.attr)
        if ast.unparse(node.value) not in ("self", "cls", "super()")
    ]
    assert len(reached) <= MOST_REACHED_INTO, "\n".join(reached)


# Tasks that the function which starts them awaits (or asks for their result) itself; all others go through
# kvgrpc.rpc.loop, which logs and counts an exception that nobody expected.
AWAITED_BY_WHO_STARTS_THEM = {
    "client/following/follower.py": "a Watch; its end, a bug's too, is the core's to hear (_watch_ended)",
    "engines/vllm/bootstrap.py": "both ways of one connection, gathered",
    "prefetch/agreement/leader.py": "both ways of one stream, results looked at",
    "registry/client/resolver.py": "a question; whoever joins it gets its result or error",
    "registry/servicer.py": "one read beside the drain",
    "rpc/interceptors/admission.py": "the headers of a stream, shielded",
    "rpc/loop.py": "the supervisor itself",
    "rpc/server.py": "the library awaits it when the server stops",
    "rpc/within.py": "what is waited for",
    "server/rank/end.py": "the closing of a rank, shielded: all who close it await it",
    "transfer/runtime/room_locator.py": "questions of one search, cancelled with it",
}
# Each thread's own code survives what it is given, and shows in a health state; or it does one thing and ends.
THREADS = {
    "cli/view/looking.py": "looks at the fleet; what fails is said on the page",
    "client/following/saved_index.py": "one read or write of a file; waited for with a deadline",
    "dataplane/mooncake/plane.py": "one contact; closing the engine",
    "dataplane/shm/plane.py": "one peer's pages are touched once",
    "demo/processes/child.py": "a demo",
    "demo/processes/live_events.py": "a demo",
    "demo/launch.py": "a demo",
    "demo/service/questions.py": "a demo; a question that fails fails alone",
    "engines/sglang/clearing.py": "a long clear; the storage counts as empty until a clear comes to its end",
    "engines/vllm/tier.py": "closing the storage; waited for with a deadline",
    "events/live/relay.py": "the relay; its healthy",
    "events/live/router.py": "the replay; its stream's healthy",
    "events/publisher.py": "the publisher; its healthy",
    "observability/bounded_http.py": "the status page, and the page of view; a request that fails fails alone",
    "observability/log_queue.py": "hands records on; a handler that raises loses its record",
    "observability/logging.py": "counts of lines left out; where one cannot be said, the next owed begins another",
    "prefetch/agreement/gloo.py": "the agreement; votes that it does not decide end by their deadline",
    "prefetch/threads/timers.py": "deadlines of operations; the controller's healthy",
    "prefetch/threads/queue_threads.py": "storage operations; the controller's healthy",
    "prefetch/storage/file/backend.py": "the scanner; a scan that fails is tried again",
    "prefetch/storage/file/visiting.py": "a look at all files; what one raises is raised by the call",
    "prefetch/storage/mooncake/child.py": "the Store's own process, whose parent watches it",
    "prefetch/storage/mooncake/link.py": "the link to the Store's process; its calls end by their deadline",
    "rpc/loop.py": "the loop; its healthy",
    "transfer/runtime/writing/worker.py": "the data plane's worker; the manager's healthy",
}


def starters(names: tuple[str, ...]) -> set[str]:
    found = set()
    for path, text in sources("kvgrpc"):
        if not any(name in text for name in names):
            continue
        calls = [node.func for node in ast.walk(parsed(path, text)) if isinstance(node, ast.Call)]
        if any(ast.unparse(call).endswith(names) for call in calls):
            found.add(path.relative_to(ROOT / "kvgrpc").as_posix())
    return found


def test_every_background_task_has_a_supervisor() -> None:
    assert starters(("create_task", "ensure_future")) == AWAITED_BY_WHO_STARTS_THEM.keys()


def test_no_cancellation_is_lost() -> None:
    """Before Python 3.12 ``asyncio.wait_for`` drops one that comes together with its result; rpc.within does not."""
    assert starters(("asyncio.wait_for",)) == set()


def test_every_thread_is_known() -> None:
    assert starters(("threading.Thread",)) == THREADS.keys()


def test_a_comment_that_cites_a_rule_names_it() -> None:
    """Of docs/session.md: "(10, ownership)" or "session.md rule 10, ownership", and never the bare number."""
    bare = re.compile(
        r"\((?:rules? )?(?:[1-9]|1[0-5])(?:, (?:[1-9]|1[0-5]))*\)|[Rr]ules? (?:[1-9]|1[0-5])\b(?![,)])"
        r"|session\.md(?: rules?)? (?:[1-9]|1[0-5])\b(?!,)"
    )
    found = []
    for path, _ in (*sources("kvgrpc"), *sources("tests")):
        if not bare.search(path.read_text()):
            continue  # tokens of all files take a busy machine a minute
        with path.open("rb") as file:
            for token in tokenize.tokenize(file.readline):
                # A call in an f-string is no citation.
                said = token.type == tokenize.COMMENT or (token.type == tokenize.STRING and token.string[0] not in "fF")
                cited = bare.finditer(token.string) if said else ()
                found += [f"{path.relative_to(ROOT)}:{token.start[0]} {number.group()}" for number in cited]
    assert not found, "\n".join(found)


# Docstrings that begin with one of these words leave it open what a caller gets. There are fewer each time.
VAGUE_BEGINNINGS = ("what", "whether", "whatever", "as", "how", "which", "where", "who")
MOST_VAGUE = 3


def test_docstrings_say_what_a_caller_gets() -> None:
    vague = [
        f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)} {said.splitlines()[0]}"
        for path, text in sources("kvgrpc")
        if "v1" not in path.parts
        for node in ast.walk(parsed(path, text))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and (said := ast.get_docstring(node))
        and re.split(r"\W+", said.lower(), maxsplit=1)[0] in VAGUE_BEGINNINGS
    ]
    assert len(vague) <= MOST_VAGUE, "\n".join(vague)


def test_a_docstring_is_read_without_the_one_above_it() -> None:
    """ "The same of ..." sends its reader looking for what it is the same as."""
    said = re.compile(r'"""The same(?:\.|,| (?:of|for|where|with|but|as)\b)')
    leaning = [str(path) for path, text in sources("kvgrpc") if "v1" not in path.parts and said.search(text)]
    assert not leaning, leaning


def test_every_public_class_says_what_it_is() -> None:
    silent = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path, text in sources("kvgrpc")
        if "v1" not in path.parts
        for node in parsed(path, text).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and not ast.get_docstring(node)
    ]
    assert not silent, "\n".join(silent)


# What has colons and is no address.
NO_ADDRESSES = {
    "cli/main.py": "module:attribute",
    "dataplane/mooncake/connections.py": "words of /proc/net/tcp",
    "net.py": "the one parser of addresses itself",
    "rpc/credentials/secrets.py": "a line of the tokens file",
}


def test_addresses_are_parsed_in_net_alone() -> None:
    at_a_colon = re.compile(r"""\.r?(?:partition|split)\(\s*["']:["']""")
    found = {
        path.relative_to(ROOT / "kvgrpc").as_posix() for path, text in sources("kvgrpc") if at_a_colon.search(text)
    }
    assert found == NO_ADDRESSES.keys()


# Each engine's adapter has its own of them, and nobody meets two at once.
NAMES_OF_TWO = {"KvGrpcPublisher"}


def test_a_class_name_means_one_thing() -> None:
    homes: dict[str, list[str]] = {}
    for path, text in sources("kvgrpc"):
        if "v1" not in path.parts:
            for node in parsed(path, text).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    homes.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    twice = {name: found for name, found in homes.items() if len(found) > 1 and name not in NAMES_OF_TWO}
    assert not twice, twice
