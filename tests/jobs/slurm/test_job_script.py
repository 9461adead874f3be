"""The job script and its supervisor as programs: hostile values, and how a job starts and ends."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from support.fake_slurm import write_commands
from support.running import ROOT, TIMEOUT

from dtt.artifacts.jobdir import JobDir
from dtt.base.errors import ConfigError
from dtt.config.launch import LaunchConfig
from dtt.config.load import resolve
from dtt.config.shipped import shipped_configs
from dtt.jobs.slurm import job_script, submissions
from dtt.jobs.slurm.job_script import Array, Script, render
from dtt.launch.submission import progress

# ---- the text ----------------------------------------------------------------------------------


def script(**changes: Any) -> Script:
    """A two-node training job; keywords of LaunchConfig go there."""
    launch = {name: changes.pop(name) for name in set(changes) & LaunchConfig.model_fields.keys()}
    settings: dict[str, Any] = {
        "job_name": "run", "job": Path("jobs/run"), "directory": Path("/scratch/me"),
        "argv": ("train",), "kind": "train",
        "launch": LaunchConfig.model_validate({"nodes": 2, **launch}),
    }  # fmt: skip
    return Script(**settings | changes)


def directives(text: str) -> dict[str, str]:
    """The `#SBATCH` lines, by option."""
    lines = re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", text, re.M)
    assert len(lines) == len(re.findall(r"^\s*#SBATCH", text, re.M))
    assert len(lines) == len(dict(lines))
    return dict(lines)


def check_syntax(folder: Path, texts: list[str]) -> None:
    """`bash -n` takes all of them."""
    paths = []
    for number, text in enumerate(texts):
        paths.append(folder / f"syntax-{number}.sh")
        paths[-1].write_text(text)
    loop = 'for f; do bash -n "$f" || { cat "$f"; exit 1; }; done'
    done = subprocess.run(["bash", "-c", loop, "x", *paths], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout


EXAMPLES = {
    "download": (("download", "-c", "jobs/run-download/config.yaml"), "other"),
    "tokenize": (("tokenize", "-c", "jobs/run-tokenize/config.yaml"), "tokenize"),
    "train": (("train",), "train"),
}


PROGRESS = {
    "download": (
        "data/corpus/docs/**/*",
        "data/corpus/docs/.parts/*",
        "data/corpus/docs/.cache/huggingface/download/**/*.incomplete",
    ),
    "tokenize": ("data/tokens/docs-bpe4096/.units/*.json",),
    "train": (),
}
"""The progress of each, as `dtt submit` names it for the dataset `docs`."""


def example(command: str) -> Script:
    """What stands in sbatch/: run.yaml and the profile `generic`, on four nodes."""
    profile = shipped_configs() / "clusters/generic.yaml"
    settings = ["name=run", "launch.nodes=4", "launch.partition=gpu"]
    if command == "tokenize":
        settings += ["launch.gpus_per_node=0", "launch.processes_per_node=32",
                     "launch.cpus_per_task=1", "launch.mpi=pmix"]  # fmt: skip
    argv, kind = EXAMPLES[command]
    return Script(
        job_name="run" if kind == "train" else f"run-{command}",
        job=Path("jobs/run" if kind == "train" else f"jobs/run-{command}"),
        directory=Path("/scratch/me/dtt"),
        argv=argv,
        kind=kind,  # type: ignore[arg-type]
        launch=resolve(profile, settings, env={}).config.launch,
        progress=PROGRESS[command],
    )


def test_the_progress_of_each_command_is_that_of_its_folders() -> None:
    cfg = resolve(None, ["download.dataset=docs", "clean.exact=true"], env={}).config
    assert {command: progress([command], [cfg]) for command in EXAMPLES} == PROGRESS
    assert progress(["clean"], [cfg]) == ("data/corpus/docs/selection-*/.work/*.json",)
    assert progress(["eval", "jobs/a", "--watch"], [cfg]) == ("jobs/a/evals/*/*.jsonl",)
    # A folder may have characters of a pattern.
    two = resolve(None, ["download.datasets=[{dataset: a}, {dataset: b}]", "tokenize.out=t[1]"])
    both = ("t[[]1]/a/.units/*.json", "t[[]1]/b/.units/*.json")
    assert progress(["tokenize"], [two.config]) == both


@pytest.mark.parametrize("command", EXAMPLES)
def test_the_examples_in_sbatch_are_up_to_date(command: str) -> None:
    path = ROOT / f"sbatch/{command}.sh"
    # A user of the examples has no copy of the supervisor.
    own = f"{example(command).job}/supervisor"
    text = render(example(command)).replace(own, "src/dtt/jobs/slurm/supervisor")
    assert len(text.splitlines()) <= 60
    if os.environ.get("DTT_WRITE_DOCS"):
        path.write_text(text)
        path.chmod(0o755)
    assert path.read_text() == text, f"DTT_WRITE_DOCS=1 pytest {__file__} rewrites it"


PROFILES = sorted(path.stem for path in (shipped_configs() / "clusters").glob("*.yaml"))


def variants(profile: str) -> Iterator[Script]:
    """Scripts of a profile that together hold every branch of the template."""
    path = shipped_configs() / f"clusters/{profile}.yaml"
    switches = {"continuation": "none", "start": "srun", "preflight": True}
    for changes in ({}, switches):
        arguments = [f"launch.{key}={value}" for key, value in changes.items()]
        yield script(launch=resolve(path, arguments, env={}).config.launch)
    launch = resolve(path, ["launch.cpus_per_task=9"], env={}).config.launch
    for argv, kind in EXAMPLES.values():
        yield script(launch=launch, argv=argv, kind=kind)
    stages = (Path("jobs/run/pretrain"), Path("jobs/run/sft"))
    yield script(stages=stages)
    trials = (Path("jobs/sweep/a"), Path("jobs/sweep/b"))
    yield script(job=Path("jobs/sweep"), array=Array(trials, cap=1), modules=("cuda/12", "gcc"))


@pytest.mark.slow(except_for=["generic"])
@pytest.mark.parametrize("profile", PROFILES)
def test_shellcheck_accepts_every_profile(profile: str, tmp_path: Path) -> None:
    paths = []
    for number, variant in enumerate(variants(profile)):
        paths.append(tmp_path / f"{number}.sh")
        paths[-1].write_text(render(variant))
    assert len({path.read_text() for path in paths}) == len(paths)
    shellcheck = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([shellcheck, *paths], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_launch_keys_become_directives_and_nothing_else() -> None:
    made = directives(
        render(
            script(
                gpus_per_node=4, cpus_per_task=8, mem="480G", time="1-00:00:00", partition="a,b",
                account="me", qos="high",
                exclude="n[1-3],m2", lead=300,
                directives=("--exclusive", "--constraint=a100&nvlink", "--reservation=r"),
            )
        )
    )  # fmt: skip
    assert made == {
        "job-name": "run", "output": "jobs/run/logs/%x-%j.log", "open-mode": "append",
        "nodes": "2", "ntasks-per-node": "1", "gpus-per-node": "4", "cpus-per-task": "8",
        "mem": "480G", "time": "1-00:00:00", "partition": "a,b", "account": "me", "qos": "high",
        "constraint": "a100&nvlink", "reservation": "r", "exclude": "n[1-3],m2",
        "signal": "B:USR2@300", "requeue": "", "exclusive": "",
    }  # fmt: skip


# ---- hostile values ----------------------------------------------------------------------------

PIECES = [
    "$(touch {c})", "`touch {c}`", "; touch {c}; ", "\n", "\r\n", "\n#SBATCH --wrap='touch {c}'\n",
    "#SBATCH --exclusive", " ", "'", '"', "''", "\\", "\\\n", "$HOME", "${IFS}", "&& touch {c} &&",
    "| touch {c}", "> {c}", "--wrap", "-x", "--uid=0", "\x00", "\x1b[31m", "\x7f", "\u2028",
    "\u202e",
    "é", "日本", "🏖", "{{ 7*7 }}", "{% raw %}", "%j", "%N", "../..", "~", "!", "*", "?", "[a]", "#",
    "\t", "}\n", "EOF", "done", "fi", ")", "<(touch {c})", "x", "1", "a.b", "=", ",", ":", "@", "^",
]  # fmt: skip
SINGLE = (
    "mem", "time", "partition", "account", "qos", "exclude", "mpi",
)  # fmt: skip


def hostile(count: int, canary: Path) -> list[str]:
    """Values that would like to be more than a value."""
    rng = random.Random(3)
    made = ["".join(rng.choices(PIECES, k=rng.randint(1, 4))) for _ in range(count)]
    return [value.replace("{c}", str(canary)) for value in made]


def accepted(key: str, value: Any) -> dict[str, Any]:
    """`{key: value}`, or nothing if it is refused."""
    try:
        LaunchConfig.model_validate({key: value})
    except ValidationError:
        return {}
    return {key: value}


def with_value(values: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Every field that takes them set to hostile values, and the names of the options they add."""
    first = values[0]
    launch: dict[str, Any] = {}
    for key in SINGLE:
        launch |= accepted(key, first)
    lists = ("directives", "modules", "setup")
    for key in lists:
        launch[key] = tuple(value for value in values if accepted(key, (value,)))
    names = {f"V{number}": value for number, value in enumerate(values)}
    launch["environment"] = {k: v for k, v in names.items() if accepted("environment", {k: v})}
    launch["environment"] |= {v: "x" for v in values if accepted("environment", {v: "x"})}
    container: dict[str, Any] = {"type": "apptainer", "image": "x.sif"}
    for key in ("binds", "options"):
        container[key] = tuple(v for v in values if accepted("container", container | {key: (v,)}))
    container |= accepted("container", container | {"image": first}).get("container", {})
    launch["container"] = container
    added = [directive.split("=")[0][2:] for directive in launch["directives"]]
    return launch, added


