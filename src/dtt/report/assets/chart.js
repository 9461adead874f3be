// A chart of lines over one axis: uPlot draws the axes, and this file the lines with their bands.

const HEIGHT = { wide: 320, normal: 230, small: 190 };
const MOVES = ["mousemove", "mouseleave"];
const KEYS = "Arrow keys move the cursor, + and - zoom, Escape shows everything.";

/** Read a CSS variable, as a canvas needs it. */
function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

const resolved = (color) => (color.startsWith("var(") ? css(color.slice(4, -1)) : color);

/**
 * A chart of lines, each { label, color, dash, x, mean, min, max, error, points }. `x` and the
 * others are arrays of one length; `error` is half the height of an error bar; `points` marks
 * every point. uPlot draws axes, cursor and selection; `draw` draws the lines, because uPlot would
 * copy all lines to the positions of all: 100 runs over time have 20,000 positions, each its own.
 */
class Chart {
  /** `spec` is { title, unit, format, size, lines(), x: view, ticks, marks() }. */
  constructor(spec) {
    Object.assign(this, { format: num, size: "normal", marks: () => [], ticks: null }, spec);
    this.readout = el("div", { class: "readout" });
    this.host = el("div", {
      class: "plot",
      tabindex: 0,
      role: "group",
      "aria-label": `${this.title}. ${KEYS}`,
      onkeydown: (event) => this.key(event),
      // Screen readers speak the values of the chart that has the focus, not of all at once.
      onfocus: () => this.readout.setAttribute("aria-live", "polite"),
      onblur: () => this.readout.removeAttribute("aria-live"),
    });
    this.values = el(
      "details",
      { class: "values", ontoggle: () => this.listValues() },
      el("summary", null, "Values"),
    );
    const notes = [this.unit, this.note].filter(Boolean);
    this.figure = el(
      "figure",
      { class: `chart ${this.size}` },
      el(
        "figcaption",
        null,
        el("h3", null, this.title),
        notes.map((note) => el("span", { class: "unit" }, note)),
      ),
      this.readout,
      this.host,
      this.values,
    );
  }

  /** Take and draw the current lines. */
  update() {
    this.drawn = this.lines().filter((line) => line.x.length);
    this.listValues();
    this.plot ??= this.build();
    const [left, right] = this.x.range();
    const [low, high] = this.yRange(left, right);
    this.plot.batch(() => {
      this.plot.setScale("x", { min: left, max: right });
      this.plot.setScale("y", { min: low, max: high });
    });
    this.plot.redraw(false);
    this.showAt(this.pointed());
  }

  /** Create the plot, whose place in the page has a width by now. */
  build() {
    // Functions, because the colors change with the theme.
    const line = { stroke: () => css("--line"), width: 1 };
    const axis = (size, space, values) => ({
      stroke: () => css("--muted"),
      font: `12px ${css("--sans")}`,
      grid: line,
      ticks: { ...line, size: 4 },
      size,
      space,
      values: (u, at) => at.map((value) => (value === null ? null : values(value))),
    });
    const below = axis(34, 70, (value) => this.tick(value));
    if (this.ticks) below.splits = () => this.ticks.map((_, i) => i);
    const range = (u, low, high) => [low, high]; // uPlot would widen it to round numbers
    return new uPlot(
      {
        ...this.room(),
        legend: { show: false },
        padding: [10, 22, 0, 0],
        cursor: {
          y: false,
          points: { show: false },
          drag: { x: true, y: false, setScale: false },
          // Of the events of one chart, the others follow the cursor alone: a zoom reaches them
          // through the view.
          sync: { key: this.x.cursor, filters: { pub: (event) => MOVES.includes(event) } },
          bind: { dblclick: () => () => this.x.zoom(null) },
        },
        scales: {
          x: { time: false, auto: false, range, distr: this.x.log ? 3 : 1 },
          y: { auto: false, range },
        },
        series: [{}, { stroke: "black" }], // without a series, uPlot draws no axis of y
        axes: [below, axis(62, 32, this.format)],
        hooks: {
          draw: [(u) => this.draw(u)],
          setCursor: [() => this.showAt(this.pointed())],
          setSelect: [(u) => this.select(u)],
        },
      },
      [
        [0, 1],
        [null, null],
      ],
      this.host,
    );
  }

