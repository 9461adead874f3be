"""dtt as a library: the snippets of its page, Ctrl-C, threads and errors."""

from __future__ import annotations

import re
import runpy
import threading
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest
from support import forked
from support.running import ROOT, TIMEOUT

import dtt
from dtt.base.errors import ConfigError, InputError

RUN = """
model: {{dim: 32, n_layers: 1, n_heads: 2}}
data: {{tokens: {tokens}}}
train:
  seq_len: 32
  global_batch_tokens: 128
  micro_batch: 2
  device: cpu
  steps: 4
  eval_every: 2
  eval_tokens: 64
  log_every: 1
  sample_tokens: 0
"""


@pytest.fixture
def folder(tmp_path: Path, tokens: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "run.yaml").write_text(RUN.format(tokens=tokens))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_script(text: str) -> str:
    code, out, err = forked.run_script(text, Path.cwd(), TIMEOUT)
    assert code == 0, err
    return out


@pytest.mark.slow
def test_the_snippets_of_the_page_run_one_after_the_other(folder: Path) -> None:
    page = (ROOT / "docs/library.md").read_text()
    said = run_script("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)))
    assert "32 from run.yaml:5" in said
    assert "jobs/first done [20] " in said
    assert (folder / "exports/first/model.safetensors").is_file()


def test_train_returns_the_job_and_resumes_it(folder: Path) -> None:
    seen: list[Any] = []
    job = dtt.train(dtt.load("run.yaml", name="a"), on_log=seen.append)
    assert job.path == folder / "jobs/a"
    assert (job.state, job.checkpoints) == ("done", [4])
    kinds = job.metrics["kind"].to_pylist()
    assert [record["kind"] for record in seen] == kinds
    evals = job.metrics.filter(pc.equal(job.metrics["kind"], "eval"))
    lowest = min(zip(evals["loss"].to_pylist(), evals["step"].to_pylist(), strict=True))
    assert job.best() == lowest[1]
    with pytest.raises(InputError, match=r"no record of eval\.los"):
        job.best("eval.los")
    # The package dtt.train is imported by now, and still is the function.
    again = dtt.train("jobs/a")
    assert again == dtt.open_job("jobs/a") == job
    assert again.metrics["kind"].to_pylist() == kinds
    assert Path.cwd() == folder


@pytest.mark.slow
def test_the_example_of_a_sweep_trains_each_job_once_and_plots_its_losses(
    folder: Path, tokens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {
        "DTT_DATA__TOKENS": tokens, "DTT_MODEL__DIM": 32, "DTT_MODEL__N_LAYERS": 1,
        "DTT_MODEL__N_HEADS": 2, "DTT_TRAIN__SEQ_LEN": 32, "DTT_TRAIN__GLOBAL_BATCH_TOKENS": 128,
        "DTT_TRAIN__MICRO_BATCH": 2, "DTT_TRAIN__STEPS": 4, "DTT_TRAIN__EVAL_EVERY": 2,
        "DTT_TRAIN__EVAL_TOKENS": 64, "DTT_TRAIN__SAMPLE_TOKENS": 0, "DTT_SCHEDULE__WARMUP": 1,
        "MPLBACKEND": "agg",
    }  # fmt: skip
    for name, value in small.items():
        monkeypatch.setenv(name, str(value))
    main = runpy.run_path(str(ROOT / "examples/sweep.py"))["main"]
    plot, rates = main.__globals__["plt"], main.__globals__["RATES"][1:3]
    main.__globals__["RATES"] = rates
    seen = []
    for _ in range(2):  # the second time, all jobs are done
        plot.close("all")
        main()
        tables = [dtt.open_job(f"jobs/lr-{lr}").metrics for lr in rates]
        seen.append([table.filter(pc.equal(table["kind"], "eval")) for table in tables])
    assert seen[0] == seen[1]  # with the times of the records
    assert [dtt.open_job(f"jobs/lr-{lr}").config.optim.lr for lr in rates] == list(rates)
    lines = plot.gca().get_lines()
    assert [line.get_label() for line in lines] == [f"{lr:g}" for lr in rates]
    for evals, line in zip(seen[1], lines, strict=True):
        assert line.get_xdata().tolist() == evals["step"].to_pylist() == [0, 2, 4]
        assert line.get_ydata().tolist() == evals["loss"].to_pylist()
    assert Path("sweep.png").stat().st_size > 1000
    plot.close("all")


def test_mistakes_are_exceptions(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.stps: unknown key; did you mean train\.steps"):
        dtt.load("run.yaml", "train.stps=4")
    with pytest.raises(ConfigError, match="2 mistakes"):
        dtt.load({"train": {"steps": -1}, "optim": {"lr": "x"}})
    with pytest.raises(InputError):
        dtt.open_job("jobs/none")
    cfg = dtt.load("run.yaml", name="a", train={"steps": 2})
    assert cfg.config.train.steps == 2
    dtt.train(cfg)
    with pytest.raises(ConfigError, match=r"started with different values of: train\.seq_len"):
        dtt.train(dtt.load("run.yaml", "train.seq_len=16", name="a", train={"steps": 2}))
    assert dtt.open_job("jobs/a").state == "done"


def test_it_trains_in_a_thread_where_signals_cannot_be_handled(folder: Path) -> None:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(dtt.train("run.yaml", "name=t")))
    thread.start()
    thread.join()
    assert found[0].state == "done"


INTERRUPTED = """
import os, signal, dtt

def log(record):
    if record["kind"] == "train" and record["step"] == 2:
        os.kill(os.getpid(), signal.SIGINT)

before = signal.getsignal(signal.SIGINT)
job = dtt.train("run.yaml", "name=c", "train.steps=100000", on_log=log)
assert signal.getsignal(signal.SIGINT) is before
print(job.state, job.checkpoints[0] < 10)
"""


def test_ctrl_c_saves_and_returns(folder: Path) -> None:
    state, early = run_script(INTERRUPTED).split()
    assert (state, early) == ("stopped", "True")
