"""The page's buttons that cancel a room, run by Node over a stand-in for the document."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from kvgrpc.cli.view.server import page_files

_DOCUMENT = """
import assert from "node:assert";

class Element {
  children = []; listeners = []; own = ""; open = false; hidden = false; disabled = false;
  constructor(tag) { this.tag = tag; }
  append(...added) { this.children.push(...added); }
  replaceChildren(...added) { this.children = added; }
  addEventListener(name, act) { this.listeners.push(act); }
  setAttribute() {}
  showModal() { this.open = true; }
  get textContent() { return this.own + this.children.map((each) => each.textContent ?? each).join(""); }
  set textContent(text) { this.own = text; this.children = []; }
  all() { return [this, ...this.children.flatMap((each) => (each.all ? each.all() : []))]; }
  click() { return this.hidden || this.disabled ? null : Promise.all(this.listeners.map((act) => act({}))); }
}

const byId = {};
const place = (id) => (byId[id] ??= new Element("div"));
globalThis.document = {
  getElementById: place,
  createElement: (tag) => new Element(tag),
  createElementNS: (_, tag) => new Element(tag),
};
const { openRoom } = await import("./room.mjs");

let posts = 0, answer = () => ({});
const times = { began: 0, ended: 1, stages: {} };
const side = { rank: "D", role: "decode", state: "TRANSFERRING", ...times, pages: 0, bytes: "0", peers: [] };
globalThis.fetch = async (path, options) => {
  if (options?.method !== "POST") {
    const room = new URL(path, "http://view").searchParams.get("room");
    return { ok: true, json: async () => ({ room, attempt: 0, sides: [side], silent: [], may_cancel: true }) };
  }
  posts++;
  return answer();
};
const says = (told) => async () => ({ ok: true, json: async () => told });
const may = (each) => each.tag === "button" && !each.hidden && !each.disabled;
const buttons = () => place("room-told").all().filter(may);
const cancel = async () => { await buttons()[0].click(); await buttons().at(-1).click(); };
const shown = () => place("room-told").textContent;
await openRoom("31");
"""


def run(tmp_path: Path, script: str) -> None:
    """Runs a test in JavaScript against the page's own script, whose room 31 is open."""
    files = page_files()
    (tmp_path / "elements.mjs").write_bytes(files["/elements.js"][0])
    (tmp_path / "room.mjs").write_bytes(files["/room.js"][0].replace(b'"/elements.js"', b'"./elements.mjs"'))
    (tmp_path / "test.mjs").write_text(_DOCUMENT + script)
    ended = subprocess.run(["node", "test.mjs"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 0, ended.stderr


pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="there is no Node here")


def test_a_double_click_only_asks(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
        const first = buttons()[0];
        await first.click();
        await first.click();
        assert.equal(posts, 0);
        await buttons().at(-1).click();
        assert.equal(posts, 1);
        """,
    )


def test_what_was_refused_is_shown_where_another_rank_cancelled(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
        answer = says({ cancelled: ["P"], refused: ["D: PERMISSION_DENIED"] });
        await cancel();
        assert.match(shown(), /D: PERMISSION_DENIED/);
        answer = says({ cancelled: ["D"], refused: [] });
        await cancel();
        assert.doesNotMatch(shown(), /PERMISSION_DENIED|Not cancelled/);
        """,
    )


def test_a_cancel_that_failed_can_be_tried_again(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
        answer = async () => ({ ok: false, text: async () => "4 others look" });
        await cancel();
        assert.match(shown(), /4 others look/);
        answer = says({ cancelled: ["P", "D"], refused: [] });
        await cancel();
        assert.equal(posts, 2);
        assert.doesNotMatch(shown(), /4 others look/);
        """,
    )


@pytest.mark.parametrize("left", ['await openRoom("32");', "place('room').open = false;"], ids=["another", "closed"])
def test_a_late_answer_leaves_what_is_shown_by_then(tmp_path: Path, left: str) -> None:
    run(
        tmp_path,
        f"""
        let release;
        const cancelled = await says({{ cancelled: ["P"], refused: [] }})();
        answer = () => new Promise((done) => (release = () => done(cancelled)));
        const late = cancel();
        while (!release) await new Promise(setImmediate);
        {left}
        const title = place("room-title").textContent, open = place("room").open;
        release();
        await late;
        assert.deepEqual([place("room-title").textContent, place("room").open], [title, open]);
        """,
    )
