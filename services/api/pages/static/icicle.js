// The prefix tree as an icicle: a row for each depth, a node as wide as its part of the recent requests.
const ROW_PX = 30, STRIP_PX = 26, CHAR_PX = 7;
const SVG_SPACE = "http://www.w3.org/2000/svg";

function shape(tag, attributes, text) {
  const made = document.createElementNS(SVG_SPACE, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// [{node, from, share}] in depth-first order: where each node begins in its row and how wide it is, as parts of all.
function placed(prefixes) {
  const total = prefixes.filter((each) => each.depth === 0).reduce((sum, each) => sum + Math.max(each.num_recent, 0.2), 0);
  const next = [0];  // by depth: where the next node begins
  return prefixes.map((node) => {
    const share = Math.max(node.num_recent, 0.2) / total, from = next[node.depth] ?? 0;
    next[node.depth] = from + share;
    next[node.depth + 1] = from;
    next.length = node.depth + 2;
    return {node, from, share};
  });
}

function about(node) {
  const where = node.replicas.length ? `cached on ${node.replicas.join(", ")}` : "cached nowhere";
  const more = node.assigned.length ? `, may also go to ${node.assigned.join(", ")}` : "";
  return `Tokens ${whole(node.end_len - node.num_tokens)} to ${whole(node.end_len)} of prompts: ${counted(node.num_recent, "recent request")}, ${whole(node.num_in_flight)} in flight; ${where}${more}.`;
}

let drawnTree = "";

function drawIcicle(prefixes, names) {
  const host = byId("icicle"), width = host.clientWidth;
  const key = JSON.stringify([prefixes, names, width]);
  if (!prefixes.length || !width || key === drawnTree) return;
  drawnTree = key;
  const focused = host.contains(document.activeElement) ? [...host.querySelectorAll("g")].indexOf(document.activeElement) : -1;
  const tint = (name) => `var(${COLOURS[names.indexOf(name) % COLOURS.length]})`;
  const depth = 1 + Math.max(...prefixes.map((each) => each.depth));
  const drawing = shape("svg", {class: "icicle", viewBox: `0 0 ${width} ${ROW_PX * depth}`, height: ROW_PX * depth, role: "group", "aria-label": `Prefix tree of ${counted(prefixes.length, "node")}`});
  for (const {node, from, share} of placed(prefixes)) drawing.append(nodeShape(node, width * from, width * share, tint));
  host.replaceChildren(drawing);
  if (focused >= 0) host.querySelectorAll("g")[focused]?.focus();
  byId("tree-legend").replaceChildren(...names.filter((name) => prefixes.some((each) => each.replicas.includes(name))).map((name) => {
    const mark = make("i");
    mark.style.background = tint(name);
    return make("span", "", mark, `replica ${name}`);
  }));
}

function nodeShape(node, x, width, tint) {
  const y = ROW_PX * node.depth, group = shape("g", {tabindex: 0, role: "img", "aria-label": about(node)});
  const holders = node.replicas.length ? node.replicas : [null];
  holders.forEach((name, index) => {
    const high = STRIP_PX / holders.length;
    const strip = shape("rect", {x, y: y + index * high, width: Math.max(width - 1, 1), height: high, class: name === null ? "none" : "held"});
    if (name !== null) strip.style.fill = `color-mix(in srgb, ${tint(name)} 45%, var(--surface))`;
    group.append(strip);
  });
  const label = counted(node.num_tokens, "token"), short = amount(node.num_tokens);
  const fits = [label, short].find((text) => text.length * CHAR_PX + 10 < width);
  if (fits) group.append(shape("text", {x: x + 5, y: y + 17}, fits));
  group.append(shape("rect", {x, y, width: Math.max(width - 1, 1), height: STRIP_PX, class: "frame"}), shape("title", {}, about(node)));
  for (const event of ["focus", "mouseenter"]) group.addEventListener(event, () => setText(byId("node"), about(node)));
  return group;
}
