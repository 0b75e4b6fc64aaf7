// The history of the service: asked for in full once and then only for what is new.
const RANGES = {second: {span_s: 900, points: 900, everyMs: 2000}, minute: {span_s: 86400, points: 1440, everyMs: 15000}};

class History {
  constructor(step) {
    this.step = step;
    this.at = [];
    this.columns = {};
    this.tenants = {};
  }

  async update() {
    const after = this.at.length ? this.at[this.at.length - 1] : 0;
    const more = await getJson(`live/series?step=${this.step}&after=${after}`);
    if (!more.at.length) return;
    for (const kind of ["columns", "tenants"]) {
      for (const [name, values] of Object.entries(more[kind])) {
        const before = this[kind][name] ?? this.at.map(() => null);
        this[kind][name] = [...before, ...values].slice(-RANGES[this.step].points);
      }
    }
    this.at = [...this.at, ...more.at].slice(-RANGES[this.step].points);
  }
}
