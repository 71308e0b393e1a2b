// What states say one after the other: plots of the last minutes, and a log of what changed.

import { counted, make, rate, setText, svg, words } from "/elements.js";

const SECONDS = 300, MOST_LINES = 100, WIDTH = 240, HEIGHT = 56;
const PLOTS = [
  ["hand-offs", "hand-offs a second", (value) => value.toFixed(1)],
  ["speed", "bytes of all pairs", (value) => rate(value) || "0"],
  ["flying", "rooms in flight at decode", (value) => String(Math.round(value))],
  ["failures", "failures a second", (value) => value.toFixed(1)],
];

const points = [];
let before = null;

// A point of each plot; counters of pairs that are new or gone are left out of a rate.
export function plot(root, state, flying) {
  const seconds = before ? state.at - before.at : 0;
  const known = new Map((before ? before.links : []).map((link) => [link.ends.join(), link]));
  const grown = (name) => state.links.reduce((sum, link) => {
    const earlier = known.get(link.ends.join());
    return sum + (earlier ? Math.max(0, link[name] - earlier[name]) : 0);
  }, 0);
  const rate = (name) => (seconds > 0 ? grown(name) / seconds : 0);
  points.push({ at: state.at, "hand-offs": rate("well"), speed: rate("bytes") / 1e9, flying, failures: rate("failed") });
  while (points.length && points[0].at < state.at - SECONDS) points.shift();
  before = state;
  if (!root.children.length) root.append(...PLOTS.map(([, title]) => figure(title)));
  PLOTS.forEach(([name, title, write], i) => redraw(root.children[i], title, points.map((each) => [each.at, each[name]]), write));
}

function figure(title) {
  const drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", preserveAspectRatio: "none" },
    svg("path", { class: "area" }), svg("path", { class: "curve", "vector-effect": "non-scaling-stroke" }));
  return make("figure", "plot", make("figcaption", "", make("span", "", title), make("b")), drawing, make("small", "dim"));
}

function redraw(element, title, values, write) {
  const now = values[values.length - 1][1], most = Math.max(...values.map(([, value]) => value));
  const end = values[values.length - 1][0];
  const place = ([at, value]) => `${(WIDTH * (1 - (end - at) / SECONDS)).toFixed(1)},${(HEIGHT - 2 - (most ? value / most : 0) * (HEIGHT - 6)).toFixed(1)}`;
  const curve = values.map(place).join(" L"), first = place([values[0][0], 0]).split(",")[0];
  const [area, line] = element.querySelectorAll("path");
  area.setAttribute("d", `M${first},${HEIGHT} L${curve} L${WIDTH},${HEIGHT} Z`);
  line.setAttribute("d", `M${curve}`);
  setText(element.querySelector("b"), write(now));
  setText(element.querySelector("small"), `at most ${write(most)} in ${length(end - values[0][0])}`);
  element.querySelector("svg").setAttribute("aria-label", `${title}: now ${write(now)}, at most ${write(most)}`);
}

const length = (seconds) => (seconds < 90 ? `${Math.round(seconds)} s` : `${Math.round(seconds / 60)} min`);

let last = null;

// One line for each thing that changed between two states, the newest first.
export function log(list, state) {
  const now = standing(state);
  const lines = last ? changes(last, now) : [["", `looking at ${state.registry}`]];
  last = now;
  for (const [style, text] of lines) {
    const line = make("li", "", make("time", "dim", new Date(state.at * 1000).toLocaleTimeString()), " ", make("span", style, text));
    list.prepend(line);
  }
  while (list.children.length > MOST_LINES) list.lastElementChild.remove();
}

function standing(state) {
  const ranks = state.engines.flatMap((engine) => engine.ranks);
  return {
    engines: new Map(state.engines.map((engine) => [engine.name, engine.ready ? "READY" : `${engine.registered} of ${counted(engine.expected, "rank")}`])),
    ranks: new Map(ranks.map((rank) => [rank.name, rank.answers ? "answers" : `no answer: ${words(rank.why)}`])),
    links: new Map(state.links.map((link) => [link.ends.join(" – "), link.state])),
    failed: new Map(state.failed.map((room) => [`${room.room} ${room.attempt} ${room.rank}`, room])),
    operations: new Map(state.operations.map((each) => [`${each.kind} of ${counted(each.pages, "page")} at ${each.rank}`, "runs"])),
    pulls: new Map(state.pulls.map((pull) => [`pull ${pull.way} ${pull.rank}, ${pull.peer}`, "runs"])),
  };
}

function* changes(was, is) {
  for (const [what, of] of [["engine", "engines"], ["rank", "ranks"], ["session", "links"]]) {
    for (const [name, state] of is[of]) {
      const earlier = was[of].get(name);
      if (earlier !== state) yield [/answer:|LOST|BROKEN|DEAD| of /.test(state) ? "bad" : "", `${what} ${name}: ${earlier ? `${earlier} → ` : "new, "}${state}`];
    }
    for (const name of was[of].keys()) if (!is[of].has(name)) yield ["dim", `${what} ${name}: gone`];
  }
  for (const of of ["operations", "pulls"]) {
    for (const name of is[of].keys()) if (!was[of].has(name)) yield ["", `${name}: began`];
    for (const name of was[of].keys()) if (!is[of].has(name)) yield ["", `${name}: ended`];
  }
  const fresh = [...is.failed].filter(([key]) => !was.failed.has(key));
  for (const [, room] of fresh.slice(0, 10)) yield ["bad", `room ${room.room} failed at ${room.rank}: ${room.reason}`];
}