def own_parameters(value: str, launch: dict[str, Any]) -> dict[str, Any]:
    """The parameters of a Script that take a hostile value."""
    taken: dict[str, Any] = {"kind": "tokenize"}
    wishes = {"job_name": value, "job": Path("jobs") / value, "directory": Path("/tmp") / value}
    for key, setting in {**wishes, "argv": ("tokenize", value)}.items():
        try:
            script(**launch, **{key: setting})
        except ConfigError:
            continue
        taken[key] = setting
    return taken


@pytest.mark.slow
def test_no_hostile_value_adds_a_directive_or_breaks_the_script(tmp_path: Path) -> None:
    texts = []
    for value in hostile(1000, tmp_path / "canary"):
        launch, added = with_value([value])
        text = render(script(**launch, **own_parameters(value, launch)))
        plain = set(directives(render(script(nodes=2)))) | {"ntasks-per-node"}
        assert set(directives(text)) - plain <= {*SINGLE, *added}
        assert not set(added) & plain
        texts.append(text)
    assert len(set(texts)) > 400
    check_syntax(tmp_path, texts)


FAKES = {
    # Runs on "every node" what the script would: without a container, in this very place.
    "srun": """
        printf '%q ' srun "$@" >>"$CALLS"; echo >>"$CALLS"
        while [[ $1 != bash ]]; do shift; done
        SLURM_NODEID=0 SLURMD_NODENAME=n1 SLURM_LAUNCH_NODE_IPADDR=10.0.0.1 exec "$@" """,
    "scontrol": """
        case "$1 $2" in
        "show hostnames") printf 'n1\\nn2\\n' ;;
        "show job") [[ ${STATE:-} != silent ]] || exit 1
            echo "JobId=$3 JobState=${STATE:-RUNNING} Reason=${REASON:-None}"
            echo "   StartTime=1000 EndTime=${ENDS:-Unknown} X=y"
            echo "   PreemptEligibleTime=1000 PreemptTime=${PREEMPT:-None}" ;;
        *) echo "scontrol $*" >>"$CALLS"; exit "${REQUEUE_CODE:-0}" ;;
        esac""",
    "sbatch": 'echo "sbatch $*" >>"$CALLS"; echo 77',
    "scancel": 'echo "scancel $*" >>"$CALLS"',
    "singularity": ":",
    "getent": "[[ $2 != n1 || -z ${UNRESOLVED:-} ]]",
    "python": 'printf "%q " python "$@" >>"$CALLS"; echo >>"$CALLS"; exit "${PYTHON_CODE:-0}"',
    # A training: it takes a signal, saves or not, and says how it ended.
    "torchrun": """
        printf '%q ' torchrun "$@" >>"$CALLS"; echo >>"$CALLS"
        job=${!#} record=$(printf '%s\n' "${!#}"/attempts/* | tail -n 1)/attempt.json
        [[ -z ${BEGINS-yes} ]] || sed -i '$ s/}/,"ranks": 2}/' "$record"
        if [[ -n ${SIGNAL:-} ]]; then
            [[ $SIGNAL == awaited ]] || kill -s "$SIGNAL" "$BATCH"
            until [[ -s $job/control/stop ]]; do sleep 0.01; done
            head -n 1 "$job/control/stop" >>"$CALLS"
            [[ -z ${PERSON:-} ]] || echo "alice: dtt job stop" >"$job/control/stop"
            ASKED=$(head -n 1 "$job/control/stop")
            rm "$job/control/stop"
        fi
        [[ -z ${SAVES:-} ]] || mkdir -p "$job/checkpoints/$SAVES"
        [[ $CODE != none ]] || kill -9 $$
        if [[ -n ${BEGINS-yes} && $CODE != silent ]]; then
            sed -i '$ s/}/,"code": '"$CODE"',"asked_by": "'"${ASKED:-}"'"}/' "$record"
        fi
        exit "${LAUNCHER_CODE:-1}" """,
}


