// Where the time of a run went, and when its attempts ran.

const PARTS = {
  useful: ["training", "--part-0"],
  start: ["start", "--part-1"],
  redone: ["steps repeated", "--part-2"],
  data: ["waiting for data", "--part-3"],
  save: ["saving", "--part-4"],
  evaluate: ["evaluation", "--part-5"],
  tasks: ["benchmark tasks", "--part-6"],
  sample: ["samples", "--part-7"],
  unlogged: ["not logged", "--part-8"],
};
const HOW = {
  done: "good",
  running: "busy",
  stopped: "idle",
  failed: "bad",
  diverged: "bad",
  killed: "bad",
};

/** Return [name, color, seconds] of each part of the time, the useful part first. */
function parts({ useful, lost }) {
  const known = Object.entries(lost).sort((a, b) => b[1] - a[1]);
  return [["useful", useful], ...known]
    .filter(([, seconds]) => seconds > 0)
    .map(([name, seconds]) => [
      PARTS[name]?.[0] ?? name,
      `var(${PARTS[name]?.[1] ?? "--part-9"})`,
      seconds,
    ]);
}

function breakdown(run) {
  const { goodput } = run.clock;
  const all = parts(goodput);
  const total = all.reduce((sum, [, , seconds]) => sum + seconds, 0);
  return [
    el("h3", null, `goodput ${goodputOf(run)} of ${duration(goodput.seconds)}`),
    el(
      "div",
      { class: "stack", "aria-hidden": "true" },
      all.map(([, color, seconds]) =>
        el("span", { style: { width: `${(100 * seconds) / total}%`, background: color } }),
      ),
    ),
    el(
      "ul",
      { class: "key" },
      all.map(([name, color, seconds]) =>
        el(
          "li",
          null,
          el("span", { class: "box", style: { background: color } }),
          `${name} `,
          el("b", null, percent(seconds / total)),
          ` ${duration(seconds)}`,
        ),
      ),
    ),
  ];
}

function goodputSection(runs) {
  const known = runs.filter((run) => run.clock.goodput);
  return runSection("time", "Where the time went", known, breakdown);
}

/** Bars of the attempts on a time line. Narrow bars stay visible and do not move others. */
function timeline(run) {
  const attempts = run.clock.attempts.filter((a) => Number.isFinite(a.began));
  if (!attempts.length) return null;
  const first = Math.min(...attempts.map((a) => a.began));
  // Those of a branch's parent are older than its first attempt.
  const saves = (run.checkpoints?.items ?? []).filter((c) => c.time >= first);
  const ends = attempts.map((a) => a.began + (a.seconds ?? 0));
  const end = Math.max(...ends, ...saves.map((c) => c.time), first + 1);
  const place = (moment) => `${(100 * (moment - first)) / (end - first)}%`;
  const bar = (a) =>
    el(
      "span",
      {
        class: `bar ${HOW[a.how] ?? "idle"}`,
        style: { left: place(a.began), width: place(first + (a.seconds ?? 0)) },
        title: `attempt ${a.number}: ${a.how}, ${duration(a.seconds)}`,
      },
      el("span", { "aria-hidden": "true" }, ICONS[HOW[a.how] ?? "idle"]),
    );
  const mark = ({ step, time }) => {
    const title = `checkpoint of step ${step}`;
    return el("span", { class: "mark", style: { left: place(time) }, title });
  };
  return el(
    "div",
    { class: "timeline" },
    el("div", { class: "track" }, attempts.map(bar), saves.map(mark)),
    el("div", { class: "ends" }, el("span", null, moment(first)), el("span", null, moment(end))),
  );
}

function attemptTable(run) {
  const columns = [
    ["Attempt", "number"],
    ["Started", "nowrap"],
    ["Ran", "number"],
    ["From step", "number"],
    ["To step", "number"],
    "Ended",
    ["Node", "nowrap"],
    "Reason",
  ];
  return table(
    `Attempts of ${run.name}`,
    columns,
    run.clock.attempts.map((a) => [
      count(a.number),
      moment(a.began),
      duration(a.seconds),
      count(a.first),
      count(a.step),
      pill({ state: a.how + (a.code ? ` (exit code ${a.code})` : ""), mood: HOW[a.how] ?? "idle" }),
      a.node,
      a.reason + (a.asked_by ? `; requested by ${a.asked_by}` : ""),
    ]),
  );
}

function attemptSection(runs) {
  const some = runs.filter((run) => run.clock.attempts.length);
  const draw = (run) => [timeline(run), attemptTable(run)];
  return runSection("attempts", "Attempts and interruptions", some, draw);
}
