// The charts of a report, and the axis that they share.

const SMOOTHING = [0, 5, 20, 100];

/**
 * Charts of the metrics of training: title, unit, and lines [metric, label, style]. `inner` is the
 * start of the names of lines, such as those of all layers; `each` that of metrics with a chart of
 * their own, whose lines `of` returns. Several runs get a chart for each line if there are titles
 * for them in `apart`.
 */
const GROUPS = [
  {
    id: "curves",
    title: "Curves",
    charts: [
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
      { title: "Reward margin", lines: trainAndEval("reward_margin") },
      { title: "Reward accuracy", format: percent, lines: trainAndEval("reward_accuracy") },
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
      { title: "Validation, own loss", lines: [["eval/objective", "", "points"]] },
      { title: "Cross-entropy", unit: "nats per token", lines: [["train/cross_entropy", ""]] },
    ],
  },
  {
    id: "own",
    title: "Own terms and actions",
    charts: [{ each: "train/own/", of: (name) => trainAndEval(`own/${name}`) }, { each: "own/" }],
  },
  {
    id: "optimization",
    title: "Learning rate and gradients",
    charts: [
      { title: "Learning rate", lines: [["train/lr", ""]], fromZero: true },
      { title: "Gradient norm", unit: "before clipping", lines: [["train/grad_norm", ""]] },
    ],
  },
  {
    id: "experts",
    title: "Load of experts",
    charts: [
      ofLayers("Largest load by layer", "above the mean", "violation"),
      ofLayers("Entropy of the load by layer", "of an even one", "entropy"),
      ofLayers("Experts without tokens by layer", null, "idle"),
      { title: "Balance loss", lines: [["train/balance_loss", ""]] },
      { title: "Router z-loss", lines: [["train/router_z_loss", ""]] },
    ],
  },
  {
    id: "speed",
    title: "Speed and memory",
    charts: [
      perf("Tokens per second", "tokens_per_second", { format: si }),
      perf("Model FLOPs utilization", "mfu", { format: percent }),
      perf("Share of matrix-product speed", "matmul_share", {
        format: percent,
        unless: "perf/mfu",
      }),
      perf("Peak memory", "memory_gb", { unit: "GB per device" }),
    ],
  },
];

function trainAndEval(name) {
  return [
    [`train/${name}`, "training"],
    [`eval/${name}`, "validation", "points"],
  ];
}

function ofLayers(title, unit, name) {
  return { title, unit, format: percent, inner: `train/expert_${name}/` };
}

function perf(title, name, rest) {
  return { title, lines: [[`perf/${name}`, ""]], fromZero: true, ...rest };
}

/** The axis that all charts of training share: its quantity, zoom, smoothing and cursor. */
class View {
  constructor(runs) {
    const cursor = "view"; // the group of charts in which uPlot moves the cursor
    Object.assign(this, { runs, cursor, axis: "steps", window: 0, zoomed: null, charts: [] });
  }

  get shown() {
    return this.runs.filter((run) => run.shown);
  }

  format(value) {
    return AXES[this.axis].format(value);
  }

  name() {
    return AXES[this.axis].label;
  }

  /** The position of a step on the axis. */
  x(run, step) {
    return AXES[this.axis].of(run, step);
  }

  /** Return the middle of each bucket of a curve on the axis. */
  xs(run, { at, width }) {
    const middle = (width - 1) / 2;
    return at.map((bucket) => this.x(run, Math.min(bucket * width + middle, run.step)));
  }

  full() {
    const ends = this.shown.map((run) => this.x(run, run.step ?? 0));
    return [0, Math.max(1, ...ends.filter(Number.isFinite))];
  }

  range() {
    return this.zoomed ?? this.full();
  }

  /** Show a range of the axis; null shows all of it. */
  zoom(range) {
    const [low, high] = this.full();
    const [left, right] = range ? [Math.max(low, range[0]), Math.min(high, range[1])] : [low, high];
    const share = (right - left) / (high - low);
    // Below a millionth, neighbouring positions are the same pixels of the canvas.
    this.zoomed = share > 1e-6 && share < 1 ? [left, right] : null;
    this.update();
  }

  set(name, value) {
    if (name === "axis") this.zoomed = null;
    this[name] = value;
    this.update();
  }

  update() {
    this.everything.hidden = !this.zoomed;
    for (const chart of this.charts) chart.update();
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
    .flatMap((spec) => (spec.each ? apiece(view, spec) : [spec]))
    .flatMap((spec) => separated(view, spec))
    .filter(({ lines, unless }) => lines.some(([name]) => known(name)) && !known(unless))
    .map((spec) => {
      const lines = () => spec.lines.flatMap((line, i) => view.lines(line, i));
      const marks = spec.size === "wide" && view.runs.length === 1 ? events(view) : {};
      return new Chart({ ...spec, x: view, quiet: view.runs.length > 1, lines, ...marks });
    });
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

/** A chart for each metric whose name begins so. */
function apiece(view, { each, of }) {
  return innerLines(view, each).map(([name, label, style]) => ({
    title: label,
    lines: of ? of(label) : [[name, "", style]],
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
  view.everything = el(
    "button",
    { type: "button", hidden: !view.zoomed, onclick: () => view.zoom(null) },
    "Show everything",
  );
  const choice = (type, name, value, checked, onchange, ...label) =>
    el("label", null, el("input", { type, name, value, checked, onchange }), label);
  const radio = ([name, { label }]) =>
    choice("radio", "axis", name, name === view.axis, () => view.set("axis", name), label);
  const smoothing = el(
    "select",
    { onchange: (event) => view.set("window", Number(event.target.value)) },
    SMOOTHING.map((n) => el("option", { value: String(n) }, n ? `± ${n} points` : "off")),
  );
  smoothing.value = String(view.window);
  const toggle = (run) => {
    const show = (event) => {
      run.shown = event.target.checked;
      view.update();
    };
    const label = [swatch(run.color, run.dash), el("span", null, run.label)];
    return choice("checkbox", "run", run.name, run.shown, show, label);
  };
  return el(
    "div",
    { class: "controls" },
    possible.length > 1 && el("fieldset", null, el("legend", null, "Axis"), possible.map(radio)),
    el("label", null, "Smoothing ", smoothing),
    view.everything,
    view.runs.length > 1 &&
      el("fieldset", { class: "runs" }, el("legend", null, "Runs"), view.runs.map(toggle)),
  );
}
