"""The report in a real browser without a network: what it loads, shows and does."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page
from support.browser import OpenPage
from support.hostile_jobs import HOSTILE, write_hostile_job, write_hostile_sweep
from support.planted_secrets import ENVIRONMENT, SECRETS, write_job_with_secrets
from support.report_jobs import (
    START,
    SyntheticRun,
    write_finished_job,
    write_interrupted_job,
    write_new_job,
    write_sweep,
)

from dtt.report import run as report
from dtt.report.metrics_history import MAX_BUCKETS

CHART = "figure:has(h3:text-is('{}'))"


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished job, an interrupted job and a sweep, each with its report."""
    folder = tmp_path_factory.mktemp("jobs")
    for job in (write_finished_job(folder), write_interrupted_job(folder), write_sweep(folder)):
        report.write([job], None)
    both = [folder / "jobs/finished", folder / "jobs/interrupted"]
    report.write(both, folder / "both.html")
    return folder


def values(page: Page, chart: str) -> list[list[str]]:
    """Open the table of values of a chart; return its rows, the first with the columns."""
    figure = page.locator(CHART.format(chart))
    if figure.locator("details.values").get_attribute("open") is None:
        figure.locator("summary").click()
    rows = figure.locator("tr")
    rows.first.wait_for()
    return [rows.nth(i).locator("th, td").all_inner_texts() for i in range(rows.count())]


def colored(figure: Locator, left: float, right: float, top: float, bottom: float) -> int:
    """Count the saturated pixels in a part of a chart; left, … are fractions of its canvas."""
    script = """
    (canvas, [left, right, top, bottom]) => {
      const [w, h] = [canvas.width, canvas.height];
      const data = canvas.getContext("2d").getImageData(
        left * w, top * h, Math.max(1, (right - left) * w), Math.max(1, (bottom - top) * h)).data;
      let found = 0;
      for (let i = 0; i < data.length; i += 4) {
        const [low, high] = [Math.min(...data.slice(i, i + 3)), Math.max(...data.slice(i, i + 3))];
        if (data[i + 3] > 40 && high - low > 60) found += 1;
      }
      return found;
    }"""
    return int(figure.locator("canvas").evaluate(script, [left, right, top, bottom]))


@pytest.mark.slow(except_for=["jobs/finished/report-1280-light"])
@pytest.mark.parametrize(
    ("name", "width", "scheme"),
    [
        ("jobs/finished/report", 1280, "light"),
        # The sections of a finished job, and more.
        ("jobs/interrupted/report", 1280, "light"),
        ("jobs/interrupted/report", 360, "dark"),
        ("jobs/sweep/report", 1280, "light"),
        ("jobs/sweep/report", 360, "dark"),
        ("both", 360, "dark"),
    ],
)
def test_a_page_needs_no_network_reports_no_error_and_is_accessible(
    name: str, width: int, scheme: str, jobs: Path, chromium: Browser
) -> None:
    with OpenPage(chromium, jobs / f"{name}.html", width=width, color_scheme=scheme) as opened:  # type: ignore[arg-type]
        assert opened.requests == []
        assert opened.problems == []
        assert opened.axe() == []
        overflow = opened.page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert overflow <= 0, "the page scrolls sideways"


def test_the_policy_permits_only_the_page_s_own_script_and_no_connection(jobs: Path) -> None:
    page = (jobs / "both.html").read_text()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    assert re.fullmatch(
        r"default-src 'none'; script-src 'sha256-[\w+/=]{44}'; style-src 'sha256-[\w+/=]{44}'; "
        r"connect-src 'none'; base-uri 'none'; form-action 'none'",
        policy[1],
    )


def test_the_sections_follow_each_other_in_the_order_of_importance(
    jobs: Path, chromium: Browser
) -> None:
    with OpenPage(chromium, jobs / "jobs/interrupted/report.html") as opened:
        found = opened.page.locator("section").evaluate_all("all => all.map(one => one.id)")
    assert found == [
        "curves", "tasks", "optimization", "speed", "time", "attempts", "samples", "mixture",
        "checkpoints", "configuration", "anomalies",
    ]  # fmt: skip


@pytest.mark.slow
def test_the_axis_radio_buttons_change_the_axis_of_every_chart(
    jobs: Path, chromium: Browser
) -> None:
    with OpenPage(chromium, jobs / "jobs/finished/report.html") as opened:
        page, run = opened.page, SyntheticRun()
        for name, column, last in (
            ("steps", "Steps", "400"),
            ("tokens", "Tokens", "819k"),
            ("time", "Time", "1 min 46 s"),
        ):
            page.check(f"input[name=axis][value={name}]")
            for chart in ("Loss", "Gradient norm", "Tokens per second", "hellaswag"):
                table = values(page, chart)
                assert table[0][1] == column
                assert table[-1][1] == last
        page.check("input[name=axis][value=flops]")
        assert values(page, "Loss")[0][1] == "FLOPs"
        assert run.batch_tokens * run.steps == 819_200
        assert opened.problems == []


