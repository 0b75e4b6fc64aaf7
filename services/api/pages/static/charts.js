// Line charts over time, drawn by uPlot in the colours of the page.
const COLOURS = ["--line-1", "--line-2", "--line-3", "--line-4", "--line-5", "--line-6"];
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const darkness = matchMedia("(prefers-color-scheme: dark)");
const MINUTES_S = [60, 120, 300, 600, 1800, 3600, 7200, 14400, 28800];  // between the labels of a time axis
const WHOLES = [1, 2, 5].flatMap((step) => Array.from({length: 9}, (_, power) => step * 10 ** power)).sort((a, b) => a - b);
const charts = [];
darkness.addEventListener("change", () => charts.forEach((chart) => chart.rebuild()));

const THIN = 60;  // fewer values than this are drawn as points, too

// The points to draw: all where they are few, else those without a neighbour, which no line goes through.
function shownPoints(plot, series, allShown) {
  const values = plot.data[series], there = [...values.keys()].filter((at) => values[at] != null);
  if (allShown) return null;
  return there.length < THIN ? there : there.filter((at) => values[at - 1] == null && values[at + 1] == null);
}

// One chart in `host`. `spec`: {lines: [{label, dash}], show: value -> text, top: least upper end of the y axis,
// xs: x values -> text, span: seconds that the x axis shows}.
class Chart {
  constructor(host, spec) {
    Object.assign(this, {host, spec, data: [[], ...spec.lines.map(() => [])], plot: null});
    this.height = spec.height ?? 150;
    new ResizeObserver(() => this.resize()).observe(host);
    charts.push(this);
  }

  set(data) {
    this.data = data;
    if (this.plot) this.plot.setData(data);
    else this.rebuild();
  }

  close() {
    this.plot?.destroy();
    charts.splice(charts.indexOf(this), 1);
  }

  resize() {
    const width = this.host.clientWidth;
    if (this.plot && width > 0 && width !== this.plot.width) this.plot.setSize({width, height: this.height});
  }

  rebuild() {
    this.plot?.destroy();
    const {spec} = this;
    const axis = {stroke: colour("--muted"), grid: {stroke: colour("--line"), width: 1}, ticks: {show: false}, font: "11px system-ui"};
    this.plot = new uPlot({
      width: Math.max(120, this.host.clientWidth), height: this.height,
      legend: {show: false}, cursor: {sync: spec.sync ? {key: spec.sync} : undefined, drag: {x: false, y: false}, points: {size: 5}},
      scales: {x: {time: !spec.xs, range: spec.span ? (u, low, high) => [Math.max(high - spec.span(), Math.min(low, high - spec.span() / 15)), high] : undefined},
        y: {range: (u, low, high) => [spec.low ? Math.min(0, 1.08 * (low ?? 0)) : 0, Math.max(spec.top ?? 0, 1.08 * (high ?? 0)) || 1]}},
      axes: [{...axis, size: 26, incrs: spec.xs ? WHOLES : MINUTES_S, values: spec.xs ? (u, all) => all.map(spec.xs) : (u, all) => all.map((at) => new Date(1000 * at).toLocaleTimeString([], {hour: "2-digit", minute: "2-digit", hour12: false}))},
        {...axis, size: 58, space: 32, values: (u, all) => all.map(spec.show)}],
      series: [{}, ...spec.lines.map((line, index) => ({
        label: line.label, stroke: colour(COLOURS[index % COLOURS.length]), width: 1.6, dash: line.dash, spanGaps: false,
        paths: line.dots ? () => null : undefined, points: {size: line.dots ? 6 : 5, fill: colour(COLOURS[index % COLOURS.length]), ...(line.dots ? {show: true} : {filter: shownPoints})},
      }))],
      hooks: {setCursor: [(plot) => spec.hover?.(plot.cursor.idx)]},
    }, this.data, this.host);
  }
}

// The history of the service: asked for in full once and then only for what is new.
const POINTS = {second: 900, minute: 1440};
const RANGES = [["5 min", "second", 300], ["15 min", "second", 900], ["3 h", "minute", 10800], ["24 h", "minute", 86400]];
const MINUTE_TURNS = 8;

// Points with lines by name; `groups` names the objects in an answer that hold lines.
class History {
  constructor(step, groups = ["columns", "tenants"]) {
    this.step = step;
    this.groups = groups;
    this.clear();
  }

  clear() {
    this.at = [];
    for (const group of this.groups) this[group] = {};
  }

  // The question for what is new.
  get query() {
    return {step: this.step, after: this.at.length ? this.at[this.at.length - 1] : 0};
  }