ENDS_WELL = """
record=$(printf '%s\\n' jobs/run/attempts/* | tail -n 1)/attempt.json
sed -i '$ s/}/,"ranks": 6,"code": 0}/' "$record"
"""


def newest(job: Path) -> dict[str, Any]:
    """The record of the newest attempt of a job."""
    number = JobDir(job).attempt()
    record: dict[str, Any] = json.loads((job / f"attempts/{number}/attempt.json").read_text())
    return record


@dataclass(frozen=True)
class Node:
    """The first node of a Slurm job, with programs that only say how they were called."""

    folder: Path
    fakes: Path
    """The folder of the programs."""

    def script(self, **changes: Any) -> str:
        """The text of a job script whose working directory is this folder."""
        return render(script(directory=self.folder, **changes))

    def execute(self, text: str, *arguments: str, **env: str) -> tuple[int, str]:
        """Run a job script as Slurm would, as job 42 on n1 and n2; return exit code and output."""
        path = self.folder / "slurm.sh"
        path.write_text(text)
        [job] = re.findall(r"^exec python3 -IB (\S+)/supervisor ", text, re.M)
        if not (self.folder / job / "supervisor").exists():
            install(self.folder / job)
        slurm_env = {
            "SLURM_JOB_ID": "42", "SLURM_JOB_NAME": "run", "SLURM_JOB_NODELIST": "n[1-2]",
            "SLURM_JOB_NUM_NODES": "2", "PATH": f"{self.fakes}:/usr/bin:/bin", "HOME": "/nowhere",
            "CALLS": str(self.folder / "calls"), "CODE": "0",
        }  # fmt: skip
        done = subprocess.run(
            ["bash", "-c", 'export BATCH=$$; exec bash "$@"', "x", path, *arguments],
            env=slurm_env | env, cwd=self.folder, text=True, timeout=TIMEOUT,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        return done.returncode, done.stdout

    def calls(self) -> list[str]:
        """What the fakes were asked."""
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def node(tmp_path: Path) -> Node:
    write_commands(tmp_path / "fakes", FAKES)
    return Node(tmp_path, tmp_path / "fakes")


def install(job: Path, **constants: object) -> None:
    """Copy the supervisor into a job directory, with other values of some constants."""
    (job / "supervisor").mkdir(parents=True)
    for path in job_script.SUPERVISOR.glob("*.py"):
        text = path.read_text()
        for name, value in constants.items():
            text = re.sub(rf"^{name} = .*$", f"{name} = {value}", text, flags=re.M)
        (job / "supervisor" / path.name).write_text(text)


def test_no_hostile_value_is_executed_and_each_arrives_as_it_is(node: Node) -> None:
    canary = node.folder / "canary"
    values = [v for v in hostile(1000, canary) if "\0" not in v]
    for start in range(0, len(values), 40):
        some = values[start : start + 40]
        launch, _ = with_value(some)
        del launch["setup"]  # lines of shell by intention
        asked = ("tokenize", *(v for v in some if "argv" in own_parameters(v, {})))
        folder = node.folder / str(start)
        folder.mkdir()
        here = Node(folder, node.fakes)
        text = render(script(**launch, argv=asked, kind="tokenize", directory=folder))
        text = text.replace("module load", ": ")
        code, output = here.execute(text)
        assert code == 0, output
        sent, got = here.calls()
        assert shlex_words(got) == ["python", "-m", "dtt.main", *asked]
        for option in launch["container"]["options"]:
            assert option in shlex_words(sent)
    assert not canary.exists()
    assert not list(node.folder.rglob("canary*"))


@pytest.mark.parametrize("kind", ["train", "tokenize"])
def test_no_variable_of_the_environment_changes_the_script_or_is_run_by_bash(
    kind: str, node: Node
) -> None:
    argv = EXAMPLES[kind][0]
    listed = subprocess.run(["bash", "-c", "compgen -v"], capture_output=True, text=True, env={})
    sources = [path.read_text() for path in job_script.SUPERVISOR.glob("*.py")]
    used = re.findall(r"_dtt_\w+|SLURM\w+", render(script(kind=kind, argv=argv)) + "".join(sources))
    names = {"BASH_ENV", "HISTCMD", "PS4", "PYTHONHOME", "RANDOM", "SECONDS", "SRANDOM"}
    names |= {*listed.stdout.split(), *used}
    assert {"_dtt_set_up", "SLURM_JOB_ID", "SHELLOPTS"} <= names
    value = f"x[$(touch {node.folder}/canary)]"
    taken = {n: value for n in sorted(names - {"PATH"}) if accepted("environment", {n: value})}
    refused = {"_dtt_job", "BASHPID", "BASH_ENV", "OPTIND", "RANDOM", "SLURM_JOB_ID", "UID"}
    assert "PYTHONHOME" in taken
    assert not refused & set(taken)
    assert accepted("environment", {"SLURM_CPU_BIND": "map_cpu:0"})
    code, output = node.execute(
        node.script(kind=kind, argv=argv, environment=taken),
    )  # fmt: skip
    assert (code, output.splitlines()[-1].endswith("slurm: done")) == (0, True), output
    assert node.calls()[-1].rstrip().endswith(shlex.join(argv) + " jobs/run" * (kind == "train"))
    assert not (node.folder / "canary").exists()


STAGES = (Path("jobs/run/pretrain"), Path("jobs/run/sft"))


def test_one_job_trains_its_stages_in_turn(node: Node) -> None:
    text = node.script(stages=STAGES)
    trained, requeued = [], []
    for _ in range(3):
        (node.folder / "calls").unlink(missing_ok=True)
        code, output = node.execute(text, SAVES="step-000001")
        assert code == 0, output
        asked = [shlex_words(line) for line in node.calls()]
        trained += [words[-1] for words in asked if words[0] == "torchrun"]
        requeued.append("scontrol requeue 42" in node.calls())
    assert trained == ["jobs/run/pretrain", "jobs/run/sft", "jobs/run/sft"]
    assert requeued == [True, False, False]
    assert [newest(node.folder / stage)["decision"] for stage in STAGES] == [
        "again: stage pretrain is done; requeued",
        "over: done",
    ]


@pytest.mark.parametrize("ending", ["75", "none"])
def test_a_stage_that_did_not_finish_is_trained_again(ending: str, node: Node) -> None:
    text = node.script(stages=STAGES)
    node.execute(text, SAVES="step-000001", CODE=ending, SIGNAL="USR2")
    node.execute(text, SAVES="step-000002")
    asked = [shlex_words(line) for line in node.calls()]
    assert [words[-1] for words in asked if words[0] == "torchrun"] == ["jobs/run/pretrain"] * 2


def test_each_byte_of_the_files_named_as_progress_is_progress(node: Node) -> None:
    """A tokenization, or a download, may reach any number of time limits."""
    job, patterns = Path("jobs/run-x"), ("t/.units/*.json", "c/.parts/*")
    install(node.folder / job, MAX_STALLED_ATTEMPTS=2)
    for folder in ("t/.units", "c/.parts"):
        (node.folder / folder).mkdir(parents=True)
    part = node.folder / "c/.parts/0"

    def attempt(does: str, restart: int = 1) -> str:
        text = node.script(job=job, argv=("x",), kind="other", progress=patterns)
        (node.fakes / "python").write_text(f"#!/bin/bash\n{does}; exit 74\n")
        restarted = {"SLURM_RESTART_COUNT": str(restart)}
        return node.execute(text, **restarted)[1].splitlines()[-1]

    for number in range(4):
        assert attempt(f"echo {{}} >t/.units/{number}.json").endswith("requeued")
    assert attempt("echo {} >t/.units/0.json").endswith("requeued")
    assert "2 consecutive attempts finished nothing more" in attempt("true")
    shutil.rmtree(node.folder / "t")
    shutil.rmtree(node.folder / job / "attempts")
    for _ in range(4):
        assert attempt("echo some >>c/.parts/0").endswith("requeued")
    assert newest(node.folder / job)["saved"] == part.stat().st_size - len("some\n")
    # A file that starts anew each time, and never gets as far as it was, is no progress.
    assert attempt("echo so >c/.parts/0").endswith("requeued")
    assert "2 consecutive attempts" in attempt("echo some >>c/.parts/0")
    # A submission by the user counts from what is there.
    assert attempt("echo some >>c/.parts/0", restart=0).endswith("requeued")


def shlex_words(line: str) -> list[str]:
    """What bash's `printf %q` wrote, read by bash."""
    read = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, check=True)
    return read.stdout.decode().split("\0")[:-1]


