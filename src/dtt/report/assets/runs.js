// The runs of a page: their curves, which grow while a run is live, and positions on the axes.

const CURVE_KINDS = ["train", "eval", "perf"];
const NOT_CURVES = new Set(["step", "time", "tokens", "steps", "slowest_rank"]);

/** A curve of buckets: at[k] covers the steps at[k] · width … (at[k] + 1) · width - 1. */
class Curve {
  constructor({ width = 1, at = [], mean = [], n, min, max } = {}) {
    Object.assign(this, {
      width,
      at,
      mean,
      n: n ?? at.map(() => 1),
      min: min ?? [...mean],
      max: max ?? [...mean],
    });
  }

  /** Add the value of a step. More than `most` buckets are merged in pairs. */
  add(step, value, most) {
    this.put(Math.floor(step / this.width), value, 1, value, value);
    while (this.at.length > most) Object.assign(this, this.halved());
  }

  put(bucket, value, n, min, max) {
    const last = this.at.length - 1;
    if (last >= 0 && this.at[last] >= bucket) {
      this.n[last] += n;
      this.mean[last] += ((value - this.mean[last]) * n) / this.n[last];
      this.min[last] = Math.min(this.min[last], min);
      this.max[last] = Math.max(this.max[last], max);
    } else {
      for (const [list, item] of [
        [this.at, bucket],
        [this.mean, value],
        [this.n, n],
        [this.min, min],
        [this.max, max],
      ])
        list.push(item);
    }
  }

  /** Return this curve with buckets of twice the width. */
  halved() {
    const half = new Curve({ width: 2 * this.width });
    this.at.forEach((bucket, k) =>
      half.put(bucket >> 1, this.mean[k], this.n[k], this.min[k], this.max[k]),
    );
    return half;
  }

  get last() {
    return this.mean.length ? this.mean[this.mean.length - 1] : null;
  }
}

class Run {
  constructor(data, index, total) {
    Object.assign(this, data);
    this.label = data.label ?? data.name;
    this.shown = true;
    this.color = runColor(index);
    this.dash = total > 1 ? runDash(index) : [];
    this.curves = Object.fromEntries(
      Object.entries(data.curves).map(([name, curve]) => [name, new Curve(curve)]),
    );
    this.changed = new Set();
    this.place();
  }

  /** Compute the tokens and the seconds of training at the end of each bucket. */
  place() {
    const { width, at, tokens, time } = this.progress;
    this.ends = [0, ...at.map((bucket) => Math.min((bucket + 1) * width - 1, this.step))];
    this.tokensAt = [0, ...tokens];
    this.secondsAt = spreadOut([0, ...time.map((t) => this.active(t))]);
  }

  /** Seconds that the attempts ran until a moment: waiting between attempts does not count. */
  active(moment) {
    const attempts = this.clock.attempts.filter((attempt) => attempt.began !== null);
    if (!attempts.length) return moment - (this.progress.time[0] ?? moment);
    return attempts.reduce((sum, { began, seconds, how }) => {
      const most = how === "running" ? Infinity : (seconds ?? 0);
      return sum + Math.max(0, Math.min(moment - began, most));
    }, 0);
  }

  /** Interpolate a quantity that is known at the ends of the buckets. */
  at(values, step) {
    const k = lastUpTo(this.ends, step);
    if (k + 1 >= this.ends.length) return values[values.length - 1];
    if (k < 0) return 0;
    const share = (step - this.ends[k]) / (this.ends[k + 1] - this.ends[k]);
    return values[k] + share * (values[k + 1] - values[k]);
  }

  /** Seconds that all attempts ran, up to the newest record of one that is running. */
  get seconds() {
    const newest = this.progress.time.at(-1) ?? 0;
    return this.clock.attempts.reduce((sum, { how, began, seconds }) => {
      const now = how === "running" ? newest - began : 0;
      return sum + Math.max(seconds ?? 0, now);
    }, 0);
  }

  get tokens() {
    return this.tokensAt[this.tokensAt.length - 1];
  }

  /** Add a record of metrics.jsonl that was written after the page was. */
  add(record) {
    const { kind, step } = record;
    if (typeof kind !== "string" || !Number.isInteger(step) || step < 0) return;
    this.changed.add(kind);
    if (CURVE_KINDS.includes(kind)) {
      this.step = Math.max(this.step ?? 0, step);
      this.addNumbers(record);
      if (kind === "perf" && Number.isInteger(record.steps)) this.steps = record.steps;
    } else if (kind === "sample" && typeof record.text === "string" && this.samples) {
      this.samples.total += 1;
      this.samples.items.push({ step, text: record.text.slice(0, 3000) });
    } else if (kind === "guard") {
      this.guard.total += 1;
      this.guard.items.push({ ...record, why: String(record.why), action: String(record.action) });
    } else if (kind === "task") this.addScores(record);
    else if (kind === "data") this.addEpochs(record);
  }

