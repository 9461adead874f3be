// The charts of a report, and the axis that they share.

const SMOOTHING = [0, 5, 20, 100];

/**
 * Charts of the metrics of training: title, unit, and lines [metric, label, style]. Several runs
 * get a chart for each line if there are titles for them in `apart`.
 */
const GROUPS = [
  [
    "curves",
    "Curves",
    [
      {
        title: "Loss",
        unit: "nats per token",
        size: "wide",
        lines: [
          ["train/loss", "training"],
          ["eval/loss", "validation", "points"],
          ["eval/ema_loss", "averaged weights", "points"],
        ],
        apart: ["Training loss", "Validation loss", "Validation loss, averaged weights"],
      },
      { title: "Validation, bits per byte", lines: [["eval/bits_per_byte", "", "points"]] },
      { title: "Validation loss by source", unit: "nats per token", inner: "eval/losses/" },
      {
        title: "Reward margin",
        lines: [
          ["train/reward_margin", "training"],
          ["eval/reward_margin", "validation", "points"],
        ],
      },
      {
        title: "Reward accuracy",
        format: percent,
        lines: [
          ["train/reward_accuracy", "training"],
          ["eval/reward_accuracy", "validation", "points"],
        ],
      },
      {
        title: "Log-probability of answers",
        unit: "nats",
        lines: [
          ["train/logp_chosen", "chosen"],
          ["train/logp_rejected", "rejected"],
        ],
      },
      {
        title: "Greedy answers that stop",
        format: percent,
        lines: [["eval/answer_stop_rate", "", "points"]],
      },
    ],
  ],
  [
    "optimization",
    "Learning rate and gradients",
    [
      { title: "Learning rate", lines: [["train/lr", ""]], fromZero: true },
      { title: "Gradient norm", unit: "before clipping", lines: [["train/grad_norm", ""]] },
    ],
  ],
  [
    "experts",
    "Load of experts",
    [
      {
        title: "Largest load by layer",
        unit: "above the mean",
        format: percent,
        inner: "train/expert_violation/",
      },
      {
        title: "Entropy of the load by layer",
        unit: "of an even one",
        format: percent,
        inner: "train/expert_entropy/",
      },
      {
        title: "Experts without tokens by layer",
        format: percent,
        inner: "train/expert_idle/",
      },
      { title: "Balance loss", lines: [["train/balance_loss", ""]] },
      { title: "Router z-loss", lines: [["train/router_z_loss", ""]] },
    ],
  ],
  [
    "speed",
    "Speed and memory",
    [
      {
        title: "Tokens per second",
        format: si,
        lines: [["perf/tokens_per_second", ""]],
        fromZero: true,
      },
      {
        title: "Model FLOPs utilization",
        format: percent,
        lines: [["perf/mfu", ""]],
        fromZero: true,
      },
      {
        title: "Share of matrix-product speed",
        format: percent,
        lines: [["perf/matmul_share", ""]],
        fromZero: true,
        unless: "perf/mfu",
      },
      {
        title: "Peak memory",
        unit: "GB per device",
        lines: [["perf/memory_gb", ""]],
        fromZero: true,
      },
    ],
  ],
];

/** The axis that all charts of training share: its quantity, zoom, smoothing and cursor. */
class View {
  constructor(runs) {
    Object.assign(this, {
      runs,
      axis: "steps",
      log: false,
      window: 0,
      zoomed: null,
      pointed: null,
      charts: [],
      listeners: [],
    });
    this.forget();
  }

  get shown() {
    return this.runs.filter((run) => run.shown);
  }

  /** Forget positions, which depend on the axis and on the records of the runs. */
  forget() {
    this.positions = new Map();
    this.full = null;
    this.least = null;
  }

  format(value) {
    return AXES[this.axis].format(value);
  }

  name() {
    return AXES[this.axis].label;
  }

  /** The position of a step on the axis; on a logarithmic one, zero is drawn at the left edge. */
  x(run, step) {
    const at = AXES[this.axis].of(run, step);
    return this.log ? Math.max(at, this.smallest()) : at;
  }