def test_lines_of_set_up_are_run_on_the_node_and_cannot_close_what_surrounds_them(
    node: Node,
) -> None:
    (node.folder / "env.sh").write_text('export FROM_FILE="a b"\n')
    lines = ("source env.sh", 'export HERE="$FROM_FILE, $OTHER"', "echo }; echo $HERE >here")
    text = node.script(setup=lines, environment={"OTHER": "$HOME `x`"})  # fmt: skip
    code, output = node.execute(text)
    assert code == 0, output
    assert (node.folder / "here").read_text() == "a b, $HOME `x`\n"
    check_syntax(node.folder, [render(script(setup=(word,))) for word in ("fi", "done", "'", "{")])


@pytest.mark.parametrize(
    ("continuation", "line"),
    [
        ("requeue", "false"),
        ("none", "exit 3"),
        ("none", "exit 0"),
        ("requeue", "source env.sh"),
        ("none", "PATH=; exit"),
    ],
)
def test_a_failed_set_up_is_reported_and_counted_and_starts_nothing(
    continuation: str, line: str, node: Node
) -> None:
    (node.folder / "env.sh").write_text("exit 0\n")
    install(node.folder / "jobs/run", MAX_STALLED_ATTEMPTS=1)
    text = node.script(setup=(line,), continuation=continuation)
    code, output = node.execute(text)
    assert code == 78
    assert "cannot set up" in output
    assert "exit code 78; " in output.splitlines()[-1]
    record = newest(node.folder / "jobs/run")
    assert (record["saved"], record["stalled"], record["code"]) == (-1, 1, 78)
    assert record["reason"] == "exit code 78: see logs/latest.log"
    assert node.calls() == []


def test_a_set_up_that_exits_on_a_node_only_ends_with_78_there(node: Node) -> None:
    line = "[[ -z ${SLURMD_NODENAME:-} ]] || exit 0"
    text = node.script(setup=(line,), continuation="none")
    assert node.execute(text)[0] == 78
    assert "cannot set up" in (node.folder / "jobs/run/logs/latest.log").read_text()


