// Reads /events and shows each state. All text comes from other processes: it is only ever set as text.

import { draw, inFlight, signature } from "/graph.js";
import { counted, fillBars, fillRows, make, rate, setText, show, size, took, words } from "/elements.js";
import { log, plot } from "/past.js";
import { listen, openRoom } from "/room.js";

const STATES = ["BOOTSTRAPPING", "WAITING_FOR_INPUT", "TRANSFERRING", "SUCCESS", "FAILED"];
const STALE_SECONDS = 10, MOST_SESSION_ROWS = 200;
const at = (id) => document.getElementById(id);

let shown = null, heard = 0, drawn = "", silentBefore = null;

const sum = (items, of) => items.reduce((total, item) => total + (of(item) || 0), 0);
function tiles(state, ranks) {
  const answering = ranks.filter((rank) => rank.answers);
  const open = state.links.filter((link) => link.state === "OPEN").length;
  const notOpen = state.links.length - open;
  const decode = state.engines.filter((engine) => engine.role === "decode").flatMap((engine) => engine.ranks);
  const failed = sum(answering, (rank) => rank.rooms.FAILED);
  show(at("tiles"), [
    ["ranks that answer", `${state.ranks.all - state.ranks.silent} / ${state.ranks.all}`, state.ranks.silent > 0],
    ["sessions open", notOpen ? `${open} / ${open + notOpen}` : `${open}`, notOpen > 0],
    ["rooms in flight at decode", sum(decode, inFlight), false],
    ["failed, still known", failed, failed > 0],
    ["hand-offs in a minute", sum(state.links, (link) => link.minute), false],
    ["held pages", sum(answering, (rank) => rank.held_pages), false],
    ["pulls in flight", state.pulls.length, false],
  ], (all) => all.map(([name, value, bad]) => make("div", bad ? "is-bad" : "", make("dt", "", name), make("dd", "", String(value)))));
}

function rooms(state) {
  const counted = state.engines.map((engine) => {
    const states = {};
    for (const rank of engine.ranks)
      for (const [name, n] of Object.entries(rank.rooms || {})) states[name] = (states[name] || 0) + n;
    const unseen = sum(engine.ranks, (rank) => (rank.answers ? rank.rooms_all - sum(Object.values(rank.rooms), (n) => n) : 0));
    return [engine.name, engine.role, states, Math.max(0, unseen)];
  });
  show(at("rooms"), counted, (all) => all.length ? all.flatMap(([name, role, states, unseen]) => {
    const bar = make("div", "bar");
    const list = make("ul", "states");
    bar.setAttribute("aria-hidden", "true");
    for (const state of [...STATES, ...Object.keys(states).filter((each) => !STATES.includes(each))]) {
      const n = states[state] || 0;
      const style = `s${STATES.indexOf(state) + 1 || 1}`;
      if (!n) continue;
      const part = make("i", style);
      part.style.flexGrow = n;
      bar.append(part);
      list.append(make("li", "", make("i", style), `${n} ${words(state)}`));
    }
    if (unseen) list.append(make("li", "dim", `${unseen} more`));
    if (!list.children.length) list.append(make("li", "dim", "no rooms"));
    return [make("h3", "", `${name} (${role || "?"})`), bar, list];
  }) : [make("p", "dim", "No engine is registered.")]);
}

function caches(ranks) {
  const tiers = ranks.flatMap((rank) => (rank.cache ? rank.cache.tiers.map((tier) => {
    const used = Number(tier.used), pages = Number(tier.pages); // 0: only storage itself knows how much fits
    const share = pages ? `${Math.round((100 * used) / pages)} %` : counted(used, "page");
    return [`${rank.name} ${tier.tier}`, used, pages, `${share}, ${size(used * tier.page_bytes)}`, "pages in use"];
  }) : []));
  fillBars(at("caches"), "meter", tiers, "No rank serves a cache.");
  const faults = ranks.filter((rank) => rank.cache && rank.cache.storage && rank.cache.storage_fault);
  show(at("storage"), faults.map((rank) => `${rank.name}: ${rank.cache.storage} does not answer: ${rank.cache.storage_fault}`),
    (all) => all.map((text) => make("p", "bad", text)));
}

function moving(state) {
  const all = [
    ...state.operations.map((each) => [`${each.kind} at ${each.rank}`, each]),
    ...state.pulls.map((pull) => [`${pull.rank} ${pull.way} ${pull.peer}`, pull]),
  ];
  fillBars(at("moving"), "progress", all.map(([name, { done, pages, bytes }]) =>
    [name, done, pages || 1, `${done}/${pages}, ${size(Number(bytes))}`, "pages that are in place"]), "None.");
}