  /** Return the middle of each bucket of a curve on the axis. */
  xs(run, curve) {
    if (!this.positions.has(curve)) {
      const middle = (curve.width - 1) / 2;
      const at = curve.at.map((bucket) =>
        this.x(run, Math.min(bucket * curve.width + middle, run.step)),
      );
      this.positions.set(curve, at);
    }
    return this.positions.get(curve);
  }

  /** The position of the first step of any run, at which a logarithmic axis starts. */
  smallest() {
    if (this.least === null) {
      const { of } = AXES[this.axis];
      const firsts = this.shown.map((run) => of(run, Math.min(1, run.step ?? 1)));
      const positive = firsts.filter((at) => at > 0 && Number.isFinite(at));
      this.least = positive.length ? Math.min(...positive) : 1;
    }
    return this.least;
  }

  range() {
    if (this.zoomed) return this.zoomed;
    if (!this.full) {
      const ends = this.shown.map((run) => this.x(run, run.step ?? 0)).filter(Number.isFinite);
      const least = this.log ? this.smallest() : 0;
      const most = Math.max(this.log ? 2 * least : 1, ...ends);
      this.full = [least, this.log ? 1.05 * most : most];
    }
    return this.full;
  }

  zoom(range) {
    const was = this.zoomed;
    this.zoomed = null;
    if (range) {
      const [low, high] = this.range();
      const close = 1e-9 * high; // logarithms do not come back exactly
      const left = range[0] < low + close ? low : range[0];
      const right = range[1] > high - close ? high : range[1];
      const share =
        (scaled(this, right) - scaled(this, left)) / (scaled(this, high) - scaled(this, low));
      this.zoomed = share > 1e-6 && (left > low || right < high) ? [left, right] : null;
    }
    if (was || this.zoomed) this.update();
  }

  /** Move the cursor of all charts. */
  point(position) {
    if (this.pointed === position) return;
    this.pointed = position;
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      for (const chart of this.charts) chart.showAt(this.pointed);
    });
  }

  set(name, value) {
    this[name] = value;
    if (name === "axis" || name === "log") {
      this.zoomed = null;
      this.pointed = null;
    }
    this.update({ rebuild: name === "log" });
  }

  update({ rebuild = false } = {}) {
    this.forget();
    for (const run of this.runs) run.place();
    for (const chart of this.charts) chart.update({ rebuild });
    for (const listener of this.listeners) listener();
  }

  /** Return the lines of a metric, the i-th of its chart: one for each shown run that has it. */
  lines([name, label, style], i) {
    const single = this.runs.length === 1;
    return this.shown
      .filter((run) => run.curves[name]?.at.length)
      .map((run) => {
        const curve = run.curves[name];
        const window = style === "points" ? 0 : this.window;
        return {
          label: single ? label : run.label,
          color: single ? runColor(i) : run.color,
          dash: single ? runDash(i) : run.dash,
          width: style === "points" ? 1.25 : 1.75,
          x: this.xs(run, curve),
          mean: curve.mean,
          smooth: window ? smoothed(curve.mean, window) : null,
          ...(window || curve.n.some((n) => n > 1) ? { min: curve.min, max: curve.max } : {}),
          points: style === "points" && curve.at.length <= 60,
        };
      });
  }
}

/** A position in the units in which a view is linear. */
function scaled(view, at) {
  return view.log ? Math.log10(at) : at;
}

/** The mean over a window of points around each point. */
function smoothed(values, window) {
  const sums = [0];
  for (const value of values) sums.push(sums[sums.length - 1] + value);
  return values.map((_, k) => {
    const [first, last] = [Math.max(0, k - window), Math.min(values.length - 1, k + window)];
    return (sums[last + 1] - sums[first]) / (last + 1 - first);
  });
}