@pytest.mark.parametrize(
    ("program", "mode", "status"), [("torchrun", None, 127), ("python", 0o644, 126)]
)
def test_a_program_that_is_missing_after_set_up_is_not_started_again(
    program: str, mode: int | None, status: int, node: Node
) -> None:
    start = "torchrun" if program == "torchrun" else "srun"
    text = node.script(start=start)
    if mode is None:
        (node.fakes / program).unlink()
    else:  # found first on PATH, but nothing that can be executed
        text = text.replace("exec python -m", f"exec {node.fakes / program} -m")
        (node.fakes / program).chmod(mode)
    code, output = node.execute(text)
    assert code == status
    assert f"exit code {status}: a program is missing" in output.splitlines()[-1]
    assert REQUEUE not in node.calls()
    assert program in (node.folder / "jobs/run/logs/latest.log").read_text()


def test_set_up_may_go_to_another_folder(node: Node) -> None:
    text = node.script(setup=("cd /", "host=else", "set -eu"))
    code, output = node.execute(text)
    assert code == 0, output
    assert newest(node.folder / "jobs/run")["code"] == 0
    assert "--rdzv_endpoint=n1:" in node.calls()[1]


# ---- how processes are started -----------------------------------------------------------------


def test_torchrun_uses_the_first_node_and_a_port_of_the_job(node: Node) -> None:
    text = node.script(gpus_per_node=4, cpus_per_task=32)
    assert node.execute(text)[0] == 0
    srun, torchrun = node.calls()
    assert "--ntasks-per-node=1 --cpus-per-task=32" in srun
    for option in ("--nnodes=2", "--nproc_per_node=4", "--node_rank=0", "--max_restarts=0",
                   "--rdzv_endpoint=n1:10042", "-m dtt.main train jobs/run"):  # fmt: skip
        assert option in torchrun


def test_a_first_node_without_a_name_is_reached_by_its_address(node: Node) -> None:
    node.execute(node.script(), UNRESOLVED="yes")
    assert "--rdzv_endpoint=10.0.0.1:" in node.calls()[1]


def test_srun_starts_every_process_with_a_master_address(node: Node) -> None:
    (node.fakes / "python").write_text(
        '#!/bin/bash\necho "$MASTER_ADDR $MASTER_PORT $*" >>"$CALLS"\n' + ENDS_WELL
    )
    text = node.script(start="srun", processes_per_node=3)
    assert node.execute(text)[0] == 0
    srun, python = node.calls()
    assert "--ntasks-per-node=3" in srun
    assert python == "n1 10042 -m dtt.main train jobs/run"


@pytest.mark.parametrize(
    ("settings", "starter"),
    [
        ({}, "srun --nodes=2 --ntasks-per-node=8 bash"),
        ({"mpi": "pmix"}, "srun --nodes=2 --ntasks-per-node=8 --mpi=pmix bash"),
        ({"mpi": "mpirun"}, "mpirun -n 16 bash"),
    ],
)
def test_tokenize_runs_as_ranks_of_mpi(settings: dict[str, Any], starter: str, node: Node) -> None:
    (node.fakes / "mpirun").write_text(FAKES["srun"].replace("srun", "mpirun"))
    (node.fakes / "mpirun").chmod(0o755)
    argv, kind = EXAMPLES["tokenize"]
    settings = {"processes_per_node": 8, **settings}
    text = node.script(argv=argv, kind=kind, **settings)
    assert node.execute(text)[0] == 0
    assert node.calls()[0].startswith(starter)
    assert node.calls()[1].startswith(f"python -m dtt.main {shlex.join(argv)}")


def test_a_preflight_that_fails_keeps_the_training_from_starting(node: Node) -> None:
    settings: dict[str, Any] = {"preflight": True, "start": "srun", "continuation": "none"}
    text = node.script(**settings)
    code, _ = node.execute(text, PYTHON_CODE="78")
    assert code == 78
    assert [c for c in node.calls() if c.startswith("python")] == [
        "python -m dtt.main doctor --device cpu --path jobs/run ",
        REPORT,
    ]
    (node.fakes / "python").write_text(
        f"#!/bin/bash\n{FAKES['python'].partition('exit')[0]}\n"
        f"[[ $* == *doctor* ]] && exit\n{ENDS_WELL}"
    )
    assert node.execute(text)[0] == 0
    assert node.calls()[-1].startswith("python -m dtt.main train jobs/run")


def test_an_array_task_trains_the_trial_of_its_number(node: Node) -> None:
    trials = (Path("jobs/sweep/a"), Path("jobs/sweep/b"))
    text = node.script(job=Path("jobs/sweep"), array=Array(trials, cap=1))
    assert directives(text)["array"] == "0-1%1"
    assert directives(text)["output"] == "jobs/sweep/logs/%x-%A_%a.log"
    task = {"SLURM_ARRAY_JOB_ID": "42", "SLURM_ARRAY_TASK_ID": "1"}
    assert node.execute(text, **task)[0] == 0
    assert node.calls()[1].rstrip().endswith("-m dtt.main train jobs/sweep/b")
    trial = node.folder / "jobs/sweep/b"
    assert (newest(trial)["slurm"], newest(trial)["stalled"]) == ("42_1", 1)
    link = trial / "logs/latest-slurm.log"
    assert link.parent / link.readlink() == trial / "logs/../../logs/run-42_1.log"
    node.execute(text, CODE="1", **task)
    assert node.calls()[-1] == "scontrol requeue 42_1"  # 42 would be all tasks
    _, output = node.execute(text, CODE="75", ASKED=ALICE, **task)
    assert output.splitlines()[-1].endswith("checkpoint; resume with dtt sweep retry sweep b")


def test_no_log_of_an_earlier_attempt_or_another_node_is_overwritten(node: Node) -> None:
    text = node.script(setup=("echo said",))
    for restart in ("0", "1"):
        node.execute(text, SLURM_RESTART_COUNT=restart)
    logs = node.folder / "jobs/run/logs"
    assert {p.name for p in logs.iterdir() if not p.is_symlink()} == {
        "train-42-r0-n1.log", "train-42-r1-n1.log",
    }  # fmt: skip
    assert (logs / "latest.log").readlink() == Path("train-42-r1-n1.log")
    assert (logs / "latest-n2.log").readlink() == Path("train-42-r1-n2.log")
    assert (logs / "latest-slurm.log").readlink() == Path("run-42.log")
    assert (logs / "train-42-r0-n1.log").read_text() == "said\n"


