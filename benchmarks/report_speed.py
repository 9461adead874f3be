"""Measure `dtt report` and its page in a browser, beside a page that plotly makes of all points.

    python benchmarks/report_speed.py [--steps 1000000] [--runs 1 10] [--rounds 3]
                                      [--peers-python PYTHON] [--work FOLDER]

Each run has a `train` record per step, with loss, learning rate and gradient norm, and a `perf`
and a `data` record every 10 steps; its loss spikes at one step. Columns:

    build        seconds of the command, from its start to its end
    memory       its peak resident memory
    page         size of the HTML file
    interactive  from the start of the navigation to the frame that shows all curves, which react
    axis         from a click that changes the axis of all curves to the frame that shows it

dtt and its peer alternate; figures are medians. The browser is the headless Chromium of this
machine. plotly draws SVG: without a GPU, its WebGL takes a minute to draw a million points. plotly
and numpy are imported from the environment of --peers-python; if they are missing, plotly is left
out. A page that does not open within 5 minutes counts as failed: its times are nan.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path

from jobs import DTT
from measurement import Table, in_turns
from playwright.sync_api import Browser, Error, sync_playwright

from dtt.artifacts.corpus import CorpusSource
from dtt.artifacts.jobdir import JobDir
from dtt.artifacts.manifests import DataManifest, SourceFacts
from dtt.base.errors import ExitCode
from dtt.config.explain import show
from dtt.config.load import resolve

PEERS = Path(__file__).with_name("report_peers.py")
BATCH_TOKENS, SECONDS_PER_STEP, LOG_EVERY = 524_288, 0.25, 10
SPIKE = 97.25
"""Loss of the step that spikes."""
LIMIT = 300
"""Seconds in which a command or a page must be ready."""
PAINTED = """
const painted = act => requestAnimationFrame(() => {
    const after = new MessageChannel();
    after.port1.onmessage = act;
    after.port2.postMessage(null);
});
"""
NOTE_READY = (
    PAINTED
    + """
