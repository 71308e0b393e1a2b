"""``kvgrpc view``: what the page is told of a fleet with a dead rank, and whom its server answers."""

from __future__ import annotations

import base64
import http.client
import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from html.parser import HTMLParser
from typing import Any

import pytest

from kvgrpc.cli.main import main
from kvgrpc.cli.view import room as view_room
from kvgrpc.cli.view import server as view_server
from kvgrpc.cli.view.looking import Looking
from kvgrpc.cli.view.room import cancel_room, look_at_room
from kvgrpc.cli.view.server import ViewServer, page_files
from kvgrpc.cli.view.state import look_at_fleet
from kvgrpc.client import SyncClient
from kvgrpc.server import RegistryServer
from tests.support.looked_at_fleet import looked_at_fleet
from tests.support.waiting import wait_until

HALF, LONELY = 2**63 - 31, 78
SECRET = "of-the-page"
State = dict[str, Any]


@pytest.fixture(scope="module")
def registry() -> Iterator[str]:
    with looked_at_fleet(HALF, LONELY, "<b>the test gave it up</b>") as address:
        yield address


@pytest.fixture(scope="module")
def looking(registry: str) -> Iterator[Looking]:
    with SyncClient(registry, timeout=2.0) as client, Looking(lambda: look_at_fleet(client), 0.2) as looking:
        yield looking


@pytest.fixture(scope="module")
def page(registry: str, looking: Looking) -> Iterator[str]:
    with (
        SyncClient(registry, timeout=2.0) as client,
        ViewServer("127.0.0.1:0", looking, partial(look_at_room, client)) as server,
    ):
        yield server.address


def no_room(room: int, attempt: int) -> State:
    raise AssertionError("nobody asks for a room")


def ask(address: str, path: str = "/", headers: dict[str, str] | None = None, method: str = "GET") -> tuple[int, bytes]:
    """The status and the body; ``headers`` replace those that a browser on the page sends."""
    connection = http.client.HTTPConnection(address, timeout=10.0)
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    for name, value in ({"Host": address} | (headers or {})).items():
        if value:
            connection.putheader(name, value)
    connection.endheaders()
    response = connection.getresponse()
    try:
        return response.status, response.read()
    finally:
        connection.close()


def watch(address: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(address, timeout=10.0)
    connection.request("GET", "/events")
    response = connection.getresponse()
    assert (response.status, response.headers["Content-Type"]) == (200, "text/event-stream; charset=utf-8")
    return response


def next_state(response: http.client.HTTPResponse) -> State:
    while not (line := response.readline()).startswith(b"data: "):
        assert line, "the stream ended"
    found: State = json.loads(line.removeprefix(b"data: "))
    return found


@pytest.fixture
def state(page: str) -> State:
    status, body = ask(page, "/state")
    assert status == 200
    found: State = json.loads(body)
    return found


def ranks_of(state: State) -> dict[str, State]:
    return {rank["name"][0]: rank for engine in state["engines"] for rank in engine["ranks"]}


def test_the_state_has_a_hand_off_from_both_sides(state: State) -> None:
    ranks = ranks_of(state)
    assert [ranks[name]["rooms"].get("TRANSFERRING") for name in "PD"] == [1, 1]
    (link,) = state["links"]
    assert (link["ends"], link["state"]) == (["D/dp0/pp0/cp0/tp0", "P/dp0/pp0/cp0/tp0"], "OPEN")
    assert link["rooms"] >= 1


def test_the_state_has_a_dead_rank(state: State) -> None:
    ranks = ranks_of(state)
    assert {name: rank["answers"] for name, rank in ranks.items()} == {"P": True, "D": True, "X": False}
    assert ranks["X"]["why"] == "PEER_UNREACHABLE"
    assert state["ranks"] == {"all": 3, "shown": 3, "silent": 1}
    assert state["took"] < 5.0  # one rank after the other would take six


def test_the_state_has_the_newest_failed_room_with_its_reason(state: State) -> None:
    failed = next(room for room in state["failed"] if room["rank"].startswith("D"))
    assert (failed["room"], failed["reason"]) == (str(LONELY), "ROOM_CANCELLED")
    assert "the test gave it up" in failed["message"]


def test_a_room_is_told_from_both_sides(page: str) -> None:
    status, body = ask(page, f"/room?room={HALF}")
    found: State = json.loads(body)
    assert (status, found["room"], found["silent"]) == (200, str(HALF), ["X/dp0/pp0/cp0/tp0"])
    assert {side["rank"][0]: (side["role"], side["state"]) for side in found["sides"]} == {
        "P": ("prefill", "TRANSFERRING"),
        "D": ("decode", "TRANSFERRING"),
    }


def test_a_failed_room_is_told_with_its_cause_and_what_to_do(page: str) -> None:
    found: State = json.loads(ask(page, f"/room?room={LONELY}&attempt=0")[1])
    failure = next(side["failure"] for side in found["sides"] if side["role"] == "decode")
    assert failure["reason"] == "ROOM_CANCELLED"
    assert "the test gave it up" in failure["message"]
    assert failure["next"]


def test_a_room_that_nobody_knows_has_no_sides(page: str) -> None:
    assert json.loads(ask(page, "/room?room=4")[1])["sides"] == []


@pytest.mark.parametrize("query", ["", "?room=", "?room=0", "?room=x", f"?room={2**63}", "?room=1&attempt=-1"])
def test_what_is_no_room_is_refused(page: str, query: str) -> None:
    assert ask(page, f"/room{query}")[0] == 400


def test_events_come_one_after_the_other(page: str) -> None:
    with watch(page) as response:
        first, second = next_state(response), next_state(response)
    assert first["at"] < second["at"]
    assert ranks_of(second).keys() == {"P", "D", "X"}


def test_a_registry_that_is_away_is_said_and_looked_for_again() -> None:
    server = RegistryServer(["127.0.0.1:0"]).open()
    with SyncClient(server.address, timeout=0.3) as client, Looking(lambda: look_at_fleet(client), 0.1) as looking:
        first = looking.after(0, 10.0)
        assert first is not None
        server.close()

        def error() -> str:
            found = looking.after(0, 10.0)
            return "" if found is None else json.loads(found[1]).get("error", "")

        wait_until(lambda: "PeerUnreachable" in error())


def test_nobody_is_asked_while_nobody_watches() -> None:
    looks: list[float] = []

    def look() -> State:
        looks.append(time.monotonic())
        return {}

    with Looking(look, 0.01) as looking:
        assert looking.after(0, 5.0) is not None
        wait_until(lambda: time.monotonic() - looks[-1] > 1.0)
        looked = len(looks)
        found = looking.after(0, 5.0)
        assert found is not None
        assert found[0] > looked, "what was seen for somebody who has left is shown again"


@pytest.mark.parametrize("path", ["/", "/view.js", "/state", "/events", "/room?room=1"])
@pytest.mark.parametrize(
    ("headers", "field"),
    [
        ({"Host": "evil.example"}, "Host"),
        ({"Host": "127.0.0.1.evil.example:8080"}, "Host"),
        ({"Host": "10.0.0.1"}, "Host"),
        ({"Host": ""}, "Host"),
        ({"Origin": "http://evil.example"}, "Origin"),
        ({"Origin": "null"}, "Origin"),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}, "Sec-Fetch-Site"),
    ],
)
def test_another_site_is_refused(page: str, path: str, headers: dict[str, str], field: str) -> None:
    status, body = ask(page, path, headers)
    assert (status, body.decode().partition(":")[0]) == (403, field)


