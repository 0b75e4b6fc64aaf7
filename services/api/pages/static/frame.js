// What every page shares: the address of the server, text, numbers, the navigation.
const TIMEOUT_MS = 3000;
const byId = (id) => document.getElementById(id);
// Pages are at /, /play, /dashboard and /dashboard/NAME[/ID], perhaps behind another server's path.
const ROOT = location.pathname.replace(/(dashboard(\/.*)?|play\/?)$/, "");
const [FOLDER, PAGE, ID = ""] = location.pathname.slice(ROOT.length).split("/").filter(Boolean);
const HERE = PAGE ? `${FOLDER}/${PAGE}` : FOLDER ?? "play";

for (const link of document.querySelectorAll("a[data-page]")) {
  link.setAttribute("href", ROOT + link.dataset.page);
  if (link.dataset.page === HERE) link.setAttribute("aria-current", "page");
}

// Text becomes a text node: no name, id or prompt is ever read as markup.
function make(tag, className = "", ...content) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...content);
  return made;
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;  // screen readers do not repeat unchanged text
}

const clock = (ms) => new Date(ms).toLocaleTimeString([], {hour12: false});
const whole = (number) => (Math.round(number) + 0).toLocaleString("en");  // + 0: no "-0" of a sum's rounding error
const counted = (number, noun) => `${whole(number)} ${noun}${Math.round(number) === 1 ? "" : "s"}`;
const natural = (a, b) => a.localeCompare(b, undefined, {numeric: true});

function seconds(value) {
  if (value === 0) return "0";
  if (value < 1) return `${(1000 * value).toFixed(value < 0.01 ? 1 : 0)} ms`;
  if (value < 100) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  if (value < 600) return `${Math.round(value)} s`;
  return value < 7200 ? `${Math.round(value / 60)} min` : `${Math.round(value / 3600)} h`;
}

