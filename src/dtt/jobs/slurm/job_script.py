"""Rendering of the job script from typed parameters."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, assert_never

from dtt.artifacts.jobdir import JobDir
from dtt.base.errors import ConfigError
from dtt.base.reading import read_text
from dtt.config.launch import ApptainerConfig, LaunchConfig, NoContainer, PyxisConfig

SUPERVISOR = Path(__file__).with_name("supervisor")
"""The package that each job directory holds a copy of."""
PLAIN_NAME = r"[A-Za-z0-9][A-Za-z0-9_./-]*"
PLAIN_PATH = r"[A-Za-z0-9_./+=@,][A-Za-z0-9_./+=@,-]*"

DEFAULT_LEAD = 120
LONGEST_LEAD = 65_535  # seconds; the maximum of `sbatch --signal`

Kind = Literal["train", "tokenize", "other"]


@dataclass(frozen=True)
class Array:
    """A Slurm array: one task per trial."""

    trials: tuple[Path, ...]
    """Job directories, relative to the working directory."""
    cap: int | None = None
    """Maximum number of tasks that run at once."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """The parameters of a job script, which determine its text completely."""

    job_name: str
    """Slurm's name of the job; each `/` is replaced by `.`."""
    job: Path
    """Job directory, relative to `directory`; for an array the folder of the sweep."""
    directory: Path
    """Absolute working directory, from which the job is submitted."""
    argv: tuple[str, ...]
    """Arguments of dtt; for `train` without the job directory, which the script appends."""
    kind: Kind
    launch: LaunchConfig
    lead: int = DEFAULT_LEAD
    """Seconds before the time limit at which the job is asked to save and stop."""
    array: Array | None = None
    stages: tuple[Path, ...] = ()
    """Job directories of all stages of training, in order, if the job trains several."""
    device: str = "auto"
    """Device that the job trains on: `cuda`, `cpu`, or `auto` for GPUs if the job has any."""
    progress: tuple[str, ...] = ()
    """Patterns of files whose bytes are progress: what the next attempt need not do again."""

    def __post_init__(self) -> None:
        # The script quotes every value, but `#SBATCH` lines are parsed by Slurm, which knows no
        # shell quoting. So names are restricted instead.
        if not re.fullmatch(PLAIN_NAME, self.job_name):
            raise ConfigError(
                f"{self.job_name!r} is not a valid name of a Slurm job",
                why="allowed are letters, digits and _ . / -",
                next="set name=ANOTHER",
            )
        folders = [self.job, *self.stages, *(self.array.trials if self.array else ())]
        invalid = [f for f in folders if not re.fullmatch(PLAIN_PATH, str(f))]
        if invalid:
            raise ConfigError(
                f"{str(invalid[0])!r} is not a valid directory of a Slurm job",
                why="allowed are letters, digits and _ . / + = @ , -",
                next="submit from a parent folder, with another name",
            )
        texts = [str(self.directory), *self.argv]
        # A line break would end a comment or an option of the script.
        if any(re.search(r"[\x00-\x1f\x7f-\x9f]", text) for text in texts):
            raise ConfigError(
                "paths and arguments of a Slurm job cannot contain control characters",
                where=shlex.join(texts),
                next="submit from another folder, or with other arguments",
            )
        container = isinstance(self.launch.container, ApptainerConfig)
        if container and re.search("[:,]", str(self.directory)):
            raise ConfigError(
                "this working directory cannot be bind-mounted into a container",
                where=self.directory,
                why="`:` and `,` separate options of apptainer",
                next="submit from another folder",
            )

    @property
    def nodes(self) -> int:
        """The number of nodes of the job."""
        return 1 if self.kind == "other" else self.launch.nodes

    @property
    def tasks_per_node(self) -> int:
        """The number of tasks that Slurm starts on a node: one torchrun, or every process."""
        one = self.kind == "other" or (self.kind == "train" and self.launch.start == "torchrun")
        return 1 if one else self.launch.processes