# ---- how it goes on ----------------------------------------------------------------------------

REPORT = "python -m dtt.main report jobs/run "
REQUEUE = "scontrol requeue 42"
ALICE = "alice: dtt job stop"
LIMIT, TERM = {"SIGNAL": "USR2"}, {"SIGNAL": "TERM"}
SAVES = {"SAVES": "step-000009"}
PREEMPTED = {"PREEMPT": "1100"}
BY_SIGNAL = {"CODE": "75", "ASKED": "SIGTERM", **SAVES}
"""The ranks got SIGTERM, and the job script has not (yet)."""
LOST_NODE = {"STATE": "COMPLETING", "REASON": "NodeDown"}


@pytest.mark.parametrize(
    ("env", "requeued", "expected", "said"),
    [
        ({"CODE": "0"}, False, 0, "done"),
        ({"CODE": "76"}, False, 76, "fix the reported error, then run sbatch jobs/run/slurm.sh"),
        ({"CODE": "none"}, True, 137, "exit code none; requeued"),
        ({"CODE": "0", "BEGINS": ""}, True, 1, "exit code 1; requeued"),
        # srun may return before the end is recorded: then nobody knows how the training ended.
        ({"CODE": "silent", "LAUNCHER_CODE": "0"}, True, 0, "exit code none; requeued"),
        ({"CODE": "75", "ASKED": ALICE, **LOST_NODE, **SAVES}, False, 75, "stopped on request"),
        ({"CODE": "75", **SAVES, **LIMIT}, True, 75, "requeued"),
        ({"CODE": "75", **SAVES, **TERM}, False, 75, "stopped on request"),
        ({**BY_SIGNAL, **PREEMPTED}, True, 75, "preempted, exit code 75; requeued"),
        ({**BY_SIGNAL, "STATE": "COMPLETING"}, False, 75, "was cancelled"),
        ({**BY_SIGNAL, **LOST_NODE, "REQUEUE_CODE": "1"}, True, 75, "requeued"),
        ({**BY_SIGNAL, "STATE": "silent"}, True, 75, "requeued"),
        ({"CODE": "1", "REQUEUE_CODE": "1"}, True, 1, "cannot be requeued"),
    ],
)
def test_how_an_attempt_ended_decides_whether_the_job_is_requeued(
    env: dict[str, str], requeued: bool, expected: int, said: str, node: Node
) -> None:
    code, output = node.execute(node.script(), **env)
    assert (code, REQUEUE in node.calls()) == (expected, requeued), output
    assert said in output.splitlines()[-1]
    asked = {"USR2": "slurm: time limit", "TERM": "slurm: SIGTERM"}.get(env.get("SIGNAL", ""))
    assert asked is None or asked in node.calls()
    record = newest(node.folder / "jobs/run")
    word = "again" if requeued and "cannot" not in said else "over"
    assert record["decision"] == f"{word}: {output.splitlines()[-1].split('slurm: ')[1]}"
    assert record["started"] <= record["decided"] <= time.time()


def test_a_second_job_in_the_same_directory_ends_and_changes_nothing(node: Node) -> None:
    text = node.script()
    assert node.execute(text, CODE="1")[0] == 1
    path = node.folder / "jobs/run/attempts/1/attempt.json"
    running = {"started": 1.0, "slurm": "42", "launch": "", "ranks": 2, "host": "n1"}
    path.write_text(json.dumps(running))
    before = {p: p.lstat().st_mtime_ns for p in (node.folder / "jobs").rglob("*") if p.is_file()}
    asked = len(node.calls())
    code, output = node.execute(text, SLURM_JOB_ID="43")
    assert (code, output.split("slurm: ")[1]) == (78, "jobs/run is used by job 42: this job ends\n")
    assert len(node.calls()) == asked
    assert before == {p: p.lstat().st_mtime_ns for p in before}
    # The job itself, requeued, goes on; and another once it has ended.
    assert node.execute(text, SLURM_RESTART_COUNT="1")[0] == 0
    assert node.execute(text, SLURM_JOB_ID="43", STATE="COMPLETED")[0] == 0


@pytest.mark.parametrize(
    ("command", "ended", "code", "expected", "requeued"),
    [("download", "0", 0, 0, False), ("tokenize", "2", 2, 2, False),
     ("export", "130", 130, 130, False), ("download", "74", 74, 74, True),
     ("tokenize", "143", 1, 143, True), ("export", "127", 1, 127, False)],
)  # fmt: skip
def test_the_other_commands_have_attempts_and_endings_too(
    command: str, ended: str, code: int, expected: int, requeued: bool, node: Node
) -> None:
    kind = "tokenize" if command == "tokenize" else "other"
    job = Path(f"jobs/run-{command}")
    text = node.script(job=job, argv=(command,), kind=kind)
    assert node.execute(text, PYTHON_CODE="1")[0] == 1
    assert node.execute(text, PYTHON_CODE=ended)[0] == expected
    assert node.calls().count(REQUEUE) == 1 + requeued
    made = JobDir(node.folder / job)
    assert made.attempt() == 2
    start, end = made.attempt_record(2), made.exit_record(2)
    assert start is not None
    assert end is not None
    assert (start["slurm"], start["host"]) == ("42", "n1")
    assert start["started"] <= end.pop("ended")
    assert end == {
        "code": code, "step": None, "rank": 0, "node": "n1", "checkpoint": None, "asked_by": "",
        "reason": "done" if code == 0 else f"exit code {ended}: see logs/latest.log",
    }  # fmt: skip


