// What builds and changes the page's elements, and how it writes sizes and times. Text is only ever set as text.

export function make(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

// Changes only what differs: a selection, a focus and a reader's place stay.
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function setButton(place, text, [label, act]) {
  const key = `${text} ${label}`;
  if (place.firstElementChild?.dataset.key === key) return;
  const made = button(text, label, act);
  made.dataset.key = key;
  place.replaceChildren(made);
}

// A cell is a text, or [text, style], or [text, style, [what a reader hears, what a click does]].
export function fillRows(body, rows, ifNone) {
  const columns = body.parentElement.tHead.rows[0].cells;
  const cells = rows.length ? rows : [[ifNone, ...Array(columns.length - 1).fill("")]];
  while (body.rows.length > cells.length) body.deleteRow(-1);
  cells.forEach((row, i) => {
    const line = body.rows[i] || body.insertRow();
    row.forEach((cell, j) => {
      const [text, style, act] = Array.isArray(cell) ? cell : [cell, ""];
      const place = line.cells[j] || line.insertCell();
      if (act) setButton(place, String(text), act);
      else setText(place, String(text));
      const className = `${columns[j].className} ${rows.length ? style : "dim"}`.trim();
      if (place.className !== className) place.className = className;
    });
  });
}

// Rows of [name, value, of how much (0: nobody knows), text, what a reader hears of the bar]; ``tag``: meter or progress.
export function fillBars(element, tag, rows, ifNone) {
  if (!rows.length) return show(element, ifNone, () => [make("p", "dim", ifNone)]);
  if (element.dataset.key) { element.replaceChildren(); delete element.dataset.key; }
  while (element.children.length > rows.length) element.lastElementChild.remove();
  rows.forEach(([name, value, most, text, said], i) => {
    if (!element.children[i]) element.append(make("div", "fill", make("span"), make(tag), make("span", "n")));
    const [label, bar, share] = element.children[i].children;
    setText(label, name);
    setText(share, text);
    bar.hidden = !most;
    bar.max = most || 1;
    bar.value = value;
    if (bar.ariaLabel !== `${name}, ${said}`) bar.ariaLabel = `${name}, ${said}`;
  });
}

// Of parts that are not text: built anew only when what they show has changed.
export function show(element, value, build) {
  const key = JSON.stringify(value);
  if (element.dataset.key === key) return;
  element.dataset.key = key;
  element.replaceChildren(...build(value));
}

export const words = (state) => state.toLowerCase().replaceAll("_", " ");

export function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  while (bytes >= 1024 && unit < units.length - 1) { bytes /= 1024; unit += 1; }
  return `${bytes < 10 && unit ? bytes.toFixed(1) : Math.round(bytes)} ${units[unit]}`;
}

// Of 10^9 bytes a second.
export const counted = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;
export const rate = (speed) => (!speed ? "" : speed < 0.1 ? `${(speed * 1000).toFixed(speed < 0.01 ? 1 : 0)} MB/s` : `${speed.toFixed(2)} GB/s`);

export function took(seconds) {
  if (!seconds) return "";
  if (seconds < 1) return `${(seconds * 1000).toFixed(seconds < 0.01 ? 2 : 1)} ms`;
  return seconds < 120 ? `${seconds.toFixed(1)} s` : `${Math.round(seconds / 60)} min`;
}

// A button that looks like the text it shows.
export function button(text, label, act) {
  const made = make("button", "as-text", text);
  made.type = "button";
  made.setAttribute("aria-label", label);
  made.addEventListener("click", act);
  return made;
}

export function svg(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}