  addNumbers(record) {
    const { kind, step, tokens, time } = record;
    for (const [name, value] of Object.entries(record)) {
      const key = `${kind}/${name}`;
      if (typeof value === "number" && !NOT_CURVES.has(name)) this.addValue(key, step, value);
      else if (name === "losses" && value && typeof value === "object") {
        for (const [inner, number] of Object.entries(value)) {
          if (typeof number === "number") this.addValue(`${key}/${inner}`, step, number);
        }
      }
    }
    if (kind !== "train" || typeof tokens !== "number" || typeof time !== "number") return;
    const bucket = Math.floor(step / this.progress.width);
    setLast(this.progress, bucket, tokens, time);
    while (this.progress.at.length > this.most) this.halveProgress();
  }

  addValue(name, step, value) {
    this.curves[name] ??= new Curve();
    this.curves[name].add(step, value, this.most);
  }

  halveProgress() {
    const { width, at, tokens, time } = this.progress;
    this.progress = { width: 2 * width, at: [], tokens: [], time: [] };
    at.forEach((bucket, k) => setLast(this.progress, bucket >> 1, tokens[k], time[k]));
  }

  addScores(record) {
    for (const [name, value] of Object.entries(record)) {
      if (
        ["step", "time", "n"].includes(name) ||
        name.endsWith("_stderr") ||
        typeof value !== "number"
      )
        continue;
      let curve = this.tasks.find((one) => one.task === record.task && one.metric === name);
      if (!curve) {
        curve = {
          task: String(record.task),
          metric: name,
          steps: [],
          values: [],
          errors: [],
          n: record.n,
        };
        this.tasks.push(curve);
      }
      curve.steps.push(record.step);
      curve.values.push(value);
      curve.errors.push(record[`${name}_stderr`] ?? null);
    }
  }

  addEpochs({ epochs }) {
    const sources = this.mixture ?? [];
    for (const source of sources) {
      if (typeof epochs?.[source.name] === "number") source.epochs = epochs[source.name];
    }
    const used = sources.map(({ tokens, epochs: times }) => (tokens ?? NaN) * times);
    const sum = used.reduce((total, tokens) => total + tokens, 0);
    sources.forEach((source, i) => {
      source.share = used[i] / sum;
    });
  }

  /** Tokens per second: the newest while the run lasts, and the median afterwards. */
  get rate() {
    const newest = this.curves["perf/tokens_per_second"]?.last;
    return this.verdict.mood === "busy" ? newest : this.speed;
  }

  /** What a page can show of this run: if it changes, the page needs other charts and sections. */
  get contents() {
    const tasks = this.tasks.map((curve) => `${curve.task}/${curve.metric}`);
    const parts = [this.progress.at.length, this.samples?.total, this.guard.total].map(Boolean);
    return JSON.stringify([Object.keys(this.curves), tasks, parts]);
  }
}

/** Set the tokens and the time at the end of the last bucket, or of a new one. */
function setLast(progress, bucket, tokens, time) {
  const { at } = progress;
  if (at[at.length - 1] !== bucket) at.push(bucket);
  progress.tokens[at.length - 1] = tokens;
  progress.time[at.length - 1] = time;
}

/** The records of the steps between two log lines have one time: spread their steps evenly. */
function spreadOut(times) {
  const spread = [...times];
  let start = 0;
  for (let k = 1; k < times.length; k += 1) {
    if (k + 1 < times.length && times[k + 1] - times[k] < 1e-3) continue;
    for (let j = start + 1; j <= k; j += 1) {
      spread[j] = times[start] + ((times[k] - times[start]) * (j - start)) / (k - start);
    }
    start = k;
  }
  return spread;
}

const AXES = {
  steps: { label: "Steps", of: (run, step) => step, format: num },
  tokens: {
    label: "Tokens",
    of: (run, step) => run.at(run.tokensAt, step),
    format: si,
  },
  time: {
    label: "Time",
    of: (run, step) => run.at(run.secondsAt, step),
    format: duration,
  },
  flops: {
    label: "FLOPs",
    of: (run, step) => run.at(run.tokensAt, step) * run.flops_per_token,
    format: si,
  },
};
