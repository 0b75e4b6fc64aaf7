// The history of the service: asked for in full once and then only for what is new.
const RANGES = {second: {span_s: 900, points: 900}, minute: {span_s: 86400, points: 1440}};

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
    const most = RANGES[this.step].points;
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