function amount(value) {
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(1)} k`;
  return value < 10 && value % 1 && Math.abs(value) >= 0.005 ? value.toFixed(2) : whole(value);
}

// Tables whose columns do not fit show each row as a block of labelled values, so that no number is cut at an edge.
const neededPx = new WeakMap();  // width of a table before its rows became blocks
function fitTable(table, frame) {
  const labels = [...table.tHead.rows[0].cells].map((head) => head.textContent);
  for (const line of table.tBodies[0].rows) [...line.cells].forEach((cell, index) => cell.dataset.label = labels[index] ?? "");
  if (table.classList.contains("stacked")) table.classList.toggle("stacked", frame.clientWidth < neededPx.get(table));
  else if (frame.scrollWidth > frame.clientWidth) {
    neededPx.set(table, frame.scrollWidth);
    table.classList.add("stacked");
  }
}

for (const table of document.querySelectorAll("table.fits")) {
  const frame = table.closest(".scroll") ?? table, fit = () => fitTable(table, frame);
  new MutationObserver(fit).observe(table.tBodies[0], {childList: true});
  new ResizeObserver(fit).observe(frame);
}

async function getJson(address) {
  const reply = await ask(ROOT + address);
  const body = await reply.json();
  if (!reply.ok) throw new Error(body.error?.message ?? `the server answered ${reply.status}`);
  return body;
}

const reasonOf = (error) => error.name === "TimeoutError" ? `no answer within ${TIMEOUT_MS / 1000} s`
  : error instanceof TypeError ? "no connection" : error.message;

// Calls `work` every so many milliseconds, never twice at once and not while the tab is hidden; `tell` hears of every
// turn: null, or why it failed.
function repeat(work, everyMs, tell) {
  async function turn() {
    const beganAt = performance.now();
    if (!document.hidden) {
      try {
        await work();
        tell(null);
      } catch (error) {
        tell(reasonOf(error));
      }
    }
    setTimeout(turn, Math.max(0, everyMs - (performance.now() - beganAt)));
  }
  turn();
}

const problems = new Map();

// For `repeat`: shows in the page's banner that `what` cannot be read.
const inBanner = (what) => (problem) => {
  if (problem === null) problems.delete(what);
  else problems.set(what, `${what} cannot be read: ${problem}. Trying again.`);
  document.body.classList.toggle("stale", problems.size > 0);
  byId("banner").hidden = !problems.size;
  setText(byId("banner-text"), [...problems.values()].join(" "));
};

const SHOWN_MS = 3000;  // shortest time that the page shows a death
const lives = new Map();  // name of a component -> {process, restarts, downAt, diedAt}
const isDown = (row) => ["dead", "lost", "failed", "gone"].includes(row.state);

// Remembers which process each component is. A death is told by the next process: a component that did not answer and is
// back as the same process was only late.
function noteLives(actors) {
  const now = Date.now(), before = new Map(lives);
  lives.clear();
  for (const row of actors) {
    const known = before.get(row.name) ?? {process: "", restarts: 0, downAt: null, diedAt: -Infinity};
    const life = row.pid ? {process: `${row.node} ${row.pid}`, restarts: row.restarts} : {process: known.process, restarts: known.restarts};
    const replaced = known.process && (life.process !== known.process || life.restarts > known.restarts);
    lives.set(row.name, {...life, downAt: isDown(row) ? known.downAt ?? now : null, diedAt: replaced ? known.downAt ?? now : known.diedAt});
  }
}

// Whether another process replaced the component a moment ago: it may have died and come back between two polls.
const wasReplaced = (row) => !isDown(row) && Date.now() - (lives.get(row.name)?.diedAt ?? -Infinity) < SHOWN_MS;

// The state of all components in one word, on pages that do not show each of them.
function showHealth({actors}) {
  noteLives(actors);
  const down = actors.filter(isDown), replaced = actors.filter(wasReplaced);
  const away = actors.filter((row) => row.state !== "ready" && !isDown(row) && !replaced.includes(row));
  const pill = byId("health");
  pill.dataset.level = down.length || replaced.length ? "bad" : away.length ? "warn" : "ok";
  const names = (rows) => rows.map((row) => row.name).join(", ");
  setText(pill, down.length ? `Down: ${names(down)}` : replaced.length ? `Restarted: ${names(replaced)}` : away.length ? `Not ready: ${names(away)}` : actors.length === 1 ? "1 component ready" : `All ${actors.length} components ready`);
  pill.title = pill.textContent;  // the line may cut the text
}

const POLL_MS = 2000, PHASE_MS = 600, LEAST_WAIT_MS = 300;
const PART_TITLES = {status: "The state of components", requests: "The requests", placement: "The placements", series: "The history", replicas: "The history of replicas", components: "The history of components"};

// All pages ask at the same instants, so that the server draws up one answer for all of them.
function untilTurn() {
  const left = (((PHASE_MS - Date.now()) % POLL_MS) + POLL_MS) % POLL_MS;
  return left < LEAST_WAIT_MS ? left + POLL_MS : left;
}

// Asks again and again for the parts of /live that the page shows, and gives each to its function: {part: take}.
// `options`: {query: () => fields of the question, wants: (part) => whether it is asked for in this turn, tell: hears of
// every turn}. Returns a function that asks at once.
function follow(parts, options = {}) {
  follow.used = true;
  const takes = byId("health") ? {status: showHealth, ...parts} : parts;
  const tell = options.tell ?? inBanner("The server");
  let timer = null, number = 0;
  async function ask() {
    const names = Object.keys(takes).filter((name) => options.wants?.(name) ?? true);
    const asked = new URLSearchParams({parts: names.join(","), ...options.query?.()});
    const own = ++number, body = await getJson(`live?${asked}`);
    if (own !== number) return;  // a later question has been asked meanwhile
    for (const name of names) {
      const problem = body[name].error?.message ?? null;
      (options.tellPart?.(name) ?? inBanner(PART_TITLES[name]))(problem);
      if (problem === null) takes[name](body[name]);
    }
  }
  async function turn() {
    clearTimeout(timer);
    if (!document.hidden) {
      try {
        await ask();
        tell(null);
      } catch (error) {
        tell(reasonOf(error));
      }
    }
    clearTimeout(timer);
    timer = setTimeout(turn, untilTurn());
  }
  turn();
  return turn;
}

// Pages that ask for nothing else show at least the health.
if (byId("health")) addEventListener("load", () => follow.used || follow({}));