def render(script: Script) -> str:
    """Return the text of the job script. It executes the copy of SUPERVISOR next to it."""
    prepare, set_up = _set_up(script)
    directives = "\n".join(f"#SBATCH {option}" for option in _directives(script))
    launcher, options = " \\\n        ".join(_launcher(script)), " \\\n    ".join(_options(script))
    return f"""\
#!/bin/bash
{directives}

# Written by `dtt submit`. In the same folder, `sbatch {script.job}/slurm.sh` resumes the job.
# The supervisor passes on stop requests and decides whether the job continues: see docs/slurm.md.
# shellcheck disable=SC1091,SC2154,SC2329  # the supervisor sets _dtt_… and calls the functions

cd -- {_quoted(script.directory)} || exit 66

# On the first node, before and outside of all that runs on the nodes.
_dtt_prepare() {{
{_indented(prepare)}
}}

# Run a command on all nodes.
_dtt_launch() {{
    exec {launcher} "$@"
}}

# On every node, in the container if there is one.
_dtt_set_up() {{
{_indented(set_up)}
}}

# After set-up: run a module of dtt with its arguments.
_dtt_program() {{
    {_program(script)} -m "$@"
}}

exec python3 -IB {_quoted(script.job)}/supervisor {options} \\
    --functions "$(declare -f _dtt_prepare _dtt_launch _dtt_set_up _dtt_program)" "$@" \\
    -- {shlex.join(script.argv)}
"""


def _indented(lines: list[str]) -> str:
    return "\n".join(f"    {line}" for line in lines)


def _quoted(value: object) -> str:
    return shlex.quote(str(value))


def _directives(script: Script) -> Iterator[str]:
    """Yield the options of sbatch; unset ones use the cluster's defaults."""
    launch, array = script.launch, script.array
    # %A_%a for tasks of an array, whose %j is a different number for each.
    log = script.job / "logs" / ("%x-%A_%a.log" if array else "%x-%j.log")
    values = {
        "job-name": script.job_name.replace("/", "."),
        "output": log,
        "open-mode": "append",
        "nodes": script.nodes,
        "ntasks-per-node": script.tasks_per_node,
        "gpus-per-node": None if launch.gpus_per_node in (0, "0") else launch.gpus_per_node,
        "cpus-per-task": launch.cpus_per_task,
        "mem": launch.mem,
        "time": launch.time,
        "partition": launch.partition,
        "account": launch.account,
        "qos": launch.qos,
        "exclude": launch.exclude,
        "signal": f"B:USR2@{script.lead}",
    }
    yield from (f"--{option}={value}" for option, value in values.items() if value is not None)
    if array is not None:
        yield f"--array=0-{len(array.trials) - 1}" + (f"%{array.cap}" if array.cap else "")
    yield "--requeue" if launch.continuation == "requeue" else "--no-requeue"
    yield from launch.directives


def _options(script: Script) -> Iterator[str]:
    """Yield the options of the supervisor."""
    launch, command = script.launch, script.argv[0]
    trains = command == "train"
    yield f"--job={_quoted(script.job)} --continuation={launch.continuation}"
    if script.array is not None:
        yield f"--trials {' '.join(map(_quoted, script.array.trials))}"
    if script.stages:
        yield f"--stages {' '.join(map(_quoted, script.stages))}"
    yield from (f"--progress={_quoted(pattern)}" for pattern in script.progress)
    if launch.preflight and command == "train":
        on_gpus = launch.gpus > 0 if script.device == "auto" else script.device.startswith("cuda")
        yield f"--preflight={'gpu' if on_gpus else 'cpu'}"
    if not trains:
        yield "--fixed-lead"
    if launch.mpi == "mpirun" and script.kind == "tokenize":
        yield "--mpirun"
    if trains and isinstance(launch.container, NoContainer):
        yield "--report"


