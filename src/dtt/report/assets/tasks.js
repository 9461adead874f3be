// Benchmark tasks: curves with error bars, and a table that compares runs. Results of sweeps.

const MAIN_METRICS = ["acc_norm", "acc", "exact_match", "word_perplexity", "bits_per_byte"];

function rank(metric) {
  const place = MAIN_METRICS.indexOf(metric);
  return place < 0 ? MAIN_METRICS.length : place;
}

/** The charts of the main metric of each task, over the axis of the view. */
function taskCharts(view) {
  const names = [...new Set(view.runs.flatMap((run) => run.tasks.map((curve) => curve.task)))];
  return names.map((task) => {
    const metrics = view.runs.flatMap((run) =>
      run.tasks.filter((curve) => curve.task === task).map((curve) => curve.metric),
    );
    const main = metrics.sort((a, b) => rank(a) - rank(b))[0];
    return new Chart({
      title: task,
      unit: main,
      size: "small",
      x: view,
      quiet: view.runs.length > 1,
      lines: () =>
        view.shown.flatMap((run) =>
          run.tasks
            .filter((curve) => curve.task === task && curve.metric === main)
            .map((curve) => ({
              label: view.runs.length > 1 ? run.label : "",
              color: run.color,
              dash: run.dash,
              points: true,
              x: curve.steps.map((step) => view.x(run, step)),
              mean: curve.values,
              error: curve.errors,
            })),
        ),
    });
  });
}

/** The newest scores of all runs, with standard errors. */
function taskTable(runs) {
  const rows = new Map();
  for (const run of runs) {
    for (const curve of run.tasks) {
      const key = JSON.stringify([curve.task, curve.metric]);
      if (!rows.has(key))
        rows.set(key, { task: curve.task, metric: curve.metric, n: curve.n, of: new Map() });
      rows.get(key).of.set(run, curve);
    }
  }
  if (!rows.size) return null;
  const score = (curve) => {
    if (!curve) return "–";
    const error = curve.errors.at(-1);
    const range = error === null ? "" : ` ± ${error.toFixed(4)}`;
    return `${curve.values.at(-1).toFixed(4)}${range} at step ${count(curve.steps.at(-1))}`;
  };
  return table(
    "Newest scores with standard errors",
    [
      "Task",
      "Metric",
      ["Questions", "number"],
      ...runs.map((run) => [runs.length > 1 ? run.label : "Score", "number"]),
    ],
    [...rows.values()].map(({ task, metric, n, of }) => [
      el("th", { scope: "row" }, task),
      metric,
      count(n),
      ...runs.map((run) => score(of.get(run))),
    ]),
  );
}

/** A view of a chart with its own x axis, as in the plots of a sweep. */
function ownAxis(key, { curves, log_x: log }) {
  const words = curves.some((curve) => curve.x.some((x) => typeof x !== "number"));
  const labels = words ? [...new Set(curves.flatMap((curve) => curve.x.map(String)))] : null;
  const all = words ? labels.map((_, i) => i) : curves.flatMap((curve) => curve.x);
  const [low, high] = [Math.min(...all), Math.max(...all)];
  const logarithmic = Boolean(log) && !words && low > 0;
  const margin = logarithmic
    ? Math.max((high / low) ** 0.06, 1.1)
    : 0.06 * (high - low) || Math.abs(0.1 * low) || 0.5;
  return {
    labels,
    at: (x) => (words ? labels.indexOf(String(x)) : x),
    log: logarithmic,
    range: () => (logarithmic ? [low / margin, high * margin] : [low - margin, high + margin]),
    format: num,
    name: () => key,
    zoom: () => {},
  };
}

function sweepCharts({ plots, metric }) {
  return plots.map((plot) => {
    const x = ownAxis(plot.key, plot);
    return new Chart({
      title: plot.key,
      unit: metric,
      size: "small",
      x,
      ticks: x.labels,
      lines: () =>
        plot.curves.map((curve, i) => ({
          label: curve.label,
          color: runColor(i),
          dash: runDash(i),
          points: true,
          x: curve.x.map(x.at),
          mean: curve.y,
          error: curve.error.length ? curve.error : null,
        })),
    });
  });
}

function sweepTable({ keys, rows, metric, goal }) {
  const best = rows.find((row) => row.mean !== null);
  const result = (row) =>
    row.mean === null
      ? "–"
      : `${row.mean.toFixed(4)}${row.error === null ? "" : ` ± ${row.error.toFixed(4)}`}`;
  return table(
    `Results, best first (${goal === "min" ? "lowest" : "highest"} ${metric})`,
    ["Place", ...keys, [metric, "number"], ["Seeds done", "number"], "Trials"],
    rows.map((row, i) => [
      row === best ? el("b", null, "★ best") : count(i + 1),
      ...row.values.map((value) => el("code", null, value)),
      row === best ? el("b", null, result(row)) : result(row),
      `${row.done} of ${row.trials.length}`,
      row.trials.join(", "),
    ]),
  );
}