new MutationObserver((_, observer) => {
    if (document.documentElement?.dataset.ready !== "1") return;
    observer.disconnect();
    painted(() => { window.readyAt = performance.now(); });
}).observe(document, {attributes: true, subtree: true, childList: true});
"""
)
CHANGE_AXIS = f"""
() => new Promise(resolve => {{
    {PAINTED}
    const began = performance.now(), done = () => resolve(performance.now() - began);
    if (window.changeAxis) window.changeAxis().then(() => painted(done));
    else {{ document.querySelector("input[name=axis][value=tokens]").click(); painted(done); }}
}})
"""


# ---- the runs ------------------------------------------------------------------------------------


def write_job(root: Path, steps: int, seed: int) -> JobDir:
    """Write a job that finished after this number of steps."""
    job = JobDir(root)
    root.mkdir(parents=True)
    arguments = [
        f"name={root.name}", f"train.steps={steps}", f"train.log_every={LOG_EVERY}", f"seed={seed}",
        f"train.global_batch_tokens={BATCH_TOKENS}", "data.tokens=tokens",
    ]  # fmt: skip
    resolved = resolve(None, arguments, env={})
    job.config.write_text(show(resolved.config, resolved.layer))
    source = SourceFacts(
        name="tokens", path="tokens", key="0" * 64, tokens=10**10, samples=10**7,
        bytes_per_token=4.0, corpus=CorpusSource(kind="local", id="benchmark"),
    )  # fmt: skip
    manifest = DataManifest(
        key="0" * 64, tokenizer_sha256="0" * 64, vocab_size=4096, end_of_document=0,
        sources=(source,),
    )  # fmt: skip
    (root / manifest.filename).write_text(manifest.dump())
    with job.metrics.open("w") as file:
        file.writelines(metrics(steps, seed))
    job.begin_attempt()
    job.end_attempt(ExitCode.DONE, "done", 0, attempt=1)
    return job


def metrics(steps: int, seed: int) -> Iterator[str]:
    """Yield the lines of metrics.jsonl. Formatting them by hand takes a third of json's time."""
    noise, spike = random.Random(seed), steps * 2 // 3
    for step in range(1, steps + 1):
        logged = 1.7e9 + -(-step // LOG_EVERY) * LOG_EVERY * SECONDS_PER_STEP
        loss = 2.4 + 8 * math.exp(-6 * (step / steps) ** 0.4) + 0.1 * noise.random()
        ledger = blake2b(step.to_bytes(8, "little"), digest_size=16).hexdigest()
        yield (
            f'{{"kind": "train", "step": {step}, "lr": {4e-3 * min(1, step / 1000)}, '
            f'"tokens": {step * BATCH_TOKENS}, "ledger": "{ledger}", '
            f'"loss": {SPIKE if step == spike else loss}, '
            f'"grad_norm": {0.3 + noise.random() ** 4}, "time": {logged}}}\n'
        )
        if step % LOG_EVERY == 0:
            seconds = SECONDS_PER_STEP * (0.95 + 0.1 * noise.random())
            yield (
                f'{{"kind": "perf", "step": {step}, "steps": {steps}, '
                f'"tokens_per_second": {BATCH_TOKENS / seconds:.1f}, '
                f'"seconds_per_step": {seconds:.6f}, "mfu": 0.41, "mfu_causal": 0.38, '
                f'"matmul_share": 0.52, "memory_gb": {61 + noise.random():.3f}, '
                '"memory_steady_gb": 60.1, "memory_reserved_gb": 64.2, "seconds": {"other": 0.01, '
                f'"data": 0.02, "forward_backward": {8 * seconds:.4f}, '
                f'"optimizer": {2 * seconds:.4f}}}, "communication_seconds": {{"optimizer": 0.0, '
                '"gradients": 0.0}, "slowest_rank": 3, "slowest_node": "node-1", '
                f'"slowest_behind": 0.012, "time": {logged}}}\n'
                f'{{"kind": "data", "step": {step}, "epochs": {{"tokens": {step / steps}}}, '
                f'"time": {logged}}}\n'
            )


# ---- the measurement -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Figures:
    """The figures of one page; those of a page that fails to open are NaN."""

    build: float
    """Seconds."""
    memory: int
    """Bytes."""
    page: int
    """Bytes."""
    interactive: float
    """Seconds."""
    axis: float
    """Seconds."""


def measured(command: Sequence[object], page: Path, browser: Browser) -> Figures:
    """Run the command that writes `page`, and open the page."""
    page.unlink(missing_ok=True)
    start = time.perf_counter()
    process = subprocess.Popen([str(part) for part in command], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)  # unlike RUSAGE_CHILDREN, of this process alone
    seconds = time.perf_counter() - start
    if os.waitstatus_to_exitcode(status):
        sys.exit(f"{' '.join(map(str, command))} failed")
    interactive, axis = opened(page, browser)
    return Figures(seconds, 1024 * usage.ru_maxrss, page.stat().st_size, interactive, axis)


def opened(page: Path, browser: Browser) -> tuple[float, float]:
    """Return the seconds until a page is interactive, and those of a change of its axis."""
    context = browser.new_context(offline=True)
    context.set_default_timeout(1000 * LIMIT)
    context.add_init_script(NOTE_READY)
    try:
        tab = context.new_page()
        tab.goto(page.as_uri())
        tab.wait_for_function("window.readyAt")
        return tab.evaluate("window.readyAt") / 1000, tab.evaluate(CHANGE_AXIS) / 1000
    except Error as error:
        print(f"{page.name}: {error.message.splitlines()[0]}", file=sys.stderr)
        return math.nan, math.nan
    finally:
        context.close()


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start the Chromium of this machine."""
    program = shutil.which("chromium")
    if program is None:
        sys.exit("no Chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program)
        yield browser
        browser.close()


def compare(jobs: Sequence[JobDir], peers: str | None, rounds: int, work: Path) -> None:
    """Measure the pages of these runs, and print a table."""
    pages = {"dtt report": work / "dtt.html", "plotly": work / "plotly.html"}
    commands: dict[str, list[object]] = {
        "dtt report": [*DTT, "report", *(job.root for job in jobs), "--out", pages["dtt report"]]
    }
    if peers is not None:
        commands["plotly"] = [peers, PEERS, pages["plotly"], *(job.metrics for job in jobs)]
    with chromium() as browser:
        results = in_turns(
            {name: partial(measured, command, pages[name], browser)
             for name, command in commands.items()},
            rounds, warm_up=0,
        )  # fmt: skip
    columns = {"build": 10, "memory": 11, "page": 11, "interactive": 13, "axis": 10}
    size = sum(job.metrics.stat().st_size for job in jobs)
    table = Table(f"{len(jobs)} run(s), {size / 1e6:,.0f} MB of metrics", 36, columns)
    medians = {}
    for name, figures in results.items():
        build, memory, page, interactive, axis = medians[name] = [
            statistics.median(getattr(one, column) for one in figures)
            for column in ("build", "memory", "page", "interactive", "axis")
        ]
        table.row(
            name, f"{build:.1f} s", f"{memory / 1e6:,.0f} MB", f"{page / 1e6:,.1f} MB",
            f"{interactive:.2f} s", f"{1e3 * axis:,.0f} ms",
        )  # fmt: skip
    if "plotly" in medians:
        pairs = zip(medians["plotly"], medians["dtt report"], strict=True)
        table.row("plotly / dtt report", *(f"{peer / own:.1f}" for peer, own in pairs))


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure dtt report and its page in a browser.")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, nargs="+", default=[1, 10])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers-python", default=sys.executable)
    parser.add_argument("--work", type=Path)
    options = parser.parse_args()
    probe = [options.peers_python, "-c", "import numpy, plotly"]
    has_peer = subprocess.run(probe, check=False, capture_output=True).returncode == 0
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        roots = [Path(folder, "jobs", f"run-{i}") for i in range(max(options.runs))]
        jobs = [write_job(root, options.steps, seed) for seed, root in enumerate(roots)]
        for runs in options.runs:
            peer = options.peers_python if has_peer else None
            compare(jobs[:runs], peer, options.rounds, Path(folder))


if __name__ == "__main__":
    main()