  room() {
    return { width: Math.max(200, this.host.clientWidth), height: HEIGHT[this.size] };
  }

  tick(value) {
    return this.ticks ? (this.ticks[value] ?? null) : this.x.format(value);
  }

  /** The range of all values in view. */
  yRange(left, right) {
    let [low, high] = [Infinity, -Infinity];
    for (const line of this.drawn) {
      const [first, last] = [Math.max(0, lastUpTo(line.x, left)), lastUpTo(line.x, right)];
      for (let k = first; k <= last; k += 1) {
        const error = line.error?.[k] ?? 0;
        low = Math.min(low, (line.min ?? line.mean)[k] - error);
        high = Math.max(high, (line.max ?? line.mean)[k] + error);
      }
    }
    if (low > high) return [0, 1];
    const margin = 0.06 * (high - low) || 0.05 * Math.abs(high) || 1;
    const floor = this.fromZero || (low >= 0 && low < margin) ? Math.min(0, low) : low - margin;
    return [floor, high + margin];
  }

  draw(u) {
    const { ctx, bbox } = u;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    ctx.lineJoin = "round";
    for (const { at, color } of this.marks()) {
      const x = u.valToPos(at, "x", true);
      const ends = [bbox.top, bbox.top + bbox.height];
      stroke(ctx, pathThrough([x, x], ends), { color: css(color), dash: [3, 3] });
    }
    for (const line of this.drawn) this.drawLine(u, line);
    ctx.restore();
  }

  drawLine(u, line) {
    const { ctx } = u;
    const color = resolved(line.color);
    const xs = line.x.map((value) => u.valToPos(value, "x", true));
    const ys = (values) => values.map((value) => u.valToPos(value, "y", true));
    const mean = ys(line.mean);
    ctx.fillStyle = color;
    if (line.max) {
      const [top, bottom] = [ys(line.max), ys(line.min)];
      const band = pathThrough([...xs, ...[...xs].reverse()], [...top, ...bottom.reverse()]);
      ctx.globalAlpha = 0.28;
      ctx.fill(band);
      // A spike of one bucket is narrower than a pixel: only its outline is visible.
      stroke(ctx, band, { color, alpha: 0.5 });
    }
    const thick = { color, width: line.width ?? 1.75, dash: line.dash };
    if (line.smooth) stroke(ctx, pathThrough(xs, mean), { color, alpha: 0.4 });
    stroke(ctx, pathThrough(xs, line.smooth ? ys(line.smooth) : mean), thick);
    line.error?.forEach((error, k) => {
      const ends = ys([line.mean[k] - error, line.mean[k] + error]);
      if (error) stroke(ctx, pathThrough([xs[k], xs[k]], ends), { color, width: 1.25 });
    });
    if (line.points || xs.length === 1) {
      xs.forEach((x, k) => dot(ctx, x, mean[k], 3.2 * devicePixelRatio));
    }
  }

  select(u) {
    const { left, width } = u.select;
    if (width < 4) return;
    const range = [u.posToVal(left, "x"), u.posToVal(left + width, "x")];
    u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.x.zoom(range);
  }

  /** Return the position of the cursor on the axis of x; null if it is outside. */
  pointed() {
    const left = this.plot?.cursor.left ?? -1;
    return left < 0 ? null : this.plot.posToVal(left, "x");
  }