@pytest.mark.slow
def test_a_watch_may_wait_for_days_but_not_fail_again_and_again(node: Node) -> None:
    """Its progress is its answers. One that ends in order at its limit did not fail."""
    argv, job = ("eval", "jobs/run", "--watch"), Path("jobs/run-eval")
    install(node.folder / job, MAX_STALLED_ATTEMPTS=2)
    text = node.script(job=job, argv=argv, kind="other", progress=progress(argv, ()))
    results = node.folder / "jobs/run/evals/step-000010/piqa-0.jsonl"
    results.parent.mkdir(parents=True)
    limit = 'kill -s USR2 "$BATCH"; until [[ -s jobs/run-eval/control/stop ]]; do sleep 1; done'
    program = f"#!/bin/bash\nif [[ CODE == 75 ]]; then {limit}; fi; exit CODE\n"

    def attempt(restart: int, code: int) -> str:
        (node.fakes / "python").write_text(program.replace("CODE", str(code)))
        restarted = {"SLURM_RESTART_COUNT": str(restart)}
        return node.execute(text, **restarted)[1].splitlines()[-1]

    for restart in range(4):
        assert attempt(restart, 75).endswith("requeued")
    assert attempt(4, 1).endswith("requeued")
    results.write_text("an answer\n")
    assert attempt(5, 1).endswith("requeued")
    assert "2 consecutive attempts" in attempt(6, 1)
    assert not (node.folder / "jobs/run/control").exists()


def test_without_continuation_nothing_is_started_again(node: Node) -> None:
    text = node.script(continuation="none")
    code, output = node.execute(text, CODE="75", **LIMIT)
    assert code == 75
    assert "resume with sbatch jobs/run/slurm.sh" in output.splitlines()[-1]
    assert not [call for call in node.calls() if call.startswith(("sbatch", "scontrol"))]


@pytest.mark.parametrize("report", ["0", "1"], ids=["written", "failed"])
def test_a_job_that_ends_early_gets_a_report_whose_failure_changes_nothing(
    report: str, node: Node
) -> None:
    text = node.script()
    code, output = node.execute(text, CODE="76", PYTHON_CODE=report)
    assert code == 76
    assert "exit code 76: fix the reported error" in output.splitlines()[-1]
    assert node.calls()[-1] == REPORT
    assert newest(node.folder / "jobs/run")["decision"].startswith("over: exit code 76")


def test_a_job_that_continues_or_is_done_leaves_the_report_to_dtt(node: Node) -> None:
    text = node.script()
    for code in ("0", "1"):
        node.execute(text, CODE=code)
    assert REPORT not in node.calls()


def test_attempts_without_a_new_checkpoint_are_counted_and_limited(node: Node) -> None:
    install(node.folder / "jobs/run", MAX_STALLED_ATTEMPTS=2)
    text = node.script()
    requeues = []

    def attempt(restart: int, **env: str) -> str:
        before = node.calls().count(REQUEUE)
        env = {"CODE": "1", "SLURM_RESTART_COUNT": str(restart), **env}
        output = node.execute(text, **env)[1]
        requeues.append(node.calls().count(REQUEUE) - before)
        return output.splitlines()[-1]

    attempt(0)
    attempt(1, SAVES="step-000010")  # a new checkpoint: the count restarts
    attempt(2)
    last = attempt(3)
    assert requeues == [1, 1, 1, 0]
    assert "2 consecutive attempts without a new checkpoint" in last
    assert last.endswith("then run sbatch jobs/run/slurm.sh")
    # A node that died left no time to count: the next start does it.
    started = len(node.calls())
    assert "2 consecutive attempts" in attempt(4)
    assert node.calls()[started:] == [REPORT]
    # A new submission restarts the count.
    attempt(0)
    assert requeues[-1] == 1


def test_a_stale_request_of_the_script_is_removed_and_a_users_is_kept(node: Node) -> None:
    text = node.script()
    stop = node.folder / "jobs/run/control/stop"
    for line, kept in (("slurm: time limit", False), ("alice: dtt job stop", True)):
        stop.parent.mkdir(parents=True, exist_ok=True)
        stop.write_text(f"{line}\n")
        node.execute(text)
        assert stop.exists() == kept


def test_a_user_can_override_the_request_while_the_job_saves(node: Node) -> None:
    env = {"CODE": "75", "SIGNAL": "USR2", "PERSON": "yes", **SAVES}
    code, output = node.execute(node.script(), **env)
    assert code == 75
    assert "stopped on request" in output.splitlines()[-1]
    assert REQUEUE not in node.calls()
    assert not (node.folder / "jobs/run/control/stop").exists()  # it was heard


def test_the_stop_request_uses_the_measured_lead(node: Node) -> None:
    install(node.folder / "jobs/run", TICK=0.01)
    (node.folder / "jobs/run/lead").write_text("1000\n")  # half of the time is the most
    env = {"CODE": "75", "SIGNAL": "awaited", "ENDS": f"{time.time() + 2:.0f}", **SAVES}
    code, output = node.execute(node.script(), **env)
    assert code == 75
    assert "slurm: time limit" in node.calls()
    assert REQUEUE in node.calls(), output


# ---- lead, sbatch, squeue ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("time", "seconds"),
    [(90, 5400), ("90", 5400), ("30:00", 1800), ("12:00:00", 43_200), ("1-12", 129_600),
     ("1-12:30", 131_400), ("1-00:00:01", 86_401), (None, None)],
)  # fmt: skip
def test_a_time_limit_is_written_as_for_slurm(time: Any, seconds: int | None) -> None:
    assert LaunchConfig(time=time).time_limit == seconds


@pytest.mark.parametrize("time", ["", "1:2", "90:60", "1-", "-1", "1:00:00:00", "1d", "1-2-3", "x"])
def test_an_invalid_time_limit_is_refused(time: str) -> None:
    with pytest.raises(ValidationError, match="must be minutes, MM:SS"):
        LaunchConfig(time=time)


@pytest.mark.parametrize("gpus", ["a100:0", "4:a100", "a100:4,v100:2", "-1"])
def test_an_invalid_number_of_gpus_is_refused(gpus: str) -> None:
    with pytest.raises(ValidationError, match="must be a number, or type:number such as a100:4"):
        LaunchConfig.model_validate({"gpus_per_node": gpus})


def test_the_lead_is_measured_or_a_default(tmp_path: Path) -> None:
    job = JobDir(tmp_path)
    assert job_script.lead(job, LaunchConfig()) == job_script.DEFAULT_LEAD
    assert job_script.lead(job, LaunchConfig(time=2)) == 60  # half of it
    job.write_lead(step=20.0, save=110.0)
    assert job_script.lead(job, LaunchConfig()) == 30 + 2 * (20 + 110)
    job.write_lead(step=0.01, save=0.2)
    assert job_script.lead(job, LaunchConfig()) == 60


