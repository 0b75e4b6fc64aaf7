// A table of things that have a page each: sorted by its heads, searched by words, narrowed by a choice of each kind.

// `spec`: {columns: [{name, label, about, number, of: row -> what to sort by, show: row -> text or node}], key: row -> its
// id (a column with `has` is left out where no row has it), link: row -> address or "", sort: name of a column, descending, search: row -> text that words are looked for in,
// choices: {name: {label, of: row -> value}}, most: rows shown}.
class RowTable {
  constructor(table, spec) {
    Object.assign(this, {table, spec, rows: [], words: [], chosen: {}, descending: spec.descending ?? false});
    this.sortBy = spec.columns.find((column) => column.name === spec.sort);
    this.drawHeads();
  }

  // A field for words and a list for each choice; what they are set to is in the address, so that it can be sent on.
  controls() {
    const asked = new URLSearchParams(location.search), {choices = {}} = this.spec;
    const field = make("input");
    Object.assign(field, {type: "search", placeholder: this.spec.searchLabel, value: asked.get("q") ?? "", spellcheck: false});
    field.setAttribute("aria-label", this.spec.searchLabel);
    field.dataset.testid = "search";
    field.addEventListener("input", () => this.choose("q", field.value));
    const lists = Object.entries(choices).map(([name, {label}]) => {
      const list = make("select");
      list.dataset.testid = `choose-${name}`;
      list.dataset.choice = name;
      list.setAttribute("aria-label", label);
      list.addEventListener("change", () => this.choose(name, list.value));
      return list;
    });
    this.lists = lists;
    for (const name of ["q", ...Object.keys(choices)]) this.choose(name, asked.get(name) ?? "");
    return [field, ...lists];
  }

  choose(name, value) {
    if (name === "q") this.words = value.toLowerCase().split(/\s+/).filter(Boolean);
    this.chosen[name] = value;
    const asked = new URLSearchParams(Object.entries(this.chosen).filter(([, each]) => each));
    history.replaceState(null, "", `${location.pathname}${asked.size ? `?${asked}` : ""}${location.hash}`);
    this.draw();
  }

  // Shows these rows from now on.
  take(rows) {
    const before = this.columns.length;
    this.rows = rows;
    if (this.columns.length !== before) this.drawHeads();
    for (const list of this.lists ?? []) this.fill(list);
    this.draw();
  }

  fill(list) {
    const {label, of} = this.spec.choices[list.dataset.choice], asked = this.chosen[list.dataset.choice];
    const values = [...new Set([...this.rows.map(of), asked].filter(Boolean))].sort(natural);
    if (values.join("\n") === list.dataset.values) return;
    list.dataset.values = values.join("\n");
    list.replaceChildren(new Option(label, ""), ...values.map((value) => new Option(value, value)));
    list.value = asked;
  }

  get shown() {
    const {search, choices = {}} = this.spec;
    return this.rows.filter((row) => this.words.every((word) => search(row).toLowerCase().includes(word))
      && Object.entries(choices).every(([name, {of}]) => !this.chosen[name] || of(row) === this.chosen[name]));
  }

  get columns() {
    return this.spec.columns.filter((column) => !column.has || this.rows.some(column.has));
  }

  drawHeads() {
    this.table.tHead.rows[0].replaceChildren(...this.columns.map((column) => {
      const button = make("button", "", column.label);
      button.type = "button";
      button.title = column.about;
      button.addEventListener("click", () => {
        this.descending = this.sortBy === column ? !this.descending : false;
        this.sortBy = column;
        this.drawHeads();
        this.draw();
        this.table.querySelector(`[data-column="${column.name}"] button`).focus();
      });
      const head = make("th", column.number ? "number" : "", button);
      head.dataset.column = column.name;
      if (column === this.sortBy) head.setAttribute("aria-sort", this.descending ? "descending" : "ascending");
      return head;
    }));
  }

  compare(a, b) {
    const [left, right] = [this.sortBy.of(a), this.sortBy.of(b)];
    const order = typeof left === "string" ? natural(left, right) : left === right ? 0 : left - right;
    return (this.descending ? -order : order) || natural(this.spec.key(a), this.spec.key(b));
  }

  // A table is drawn again with every answer: the keyboard's place in it is kept.
  draw() {
    const {columns, spec: {key, link, most = 300}} = this, body = this.table.tBodies[0];
    const focused = this.table.contains(document.activeElement) ? document.activeElement.closest("tbody tr")?.dataset.id : null;
    body.replaceChildren(...this.shown.sort((a, b) => this.compare(a, b)).slice(0, most).map((row) => {
      const cells = columns.map((column) => make("td", column.number ? "number" : "", column.show(row)));
      const line = make("tr", "", ...cells), address = link(row);
      line.dataset.id = key(row);
      if (address) {
        const first = make("a", "", ...cells[0].childNodes);
        first.href = address;
        cells[0].replaceChildren(first);
        line.addEventListener("click", (event) => {
          if (!event.target.closest("a") && !String(getSelection())) location.assign(address);
        });
        line.classList.add("leads");
      }
      return line;
    }));
    this.spec.drawn?.(body.rows.length, this.rows.length);
    if (focused) [...body.rows].find((line) => line.dataset.id === focused)?.querySelector("a")?.focus();
  }
}
