"""A sweep's trials: planned from its file, kept in its manifest, told from their own files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtt.base.errors import ConfigError, DamagedError, ExitCode, InputError
from dtt.config.explain import scalar
from dtt.config.layers import parse_scalar
from dtt.config.load import load_job
from dtt.jobs import sweeps as results
from dtt.jobs import sweeps as trials
from dtt.jobs.sweeps import Sweep, SweepManifest
from dtt.launch.sweep.local_trials import split_gpus, visible_gpus
from dtt.track import plot


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`jobs/` is this test's own."""
    monkeypatch.chdir(tmp_path)


def write(parameters: Mapping[str, Any], **said: Any) -> Path:
    """A sweep file over the quickstart."""
    path = Path("s.json")
    path.write_text(json.dumps({"base": "quickstart", "parameters": parameters} | said))
    return path


def planned(parameters: Mapping[str, Any], **said: Any) -> trials.SweepPlan:
    return trials.plan(write(parameters, **said))


NASTY = [
    "a-b c", "-1e-3", "", " ", "'", '"', "a\nb", "x: y # z", "null", "~", "[1]", "{}", "$HOME",
    "`id`", "0x1F", "1_000", "yes", "é\u2028\x85\U0001f600", "\\", "%s", "2026-01-01",
    "!!python/name:os", "1:2",
]  # fmt: skip


@pytest.mark.slow
def test_values_survive_the_manifest_and_the_trials_own_config() -> None:
    rates = [1e-3, 1.234567890123456e-38, 1e30] * len(NASTY)
    parameters = {"train.sample_prompt": NASTY, "optim.lr": rates[: len(NASTY)]}
    made = planned(parameters, mode="zip").write()
    assert len(made.manifest.trials) == len(NASTY)
    assert Sweep(made.root, SweepManifest.read(made.root)) == made
    for trial, record in made.manifest.trials.items():
        config = load_job(made.job(trial).root)
        assert config.train.sample_prompt == record.values["train.sample_prompt"]
        assert config.optim.lr == record.values["optim.lr"]
        assert config.name == f"s/{trial}"
        assert config.job_dir == made.job(trial).root


plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()


@given(plain | st.lists(plain, max_size=3))
def test_a_value_shown_in_one_line_reads_as_itself(value: Any) -> None:
    text = scalar(value)
    assert "\n" not in text
    if not isinstance(value, float) or math.isfinite(value):
        assert parse_scalar(text) == value or value == ""


def test_null_lists_and_sections_of_another_type_are_values() -> None:
    plan = planned(
        {"train.clip_norm": [None, 1.0], "optim.betas": [[0.9, 0.95], [0.8, 0.99]]},
        overrides=["optim.type=adamw"],
    )
    got = [(t.resolved.config.train.clip_norm, t.resolved.config.optim.betas) for t in plan.trials]  # type: ignore[union-attr]
    assert got == [(c, b) for c in (None, 1.0) for b in ((0.9, 0.95), (0.8, 0.99))]
    types = planned({"optim.type": ["adamw", "muon"]}, name="types")
    assert [t.resolved.config.optim.type for t in types.trials] == ["adamw", "muon"]


def test_dropped_combinations_have_a_reason() -> None:
    plan = planned({"optim.lr": [1e-3, -1e-3, 0.001], "model.n_heads": [4, 5]})
    assert [trial.values for trial in plan.trials] == [{"optim.lr": 1e-3, "model.n_heads": 4}]
    why = [(v["optim.lr"], v["model.n_heads"], why) for v, why in plan.dropped]
    assert [(lr, heads) for lr, heads, _ in why] == [
        (1e-3, 5), (-1e-3, 4), (-1e-3, 5), (1e-3, 4), (1e-3, 5)
    ]  # fmt: skip
    assert "n_heads (5)" in why[0][2]
    assert "optim.lr: input should be greater than 0 (got -0.001)" in why[1][2]
    assert why[3][2] == f"is identical to {plan.trials[0].id}"


def test_a_sweep_without_trials_reports_the_reasons() -> None:
    with pytest.raises(ConfigError, match=r"all 2 combinations are dropped\n.*n_heads \(7\)"):
        planned({"model.n_heads": [7, 11]})