def _set_up(script: Script) -> tuple[list[str], list[str]]:
    """Return the lines for the first node, outside of a container, and for every node."""
    launch = script.launch
    modules = [f"module load {' '.join(launch.modules)} || return"] if launch.modules else []
    exports = [f"export {name}={_quoted(text)}" for name, text in launch.environment.items()]
    # Quoted for `eval`, as an unmatched quote, `fi` or `}` would change the syntax of the script.
    lines = [f"eval {_quoted(line)} || return" for line in launch.setup]
    own = [*exports, *lines, "return 0"]
    if isinstance(launch.container, NoContainer):
        return ["_dtt_set_up"], [*modules, *own]
    # Modules change the libraries of the host, and srun reads some of the variables.
    return [*modules, *exports, "return 0"], own


def _program(script: Script) -> str:
    """Return the command that starts a module of dtt on a node, without `-m MODULE`."""
    launch = script.launch
    if script.kind != "train":
        return "exec python"
    if launch.start == "srun":
        return "export MASTER_ADDR=$_dtt_host MASTER_PORT=$_dtt_port\n    exec python"
    return "exec " + " \\\n        ".join(
        (
            f'torchrun --nnodes="$SLURM_JOB_NUM_NODES" --nproc_per_node={launch.processes}',
            '--node_rank="$SLURM_NODEID" --rdzv_endpoint="$_dtt_host:$_dtt_port"',
            "--max_restarts=0 --signals_to_handle=SIGINT,SIGHUP,SIGQUIT",
        )
    )


def _launcher(script: Script) -> Iterator[str]:
    """Yield the parts of the command that runs another command on all nodes."""
    launch = script.launch
    if script.kind == "tokenize" and launch.mpi == "mpirun":
        yield f"mpirun -n {script.nodes * script.tasks_per_node}"
    else:
        # From the allocation, as `sbatch --nodes=N slurm.sh` overrides the number in the script.
        yield f'srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node={script.tasks_per_node}'
        # Since Slurm 22.05, srun no longer inherits --cpus-per-task from sbatch.
        if launch.cpus_per_task is not None:
            yield f"--cpus-per-task={launch.cpus_per_task}"
        if script.kind == "tokenize" and launch.mpi is not None:
            yield f"--mpi={launch.mpi}"
        if script.kind == "train":
            # Let each rank write how it ended instead of killing all at the first failure, but end
            # the step 60 s after the first rank has ended: ranks of a lost node never end.
            yield "--kill-on-bad-exit=0 --wait=60"
    if words := list(_container(script)):
        yield " ".join(map(_quoted, words))


def _container(script: Script) -> Iterator[str]:
    """Yield the words, after the launcher, with which a command runs in a container."""
    container = script.launch.container
    match container:
        case NoContainer():
            pass
        case ApptainerConfig():
            yield from (container.command, "exec", f"--bind={script.directory}")
            yield from (f"--bind={bind}" for bind in container.binds)
            yield from container.options
            yield str(container.image)
        case PyxisConfig():
            if container.image is not None:
                directory = f"{script.directory}:{script.directory}"
                yield f"--container-image={container.image}"
                yield f"--container-mounts={','.join([directory, *container.binds])}"
            elif container.binds:
                yield f"--container-mounts={','.join(container.binds)}"
            yield from container.options
        case _:
            assert_never(container)


def lead(job: JobDir, launch: LaunchConfig) -> int:
    """Return the seconds before the time limit at which the job is asked to stop.

    The job derives it from its measured step and save times; it is at most half of the time limit.
    """
    # Read at each submission: the job measures its step and save times while it runs.
    recorded = (read_text(job.lead) or "").strip()
    seconds = int(recorded) if re.fullmatch(r"[0-9]{1,9}", recorded) else DEFAULT_LEAD
    if launch.time_limit is not None:
        # A lead of more than half would leave less time to train than to stop.
        seconds = min(seconds, max(1, launch.time_limit // 2))
    return min(seconds, LONGEST_LEAD)