/** Return the charts of a group that have data. */
function chartsOf(view, specs) {
  const known = (name) => view.runs.some((run) => run.curves[name]?.at.length);
  return specs
    .flatMap((spec) => separated(view, spec))
    .filter(({ lines, unless }) => lines.some(([name]) => known(name)) && !known(unless))
    .map(
      (spec) =>
        new Chart({
          ...spec,
          x: view,
          quiet: view.runs.length > 1,
          lines: () => spec.lines.flatMap((line, i) => view.lines(line, i)),
          ...(spec.size === "wide" && view.runs.length === 1 ? events(view) : {}),
        }),
    );
}

/** Several runs get a chart for each metric, because colors and dashes tell the runs apart. */
function separated(view, spec) {
  const lines = spec.lines ?? innerLines(view, spec.inner);
  if (view.runs.length === 1 || lines.length === 1) return [{ ...spec, lines }];
  return lines.map((line, i) => ({
    ...spec,
    lines: [line],
    title: spec.apart?.[i] ?? `${spec.title}: ${line[1]}`,
  }));
}

/** The metrics with a name of their own, such as the loss of each source. */
function innerLines(view, prefix) {
  const names = new Set(view.runs.flatMap((run) => Object.keys(run.curves)));
  return [...names]
    .filter((name) => name.startsWith(prefix))
    .map((name) => [name, name.slice(prefix.length), "points"]);
}

/** Where the only run resumed, and which steps it skipped: marks of a chart, and their meaning. */
function events(view) {
  const [run] = view.runs;
  const resumed = run.clock.attempts.slice(1).filter((attempt) => attempt.first !== null);
  return {
    marks: () => [
      ...resumed.map(({ first }) => ({ at: view.x(run, first), color: "--muted" })),
      ...run.guard.items.map(({ step }) => ({ at: view.x(run, step), color: "--bad" })),
    ],
    note: [
      resumed.length > 0 && "dashed grey: the run resumed",
      run.guard.total > 0 && "dashed red: a skipped step",
    ]
      .filter(Boolean)
      .join("; "),
  };
}

/** The bar above the charts: quantity of the axis, smoothing, zoom, and which runs are shown. */
function controls(view) {
  const trained = view.runs.filter((run) => run.progress.at.length);
  const possible = Object.entries(AXES).filter(
    ([name]) =>
      name === "steps" ||
      (trained.length && (name !== "flops" || trained.every((run) => run.flops_per_token))),
  );
  const everything = el(
    "button",
    { type: "button", hidden: !view.zoomed, onclick: () => view.zoom(null) },
    "Show everything",
  );
  view.listeners.push(() => {
    everything.hidden = !view.zoomed;
  });
  const radio = ([name, { label }]) =>
    el(
      "label",
      null,
      el("input", {
        type: "radio",
        name: "axis",
        value: name,
        checked: name === view.axis,
        onchange: () => view.set("axis", name),
      }),
      label,
    );
  const smoothing = el(
    "select",
    { onchange: (event) => view.set("window", Number(event.target.value)) },
    SMOOTHING.map((n) => el("option", { value: String(n) }, n ? `± ${n} points` : "off")),
  );
  smoothing.value = String(view.window);
  const toggle = (run) =>
    el(
      "label",
      { class: "run" },
      el("input", {
        type: "checkbox",
        name: "run",
        value: run.name,
        checked: run.shown,
        onchange: (event) => {
          run.shown = event.target.checked;
          view.update();
        },
      }),
      swatch(run.color, run.dash),
      el("span", null, run.label),
    );
  return el(
    "div",
    { class: "controls" },
    possible.length > 1 && el("fieldset", null, el("legend", null, "Axis"), possible.map(radio)),
    el(
      "label",
      null,
      el("input", {
        type: "checkbox",
        name: "log",
        checked: view.log,
        onchange: (event) => view.set("log", event.target.checked),
      }),
      "logarithmic",
    ),
    el("label", null, "Smoothing ", smoothing),
    everything,
    view.runs.length > 1 &&
      el("fieldset", { class: "runs" }, el("legend", null, "Runs"), view.runs.map(toggle)),
  );
}