@pytest.mark.slow
@settings(max_examples=12)
@given(
    st.lists(st.integers(20, 10**9), min_size=1, max_size=3, unique=True),
    st.lists(st.text(max_size=4), min_size=1, max_size=3, unique=True),
    st.integers(0, 2),
    st.randoms(use_true_random=False),
)
def test_a_trial_has_its_id_by_what_it_sets(
    steps: list[int], prompts: list[str], seeds: int, random: Any
) -> None:
    parameters = {"train.steps": steps, "train.sample_prompt": prompts}
    plan = planned(parameters, seeds=list(range(seeds)))
    assert len(plan.trials) == len(steps) * len(prompts) * max(1, seeds)
    hashes = {t.id.split("-")[1]: t.values for t in plan.trials}
    assert len({t.id for t in plan.trials}) == len(plan.trials)
    for values in parameters.values():
        random.shuffle(values)
    again = planned(parameters, seeds=list(range(seeds)))
    assert {t.id.split("-")[1]: t.values for t in again.trials} == hashes


def test_a_longer_file_adds_trials_and_keeps_existing_ones() -> None:
    first = planned({"optim.lr": [1e-3, 1e-2]}).write().manifest
    longer = planned({"optim.lr": [3e-3, 1e-2, 1e-3, 2e-3]}).write().manifest
    assert {id: longer.trials[id] for id in first.trials} == first.trials
    assert [r.values["optim.lr"] for r in longer.trials.values()] == [1e-3, 1e-2, 3e-3, 2e-3]
    assert [id[:3] for id in longer.trials] == ["001", "002", "003", "004"]


def test_numbers_of_dropped_trials_are_not_reused() -> None:
    first = planned({"optim.lr": [1e-3, 1e-2, 1e-1]})
    trials.SweepPlan(first.file, (first.trials[0], first.trials[2]), ()).write()  # one was dropped
    longer = planned({"optim.lr": [1e-3, 1e-1, 3e-3, 2e-3]}).write().manifest
    assert [id[:3] for id in longer.trials] == ["001", "003", "004", "005"]


def test_another_sweep_cannot_use_the_folder() -> None:
    planned({"optim.lr": [1e-3]}).write()
    with pytest.raises(ConfigError, match=r"different values of: train\.seq_len"):
        planned({"optim.lr": [1e-3, 1e-2]}, overrides=["train.seq_len=128"])
    with pytest.raises(ConfigError, match=r"different keys: optim\.lr"):
        planned({"model.dim": [192]})
    assert planned({"model.dim": [192]}, name="other").trials


def test_a_sweep_cannot_use_the_folder_of_a_job() -> None:
    path = write({"optim.lr": [1e-3]})
    Path("jobs/s").mkdir(parents=True)
    Path("jobs/s/config.yaml").touch()
    with pytest.raises(ConfigError, match="jobs/s is a job"):
        trials.plan(path)


def test_names_are_never_parsed() -> None:
    made = planned({"optim.lr": [1e-3, 2e-3]}).write()
    records = {f"odd name {i}": r for i, r in enumerate(made.manifest.trials.values())}
    odd = Sweep(made.root, made.manifest.model_copy(update={"trials": records}))
    assert [p.values["optim.lr"] for p in results.progress(odd)] == [1e-3, 2e-3]
    assert odd.job("odd name 1").config.is_file()


def test_a_sweep_is_found_by_folder_by_name_and_by_file() -> None:
    path = write({"optim.lr": [1e-3]}, name="mine")
    made = trials.plan(path).write()
    for name in ("jobs/mine", "mine", "s.json", "./jobs/mine/"):
        assert trials.find(name).manifest == made.manifest
    with pytest.raises(InputError, match="no sweep in jobs/other"):
        trials.find("other")
    with pytest.raises(InputError, match="no trial 009"):
        made.chosen(["009"])
    [only] = made.manifest.trials
    assert made.chosen([f"jobs/mine/{only}"]) == made.chosen([only]) == made.chosen([]) == [only]


