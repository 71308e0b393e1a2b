// One room in a dialog: a bar for each rank that knows it, on one scale of time, why it failed, and where it is allowed a button that
// cancels it.

import { make, rate, setText, size, svg, took, words } from "/elements.js";

const STAGES = { bootstrap: "until both sides were known", wait: "until there were pages", transfer: "until all had moved" };
const at = (id) => document.getElementById(id);
const ENDED = ["SUCCESS", "FAILED"];
let asked = 0;

// "refused": what ranks said that did not cancel it; empty: nobody was asked, or all did.
export async function openRoom(room, attempt = 0, refused = "") {
  const mine = ++asked;
  setText(at("room-title"), attempt ? `Room ${room}, attempt ${attempt}` : `Room ${room}`);
  at("room-told").replaceChildren(make("p", "dim", "asking all ranks"));
  if (!at("room").open) at("room").showModal();
  let told;
  try {
    const answer = await fetch(`/room?room=${encodeURIComponent(room)}&attempt=${encodeURIComponent(attempt)}`);
    told = answer.ok ? story(await answer.json()) : [make("p", "bad", (await answer.text()).trim())];
  } catch {
    told = [make("p", "bad", "kvgrpc view does not answer")];
  }
  if (refused) told.push(make("p", "bad", `Not cancelled everywhere: ${refused}`));
  if (mine === asked) at("room-told").replaceChildren(...told);
}

export function listen() {
  at("room-close").addEventListener("click", () => at("room").close());
  at("room-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const [room, attempt = "0"] = at("room-number").value.trim().split(/[\s/]+/);
    if (room) openRoom(room, attempt);
  });
}

function story(found) {
  const silent = found.silent.length ? [make("p", "bad", `No answer from ${found.silent.slice(0, 5).join(", ")}.`)] : [];
  if (!found.sides.length) return [make("p", "", "No rank that answers knows this room: it never came, or was forgotten."), ...silent];
  const failed = found.sides.filter((side) => side.failure).sort((a, b) => a.ended - b.ended)[0];
  const open = found.sides.some((side) => !ENDED.includes(side.state));
  return [...(failed ? why(failed) : []), timeline(found.sides), ...found.sides.map(facts), ...silent, ...(found.may_cancel && open ? [canceller(found)] : [])];
}

// Two buttons beside each other: a double click, or a key that is held, only asks.
function canceller({ room, attempt }) {
  const ask = button("room-cancel", "Cancel this room"), sure = button("room-cancel-sure", "Yes, on both sides"), failed = make("p", "bad");
  sure.hidden = true;
  ask.addEventListener("click", () => (sure.hidden = false));
  sure.addEventListener("click", async () => {
    const mine = asked;
    sure.disabled = true;
    const { cancelled, refused } = await cancel(room, attempt);
    if (mine !== asked || !at("room").open) return; // whoever asked looks at another room now, or at none
    if (cancelled) return openRoom(room, attempt, refused);
    setText(failed, refused);
    sure.disabled = false;
    sure.hidden = true;
  });
  return make("div", "", ask, " ", sure, failed);
}

function button(id, text) {
  const made = make("button", "", text);
  made.type = "button";
  made.id = id;
  return made;
}

// Whether any rank cancelled it, and what those said that did not.
async function cancel(room, attempt) {
  const failed = (refused) => ({ cancelled: false, refused });
  try {
    const answer = await fetch(`/cancel?room=${encodeURIComponent(room)}&attempt=${encodeURIComponent(attempt)}`, { method: "POST" });
    if (!answer.ok) return failed((await answer.text()).trim());
    const { cancelled, refused } = await answer.json(), told = refused.slice(0, 5).join("; ");
    return cancelled.length ? { cancelled: true, refused: told } : failed(told || "no rank knows the room any more");
  } catch {
    return failed("kvgrpc view does not answer");
  }
}

function why(side) {
  const { reason, message, origin, next, metadata } = side.failure;
  const more = Object.entries(metadata).map(([name, value]) => `${name} ${value}`).join(", ");
  return [
    make("p", "", make("b", "bad", reason), ` ${message}`),
    make("p", "dim", [origin ? `Seen first by ${origin}.` : "", more ? `${more}.` : ""].join(" ").trim()),
    make("p", "", next),
  ].filter((each) => each.textContent);
}

function timeline(sides) {
  const first = Math.min(...sides.map((side) => side.began)), last = Math.max(...sides.map((side) => side.ended));
  const width = 640, left = 4, span = Math.max(last - first, 1e-6), row = 44;
  const x = (time) => left + ((time - first) / span) * (width - 2 * left);
  const root = svg("svg", { class: "timeline", viewBox: `0 0 ${width} ${sides.length * row + 18}`, role: "img" });
  root.setAttribute("aria-label", `${sides.length} sides over ${took(span)}`);
  sides.forEach((side, i) => {
    const y = i * row;
    root.append(svg("text", { x: left, y: y + 13 }, `${side.rank} (${side.role})`));
    let start = side.began;
    const parts = Object.entries(side.stages);
    for (const [stage, seconds] of parts.length ? parts : [[side.failure ? "failed" : "open", side.ended - side.began]]) {
      const bar = svg("rect", { class: `stage-${stage}`, x: x(start), y: y + 18, height: 16, width: Math.max(1.5, x(start + seconds) - x(start)) });
      bar.append(svg("title", {}, `${STAGES[stage] || words(side.state)}: ${took(seconds)}`));
      root.append(bar);
      start += seconds;
    }
  });
  const foot = sides.length * row + 12;
  root.append(svg("text", { class: "tick", x: left, y: foot }, "0"), svg("text", { class: "tick", x: width - left, y: foot, "text-anchor": "end" }, took(span)));
  return make("figure", "", root, make("figcaption", "said", "Each side by the clock of its own host."));
}

function facts(side) {
  const list = make("dl", "facts");
  const say = (name, value) => value && list.append(make("dt", "", name), make("dd", "", value));
  say(side.rank, words(side.state));
  for (const [stage, seconds] of Object.entries(side.stages)) say(STAGES[stage], took(seconds) || "0 ms");
  say("pages", side.pages ? `${side.pages}${Number(side.bytes) ? `, ${size(Number(side.bytes))}` : ""}${side.speed ? `, ${rate(side.speed)}` : ""}` : "");
  say("held pages", side.held ? String(side.held) : "");
  say("with", side.peers.slice(0, 8).join(", "));
  say("trace", side.trace);
  return list;
}
