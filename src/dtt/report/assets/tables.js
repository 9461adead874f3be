// Sections of text and tables: samples, data, checkpoints, configuration.

const sliders = new Map();

/** A slider over the samples; it stays where the reader put it, and else shows the newest. */
function sampleSection(runs) {
  const some = runs.filter((run) => run.samples?.items.length);
  const draw = (run) => {
    const { items, total } = run.samples;
    const text = el("blockquote", { tabindex: 0, "aria-label": "Sample" });
    const title = el("output", null);
    const last = items.length - 1;
    const show = (index) => {
      text.textContent = items[index].text;
      const { step, temperature } = items[index];
      const how = temperature == null ? "" : ` at temperature ${temperature}`;
      title.textContent = `step ${count(step)}${how}`;
      slider.setAttribute("aria-valuetext", title.textContent);
    };
    const slider = el("input", {
      type: "range",
      min: 0,
      max: last,
      "aria-label": "Step of the sample",
      oninput: ({ target }) => {
        const index = Number(target.value);
        sliders.set(run.path, index === last ? null : index);
        show(index);
      },
    });
    slider.value = sliders.get(run.path) ?? last;
    show(Number(slider.value));
    const some = total > items.length && ` ${items.length} of ${count(total)} samples`;
    return [el("p", { class: "slide" }, slider, title, some && el("small", null, some)), text];
  };
  return runSection("samples", "Samples", some, draw);
}

function mixtureSection(runs) {
  const some = runs.filter((run) => run.mixture?.length);
  return runSection("mixture", "Data", some, (run) =>
    table(
      `Data of ${run.name}`,
      [
        "Source",
        ["Share of tokens", "number"],
        ["Epochs", "number"],
        ["Tokens per epoch", "number"],
      ],
      run.mixture.map((source) => [
        source.name,
        meter(source.share),
        num(source.epochs),
        si(source.tokens),
      ]),
    ),
  );
}

function meter(share) {
  if (!Number.isFinite(share)) return "–";
  return el(
    "span",
    { class: "meter" },
    el("span", { style: { width: `${100 * share}%` } }),
    el("b", null, percent(share)),
  );
}

const parentOf = ({ parent }) => `${parent.path}@${parent.step}`;

function checkpointSection(runs) {
  const some = runs.filter(
    (run) => run.checkpoints && (run.checkpoints.items.length || run.parent || run.branches.length),
  );
  return runSection("checkpoints", "Checkpoints and branches", some, (run) => {
    const { items, kept, deleted } = run.checkpoints;
    const steps = new Map(run.branches.map((branch) => [branch.step, []]));
    for (const branch of run.branches) steps.get(branch.step).push(branch.path);
    const rows = items.map((c) => [
      count(c.step),
      bytes(c.bytes),
      duration(c.blocked_seconds),
      moment(c.time),
      (steps.get(c.step) ?? []).join(", ") || "–",
    ]);
    const gone = run.branches.filter((branch) => !items.some((c) => c.step === branch.step));
    return [
      run.parent &&
        el("p", null, "This run is a branch of ", el("code", null, parentOf(run)), "."),
      el(
        "p",
        null,
        `${plural(kept, "checkpoint")} kept`,
        deleted > 0 && `, ${count(deleted)} deleted by retention`,
        items.length < kept && `; the newest ${items.length} are listed`,
        ".",
      ),
      rows.length > 0 &&
        table(
          `Checkpoints of ${run.name}`,
          [
            ["Step", "number"],
            ["Size", "number"],
            ["Training blocked", "number"],
            ["Saved", "nowrap"],
            "Branches",
          ],
          rows,
        ),
      gone.map(({ path, step }) =>
        el("p", null, "Branch ", el("code", null, path), ` from step ${count(step)}.`),
      ),
    ];
  });
}

const keyCell = (key) => el("th", { scope: "row" }, el("code", null, key));

function configurationSection(data, runs) {
  const content = [];
  if (runs.length > 1 && data.differences?.length) {
    content.push(
      table(
        "Keys that differ between runs",
        ["Key", ...runs.map((run) => run.label)],
        data.differences.map(({ key, values }) => [
          keyCell(key),
          ...values.map((value) => (value === null ? "–" : el("code", null, value))),
        ]),
      ),
    );
  }
  const some = runs.filter((run) => run.configuration);
  if (some.length && !data.sweep) {
    content.push(
      perRun("configuration", some, (run) => [
        table(
          `Keys of ${run.name} that differ from their defaults`,
          ["Key", "Value"],
          run.configuration.map(([key, value]) => [keyCell(key), el("code", null, value)]),
        ),
        run.configuration_text &&
          el(
            "details",
            null,
            el("summary", null, "The complete configuration, with the origin of each value"),
            el("pre", { tabindex: 0 }, run.configuration_text),
          ),
      ]),
    );
  }
  return section(
    "configuration",
    runs.length > 1 ? "Configuration, and what differs" : "Configuration",
    content,
  );
}

function guardSection(runs) {
  const some = runs.filter((run) => run.guard.total);
  return runSection("anomalies", "Skipped steps and anomalies", some, (run) => {
    const { items, total } = run.guard;
    return [
      el(
        "p",
        null,
        `${plural(total, "step")} ${total === 1 ? "was" : "were"} skipped`,
        items.length < total && `; the newest ${items.length} are listed`,
        ".",
      ),
      items.length > 0 &&
        table(
          `Skipped steps of ${run.name}`,
          [["Step", "number"], "Reason", "Action", ["Anomalous step", "number"]],
          items.map((item) => [
            count(item.step),
            item.why.replaceAll("_", "-"),
            item.action,
            count(item.bad_step),
          ]),
        ),
    ];
  });
}