@pytest.mark.parametrize("host", ["localhost:9", "127.0.0.1:9000", "[::1]:9000"])
def test_a_tunnel_has_a_port_of_its_own(page: str, host: str) -> None:
    assert ask(page, "/", {"Host": host, "Origin": f"http://{host}"})[0] == 200


def test_a_link_elsewhere_may_lead_to_the_page(page: str) -> None:
    assert ask(page, "/", {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"})[0] == 200


@pytest.mark.parametrize("path", ["/server.py", "/../server.py", "//etc/passwd", "/%2e%2e/server.py", "/page/view.js"])
def test_nothing_but_the_page_is_served(page: str, path: str) -> None:
    assert ask(page, path)[0] == 404


def test_a_name_is_called_by_whom_it_was_allowed(looking: Looking) -> None:
    with ViewServer("127.0.0.1:0", looking, no_room, names=["fleet.example"]) as server:
        assert ask(server.address, "/", {"Host": "Fleet.example:80"})[0] == 200
        assert ask(server.address, "/", {"Host": "other.example"})[0] == 403


@pytest.mark.parametrize("path", ["/", "/view.css", "/state", "/events", "/room?room=1"])
def test_a_token_is_the_password(looking: Looking, path: str) -> None:
    with ViewServer("127.0.0.1:0", looking, no_room, SECRET) as server:
        wrong = {"Authorization": "Basic " + base64.b64encode(b"me:another").decode()}
        for headers in ({}, wrong, {"Authorization": "Basic ?"}, {"Authorization": f"Bearer {SECRET}"}):
            assert ask(server.address, path, headers)[0] == 401
        right = {"Authorization": "Basic " + base64.b64encode(f"me:{SECRET}".encode()).decode()}
        if path not in ("/events", "/room?room=1"):  # which would go on, or ask for a room
            assert ask(server.address, path, right)[0] == 200


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", ":0", "10.0.0.1:0"])
def test_listening_for_other_hosts_needs_a_token(
    registry: str, listen: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["view", "-s", registry, "--listen", listen])
    assert ended.value.code == 2
    assert "--view-token-file" in capsys.readouterr().err


def test_actions_need_a_token_on_this_host_too(registry: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["view", "-s", registry, "--listen", "127.0.0.1:0", "--allow-actions"])
    assert ended.value.code == 2
    assert "--view-token-file" in capsys.readouterr().err


def test_without_allow_actions_the_page_only_shows(page: str) -> None:
    status, body = ask(page, f"/cancel?room={HALF}", {"Origin": f"http://{page}"}, "POST")
    assert (status, b"--allow-actions" in body) == (403, True)
    told: State = json.loads(ask(page, f"/room?room={HALF}")[1])
    assert told["may_cancel"] is False
    assert {side["state"] for side in told["sides"]} == {"TRANSFERRING"}


def test_an_action_comes_from_the_page_itself_and_with_its_password(looking: Looking) -> None:
    asked: list[tuple[int, int]] = []

    def cancel(room: int, attempt: int) -> State:
        asked.append((room, attempt))
        return {"cancelled": ["P"], "refused": []}

    with ViewServer("127.0.0.1:0", looking, no_room, SECRET, cancel_room=cancel) as server:
        own = {"Origin": f"http://{server.address}"}
        password = {"Authorization": "Basic " + base64.b64encode(f"me:{SECRET}".encode()).decode()}
        post = partial(ask, server.address, "/cancel?room=31&attempt=2", method="POST")
        for origin in ({}, {"Origin": "null"}, {"Origin": "http://evil.example"}):
            assert post(origin | password)[0] == 403
        assert post(own | password | {"Host": "evil.example"})[0] == 403
        assert post(own | password | {"Sec-Fetch-Site": "cross-site"})[0] == 403
        assert post(own)[0] == 401
        assert ask(server.address, "/drain", own | password, "POST")[0] == 404
        assert ask(server.address, "/cancel?room=31", own | password)[0] == 404
        assert asked == []
        assert post(own | password) == (200, b'{"cancelled":["P"],"refused":[]}')
        assert asked == [(31, 2)]


def test_a_room_is_cancelled_at_each_rank_that_knows_it() -> None:
    fleet = looked_at_fleet(HALF, LONELY, "given up", with_dead=False)
    with fleet as registry, SyncClient(registry, timeout=2.0) as client:
        both = ["D/dp0/pp0/cp0/tp0", "P/dp0/pp0/cp0/tp0"]
        assert cancel_room(client, HALF, 0) == {"cancelled": both, "refused": []}

        def failures() -> list[State | None]:
            return [side["failure"] for side in look_at_room(client, HALF, 0)["sides"]]

        wait_until(lambda: sum(each is not None for each in failures()) == 2)
        assert {each["reason"] for each in failures() if each} == {"ROOM_CANCELLED"}
        assert "cancelled on the page of kvgrpc view" in str(failures())


def test_a_rank_that_did_not_cancel_is_named(registry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_room, "CANCEL_SECONDS", 0.2)
    with SyncClient(registry, timeout=2.0) as client:
        found = cancel_room(client, 4, 0)
    assert found["cancelled"] == []
    assert found["refused"][-1].startswith("X/dp0/pp0/cp0/tp0: PEER_UNREACHABLE")


def test_a_slow_watcher_holds_up_no_other(looking: Looking, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that begins to watch and reads nothing, and one that sends its request byte by byte."""
    monkeypatch.setattr(view_server._PageHandler, "timeout", 0.3)
    big = Looking(lambda: {"filling": "x" * (8 << 20)}, 0.05)
    with big, ViewServer("127.0.0.1:0", big, no_room) as server, ExitStack() as stack:
        host, port = server.address.rsplit(":", 1)
        for _ in range(view_server.MOST_WATCHERS):
            slow = stack.enter_context(socket.create_connection((host, int(port)), 5.0))
            slow.sendall(f"GET /events HTTP/1.1\r\nHost: {server.address}\r\n\r\n".encode())
        half = stack.enter_context(socket.create_connection((host, int(port)), 5.0))
        half.sendall(b"GET / HT")
        assert ask(server.address)[0] == 200
        # Each gives its place back once a write to it has waited for too long.
        wait_until(lambda: ask(server.address, "/state")[0] == 200)


def test_one_watcher_too_many_is_asked_to_come_again(page: str) -> None:
    with ExitStack() as stack:
        for _ in range(view_server.MOST_WATCHERS):
            next_state(stack.enter_context(watch(page)))
        assert ask(page, "/state")[0] == 503
        assert ask(page)[0] == 200
    wait_until(lambda: ask(page, "/state")[0] == 200)


class Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attributes if name in ("src", "href") and value]


def test_the_page_is_in_the_package_and_asks_no_other_host() -> None:
    files = page_files()
    links = Links()
    links.feed(files["/"][0].decode())
    assert [link for link in links.found if link not in files and link != "data:,"] == []
    for path, (content, _) in files.items():
        text = content.decode().replace("http://www.w3.org/2000/svg", "")
        assert "//" not in "".join(line.partition("// ")[0] for line in text.splitlines()), path
        assert "innerHTML" not in text
