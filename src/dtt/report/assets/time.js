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

function breakdown(run, legend) {
  const { goodput } = run.clock;
  if (!goodput) return null;
  const all = parts(goodput);
  const total = all.reduce((sum, [, , seconds]) => sum + seconds, 0);
  const width = (seconds) => `${(100 * seconds) / total}%`;
  return el(
    "div",
    { class: "breakdown" },
    el(
      "div",
      { class: "stack", "aria-hidden": "true" },
      all.map(([name, color, seconds]) =>
        el("span", {
          style: { width: width(seconds), background: color },
          title: `${name}: ${percent(seconds / total)}`,
        }),
      ),
    ),
    legend &&
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
  );
}

function goodputSection(runs) {
  const known = runs.filter((run) => run.clock.goodput);
  const share = (run) => `goodput ${goodputOf(run)} of ${duration(run.clock.goodput.seconds)}`;
  if (runs.length === 1) {
    return section(
      "time",
      "Where the time went",
      known.map((run) => [el("h3", null, share(run)), breakdown(run, true)]),
    );
  }
  const names = [
    ...new Map(
      known.flatMap((run) => parts(run.clock.goodput)).map(([name, color]) => [name, color]),
    ),
  ];
  return section(
    "time",
    "Where the time went",
    known.length && [
      el(
        "div",
        { class: "rows" },
        known.map((run) =>
          el(
            "div",
            { class: "row" },
            el("span", { class: "name" }, swatch(run.color, run.dash), ` ${run.label}`),
            breakdown(run, false),
            el("span", { class: "share" }, share(run)),
          ),
        ),
      ),
      shareTable(known, names),
    ],
  );
}

/** The bars in numbers: the share of each part of the time of each run. */
function shareTable(runs, names) {
  const columns = names.map(([name, color]) => [
    [el("span", { class: "box", style: { background: color } }), name],
    "number",
  ]);
  const rows = runs.map((run) => {
    const all = parts(run.clock.goodput);
    const total = all.reduce((sum, [, , seconds]) => sum + seconds, 0);
    const seconds = new Map(all.map(([name, , value]) => [name, value]));
    const cells = names.map(([name]) => percent((seconds.get(name) ?? 0) / total));
    return [el("th", { scope: "row" }, run.label), ...cells];
  });
  return table("Shares of the time", ["Run", ...columns], rows);
}

/** Bars of all attempts on one time line. Narrow bars stay visible and do not move others. */
function timeline(runs) {
  const all = runs.flatMap((run) => run.clock.attempts.filter((a) => Number.isFinite(a.began)));
  if (!all.length) return null;
  const first = Math.min(...all.map((a) => a.began));
  const saves = runs.flatMap((run) => (run.checkpoints?.items ?? []).map((c) => c.time ?? 0));
  const end = Math.max(...all.map((a) => a.began + (a.seconds ?? 0)), ...saves, first + 1);
  const place = (moment) => `${(100 * (moment - first)) / (end - first)}%`;
  const row = (run) =>
    el(
      "div",
      { class: runs.length > 1 ? "row" : "" },
      runs.length > 1 &&
        el("span", { class: "name" }, swatch(run.color, run.dash), ` ${run.label}`),
      el(
        "div",
        { class: "track" },
        run.clock.attempts
          .filter((a) => Number.isFinite(a.began))
          .map((a) =>
            el(
              "span",
              {
                class: `bar ${HOW[a.how] ?? "idle"}`,
                style: { left: place(a.began), width: place(first + (a.seconds ?? 0)) },
                title: `attempt ${a.number}: ${a.how}, ${duration(a.seconds)}`,
              },
              el("span", { "aria-hidden": "true" }, ICONS[HOW[a.how] ?? "idle"]),
            ),
          ),
        (run.checkpoints?.items ?? [])
          .filter((c) => c.time >= first && c.time <= end)
          .map((c) =>
            el("span", {
              class: "mark",
              style: { left: place(c.time) },
              title: `checkpoint of step ${c.step}`,
            }),
          ),
      ),
    );
  return el(
    "div",
    { class: "timeline" },
    runs.map(row),
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
  const title = "Attempts and interruptions";
  const some = runs.filter((run) => run.clock.attempts.length);
  return section("attempts", title, timeline(runs), perRun("attempts", some, attemptTable));
}