def test_gpus_are_split_between_trials() -> None:
    assert split_gpus([], 3) == [[], [], []]
    assert split_gpus(list("0123"), 2) == [["0", "1"], ["2", "3"]]
    assert split_gpus(list("01234"), 2) == [["0", "1"], ["2", "3"]]
    assert split_gpus(list("01"), 3) == [["0"], ["1"], ["0"]]


@pytest.mark.parametrize(("said", "gpus"), [("2,GPU-5f", ["2", "GPU-5f"]), ("", [])])
def test_only_visible_gpus_are_used(
    said: str, gpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", said)
    assert visible_gpus() == gpus


# ---- results -----------------------------------------------------------------------------------

LOSSES = {  # lr, dim, seed: last loss; None: failed
    (1e-4, 64, 0): 3.0, (1e-4, 64, 1): 3.4, (1e-3, 64, 0): 2.0, (1e-3, 64, 1): 2.5,
    (1e-2, 64, 0): None, (1e-2, 64, 1): 4.0, (1e-4, 96, 0): 2.9, (1e-4, 96, 1): 3.1,
    (1e-3, 96, 0): 1.9, (1e-3, 96, 1): 2.2, (1e-2, 96, 0): None, (1e-2, 96, 1): None,
}  # fmt: skip


def measured(losses: Mapping[Sequence[Any], float | None], **said: Any) -> Sweep:
    """A sweep of which every trial has run, with these last losses."""
    lrs, dims, seeds = (list(dict.fromkeys(key[i] for key in losses)) for i in range(3))
    parameters = {"optim.lr": lrs, "model.dim": dims}
    made = planned(parameters, seeds=seeds, overrides=["model.n_heads=2"], **said).write()
    for trial, record in made.manifest.trials.items():
        job, loss = made.job(trial), losses[tuple(record.values.values())]
        code = 0 if loss is not None else 76
        reason = "done" if code == 0 else "training diverged\n  why: x"
        job.begin_attempt()
        job.end_attempt(ExitCode(code), reason, 0, attempt=1)
        lines = [
            {"kind": "eval", "step": 0, "loss": 9.0},
            {"kind": "train", "step": 5, "loss": 8.0},
        ]
        if loss is not None:
            lines.append({"kind": "eval", "step": 10, "loss": loss})
        text = "".join(json.dumps(line) + "\n" for line in lines)
        job.metrics.write_text(text + '{"kind": "eval", "step": 20, "lo')  # torn by a crash
    return made


@pytest.mark.parametrize("goal", ["min", "max"])
def test_results_are_means_over_seeds_best_first(goal: str) -> None:
    rows = results.table(measured(LOSSES, goal=goal))
    order = [(r.values["optim.lr"], r.values["model.dim"]) for r in rows]
    assert "seed" not in rows[0].values
    best = [(1e-3, 96), (1e-3, 64), (1e-4, 96), (1e-4, 64), (1e-2, 64)]
    assert order == [*(best if goal == "min" else reversed(best)), (1e-2, 96)]
    by = dict(zip(order, rows, strict=True))
    both = by[1e-3, 64]
    assert both.mean == mean([2.0, 2.5])
    assert both.error == pytest.approx(stdev([2.0, 2.5]) / math.sqrt(2))
    assert (by[1e-2, 64].mean, by[1e-2, 64].error, len(by[1e-2, 64].done)) == (4.0, None, 1)
    assert (by[1e-2, 96].mean, by[1e-2, 96].done, len(by[1e-2, 96].trials)) == (None, (), 2)


def test_progress_is_the_newest_of_each_trials_own_files() -> None:
    reported = results.progress(measured(LOSSES))
    assert len(reported) == 12
    for one in reported:
        loss = LOSSES[tuple(one.values.values())]  # type: ignore[index]
        expected = ("diverged", 9.0, 5) if loss is None else ("done", loss, 10)
        assert (one.state, one.metric, one.step) == expected
    assert {p.error for p in reported if p.state == "diverged"} == {"training diverged"}


def test_a_curve_for_each_combination_of_the_other_keys() -> None:
    made = measured(LOSSES)
    curves = results.against(made, results.table(made), "optim.lr")
    assert [(c.label, list(c.x)) for c in curves] == [
        ("model.dim=64", [1e-4, 1e-3, 1e-2]), ("model.dim=96", [1e-4, 1e-3]),
    ]  # fmt: skip
    assert list(curves[0].y) == [mean([3.0, 3.4]), mean([2.0, 2.5]), 4.0]
    assert curves[0].error[1] == pytest.approx(0.25)
    histories = results.histories(made, "eval.loss")
    assert len(histories) == 12
    assert [list(histories[0].x), list(histories[0].y)] == [[0, 10], [9.0, 3.0]]


def test_a_plot_without_results_is_an_error() -> None:
    made = measured(dict.fromkeys(LOSSES))
    with pytest.raises(InputError, match="nothing to plot"):
        results.against(made, results.table(made), "optim.lr")


@pytest.mark.parametrize(
    ("values", "logarithmic"),
    [([1e-4, 1e-1], True), ([1, 100], False), ([0, 1e9], False), ([-1, 1e9], False),
     (["a", "b"], False), ([1, True, 1000], False)],
)  # fmt: skip
def test_a_logarithmic_axis_is_for_values_far_apart_above_zero(
    values: list[Any], logarithmic: bool
) -> None:
    assert plot.spread([values[:1], values[1:]]) is logarithmic


def test_a_plot_has_axes_error_bars_and_a_short_legend(tmp_path: Path) -> None:
    curves = [plot.Curve(f"$x$={i}", [1e-4, 1e-2], [2.0, 1.0], [0.1, 0.0]) for i in range(15)]
    figure = plot.figure(curves, "optim.lr", "eval.loss", log_x=True, log_y=False)
    [axes] = figure.axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "linear")
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("optim.lr", "eval.loss")
    assert len(axes.containers) == 15
    legend = axes.get_legend()
    assert legend is not None
    assert len(legend.get_texts()) == 12
    assert legend.get_title().get_text() == "and 3 more"
    plot.save(figure, tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    words = plot.figure(
        [plot.Curve("", ["a$b$", "c"], [1.0, 2.0])], "x", "y", log_x=False, log_y=True
    )
    plot.save(words, tmp_path / "words.png")
    assert [t.get_text() for t in words.axes[0].get_xticklabels()] == [r"a\$b\$", "c"]


@pytest.mark.parametrize("name", ["../../victim", "/victim", "a/../../victim"])
def test_a_manifest_with_trials_outside_the_sweep_is_refused(name: str) -> None:
    made = planned({"optim.lr": [1e-3, 1e-2]}).write()
    path = made.root / SweepManifest.filename
    content = json.loads(path.read_text())
    one, _ = content["trials"]
    for listed in ({one: {"values": {}, "folder": name}}, {name: content["trials"][one]}):
        path.write_text(json.dumps(content | {"trials": listed}))
        with pytest.raises(DamagedError, match="a manifest names a file outside its folder"):
            trials.find("s")
        with pytest.raises(DamagedError, match="a manifest names a file outside its folder"):
            planned({"optim.lr": [1e-3, 1e-2]})


@pytest.mark.parametrize("name", ["../victim", "a/../../b", "/victim", ".."])
def test_a_sweep_file_cannot_name_a_folder_outside_of_jobs(name: str) -> None:
    with pytest.raises(ConfigError, match="name"):
        planned({"optim.lr": [1e-3]}, name=name)


def test_keys_of_a_users_own_class_can_be_swept(tmp_path: Path) -> None:
    """A required key, too; a key that neither dtt nor the class has is refused with its line."""
    (tmp_path / "mine.py").write_text(
        "import dtt\nclass Steep(dtt.Schedule):\n    power: float\n    floor: float = 0.0\n"
    )
    (tmp_path / "run.yaml").write_text("schedule: {type: mine.py:Steep}\n")
    path = tmp_path / "powers.yaml"
    path.write_text("base: run.yaml\nparameters:\n  schedule.power: [1.0, 2.0]\n")
    found = [trial.resolved.config.schedule for trial in trials.plan(path).trials]
    assert [vars(schedule)["power"] for schedule in found] == [1.0, 2.0]
    path.write_text("base: run.yaml\nparameters:\n  schedule.powr: [1.0]\n")
    with pytest.raises(ConfigError, match=r"powers\.yaml:3 .*did you mean schedule\.power\?"):
        trials.plan(path)
