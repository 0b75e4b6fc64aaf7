// Line charts over time, drawn by uPlot in the colours of the page.
const COLOURS = ["--line-1", "--line-2", "--line-3", "--line-4", "--line-5", "--line-6"];
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const darkness = matchMedia("(prefers-color-scheme: dark)");
const MINUTES_S = [60, 120, 300, 600, 1800, 3600, 7200, 14400, 28800];  // between the labels of a time axis
const WHOLES = [1, 2, 5].flatMap((step) => Array.from({length: 9}, (_, power) => step * 10 ** power)).sort((a, b) => a - b);
const charts = [];
darkness.addEventListener("change", () => charts.forEach((chart) => chart.rebuild()));

// Points without a neighbour, which no line goes through; null where all points are drawn anyway.
function lonePoints(plot, series, allShown) {
  const values = plot.data[series];
  return allShown ? null : [...values.keys()].filter((at) => values[at] != null && values[at - 1] == null && values[at + 1] == null);
}

// One chart in `host`. `spec`: {lines: [{label, dash}], show: value -> text, top: least upper end of the y axis,
// xs: x values -> text, span: seconds that the x axis shows}.
class Chart {
  constructor(host, spec) {
    Object.assign(this, {host, spec, data: [[], ...spec.lines.map(() => [])], plot: null});
    this.height = spec.height ?? 132;
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
        paths: line.dots ? () => null : undefined, points: {size: line.dots ? 6 : 4, fill: colour(COLOURS[index % COLOURS.length]), ...(line.dots ? {show: true} : {filter: lonePoints})},
      }))],
      hooks: {setCursor: [(plot) => spec.hover?.(plot.cursor.idx)]},
    }, this.data, this.host);
  }
}