function tables(state, ranks) {
  fillRows(at("ranks"), ranks.map((rank) => rank.answers
    ? [rank.name, ["answers", "good"], rank.sessions, [rank.not_open, rank.not_open ? "bad" : ""], rank.rooms_all, rank.held_pages, rank.address]
    : [[rank.name, "bad"], [`no answer: ${words(rank.why)}`, "bad"], "", "", "", "", rank.address]), "none is registered");
  fillRows(at("sessions"), state.links.slice(0, MOST_SESSION_ROWS).map((link) => [
    link.ends.join(" – "), [words(link.state), link.state === "OPEN" ? "good" : "bad"], link.rooms, link.minute || "",
    rate(link.speed), took(link.p50), took(link.p99), link.well, [link.failed, link.failed ? "bad" : ""],
  ]), "none");
  fillRows(at("failed"), state.failed.map((room) => [
    roomCell(room), [room.reason, "bad"], room.message, room.rank,
    room.time ? new Date(room.time * 1000).toLocaleTimeString() : "",
  ]), "none");
  fillRows(at("slowest"), state.slowest.map((room) => [
    roomCell(room), took(room.seconds), took(room.bootstrap), took(room.wait), took(room.transfer),
    rate(room.speed), `${room.pages}, ${size(Number(room.bytes))}`, room.rank, room.peer,
  ]), "none");
}

function roomCell(room) {
  const text = room.attempt ? `${room.room} (attempt ${room.attempt})` : room.room;
  return [text, "", [`room ${text}, what became of it`, () => openRoom(room.room, room.attempt)]];
}

function tell(silent) {
  if (silentBefore !== null) {
    const gone = silent.filter((name) => !silentBefore.includes(name));
    const back = silentBefore.filter((name) => !silent.includes(name));
    const said = [gone.length ? `No answer from ${gone.slice(0, 5).join(", ")}.` : "", back.length ? `${back.slice(0, 5).join(", ")}: answers again, or left.` : ""];
    if (gone.length || back.length) setText(at("told"), said.join(" ").trim());
  }
  silentBefore = silent;
}

function graph() {
  const root = at("graph");
  const width = Math.max(260, Math.floor(root.parentElement.clientWidth));
  const now = signature(shown, width);
  if (now === drawn) return;
  drawn = now;
  const missing = draw(root, shown, width) + shown.links_left_out;
  const silent = shown.ranks.silent;
  const unshown = shown.ranks.all - shown.ranks.shown;
  setText(at("graph-said"), [
    `${counted(shown.ranks.all, "rank")}, ${silent || "none"} without an answer, ${counted(shown.links.length, "session")}. The numbers are rooms in flight.`,
    missing ? `${counted(missing, "session")} not drawn.` : "", unshown ? `${counted(unshown, "rank")} not shown.` : "",
  ].join(" ").trim());
}

function notice(text, style = "notice") {
  const element = at("notice");
  element.className = style;
  setText(element, text);
  element.hidden = !text;
}

function take(state) {
  heard = Date.now();
  if (state.error) return notice(`The registry was not read: ${state.error}. What you see is older.`);
  notice(state.warming_up ? "The registry has just started: there may be more ranks than these." : "", "notice mild");
  shown = state;
  const ranks = state.engines.flatMap((engine) => engine.ranks);
  setText(at("registry"), state.registry);
  document.title = `${state.ranks.silent ? `(${state.ranks.silent} silent) ` : ""}kvgrpc ${state.registry}`;
  tell(ranks.filter((rank) => !rank.answers).map((rank) => rank.name));
  tiles(state, ranks);
  graph();
  rooms(state);
  tables(state, ranks);
  caches(ranks);
  moving(state);
  plot(at("plots"), state, sum(state.engines.filter((engine) => engine.role === "decode").flatMap((engine) => engine.ranks), inFlight));
  log(at("log"), state);
}

function link(className, text) {
  at("link").className = className;
  setText(at("link"), text);
}

listen();
const events = new EventSource("/events");
events.onmessage = (message) => { take(JSON.parse(message.data)); link("live", "live"); };
// A refusal (too many watch) closes it for good; a connection that broke is tried again by the browser.
events.onerror = () => link("lost", events.readyState === EventSource.CLOSED
  ? "kvgrpc view refused: too many watch, or it wants a password; load the page again"
  : "kvgrpc view does not answer; trying again");
setInterval(() => {
  const age = (Date.now() - heard) / 1000;
  if (heard && age > STALE_SECONDS && events.readyState === EventSource.OPEN) link("waits", `nothing new for ${Math.round(age)} s`);
}, 1000);
new ResizeObserver(() => { if (shown) graph(); }).observe(at("graph").parentElement);
