// The page: a report of runs, or the list of jobs of a live server.

const page = document.querySelector("#page");

function footer(data) {
  return el("footer", null, `dtt ${data.version}, ${moment(data.generated)}`);
}

function liveBar(data) {
  if (!data.live) return null;
  return el(
    "p",
    { class: "live" },
    el("span", { id: "connection", role: "status" }, "live"),
    data.view === "report" && el("a", { href: "./" }, "All jobs"),
  );
}

/** Put charts into a grid; the page draws them once they have a width. */
function grid(report, charts) {
  report.charts.push(...charts);
  const halves = charts.filter((chart) => chart.size !== "wide");
  if (halves.length % 2) halves.at(-1).figure.classList.add("alone");
  return charts.length
    ? el(
        "div",
        { class: "grid" },
        charts.map((chart) => chart.figure),
      )
    : null;
}

/** Sections that a live page draws again when what they show has changed. */
const LIVE_SECTIONS = ["time", "attempts", "samples", "mixture", "checkpoints", "anomalies"];

class ReportPage {
  constructor(data) {
    this.data = data;
    this.runs = data.runs.map((run, i) => new Run(run, i, data.runs.length));
    this.view = new View(this.runs);
    this.bar = liveBar(data);
    this.draw();
    const charts = (action) => this.charts.forEach(action);
    new ResizeObserver(() => charts((chart) => chart.plot?.setSize(chart.room()))).observe(page);
    onThemeChange(() => charts((chart) => chart.update()));
    if (data.live) poll(`report.json${location.search}`, (fresh) => this.take(fresh));
  }

  /** Return each section after the curves, by its id, in order; null if it has no content. */
  sections() {
    const { data, runs } = this;
    return {
      time: () => goodputSection(runs),
      attempts: () => attemptSection(runs),
      samples: () => sampleSection(runs),
      mixture: () => mixtureSection(runs),
      checkpoints: () => checkpointSection(runs),
      configuration: () => configurationSection(data, runs),
      sweep: () =>
        data.sweep &&
        section("sweep", "Sweep", sweepTable(data.sweep), grid(this, sweepCharts(data.sweep))),
      anomalies: () => guardSection(runs),
    };
  }

  /** Draw everything; the axis, the zoom and the runs that are shown stay. */
  draw() {
    const { data, runs, view } = this;
    this.contents = runs.map((run) => run.contents).join();
    for (const chart of this.charts ?? []) chart.plot?.destroy(); // else they follow the cursor
    this.charts = [];
    const [curves, ...others] = GROUPS.map(({ id, title, charts }) =>
      section(id, title, grid(this, chartsOf(view, charts))),
    );
    this.scores = el("div", null, taskTable(runs));
    const ofTasks = grid(this, taskCharts(view));
    const tasks = ofTasks && section("tasks", "Benchmark tasks", ofTasks, this.scores);
    view.charts = [...this.charts];
    this.drawn = Object.fromEntries(
      Object.entries(this.sections()).map(([name, draw]) => [name, drawn(draw)]),
    );
    const all = [curves, tasks, ...others, ...Object.values(this.drawn)].filter(Boolean);
    const links = all.map((one) =>
      el("li", null, el("a", { href: `#${one.id}` }, one.querySelector("h2").textContent)),
    );
    this.head = head(data, runs);
    page.replaceChildren(
      ...[
        this.bar,
        this.head,
        el("nav", { "aria-label": "Sections" }, el("ul", null, links)),
        controls(view),
        ...all,
        footer(data),
      ].filter(Boolean),
    );
    for (const chart of this.charts) chart.update();
  }