@pytest.mark.parametrize(
    ("printed", "found"),
    [("Welcome: 3 messages\n\n 77;cluster \n", "77"), ("Submitted 77", None),
     ("77 jobs wait\n", None), ("", None), ("77\nGoodbye\n", None)],
)  # fmt: skip
def test_the_id_of_a_job_is_the_last_line_of_sbatch_or_it_is_unknown(
    printed: str, found: str | None, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{node.fakes}:/usr/bin:/bin")
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    (node.fakes / "sbatch").write_text(f"#!/bin/bash\nprintf '{printed}'\n")
    # Odd lines of squeue are no job.
    (node.fakes / "squeue").write_text(
        "#!/bin/bash\necho '5|N/A|slurm.sh'; echo 'x|y'; echo '||'\n"
    )
    if found is not None:
        assert submissions.sbatch(Path("slurm.sh")) == found
        return
    with pytest.raises(submissions.SlurmUnreachable, match="sbatch"):
        submissions.sbatch(Path("slurm.sh"))


def test_a_submission_from_within_a_job_hands_on_nothing_of_it(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{node.fakes}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_NTASKS", "3")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    monkeypatch.setenv("SBATCH_ACCOUNT", "mine")
    (node.fakes / "sbatch").write_text(f"#!/bin/bash\nenv >{node.folder}/env; echo 17\n")
    submissions.sbatch(Path("slurm.sh"))
    env = (node.folder / "env").read_text()
    assert "SLURM_NTASKS" not in env
    assert "SLURM_CONF=/etc/slurm.conf" in env
    assert "SBATCH_ACCOUNT=mine" in env


@pytest.mark.parametrize(
    ("directive", "gpus"),
    [("--gres=gpu:2", 2), ("--gres=gpu", 1), ("--gres=gpu:a100:4", 4), ("--gres=gpu:a100", 1),
     ("--gre=tmp:5,gpu:3(S:0-1)", 3), ("--gres=shard:8", 0), ("--gres-flags=enforce-binding", 0)],
)  # fmt: skip
def test_gpus_of_directives_are_the_gpus_of_the_job(directive: str, gpus: int) -> None:
    asked = script(directives=(directive,), preflight=True, nodes=1)
    assert [*asked.launch.problems()] == []
    assert asked.launch.gpus == gpus
    assert asked.launch.processes == max(gpus, 1)
    text = render(asked)
    assert f"#SBATCH {directive}\n" in text
    assert "gpus-per-node" not in text
    assert f"--preflight={'gpu' if gpus else 'cpu'}" in text
    assert "--preflight=cpu" in render(replace(asked, device="cpu"))
    assert "--preflight=gpu" in render(replace(asked, device="cuda"))


@pytest.mark.parametrize(
    ("option", "key"),
    [("gpus-per-node=8", "gpus_per_node"), ("tres-per-task=1", "gpus_per_node"),
     ("acc=x", "account"),
     ("ntasks=3", "processes_per_node"), ("tim=3", "time"), ("gpus-per-socket=1", "gpus_per_node"),
     ("gpus=8", "gpus_per_node"), ("gpus-per-task=1", "gpus_per_node")],
)  # fmt: skip
def test_an_option_that_is_a_key_is_refused_with_the_key(option: str, key: str) -> None:
    [(_, why)] = LaunchConfig(directives=(f"--{option}",)).problems()
    assert f"launch.{key}" in why


def test_an_ambiguous_number_of_gpus_is_refused() -> None:
    [(key, why)] = LaunchConfig(directives=("--gres=gpu:8",), gpus_per_node=8).problems()
    assert key == "directives"
    assert "omit one of them" in why


@pytest.mark.parametrize(
    ("directive", "left"),
    [("--gres=gpu:4,nvme:1", ("--gres=nvme:1",)), ("--gres=nvme:1,gpu:a100:4", ("--gres=nvme:1",)),
     ("--gre=gpu(S:0-1)", ()), ("--gres=gpu:4", ()), ("--gres=gpunode:1", ("--gres=gpunode:1",)),
     ("--qos=low", ("--qos=low",))],
)  # fmt: skip
def test_a_download_asks_for_all_that_directives_do_but_gpus(
    directive: str, left: tuple[str, ...]
) -> None:
    step = LaunchConfig(directives=(directive,)).of_step("download")
    assert step.directives == left
    assert step.gpus == 0


@pytest.mark.parametrize(
    ("settings", "directives", "key", "cores"),
    [({"directives": ("--gres=gpu:4,nvme:1",)}, ("--gres=gpu:1,nvme:1",), 0, 8),
     ({"directives": ("--gre=nvme:1,gpu:a100:4(S:0-1)",)}, ("--gre=gpu:a100:1,nvme:1",), 0, 8),
     ({"directives": ("--gres=gpu:a100",)}, ("--gres=gpu:a100",), 0, 32),
     ({"directives": ("--gres=nvme:4", "--exclusive")}, ("--gres=nvme:4", "--exclusive"), 0, 32),
     ({"directives": ("--gres=gpu:a100:3,gpu:v100:1",)}, ("--gres=gpu:a100:1",), 0, 8),
     ({"gpus_per_node": "a100:4", "nodes": 2, "processes_per_node": 2}, (), "a100:1", 8),
     ({"gpus_per_node": 4, "start": "srun"}, (), 1, 32),
     ({"nodes": 2}, (), 0, 32)],
)  # fmt: skip
def test_an_evaluation_asks_for_one_gpu_and_its_share_of_the_cores(
    settings: dict[str, Any], directives: tuple[str, ...], key: object, cores: int
) -> None:
    launch = LaunchConfig.model_validate({"cpus_per_task": 32, **settings})
    step = launch.of_step("eval")
    assert (step.directives, str(step.gpus_per_node)) == (directives, str(key))
    assert step.gpus == min(1, launch.gpus)
    assert (step.nodes, step.processes_per_node, step.cpus_per_task) == (1, 1, cores)
    two = {"steps": {"eval": {"gpus_per_node": 2}}}
    step = LaunchConfig.model_validate({**settings, **two}).of_step("eval")
    assert (step.gpus, [*step.problems()]) == (2, [])
