// A chart of lines over one axis: uPlot draws the axes, and this file the lines with their bands.

const HEIGHT = { wide: 320, normal: 230, small: 190 };

/** Read a CSS variable, as a canvas needs it. */
function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

const resolved = (color) => (color.startsWith("var(") ? css(color.slice(4, -1)) : color);

/**
 * A line is { label, color, dash, x, mean, min, max, error, points }. `x` and the others are arrays
 * of one length; `error` is half the height of an error bar; `points` marks every point.
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
      "aria-label": this.description(),
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
    this.figure = el(
      "figure",
      { class: `chart ${this.size}` },
      el(
        "figcaption",
        null,
        el("h3", null, this.title),
        this.unit && el("span", { class: "unit" }, this.unit),
        this.note && el("span", { class: "unit" }, this.note),
      ),
      this.readout,
      this.host,
      this.values,
    );
  }

  description() {
    return `${this.title}. Arrow keys move the cursor, + and - zoom, Escape shows everything.`;
  }

  /** Take the current lines; draw them at once if the chart is in view, else soon. */
  update({ rebuild = false } = {}) {
    this.drawn = this.lines().filter((line) => line.x.length);
    if (this.values.open) this.listValues();
    if (rebuild) this.plot = this.plot?.destroy();
    paintSoon(this);
  }

  /** Draw the lines; `update` has taken them. */
  paint() {
    if (!this.plot) this.build();
    const [left, right] = this.x.range();
    const [low, high] = this.yRange(left, right);
    this.plot.batch(() => {
      this.plot.setScale("x", { min: left, max: right });
      this.plot.setScale("y", { min: low, max: high });
    });
    this.plot.redraw(false);
    this.showAt(this.x.pointed ?? null);
  }

  /** Create the plot, whose place in the page has a width by now. */
  build() {
    const [text, line, font] = [css("--muted"), css("--line"), `12px ${css("--sans")}`];
    const axis = {
      stroke: text,
      font,
      grid: { stroke: line, width: 1 },
      ticks: { stroke: line, width: 1, size: 4 },
    };
    const width = Math.max(200, this.host.clientWidth);
    this.plot = new uPlot(
      {
        width,
        height: HEIGHT[this.size],
        legend: { show: false },
        padding: [10, 22, 0, 0],
        cursor: {
          x: false,
          y: false,
          points: { show: false },
          drag: { x: true, y: false, setScale: false },
          bind: {
            dblclick: () => () => {
              this.x.zoom(null);
              return null;
            },
          },
        },
        scales: {
          x: { time: false, auto: false, range: exactly, distr: this.x.log ? 3 : 1 },
          y: { auto: false, range: exactly },
        },
        series: [{}, { stroke: text, points: { show: false } }],
        axes: [
          {
            ...axis,
            size: 34,
            space: 70,
            values: (u, at) => at.map((v) => this.tick(v)),
            ...(this.ticks ? { splits: () => this.ticks.map((_, i) => i) } : {}),
          },
          {
            ...axis,
            size: 62,
            space: 32,
            values: (u, at) => at.map((v) => (v === null ? null : this.format(v))),
          },
        ],
        hooks: {
          draw: [(u) => this.draw(u)],
          setCursor: [(u) => this.follow(u)],
          setSelect: [(u) => this.select(u)],
        },
      },
      [
        [0, 1],
        [null, null],
      ],
      this.host,
    );
    this.hair = el("div", { class: "hair", hidden: true });
    this.plot.over.append(this.hair);
  }

  tick(value) {
    if (value === null) return null;
    return this.ticks ? (this.ticks[value] ?? null) : this.x.format(value);
  }

  resize() {
    if (this.plot)
      this.plot.setSize({ width: Math.max(200, this.host.clientWidth), height: HEIGHT[this.size] });
  }

  /**
   * The range of all values in view. Where a few buckets are far above the rest, as in a spike or
   * at the first steps, the range ends below them, and triangles mark them.
   */
  yRange(left, right) {
    let [low, high] = [Infinity, -Infinity];
    const tops = [];
    for (const line of this.drawn) {
      const [first, last] = [Math.max(0, lastUpTo(line.x, left)), lastUpTo(line.x, right)];
      for (let k = first; k <= last; k += 1) {
        const error = line.error?.[k] ?? 0;
        low = Math.min(low, (line.min ?? line.mean)[k] - error);
        const top = (line.max ?? line.mean)[k] + error;
        high = Math.max(high, top);
        tops.push(top);
      }
    }
    if (low > high) return [0, 1];
    if (tops.length > 100) {
      const usual = tops.sort((a, b) => a - b)[Math.floor(0.995 * (tops.length - 1))];
      if (high - usual > 3 * (usual - low) && usual > low) high = usual;
    }
    const margin = 0.06 * (high - low) || 0.05 * Math.abs(high) || 1;
    const floor = this.fromZero || (low >= 0 && low < margin) ? Math.min(0, low) : low - margin;
    return [floor, high + margin];
  }

  draw(u) {
    const { ctx, bbox } = u;
    const { x, y } = u.scales;
    const toX = scale(x, bbox.left, bbox.width);
    const toY = (value) =>
      bbox.top + bbox.height - ((value - y.min) / (y.max - y.min)) * bbox.height;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    const ratio = devicePixelRatio;
    for (const { at, color } of this.marks()) vertical(ctx, toX(at), bbox, css(color), ratio);
    for (const line of this.drawn) this.drawLine(ctx, line, toX, toY, ratio, y.max, bbox);
    ctx.restore();
  }

  drawLine(ctx, line, toX, toY, ratio, top, bbox) {
    const color = resolved(line.color);
    const xs = line.x.map(toX);
    ctx.strokeStyle = color;
    ctx.fillStyle = color;
    ctx.lineJoin = "round";
    if (line.max) drawBand(ctx, line, xs, toY, ratio);
    if (line.smooth) {
      ctx.globalAlpha = 0.4;
      ctx.lineWidth = ratio;
      ctx.stroke(pathThrough(xs, line.mean.map(toY)));
      ctx.globalAlpha = 1;
    }
    ctx.lineWidth = (line.width ?? 1.75) * ratio;
    ctx.setLineDash((line.dash ?? []).map((length) => length * ratio));
    ctx.stroke(pathThrough(xs, (line.smooth ?? line.mean).map(toY)));
    ctx.setLineDash([]);
    const all = line.points || xs.length === 1;
    xs.forEach((x, k) => {
      if (line.error?.[k])
        errorBar(
          ctx,
          x,
          toY(line.mean[k] - line.error[k]),
          toY(line.mean[k] + line.error[k]),
          ratio,
        );
      if (all) dot(ctx, x, toY(line.mean[k]), 3.2 * ratio);
      if ((line.max ?? line.mean)[k] > top) triangle(ctx, x, bbox.top + 2 * ratio, 5 * ratio);
    });
  }

  /** Follow the mouse. A plot also calls this when it is drawn, which moves no cursor. */
  follow(u) {
    const hovered = u.cursor.left >= 0;
    if (hovered) this.x.point(u.posToVal(u.cursor.left, "x"));
    else if (this.hovered) this.x.point(null);
    this.hovered = hovered;
  }

  select(u) {
    const { left, width } = u.select;
    if (width < 4) return;
    const [from, to] = [u.posToVal(left, "x"), u.posToVal(left + width, "x")];
    u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.x.zoom([from, to]);
  }

  /** Show the values at a position; null shows the last ones. */
  showAt(position) {
    if (!this.plot || waiting.has(this)) return;
    this.hair.hidden = position === null;
    if (position !== null) {
      this.hair.style.setProperty(
        "transform",
        `translateX(${this.plot.valToPos(position, "x")}px)`,
      );
    }
    const [, right] = this.x.range();
    if (this.quiet && position === null) {
      // the bar of controls names the runs
      this.readout.replaceChildren();
      return;
    }
    this.readout.replaceChildren(
      ...this.drawn.map((line) => {
        const k =
          position === null ? Math.max(0, lastUpTo(line.x, right)) : nearest(line.x, position);
        const band =
          line.max && line.max[k] > line.min[k]
            ? ` (${this.format(line.min[k])} to ${this.format(line.max[k])})`
            : "";
        const error = line.error?.[k] ? ` ± ${this.format(line.error[k])}` : "";
        return el(
          "span",
          null,
          swatch(line.color, line.dash),
          line.label && el("span", null, line.label),
          el("b", null, this.format(line.mean[k])),
          error || band,
        );
      }),
    );
  }

  key(event) {
    const linear = (at) => scaled(this.x, at);
    const [left, right] = this.x.range().map(linear);
    const step = (right - left) / (event.shiftKey ? 10 : 100);
    const at = Math.min(right, Math.max(left, linear(this.x.pointed ?? this.x.range()[1])));
    const position = (value) => (this.x.log ? 10 ** value : value);
    const point = (value) => this.x.point(position(Math.min(right, Math.max(left, value))));
    const zoom = (factor) =>
      this.x.zoom([at - (at - left) * factor, at + (right - at) * factor].map(position));
    const moves = {
      ArrowLeft: () => point(at - step),
      ArrowRight: () => point(at + step),
      Home: () => point(left),
      End: () => point(right),
      "+": () => zoom(0.5),
      "-": () => zoom(2),
      Escape: () => this.x.zoom(null),
    };
    const move = moves[event.key];
    if (!move) return;
    event.preventDefault();
    move();
  }

  /** Fill the table of values: up to twelve of those in view, evenly spread. */
  listValues() {
    if (!this.values.open || !this.drawn) return;
    const [left, right] = this.x.range();
    const rows = this.drawn.flatMap((line) => {
      const first = lastUpTo(line.x, left) + (line.x[lastUpTo(line.x, left)] === left ? 0 : 1);
      const last = lastUpTo(line.x, right);
      return spread(first, last, 12).map((k) => [
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

const waiting = new Set();
let painting = null;

/** Draw a chart in view at once, and others one by one: a long page reacts at once. */
function paintSoon(chart) {
  const { top, bottom } = chart.host.getBoundingClientRect();
  if (bottom > 0 && top < innerHeight) {
    waiting.delete(chart);
    chart.paint();
  } else waiting.add(chart);
  painting ??= setTimeout(paintNext);
}

function paintNext() {
  const [chart] = waiting;
  waiting.delete(chart);
  chart?.paint();
  painting = waiting.size ? setTimeout(paintNext) : null;
}

/** Draw all charts that still wait, as paper needs them. */
function paintAll() {
  for (const chart of waiting) chart.paint();
  waiting.clear();
}

function pathThrough(xs, ys) {
  const path = new Path2D();
  xs.forEach((x, k) => (k ? path.lineTo(x, ys[k]) : path.moveTo(x, ys[k])));
  return path;
}

/**
 * Draw the band from minimum to maximum: one rectangle for each column of pixels, so that a spike
 * is visible however narrow it is. Rectangles are also much faster than a long outline.
 */
function drawBand(ctx, { min, max }, xs, toY, ratio) {
  const columns = [];
  let [left, low, high] = [xs[0], Infinity, -Infinity];
  xs.forEach((x, k) => {
    [low, high] = [Math.min(low, min[k]), Math.max(high, max[k])];
    const right = k + 1 < xs.length ? (x + xs[k + 1]) / 2 : x;
    if (right - left < 1 && k + 1 < xs.length) return;
    const [from, to] = [Math.round(left), Math.round(right)];
    columns.push({ from, width: Math.max(1, to - from), top: toY(high), bottom: toY(low) });
    [left, low, high] = [right, Infinity, -Infinity];
  });
  columns.forEach(({ from, width, top, bottom }, k) => {
    const [before, after] = [columns[k - 1], columns[k + 1]];
    const far = 12 * ratio;
    const above = (other) => other && other.top - top > far;
    const below = (other) => other && bottom - other.bottom > far;
    const spike = (above(before) && above(after)) || (below(before) && below(after));
    ctx.globalAlpha = spike ? 0.8 : 0.28;
    ctx.fillRect(from, top, width, Math.max(ratio, bottom - top));
  });
  ctx.globalAlpha = 1;
}

/** Return up to `most` whole numbers from `first` to `last`, evenly spread. */
function spread(first, last, most) {
  const number = Math.min(most, last - first + 1);
  const step = (last - first) / Math.max(1, number - 1);
  return Array.from({ length: Math.max(0, number) }, (_, i) => Math.round(first + i * step));
}

/** A range for uPlot that it does not widen to round numbers. */
const exactly = (u, low, high) => [low, high];

/** Return a function from values to pixels. */
function scale({ min, max, distr }, start, length) {
  const f = distr === 3 ? Math.log10 : (value) => value;
  const [low, factor] = [f(min), length / (f(max) - f(min))];
  return (value) => start + (f(value) - low) * factor;
}

function nearest(sorted, value) {
  const k = lastUpTo(sorted, value);
  if (k < 0) return 0;
  return k + 1 < sorted.length && sorted[k + 1] - value < value - sorted[k] ? k + 1 : k;
}

function vertical(ctx, x, { top, height }, color, ratio) {
  ctx.strokeStyle = color;
  ctx.lineWidth = ratio;
  ctx.setLineDash([3 * ratio, 3 * ratio]);
  ctx.beginPath();
  ctx.moveTo(x, top);
  ctx.lineTo(x, top + height);
  ctx.stroke();
  ctx.setLineDash([]);
}

function errorBar(ctx, x, low, high, ratio) {
  ctx.lineWidth = 1.25 * ratio;
  ctx.beginPath();
  for (const [fromX, fromY, toX, toY] of [
    [x, low, x, high],
    [x - 3 * ratio, low, x + 3 * ratio, low],
    [x - 3 * ratio, high, x + 3 * ratio, high],
  ]) {
    ctx.moveTo(fromX, fromY);
    ctx.lineTo(toX, toY);
  }
  ctx.stroke();
}

function dot(ctx, x, y, radius) {
  ctx.beginPath();
  ctx.arc(x, y, radius, 0, 2 * Math.PI);
  ctx.fill();
}

/** Mark a value above the plot. */
function triangle(ctx, x, y, size) {
  ctx.beginPath();
  ctx.moveTo(x, y);
  ctx.lineTo(x - size, y + 1.6 * size);
  ctx.lineTo(x + size, y + 1.6 * size);
  ctx.closePath();
  ctx.fill();
}
