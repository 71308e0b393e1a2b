// Ranks as boxes, prefill left and decode right; sessions as curves between them.

import { counted, rate } from "/elements.js";

const NAMESPACE = "http://www.w3.org/2000/svg";
const ROW = 30, HEAD = 24, GAP = 12;
// More curves than this are one colour, and take longer to paint than the next look to come.
const MOST_SESSIONS = 300, MANY_SESSIONS = 60, MOST_LABELS = 12, LEAST_LABELLED = 480;

const cut = (text, most) => (text.length > most ? `${text.slice(0, Math.max(1, most - 1))}…` : text);

export function inFlight(rank) {
  const ended = new Set(["SUCCESS", "FAILED"]);
  return Object.entries(rank.rooms || {}).reduce((sum, [state, n]) => sum + (ended.has(state) ? 0 : n), 0);
}

// Whatever decides how the graph looks: it is drawn anew only when this has changed.
export function signature(state, width) {
  const ranks = state.engines.map((e) => [e.name, e.ready, e.ranks.map((r) => [r.name, r.answers, inFlight(r)])]);
  return JSON.stringify([width, ranks, state.links.slice(0, MOST_SESSIONS)]);
}

// Draws into ``root``; how many sessions it left out.
export function draw(root, state, width) {
  const boxWidth = Math.min(250, Math.floor(width * 0.37));
  const places = new Map();
  const nodes = [];
  const heights = { left: 4, right: 4 };
  const hosts = new Set(state.engines.flatMap((engine) => engine.ranks.map((rank) => rank.host)));
  for (const engine of state.engines) {
    const side = engine.role === "decode" ? "right" : "left";
    const x = side === "right" ? width - boxWidth - 2 : 2;
    nodes.push(["text", { class: "engine", x, y: heights[side] + 15 }, title(engine, boxWidth / 8.2)]);
    heights[side] += HEAD;
    const labels = labelled(engine.ranks);
    engine.ranks.forEach((rank, i) => {
      places.set(rank.name, { x, y: heights[side] + ROW / 2 - 2, side });
      const words = hosts.size > 1 ? `${labels[i]} · ${rank.host}` : labels[i];
      nodes.push(node(rank, words, x, heights[side], boxWidth));
      heights[side] += ROW;
    });
    heights[side] += GAP;
  }
  const known = state.links.slice(0, MOST_SESSIONS).filter((link) => link.ends.every((end) => places.has(end)));
  // By their ends, so that a curve stays the same element from look to look; what is not open lies on top.
  known.sort((a, b) => a.bad - b.bad || (a.ends < b.ends ? -1 : 1));
  const lines = known.map((link) => [link, line(places.get(link.ends[0]), places.get(link.ends[1]), boxWidth)]);
  const labels = known.length <= MOST_LABELS && width > LEAST_LABELLED ? lines.map(([link, at]) => label(link, at)) : [];
  const height = Math.max(heights.left, heights.right, 40);
  change(root, { viewBox: `0 0 ${width} ${height}`, height });
  patch(root, [
    ["g", { class: known.length > MANY_SESSIONS ? "many" : "" }, "", lines.map(([link, at]) => session(link, at))],
    ["g", {}, "", nodes], ["g", {}, "", labels],
  ]);
  return state.links.length - known.length;
}

// The coordinates that tell the ranks of an engine apart; dp where none does.
function labelled(ranks) {
  const parts = ranks.map((rank) => rank.label.split("/"));
  const differs = (i) => parts.some((each) => each[i] !== parts[0][i]);
  return parts.map((each) => each.filter((part, i) => i === 0 || differs(i)).join(" "));
}

function title(engine, most) {
  const name = engine.ready ? engine.name : `${engine.name} ${engine.registered}/${engine.expected}`;
  const whole = `${name} (${engine.role || "?"})`;
  return whole.length <= most ? whole : cut(name, most);
}

function node(rank, words, x, y, width) {
  const said = rank.answers ? `${counted(inFlight(rank), "room")} in flight` : `no answer: ${rank.why}`;
  const count = rank.answers ? String(inFlight(rank)) : "✕";
  return ["g", { class: rank.answers ? "node" : "node silent" }, "", [
    ["title", {}, `${rank.name}, ${rank.address}: ${said}`],
    ["rect", { x, y, width, height: ROW - 6, rx: 5 }, ""],
    ["text", { x: x + 8, y: y + 16.5 }, cut(words, (width - 46) / 6.6)],
    ["text", { class: "count", x: x + width - 8, y: y + 16.5 }, count],
  ]];
}

// From the inner edge of one box to that of the other; between boxes of one column out and back.
function line(from, to, width) {
  const [a, b] = from.x <= to.x ? [from, to] : [to, from];
  const same = a.side === b.side, outwards = same && a.side === "right" ? -1 : 1;
  const x1 = outwards < 0 ? a.x : a.x + width, x2 = same ? x1 : b.x;
  const bend = same ? outwards * 40 : (x2 - x1) / 2;
  return { x1, y1: a.y, x2, y2: b.y, c1: x1 + bend, c2: same ? x2 + bend : x2 - bend };
}

function session(link, at) {
  const open = link.state === "OPEN";
  return ["path", {
    class: open ? "session" : "session not-open",
    d: `M${at.x1},${at.y1} C${at.c1},${at.y1} ${at.c2},${at.y2} ${at.x2},${at.y2}`,
    "stroke-width": open ? (1.5 + Math.min(4, Math.log2(1 + link.rooms))).toFixed(1) : 2,
  }, "", [["title", {}, `${link.ends.join(" – ")}: ${link.state}, ${counted(link.rooms, "room")}, ${link.pending} to be told, ${link.well} went well, ${link.failed} failed`]]];
}

function label(link, at) {
  const words = link.state !== "OPEN" ? link.state.toLowerCase() : link.speed ? rate(link.speed) : link.rooms ? counted(link.rooms, "room") : "";
  return ["text", { class: "session-label", x: at.x1 + (at.x2 - at.x1) * 0.32, y: at.y1 + (at.y2 - at.y1) * 0.24 + 4 }, words];
}

function change(element, attributes) {
  for (const [name, value] of Object.entries(attributes))
    if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

// Makes the children of ``parent`` those that are wanted ([tag, attributes, text, children]), and changes what differs.
function patch(parent, wanted) {
  while (parent.children.length > wanted.length) parent.lastElementChild.remove();
  let place = parent.firstElementChild;
  for (const [tag, attributes, text, children] of wanted) {
    if (!place || place.tagName !== tag) {
      const made = document.createElementNS(NAMESPACE, tag);
      if (place) place.replaceWith(made); else parent.append(made);
      place = made;
    }
    change(place, attributes);
    if (children) patch(place, children);
    else if (place.textContent !== text) place.textContent = text;
    place = place.nextElementSibling;
  }
}