@pytest.mark.slow
def test_dragging_zooms_all_charts_and_the_button_shows_everything_again(
    jobs: Path, chromium: Browser
) -> None:
    with OpenPage(chromium, jobs / "jobs/finished/report.html") as opened:
        page = opened.page
        everything = page.get_by_role("button", name="Show everything")
        assert not everything.is_visible()
        area = page.locator(CHART.format("Loss")).locator(".u-over")
        area.scroll_into_view_if_needed()
        box = area.bounding_box()
        assert box is not None
        middle = box["y"] + box["height"] / 2
        page.mouse.move(box["x"] + 0.25 * box["width"], middle)
        page.mouse.down()
        page.mouse.move(box["x"] + 0.5 * box["width"], middle, steps=5)
        page.mouse.up()
        for chart in ("Loss", "Learning rate"):
            steps = [int(row[1]) for row in values(page, chart)[1:]]
            assert min(steps) in range(98, 152)  # validation is every 50 steps
            assert max(steps) in range(148, 203)
        everything.click()
        assert int(values(page, "Loss")[-1][1]) == 400
        assert not everything.is_visible()


@pytest.mark.slow
def test_run_toggles_remove_the_curves_of_a_run(jobs: Path, chromium: Browser) -> None:
    with OpenPage(chromium, jobs / "both.html") as opened:
        page = opened.page
        chart = page.locator(CHART.format("Training loss"))
        assert {row[0] for row in values(page, "Training loss")[1:]} == {"finished", "interrupted"}
        page.uncheck("input[name=run] >> nth=0")
        assert {row[0] for row in values(page, "Training loss")[1:]} == {"interrupted"}
        page.uncheck("input[name=run] >> nth=1")
        assert len(values(page, "Training loss")) == 1  # only the names of the columns
        assert colored(chart, 0.1, 1, 0, 0.9) == 0
        page.check("input[name=run] >> nth=0")
        assert colored(chart, 0.1, 1, 0, 0.9) > 100


