// Ranks as boxes, prefill left and decode right; sessions as curves between them.

const NAMESPACE = "http://www.w3.org/2000/svg";
const ROW = 30, HEAD = 24, GAP = 12, MOST_LABELS = 12;

export function svg(tag, attributes, ...children) {
  const made = document.createElementNS(NAMESPACE, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const cut = (text, most) => (text.length > most ? `${text.slice(0, Math.max(1, most - 1))}…` : text);

// Whatever decides how the graph looks: it is drawn anew only when this has changed.
export function signature(state, width) {
  const ranks = state.engines.map((e) => [e.name, e.ready, e.ranks.map((r) => [r.name, r.answers, inFlight(r)])]);
  return JSON.stringify([width, ranks, state.links.map((l) => [l.ends, l.state, l.rooms])]);
}

export function inFlight(rank) {
  const ended = new Set(["SUCCESS", "FAILED"]);
  return Object.entries(rank.rooms || {}).reduce((sum, [state, n]) => sum + (ended.has(state) ? 0 : n), 0);
}

export function draw(root, state, width) {
  const boxWidth = Math.min(250, Math.floor(width * 0.37));
  const places = new Map();
  const nodes = [];
  const heights = { left: 4, right: 4 };
  for (const engine of state.engines) {
    const side = engine.role === "decode" ? "right" : "left";
    const x = side === "right" ? width - boxWidth - 2 : 2;
    const ready = engine.ready ? "" : ` ${engine.registered}/${engine.expected}`;
    const title = `${engine.name}${ready} (${engine.role || "?"})`;
    nodes.push(svg("text", { class: "engine", x, y: heights[side] + 15 }, cut(title, boxWidth / 7.2)));
    heights[side] += HEAD;
    for (const rank of engine.ranks) {
      places.set(rank.name, { x, y: heights[side] + ROW / 2 - 2, side });
      nodes.push(node(rank, x, heights[side], boxWidth));
      heights[side] += ROW;
    }
    heights[side] += GAP;
  }
  const height = Math.max(heights.left, heights.right, 40);
  const drawn = state.links.filter((link) => link.ends.every((end) => places.has(end)));
  const edges = drawn.map((link) => edge(link, ...link.ends.map((end) => places.get(end)), boxWidth));
  const labels = drawn.length <= MOST_LABELS ? drawn.map((link) => label(link, ...link.ends.map((end) => places.get(end)), boxWidth)) : [];
  root.setAttribute("viewBox", `0 0 ${width} ${height}`);
  root.setAttribute("height", height);
  root.replaceChildren(...edges, ...nodes, ...labels);
  return state.links.length - drawn.length;
}

function node(rank, x, y, width) {
  const said = rank.answers ? `${inFlight(rank)} rooms in flight` : `no answer: ${rank.why}`;
  const count = rank.answers ? String(inFlight(rank)) : "✕";
  return svg("g", { class: rank.answers ? "node" : "node silent" },
    svg("title", {}, `${rank.name}, ${rank.address}: ${said}`),
    svg("rect", { x, y, width, height: ROW - 6, rx: 5 }),
    svg("text", { x: x + 8, y: y + 16.5 }, cut(rank.label || rank.name, (width - 40) / 6.6)),
    svg("text", { class: "count", x: x + width - 8, y: y + 16.5 }, count));
}

function ends(from, to, width) {
  const [a, b] = from.x <= to.x ? [from, to] : [to, from];
  const start = a.x + width, end = a.side === b.side ? b.x + width : b.x;
  return { x1: start, y1: a.y, x2: end, y2: b.y, bend: a.side === b.side ? 40 : (end - start) / 2, same: a.side === b.side };
}

function edge(link, from, to, width) {
  const { x1, y1, x2, y2, bend, same } = ends(from, to, width);
  const inner = same ? x2 + bend : x2 - bend;
  return svg("path", {
    class: link.state === "OPEN" ? "session" : "session not-open",
    d: `M${x1},${y1} C${x1 + bend},${y1} ${inner},${y2} ${x2},${y2}`,
    "stroke-width": link.state === "OPEN" ? 1.5 + Math.min(4, Math.log2(1 + link.rooms)) : 2,
  }, svg("title", {}, `${link.ends.join(" – ")}: ${link.state}, ${link.rooms} rooms, ${link.pending} to be told`));
}

function label(link, from, to, width) {
  const { x1, y1, x2, y2, same } = ends(from, to, width);
  const words = link.state === "OPEN" ? (link.rooms ? `${link.rooms}` : "") : link.state.toLowerCase();
  return svg("text", { class: "session-label", x: (x1 + x2) / 2 + (same ? 30 : 0), y: (y1 + y2) / 2 + 4 }, words);
}