  /** Show the values at a position; null shows the last ones. */
  showAt(position) {
    // Without a cursor, the bar of controls names the runs.
    const shown = this.quiet && position === null ? [] : this.drawn;
    const [, right] = this.x.range();
    this.readout.replaceChildren(
      ...shown.map((line) => {
        const k =
          position === null ? Math.max(0, lastUpTo(line.x, right)) : nearest(line.x, position);
        const band = line.max?.[k] > line.min?.[k];
        const range = band ? ` (${this.format(line.min[k])} to ${this.format(line.max[k])})` : "";
        return el(
          "span",
          null,
          swatch(line.color, line.dash),
          line.label && el("span", null, line.label),
          el("b", null, this.format(line.mean[k])),
          line.error?.[k] ? ` ± ${this.format(line.error[k])}` : range,
        );
      }),
    );
  }

  /** Move the cursor of all charts, or zoom around it, in pixels of this one. */
  key(event) {
    const { plot } = this;
    const width = plot.over.clientWidth;
    const step = width / (event.shiftKey ? 10 : 100);
    const at = plot.cursor.left < 0 ? width : plot.cursor.left;
    const point = (left) =>
      plot.setCursor({ left: Math.min(width, Math.max(0, left)), top: 0 }, true, true);
    const zoom = (factor) => {
      const ends = [at - at * factor, at + (width - at) * factor];
      this.x.zoom(ends.map((pixel) => plot.posToVal(pixel, "x")));
    };
    const moves = {
      ArrowLeft: () => point(at - step),
      ArrowRight: () => point(at + step),
      Home: () => point(0),
      End: () => point(width),
      "+": () => zoom(0.5),
      "-": () => zoom(2),
      Escape: () => this.x.zoom(null),
    };
    if (!Object.hasOwn(moves, event.key)) return;
    event.preventDefault();
    moves[event.key]();
  }

  /** Fill the table of values: up to twelve of those in view, evenly spread. */
  listValues() {
    if (!this.values.open || !this.drawn) return;
    const [left, right] = this.x.range();
    const rows = this.drawn.flatMap((line) => {
      const first = line.x.findIndex((at) => at >= left);
      return spread(first < 0 ? line.x.length : first, lastUpTo(line.x, right), 12).map((k) => [
        line.label || this.title,
        this.tick(line.x[k]),
        this.format(line.mean[k]),
        this.format((line.min ?? line.mean)[k]),
        this.format((line.max ?? line.mean)[k]),
      ]);
    });
    const numbers = [this.x.name(), "Mean", "Minimum", "Maximum"];
    const columns = ["Line", ...numbers.map((name) => [name, "number"])];
    this.values.replaceChildren(
      this.values.firstElementChild,
      table(`Values of ${this.title}`, columns, rows),
    );
  }
}

function pathThrough(xs, ys) {
  const path = new Path2D();
  xs.forEach((x, k) => path.lineTo(x, ys[k])); // the first one moves there
  return path;
}

/** Stroke a path; width and dashes are in CSS pixels, as a canvas has more on a fine screen. */
function stroke(ctx, path, { color, width = 1, dash = [], alpha = 1 }) {
  ctx.strokeStyle = color;
  ctx.globalAlpha = alpha;
  ctx.lineWidth = width * devicePixelRatio;
  ctx.setLineDash(dash.map((length) => length * devicePixelRatio));
  ctx.stroke(path);
  ctx.setLineDash([]);
  ctx.globalAlpha = 1;
}

/** Return up to `most` whole numbers from `first` to `last`, evenly spread. */
function spread(first, last, most) {
  const number = Math.min(most, last - first + 1);
  const step = (last - first) / Math.max(1, number - 1);
  return Array.from({ length: Math.max(0, number) }, (_, i) => Math.round(first + i * step));
}

function nearest(sorted, value) {
  const k = Math.max(0, lastUpTo(sorted, value));
  return sorted[k + 1] - value < value - sorted[k] ? k + 1 : k;
}

function dot(ctx, x, y, radius) {
  ctx.beginPath();
  ctx.arc(x, y, radius, 0, 2 * Math.PI);
  ctx.fill();
}