@pytest.mark.slow
def test_lines_of_a_chart_differ_in_color_and_in_dashes(tmp_path: Path, chromium: Browser) -> None:
    job = write_finished_job(tmp_path)
    lines = (job / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    for record in records:
        if record["kind"] == "train":
            record |= {"logp_chosen": -50.0 - record["step"], "logp_rejected": -60.0}
        elif record["kind"] == "eval":
            record["ema_loss"] = record["loss"] - 0.1
    (job / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    report.write([job], None)
    with OpenPage(chromium, job / "report.html") as opened:
        for chart, count in (
            ("Loss", 3), ("Log-probability of answers", 2), ("Validation loss by source", 2)
        ):  # fmt: skip
            lines_of = opened.page.locator(CHART.format(chart)).locator(".readout line")
            styles = lines_of.evaluate_all(
                "all => all.map(l => [l.style.stroke, l.getAttribute('stroke-dasharray')])"
            )
            assert len(styles) == count
            assert len({color for color, _ in styles}) == count
            assert len({dash for _, dash in styles}) == count


@pytest.mark.slow
def test_zoom_works_beside_a_run_that_has_not_started(tmp_path: Path, chromium: Browser) -> None:
    one = write_finished_job(tmp_path)
    other = write_new_job(tmp_path, "other", SyntheticRun()).job.root
    report.write([one, other], tmp_path / "page.html")
    with OpenPage(chromium, tmp_path / "page.html") as opened:
        page = opened.page
        page.check("input[name=axis][value=tokens]")
        page.mouse.move(0, 0)  # where no chart can scroll under the mouse and move the cursor
        chart = page.locator(CHART.format("Training loss"))
        chart.locator(".plot").focus()
        for key in ("Home", "+", "+"):
            page.keyboard.press(key)
        assert page.get_by_role("button", name="Show everything").is_visible()
        tokens = [row[1] for row in values(page, "Training loss")[1:]]
        assert tokens[0] == "2.05k"  # of the first step
        assert opened.problems == []


@pytest.mark.slow
def test_a_run_with_no_step_and_one_with_step_0_only_have_a_page(
    tmp_path: Path, chromium: Browser
) -> None:
    new = write_new_job(tmp_path, "new", SyntheticRun()).job.root
    job = write_finished_job(tmp_path)
    kept = [
        line for line in (job / "metrics.jsonl").read_text().splitlines() if '"step": 0' in line
    ]
    (job / "metrics.jsonl").write_text("".join(f"{line}\n" for line in kept))
    for path in (new, job):
        report.write([path], None)
        with OpenPage(chromium, path / "report.html") as opened:
            assert opened.problems == []
            assert opened.axe() == []


@pytest.mark.slow
def test_smoothing_is_off_at_first_and_changes_no_value(jobs: Path, chromium: Browser) -> None:
    with OpenPage(chromium, jobs / "jobs/finished/report.html") as opened:
        page = opened.page
        smoothing = page.locator(".controls select")
        assert smoothing.input_value() == "0"
        before = values(page, "Gradient norm")
        chart = page.locator(CHART.format("Gradient norm")).locator("canvas")
        drawn = chart.evaluate("canvas => canvas.toDataURL()")
        smoothing.select_option("20")
        assert values(page, "Gradient norm") == before
        assert chart.evaluate("canvas => canvas.toDataURL()") != drawn


@pytest.mark.slow
def test_the_page_can_be_used_with_the_keyboard_alone(jobs: Path, chromium: Browser) -> None:
    with OpenPage(chromium, jobs / "jobs/finished/report.html") as opened:
        page = opened.page

        def focus(selector: str) -> None:
            for _ in range(80):
                page.keyboard.press("Tab")
                if page.evaluate("s => document.activeElement.matches(s)", selector):
                    return
            pytest.fail(f"{selector} cannot be reached with Tab")

        focus("input[name=axis]")
        page.keyboard.press("ArrowRight")
        assert page.is_checked("input[name=axis][value=tokens]")
        page.keyboard.press("ArrowLeft")
        focus(".plot")
        readout = page.locator(CHART.format("Loss")).locator(".readout")
        at_the_end = readout.inner_text()
        page.keyboard.press("Home")
        page.wait_for_function(
            "before => document.querySelector('.readout').innerText !== before", arg=at_the_end
        )
        page.keyboard.press("+")
        assert page.get_by_role("button", name="Show everything").is_visible()
        page.keyboard.press("Escape")
        assert not page.get_by_role("button", name="Show everything").is_visible()
        focus(".values summary")
        page.keyboard.press("Enter")
        assert page.locator(".values[open]").count() == 1
        focus("#samples input[type=range]")
        page.keyboard.press("Home")
        assert page.locator("#samples output").inner_text() == "step 0"


def test_the_slider_shows_the_sample_of_each_step(jobs: Path, chromium: Browser) -> None:
    with OpenPage(chromium, jobs / "jobs/finished/report.html") as opened:
        page = opened.page
        assert "after 400 steps" in page.locator("#samples blockquote").inner_text()
        page.locator("#samples input").fill("0")
        assert "after 0 steps" in page.locator("#samples blockquote").inner_text()


def test_interruptions_and_skipped_steps_are_listed_with_their_reasons(
    jobs: Path, chromium: Browser
) -> None:
    with OpenPage(chromium, jobs / "jobs/interrupted/report.html") as opened:
        rows = opened.page.locator("#attempts tbody tr").all_inner_texts()
        assert len(rows) == 4
        for row, state, why in zip(
            rows,
            ("killed", "stopped (exit code 75)", "failed (exit code 74)", "done"),
            ("–", "requested by SIGTERM", "no space left on device", "done"),
            strict=True,
        ):
            assert state in row
            assert why in row
        assert opened.page.locator("#attempts .bar").count() == 4
        skipped = opened.page.locator("#anomalies tbody tr").all_inner_texts()
        assert [row.split() for row in skipped] == [["157", "spike", "skip", "157"]]
        assert "steps repeated" in opened.page.locator("#time").inner_text()


def test_a_sweep_names_the_best_trial_and_plots_each_key(jobs: Path, chromium: Browser) -> None:
    with OpenPage(chromium, jobs / "jobs/sweep/report.html") as opened:
        page = opened.page
        assert "best" in page.locator("header").inner_text()
        first = page.locator("#sweep tbody tr").first.inner_text()
        assert "★ best" in first
        headings = page.locator("#sweep figure h3").all_inner_texts()
        assert headings == ["optim.lr", "model.n_layers"]
        diverged = page.locator("header tbody tr", has_text="diverged")
        assert "lr=0.016, n_layers=2" in diverged.inner_text()


ALL_VALUES_LISTED = """
[...document.querySelectorAll("details.values")].every(one => one.querySelector("tr"))"""
EVERY_SAMPLE = """
slider => Array.from({length: Number(slider.max) + 1}, (_, i) => {
  slider.value = i;
  slider.dispatchEvent(new Event("input", {bubbles: true}));
  return document.querySelector("#samples blockquote").innerText;
})"""
"""Moves the slider of samples over its range: one call, not two for each of 100 samples."""


@pytest.mark.slow
def test_two_hundred_hostile_texts_are_shown_and_none_is_executed(
    tmp_path: Path, chromium: Browser
) -> None:
    job = write_hostile_job(tmp_path)
    sweep = write_hostile_sweep(tmp_path)
    report.write([job], tmp_path / "job.html")
    report.write([sweep], tmp_path / "sweep.html")
    report.write([job, tmp_path / "jobs" / job.name], tmp_path / "twice.html")
    assert len(HOSTILE) == 200
    for name in ("job", "sweep", "twice"):
        with OpenPage(chromium, tmp_path / f"{name}.html") as opened:
            page = opened.page
            page.locator("summary").evaluate_all("all => all.forEach(one => one.click())")
            page.wait_for_function(ALL_VALUES_LISTED)
            if name == "job":
                shown = page.locator("#samples input").evaluate(EVERY_SAMPLE)
                assert len(set(shown)) > 90  # a page has up to 100 samples
            assert page.locator("main script, main img, main iframe, main object").count() == 0
            assert opened.pwned is None
            assert opened.problems == []
            assert opened.requests == []


def test_no_planted_secret_is_in_any_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = write_job_with_secrets(tmp_path)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    report.write([job], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    metrics = (job / "metrics.jsonl").read_text()
    assert [secret for secret in SECRETS.values() if secret in metrics] == [*SECRETS.values()]
    assert [secret for secret in SECRETS.values() if secret in page] == []
    assert "[secret]" in page


@pytest.mark.slow
def test_a_spike_of_one_step_is_visible_in_a_long_run(tmp_path: Path, chromium: Browser) -> None:
    run = SyntheticRun(
        steps=60_000, spike=44_444, log_every=100, eval_every=10_000, save_every=20_000
    )
    job = write_finished_job(tmp_path, run=run)
    report.write([job], None)
    page = (job / "report.html").read_text()
    assert len(page.encode()) < 2_000_000
    with OpenPage(chromium, job / "report.html") as opened:
        figure = opened.page.locator(CHART.format("Loss"))
        buckets = opened.page.evaluate(
            "JSON.parse(document.querySelector('#data').textContent).runs[0].curves['train/loss']"
        )
        assert len(buckets["at"]) <= MAX_BUCKETS
        assert max(buckets["max"]) == 11.5
        # The axis of y takes 62 px of the left side.
        box = figure.locator("canvas").bounding_box()
        assert box is not None
        start = 62 / box["width"]
        at = start + (1 - 22 / box["width"] - start) * 44_444 / 60_000
        assert colored(figure, at - 0.004, at + 0.004, 0.02, 0.3) > 5
        assert colored(figure, at - 0.05, at - 0.01, 0.02, 0.3) == 0


@pytest.mark.slow
def test_print_shows_light_pages_without_controls(jobs: Path, chromium: Browser) -> None:
    with OpenPage(
        chromium, jobs / "jobs/interrupted/report.html", color_scheme="dark", media="print"
    ) as opened:
        assert not opened.page.locator(".controls").is_visible()
        opened.page.evaluate("dispatchEvent(new Event('beforeprint'))")
        cells = opened.page.locator("#attempts tbody tr").first
        assert cells.evaluate("row => getComputedStyle(row).display") == "table-row"
        background = opened.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert background == "rgb(255, 255, 255)"
        assert len(opened.page.pdf()) > 10_000


def test_each_number_of_one_s_own_has_a_chart(tmp_path: Path, chromium: Browser) -> None:
    """Also beside another run, and whatever its name is."""
    written = write_new_job(tmp_path, "own", SyntheticRun())
    named = {"norm": 0.5, "<b>share": 0.25}
    own = [{"kind": "own/Norms", "step": step, **named} for step in (10, 20)]
    own += [{"kind": kind, "step": 20, "own/kl": 0.75} for kind in ("train", "eval")]
    written.attempt(0, 50, began=START, extra=own)
    report.write([written.job.root], None)
    both = [written.job.root, write_finished_job(tmp_path)]
    report.write(both, tmp_path / "both.html")
    for page in (written.job.report, tmp_path / "both.html"):
        with OpenPage(chromium, page) as opened:
            assert opened.problems == []
            for title, number in (("Norms/norm", "0.5"), ("Norms/<b>share", "0.25")):
                rows = values(opened.page, title)[1:]
                assert [row[1:3] for row in rows] == [["10", number], ["20", number]], rows
            # With the lines of training and validation; beside another run each has its own chart.
            of_training = "kl" if page == written.job.report else "kl: training"
            assert "0.75" in [value for row in values(opened.page, of_training) for value in row]
