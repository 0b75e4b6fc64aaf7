// Cards with a chart each, and the choice between the last minutes and the last day.
const percent = (value) => `${(100 * value).toFixed(0)} %`;
const MINUTE_TURNS = 8;  // points of minutes are no reason to ask every time

// The buttons "15 min" and "24 h"; `changed` is called after a change.
class RangeButtons {
  constructor(changed) {
    this.value = "second";
    this.turns = 0;
    for (const button of document.querySelectorAll("[data-range]")) {
      button.addEventListener("click", () => {
        this.value = button.dataset.range;
        for (const other of document.querySelectorAll("[data-range]")) other.setAttribute("aria-pressed", String(other === button));
        changed();
      });
    }
  }

  // Whether the history is to be asked for in this turn.
  due(history) {
    return this.value === "second" || !history.at.length || this.turns++ % MINUTE_TURNS === 0;
  }
}

// Charts of a table: one for each column, with a line for each row. `table`: () => its history now.
class LineGrid {
  constructor(host, table) {
    Object.assign(this, {host, table, cards: new Map()});
  }

  draw(specs) {
    const {at, lines} = this.table();
    const found = Object.entries(lines).map(([name, values]) => [...JSON.parse(name), values]);
    for (const spec of specs) {
      const own = found.filter(([, column]) => column === spec.column).sort((a, b) => natural(a[0], b[0])).map(([label, , values]) => ({label, values}));
      this.card(spec).draw(at, own);
    }
    for (const [column, card] of this.cards) card.node.hidden = !specs.some((spec) => spec.column === column) || card.empty;
  }

  card(spec) {
    if (!this.cards.has(spec.column)) {
      const card = new ChartCard(spec);
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
      const value = line.values[this.index ?? line.values.length - 1] ?? null;
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
