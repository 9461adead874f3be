// The runs of a page: their curves, and positions on the axes.

/** A curve of buckets: at[k] covers the steps at[k] · width … (at[k] + 1) · width - 1. */
class Curve {
  constructor({ width, at, mean, n, min, max }) {
    Object.assign(this, {
      width,
      at,
      mean,
      n: n ?? at.map(() => 1),
      min: min ?? mean,
      max: max ?? mean,
    });
  }

  get last() {
    return this.mean.length ? this.mean[this.mean.length - 1] : null;
  }
}

class Run {
  constructor(data, index, total) {
    this.shown = true;
    this.color = runColor(index);
    this.dash = total > 1 ? runDash(index) : [];
    this.take(data);
  }

  /** Take the data of the run, or newer ones. */
  take(data) {
    Object.assign(this, data);
    this.label = data.label ?? data.name;
    this.curves = Object.fromEntries(
      Object.entries(data.curves).map(([name, curve]) => [name, new Curve(curve)]),
    );
    this.place();
  }

  /** Compute the tokens and the seconds of training at the end of each bucket. */
  place() {
    const { width, at, tokens, computed, time } = this.progress;
    this.ends = [0, ...at.map((bucket) => Math.min((bucket + 1) * width - 1, this.step))];
    this.tokensAt = [0, ...tokens];
    // Padding and tokens without a target are computed, too.
    this.computedAt = [0, ...(computed ?? tokens)];
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

  /** Tokens per second: the newest while the run lasts, and the median afterwards. */
  get rate() {
    const newest = this.curves["perf/tokens_per_second"]?.last;
    return this.verdict.mood === "busy" ? newest : this.speed;
  }

  /** What a page can show of this run: if it changes, the page needs other charts and sections. */
  get contents() {
    const tasks = this.tasks.map((curve) => `${curve.task}/${curve.metric}`);
    const parts = [this.progress.at, this.samples?.items, this.mixture, this.checkpoints?.items];
    const shown = [...parts, this.guard.items].map((items) => Boolean(items?.length));
    const { attempts, goodput } = this.clock;
    const state = [this.verdict.mood, attempts.length, Boolean(goodput)];
    return JSON.stringify([Object.keys(this.curves), tasks, shown, state]);
  }
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
    of: (run, step) => run.at(run.computedAt, step) * run.flops_per_token,
    format: si,
  },
};
