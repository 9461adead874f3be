"""Live pages in a real browser: new points, changed states, resumed jobs, and the list of jobs."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect
from support.browser import OpenPage
from support.report_jobs import START, SyntheticRun, WrittenJob, write_finished_job, write_new_job
from support.running import Dtt

from dtt.artifacts.jobdir import JobDir
from dtt.track.jsonl import JsonlTracker

CHARTS = ("Loss", "Gradient norm", "Tokens per second", "Validation, bits per byte", "hellaswag")


@dataclass
class RunningJob:
    """A job that runs, in that its heartbeat is fresh; records are appended by the test."""

    job: JobDir
    run: SyntheticRun
    step: int

    def beat(self) -> None:
        heartbeat = json.loads(self.job.heartbeat.read_text())
        heartbeat |= {
            "time": time.time() + 3600, "phase": "step", "step": self.step,
            "node": socket.gethostname(), "pid": os.getpid(),
        }  # fmt: skip
        self.job.heartbeat.write_text(json.dumps(heartbeat))

    def train(self, steps: int) -> None:
        """Append the records of the next steps."""
        records = self.run.records(self.step, self.step + steps, START)
        text = "".join(json.dumps(record) + "\n" for record in records if record["kind"] != "start")
        with self.job.metrics.open("a") as file:
            file.write(text)
        self.step += steps
        self.beat()


def start(folder: Path, run: SyntheticRun, step: int, name: str = "run") -> RunningJob:
    written: WrittenJob = write_new_job(folder, name, run)
    written.attempt(0, step, began=START, code=None)
    running = RunningJob(written.job, run, step)
    running.beat()
    return running


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """The address that `dtt report --serve` prints, for the jobs in tmp_path/jobs."""
    (tmp_path / "jobs").mkdir()
    process = Dtt(tmp_path).start("report", "--serve")
    assert process.stdout is not None
    url = process.stdout.readline().strip()
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{32}/", url), process.communicate()
    yield url
    process.terminate()
    Dtt.wait(process)


def tables(page: Page) -> dict[str, list[str]]:
    """Return the rows of the tables of values of CHARTS, with tabs between the cells."""
    row = "tr => [...tr.cells].map(cell => cell.textContent).join('\\t')"
    found = {}
    for chart in CHARTS:
        values = page.locator(f"figure:has(h3:text-is('{chart}')) details.values")
        if values.get_attribute("open") is None:
            values.locator("summary").click()
        values.locator("tr").first.wait_for()
        found[chart] = values.locator("tr").evaluate_all(f"rows => rows.map({row})")
    return found


@pytest.mark.slow
def test_a_page_shows_new_points_within_seconds_and_what_a_new_page_shows(
    address: str, tmp_path: Path, chromium: Browser
) -> None:
    # It grows beyond 2,000 steps, so that buckets have more than one.
    job = start(tmp_path, SyntheticRun(steps=4000, eval_every=500, spike=2157), 1990)
    with OpenPage(chromium, f"{address}report?job=jobs/run") as opened:
        page = opened.page
        expect(page.locator("#connection")).to_have_text("live")
        for _ in range(2):
            job.train(300)
            step = f"{job.step:,} of 4,000"
            expect(page.locator(".tiles")).to_contain_text(step)
        seen = tables(page)
        assert any(row.startswith("training\t2,590\t") for row in seen["Loss"])
        assert seen["Loss"][-1].startswith("validation\t2,500\t")
        page.check("input[name=axis][value=tokens]")
        by_tokens = tables(page)
        assert opened.problems == []
        assert opened.axe() == []
    with OpenPage(chromium, f"{address}report?job=jobs/run") as opened:
        assert tables(opened.page) == seen
        opened.page.check("input[name=axis][value=tokens]")
        assert tables(opened.page) == by_tokens


@pytest.mark.slow
def test_a_page_follows_a_run_from_before_its_first_step_to_its_end(
    address: str, tmp_path: Path, chromium: Browser
) -> None:
    job = start(tmp_path, SyntheticRun(eval_every=10), 0)
    job.job.metrics.write_text("")
    with OpenPage(chromium, f"{address}report?job=jobs/run") as opened:
        page = opened.page
        expect(page.locator("#connection")).to_have_text("live")
        expect(page.locator(".verdict")).to_contain_text("running")
        assert page.locator("figure").count() == 0
        job.train(5)
        expect(page.locator("h3", has_text="Loss").first).to_be_visible()
        job.train(5)  # the first evaluation: its charts and the samples are new
        expect(page.locator("#samples blockquote")).to_contain_text("10")
        expect(page.locator("h3", has_text="hellaswag")).to_be_visible()
        # A redraw keeps the sample, the axis and the cursor.
        page.locator("#samples input").fill("0")
        page.check("input[name=axis][value=tokens]")
        page.locator(".plot").first.focus()
        page.keyboard.press("Home")
        job.train(20)
        expect(page.locator(".tiles")).to_contain_text("30 of 400")
        assert page.locator("#samples output").inner_text() == "step 0"
        assert page.is_checked("input[name=axis][value=tokens]")
        assert page.locator(".u-cursor-x").first.is_visible()
        why = "training diverged at step 30: loss is nan\n  next:  lower optim.lr"
        job.job.end_attempt(76, why, 0, attempt=1)  # type: ignore[arg-type]
        expect(page.locator(".verdict")).to_contain_text("diverged")
        expect(page.locator(".verdict")).to_contain_text("lower optim.lr")
        assert opened.problems == []


def test_a_page_follows_a_job_that_resumes_from_an_earlier_step(
    address: str, tmp_path: Path, chromium: Browser
) -> None:
    job = start(tmp_path, SyntheticRun(), 190)
    with OpenPage(chromium, f"{address}report?job=jobs/run") as opened:
        page = opened.page
        expect(page.locator("#connection")).to_have_text("live")
        JsonlTracker(job.job.metrics, 100).close()
        job.step = 100
        job.train(10)
        expect(page.locator(".tiles")).to_contain_text("110 of 400")


@pytest.mark.slow
def test_the_list_shows_all_jobs_with_their_states_and_opens_several_of_them(
    address: str, tmp_path: Path, chromium: Browser
) -> None:
    running = start(tmp_path, SyntheticRun(), 190, "first")
    write_finished_job(tmp_path, "second")
    with OpenPage(chromium, address) as opened:
        page = opened.page
        rows = page.locator("tbody tr")
        expect(rows).to_have_count(2)
        expect(rows.nth(0)).to_contain_text("running")
        expect(rows.nth(1)).to_contain_text("done")
        running.train(30)
        expect(rows.nth(0)).to_contain_text("220 of 400")
        write_finished_job(tmp_path, "third")
        expect(rows).to_have_count(3)
        assert opened.axe() == []
        assert opened.problems == []
        page.get_by_label("Compare jobs/first").check()
        page.get_by_label("Compare jobs/second").check()
        page.get_by_role("button", name="Compare").click()
        page.wait_for_selector("html[data-ready='1'] h1:text-is('2 runs')")
        expect(page.locator("header tbody tr")).to_have_count(2)
        page.get_by_role("link", name="All jobs").click()
        page.wait_for_selector("h1:text-is('Jobs')")


@pytest.mark.slow
def test_a_server_that_went_away_is_reported_on_the_page(tmp_path: Path, chromium: Browser) -> None:
    start(tmp_path, SyntheticRun(), 50)
    process = Dtt(tmp_path).start("report", "jobs/run", "--serve")
    assert process.stdout is not None
    url = process.stdout.readline().strip()
    with OpenPage(chromium, f"{url}report?job=jobs/run") as opened:
        expect(opened.page.locator("#connection")).to_have_text("live")
        process.terminate()
        Dtt.wait(process)
        expect(opened.page.locator("#connection")).to_contain_text("not connected")
