// Live pages: the server sends the lines appended to metrics.jsonl, and states that change.

/** Yield the lines of an endless response; reconnect forever, from where it broke. */
async function* lines(url) {
  for (;;) {
    await shown();
    const connection = new AbortController();
    const pause = () => connection.abort();
    document.addEventListener("visibilitychange", pause, { once: true });
    let refused = false;
    try {
      const response = await fetch(url(), { signal: connection.signal });
      if (!response.ok) {
        status(`the server refuses: ${(await response.text()) || "open its new address"}`);
        if (response.status !== 503) return;
        refused = true;
      }
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (let part = await reader.read(); !part.done; part = await reader.read()) {
        const found = (rest + part.value).split("\n");
        rest = found.pop();
        for (const line of found) if (line) yield line;
      }
    } catch (error) {
      const known = error instanceof TypeError || error.name === "AbortError";
      if (!known) throw error; // else the server is away, the computer slept, or the tab is hidden
    }
    document.removeEventListener("visibilitychange", pause);
    if (document.hidden) continue;
    if (!refused) status("not connected: trying again");
    await new Promise((resolve) => {
      setTimeout(resolve, 2000);
    });
  }
}

/** Wait until the tab is visible: a browser opens only a few connections to a server. */
function shown() {
  return new Promise((resolve) => {
    if (!document.hidden) resolve();
    else document.addEventListener("visibilitychange", () => resolve(), { once: true });
  });
}

function status(text) {
  document.querySelector("#connection").textContent = text;
}

const encoder = new TextEncoder();

/** Follow the runs of a report: add their records, and call `changed` soon after. */
async function follow(runs, changed) {
  const position = (run) => `job=${encodeURIComponent(`${run.path}:${run.offset}`)}`;
  const url = () => `stream?${runs.map(position).join("&")}`;
  for await (const line of lines(url)) {
    status("live");
    const [, index, sign, text] = /^(\d+)([!~]?) ?(.*)$/s.exec(line) ?? [];
    const run = runs[index];
    if (!run) continue;
    const verdict = sign === "!" ? JSON.parse(text) : run.verdict;
    const record = sign === "" ? parsed(text) : null;
    const first = record?.kind === "train" && !run.progress.at.length;
    if (sign === "~" || phase(verdict) !== phase(run.verdict) || first) {
      // An attempt has started, trained its first steps, or ended, or the file was written anew:
      // parts of the page that do not follow from the metrics have changed, too.
      location.reload();
      return;
    }
    run.verdict = verdict;
    if (sign === "") run.offset += encoder.encode(text).length + 1;
    if (record) run.add(record);
    changed();
  }
}

/** What an attempt is doing, as far as it decides how the page is built. */
function phase({ mood, attempt }) {
  return JSON.stringify([mood === "busy", attempt]);
}

/** A record, or null for a damaged line. */
function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

/** Follow the states of all jobs. */
async function followJobs(rows, changed) {
  for await (const line of lines(() => "stream")) {
    status("live");
    const row = JSON.parse(line);
    rows.set(row.job, row);
    changed();
  }
}

/** Return a function that calls `action` at most once per `milliseconds`. */
function atMostEvery(milliseconds, action) {
  let waiting = false;
  return () => {
    if (waiting) return;
    waiting = true;
    setTimeout(() => {
      waiting = false;
      action();
    }, milliseconds);
  };
}