  take(more) {
    const fresh = more.at.findIndex((at) => !this.at.length || at > this.at[this.at.length - 1]);
    if (fresh < 0) return;
    const most = POINTS[this.step];
    for (const group of this.groups) {
      const names = new Set([...Object.keys(this[group]), ...Object.keys(more[group])]);
      for (const name of names) {
        const before = this[group][name] ?? this.at.map(() => null);
        const added = more[group][name]?.slice(fresh) ?? more.at.slice(fresh).map(() => null);
        this[group][name] = [...before, ...added].slice(-most);
      }
    }
    this.at = [...this.at, ...more.at.slice(fresh)].slice(-most);
  }
}

// An answer with rows that hold lines, as one with lines named "row, column".
const flat = ({at, rows}) => ({at, lines: Object.fromEntries(Object.entries(rows).flatMap(([row, lines]) => Object.entries(lines).map(([column, values]) => [JSON.stringify([row, column]), values])))});

const percent = (value) => `${(100 * value).toFixed(0)} %`;

// The buttons that choose how far back charts and figures go; `changed` is called after a change.
class RangeButtons {
  constructor(changed) {
    this.turns = 0;
    this.choose(1);
    byId("ranges").append(...RANGES.map(([label], index) => {
      const button = make("button", "", label);
      button.type = "button";
      button.dataset.testid = `range-${RANGES[index][2]}`;
      button.setAttribute("aria-pressed", String(index === 1));
      button.addEventListener("click", () => {
        this.choose(index);
        [...byId("ranges").children].forEach((other, at) => other.setAttribute("aria-pressed", String(at === index)));
        changed();
      });
      return button;
    }));
  }

  choose(index) {
    [this.label, this.step, this.span_s] = RANGES[index];
  }

  // Whether the history is to be asked for in this turn: points of minutes are no reason to ask every time.
  due(history) {
    return this.step === "second" || !history.at.length || this.turns++ % MINUTE_TURNS === 0;
  }
}

// Charts of a table: one for each column, with a line for each row. `table`: () => its history now; `span`: () => seconds;
// `named`: row -> its label.
class LineGrid {
  constructor(host, table, span, named = (row) => row) {
    Object.assign(this, {host, table, span, named, cards: new Map()});
  }

  draw(specs) {
    const {at, lines} = this.table();
    const found = Object.entries(lines).map(([name, values]) => [...JSON.parse(name), values]);
    for (const spec of specs) {
      const own = found.filter(([, column]) => column === spec.column).sort((a, b) => natural(a[0], b[0])).map(([row, , values]) => ({label: this.named(row), values}));
      this.card(spec).draw(at, own);
    }
    for (const [column, card] of this.cards) card.node.hidden = !specs.some((spec) => spec.column === column) || card.empty;
  }

  card(spec) {
    if (!this.cards.has(spec.column)) {
      const card = new ChartCard({...spec, span: this.span});
      this.cards.set(spec.column, card);
      this.host.append(card.node);
    }
    return this.cards.get(spec.column);
  }
}

// A chart with its title, and its lines with their latest values or those under the pointer.
class ChartCard {
  constructor(spec) {
    this.spec = spec;
    this.plot = make("div", "plot");
    this.values = make("div", "values");
    const head = make("h3", "", spec.title);
    head.title = spec.about;
    this.node = make("section", "chart", head, this.values, this.plot);
    this.node.dataset.testid = `chart-${spec.id ?? spec.column}`;
    this.node.tabIndex = 0;
    this.names = "";
    this.lines = [];
  }

  get empty() {
    return !this.lines.length;
  }

  draw(at, lines) {
    this.lines = lines;
    if (!lines.length) {
      if (this.spec.none) setText(this.values, this.spec.none);
      return;
    }
    if (!this.values.children.length) this.values.textContent = "";
    const names = lines.map((line) => line.label).join("\n");
    if (names !== this.names) {
      this.plot.replaceChildren();
      this.chart?.close();
      this.chart = new Chart(this.plot, {lines, show: this.spec.show, top: this.spec.top, low: this.spec.low, sync: "cards", span: this.spec.span, hover: (index) => {
        this.index = index;
        this.showValues();
      }});
      this.names = names;
    }
    this.chart.set([at, ...lines.map((line) => line.values)]);
    this.showValues();
  }

  showValues() {
    const pairs = this.lines.map((line) => {
      const value = this.index === undefined || this.index === null ? line.values.findLast((each) => each !== null) ?? null : line.values[this.index] ?? null;
      return [line.label, value === null ? "–" : this.spec.show(value)];
    });
    showPairs(this.values, pairs);
    this.node.setAttribute("aria-label", `${this.spec.title}: ${pairs.map((pair) => pair.join(" ")).join(", ")}`);
  }
}

// Names with the colours of their lines, and numbers.
function showPairs(host, pairs) {
  while (host.children.length > pairs.length) host.lastElementChild.remove();
  pairs.forEach(([label, text], at) => {
    if (!host.children[at]) host.append(make("span", `tag tag-${at % COLOURS.length + 1}`, make("i"), make("span"), make("b")));
    const [, name, number] = host.children[at].children;
    setText(name, label);
    setText(number, text);
  });
}