  /** Show newer data: what has not changed stays, so that the focus and a selection do. */
  take(data) {
    this.data = data;
    this.runs.forEach((run, i) => run.take(data.runs[i]));
    if (this.contents !== this.runs.map((run) => run.contents).join()) {
      this.draw(); // there is a metric, a task or a section that the page did not have
      return;
    }
    this.head = renewed(this.head, head(this.data, this.runs));
    const sections = this.sections();
    for (const name of LIVE_SECTIONS) {
      const [before, after] = [this.drawn[name], drawn(sections[name])];
      if (before && after) this.drawn[name] = renewed(before, after);
    }
    const scores = taskTable(this.runs);
    if (scores) renewed(this.scores.firstElementChild, scores);
    this.view.update();
  }
}

/** Replace an element by a newer one, if that differs; return the one that is shown. */
function renewed(before, after) {
  // The reader may have opened the end of the log.
  if (before.outerHTML.replaceAll(' open=""', "") === after.outerHTML) return before;
  before.replaceWith(after);
  return after;
}

/** Return a section; null if its data is damaged, so that the others are shown. */
function drawn(draw) {
  try {
    return draw();
  } catch (error) {
    console.error(error);
    return null;
  }
}

/** Dark or light; paper is always light. */
function onThemeChange(redraw) {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  const paper = (on) => () => {
    document.documentElement.classList.toggle("paper", on);
    redraw();
  };
  addEventListener("beforeprint", paper(true));
  addEventListener("afterprint", paper(false));
}

function drawJobs(data) {
  let rows = data.jobs;
  const chosen = new Set();
  const host = el("div");
  const compare = el(
    "button",
    { type: "button", disabled: true, onclick: () => open([...chosen]) },
    "Compare",
  );
  const address = (jobs) =>
    `report?${jobs.map((job) => `job=${encodeURIComponent(job)}`).join("&")}`;
  const open = (jobs) => {
    location.href = address(jobs);
  };
  const filter = el("input", { type: "search", "aria-label": "Filter", placeholder: "Filter" });
  filter.addEventListener("input", () => draw());
  const matches = ({ job, verdict: { state, text } }) =>
    `${job} ${state} ${text}`.toLowerCase().includes(filter.value.toLowerCase());
  const choose = (job) =>
    el("input", {
      type: "checkbox",
      "aria-label": `Compare ${job}`,
      checked: chosen.has(job),
      onchange: (event) => {
        chosen[event.target.checked ? "add" : "delete"](job);
        compare.disabled = chosen.size === 0;
      },
    });
  const draw = () => {
    const focused = document.activeElement?.getAttribute?.("aria-label");
    const columns = [
      "Compare",
      "Job",
      "State",
      ["Step", "number"],
      ["Loss", "number"],
      ["Tokens", "number"],
      ["Tokens/s", "number"],
      ["Left", "number"],
      "Why",
    ];
    host.replaceChildren(
      rows.length
        ? table(
            "Jobs",
            columns,
            rows.filter(matches).map((row) => [
              choose(row.job),
              el("th", { scope: "row" }, el("a", { href: address([row.job]) }, row.job)),
              pill(row.verdict),
              progress(row),
              num(row.loss),
              si(row.tokens),
              si(row.tokens_per_second),
              duration(row.seconds_left),
              row.verdict.text,
            ]),
          )
        : el("p", null, "There are no jobs yet."),
    );
    if (focused) host.querySelector(`[aria-label="${CSS.escape(focused)}"]`)?.focus();
  };
  page.replaceChildren(
    liveBar(data),
    el("header", null, el("h1", null, data.title)),
    el("p", { class: "slide" }, filter, compare),
    host,
    footer(data),
  );
  draw();
  poll("jobs.json", (fresh) => {
    const same = JSON.stringify(fresh.jobs) === JSON.stringify(rows);
    rows = fresh.jobs;
    if (!same) draw();
  });
}

{
  const data = JSON.parse(document.querySelector("#data").textContent);
  if (data.view === "jobs") drawJobs(data);
  else new ReportPage(data);
  requestAnimationFrame(() => {
    document.documentElement.dataset.ready = "1";
  });
}
