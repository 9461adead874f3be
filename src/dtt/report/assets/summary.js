// The head of a report: what state each run is in, why, and its key figures.

/** The state of a run, with a symbol, because colour alone would not reach everybody. */
function pill({ state, mood }) {
  return el(
    "span",
    { class: `pill ${mood}` },
    el("span", { "aria-hidden": "true" }, `${ICONS[mood]} `),
    state,
  );
}

const newest = (run, name) => run.curves[name]?.last ?? null;

function progress(run) {
  if (run.step === null || run.step === undefined) return "–";
  return run.steps ? `${count(run.step)} of ${count(run.steps)}` : count(run.step);
}

function goodputOf(run) {
  return run.clock.goodput ? percent(run.clock.goodput.share) : "–";
}

/** The time left of a running job, from the speed of its newest steps. */
function left(run) {
  const seconds = newest(run, "perf/seconds_per_step");
  if (run.verdict.state !== "running" || !seconds || !run.steps) return null;
  return Math.max(0, run.steps - run.step) * seconds;
}

function verdictLine(run) {
  const { text, why, next, log } = run.verdict;
  return el(
    "div",
    { class: "verdict" },
    el("p", null, pill(run.verdict), text && el("span", null, ` ${text}`)),
    why.map((line) => el("p", { class: "why" }, line)),
    next && el("p", { class: "next" }, "Next: ", el("code", null, next)),
    log.length > 0 &&
      el("details", null, el("summary", null, "End of the log"), el("pre", null, log.join("\n"))),
  );
}

/** Key figures of a run: their names, and their texts; – for one that the run does not have. */
const FACTS = [
  ["Validation loss", (run) => num(newest(run, "eval/loss"))],
  ["Bits per byte", (run) => num(newest(run, "eval/bits_per_byte"))],
  ["Training loss", (run) => num(newest(run, "train/loss"))],
  ["Step", progress],
  ["Tokens", (run) => si(run.tokens || null)],
  ["Tokens per second", (run) => si(run.rate || null)],
  ["Time", (run) => duration(run.seconds || null)],
  ["Time left", (run) => duration(left(run))],
  ["Goodput", goodputOf],
  ["Parameters", (run) => si(run.parameters)],
];

function tiles(run) {
  const facts = FACTS.map(([name, text]) => [name, text(run)]);
  return el(
    "dl",
    { class: "tiles" },
    facts
      .filter(([name, text]) => text !== "–" || name === "Step")
      .map(([name, text]) => el("div", null, el("dt", null, name), el("dd", null, text))),
  );
}

/** One row per run: state, why, the command to type next, and key figures. */
function runTable(runs) {
  const numbers = FACTS.map(([name]) => [name, "number"]);
  return table(
    "Runs",
    ["Run", "State, and what to type next", ...numbers],
    runs.map((run) => [
      el("th", { scope: "row" }, swatch(run.color, run.dash), " ", run.label),
      [
        pill(run.verdict),
        el(
          "div",
          { class: "why" },
          run.verdict.text && el("div", null, run.verdict.text),
          run.verdict.next && el("code", null, run.verdict.next),
        ),
      ],
      ...FACTS.map(([, text]) => text(run)),
    ]),
  );
}

function bestTrial({ keys, rows, metric }) {
  const [best] = rows;
  if (!best || best.mean === null) return el("p", null, "No trial has finished yet.");
  const values = keys.map((key, i) => `${key}=${best.values[i]}`).join(" ");
  return el(
    "p",
    { class: "verdict" },
    pill({ state: "best", mood: "good" }),
    " ",
    el("code", null, values),
    ` reaches ${metric} `,
    el("b", null, best.mean.toFixed(4)),
    best.error === null ? "" : ` ± ${best.error.toFixed(4)}`,
    ". ",
    el("a", { href: "#sweep" }, "All results"),
  );
}

function head(data, runs) {
  const [run] = runs;
  return el(
    "header",
    { id: "top" },
    el("h1", null, data.title),
    data.sweep && bestTrial(data.sweep),
    runs.length === 1 ? [verdictLine(run), tiles(run)] : runTable(runs),
  );
}

const chosen = new Map();

/** A choice of one run, for sections that show one at a time; a section keeps it when redrawn. */
function perRun(id, runs, draw) {
  if (runs.length < 2) return runs.map(draw);
  const host = el("div");
  const show = (index) => {
    chosen.set(id, index);
    host.replaceChildren(...[draw(runs[index])].flat().filter(Boolean));
  };
  const choice = el(
    "select",
    { onchange: (event) => show(Number(event.target.value)) },
    runs.map((run, i) => el("option", { value: String(i) }, run.label)),
  );
  choice.value = String(Math.min(chosen.get(id) ?? 0, runs.length - 1));
  show(Number(choice.value));
  return [el("label", { class: "choice" }, "Run ", choice), host];
}

/** A section that shows one run at a time. */
function runSection(id, title, runs, draw) {
  return section(id, title, perRun(id, runs, draw));
}
