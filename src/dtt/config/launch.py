"""Keys of a Slurm job submitted with `dtt submit`. Cluster profiles set these."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from dtt.config.base import Processes, Section, must_be, resumable

# Characters that values may contain without being split or executed. `#SBATCH` lines accept only
# PLAIN characters, because Slurm parses quotes, spaces and `#` by its own rules. In the script
# any single line without control characters is safe, because it is quoted for the shell.
CHARACTER = r"[^\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]"
PLAIN = r"[A-Za-z0-9_.,:/@%+=&|()\[\]*-]+"
TIME = (
    r"[0-9]{1,9}(:[0-5][0-9])?|[0-9]{1,4}(:[0-5][0-9]){2}|[0-9]{1,4}-[0-9]{1,4}(:[0-5][0-9]){0,2}"
)

# Environment variables that `launch.environment` must not set: those of the job script, those that
# Slurm sets (except the ones that are options of `srun`), and those with a meaning for bash, which
# executes the values of some, such as BASH_ENV.
OWN_VARIABLES = (
    r"_dtt_.*|SLURM_(?!(CPU_BIND|DISTRIBUTION|GPU_BIND|HINT|MEM_BIND|MPI_TYPE|NETWORK)$).*|BASH.*"
    r"|(DIRSTACK|E?UID|FUNCNAME|GROUPS|HISTCMD|IFS|LINENO|OPTIND|PIPESTATUS|POSIXLY_CORRECT|PPID"
    r"|PS4|S?RANDOM|SECONDS|SHELLOPTS|_)"
)


Name = Annotated[
    str,
    must_be(
        r"\w[\w.,@+:/=-]*",
        "one or more names of letters, digits and _ - . @ + : / =, separated by commas",
    ),
]
Nodes = Annotated[str, must_be(r"\w[\w.,\[\]-]*", "a list of nodes, such as n[1-3],n7")]
Memory = Annotated[str | int, must_be(r"0|[1-9][0-9]*[KMGT]?", "an amount of memory, such as 480G")]
Time = Annotated[
    str | int, must_be(TIME, "minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS, as for Slurm")
]
Gpus = Annotated[
    str | int,
    must_be(r"0|([A-Za-z]\w*:)?[1-9][0-9]{0,5}", "a number, or type:number such as a100:4"),
]
Module = Annotated[str, must_be(r"\w[\w./+:-]*", "the name of a module, such as PrgEnv-gnu/8.5")]
Variable = Annotated[
    str,
    must_be(r"[A-Za-z_]\w*", "the name of a variable"),
    must_be(rf"(?!({OWN_VARIABLES})$).*", "none of the variables of bash, Slurm and dtt's script"),
]
Value = Annotated[str | int, must_be(f"{CHARACTER}*", "a single line without control characters")]
Line = Annotated[str, must_be(f"{CHARACTER}*", "a single line without control characters")]
Text = Annotated[
    str, must_be(rf"(?!-){CHARACTER}+", "a single line that does not start with a dash")
]
Option = Annotated[str, must_be(rf"-{CHARACTER}+", "an option, in a single line")]
Directive = Annotated[
    str, must_be(rf"--[a-z][a-z-]*(={PLAIN})?", "--option or --option=value without spaces")
]

OF_DTT = (
    *("array", "chdir", "dependency", "error", "export", "export-file", "input", "job-name"),
    *("open-mode", "output", "parsable", "signal", "test-only", "wait", "wrap"),
)
"""Options of sbatch that dtt sets, or that would break the script."""
OF_KEYS = {
    "account": "account",
    "cpus-per-task": "cpus_per_task",
    "exclude": "exclude",
    "gpus": "gpus_per_node",
    "gpus-per-node": "gpus_per_node",
    "gpus-per-socket": "gpus_per_node",
    "gpus-per-task": "gpus_per_node",
    "mem": "mem",
    "no-requeue": "continuation",
    "nodes": "nodes",
    "ntasks": "processes_per_node",
    "ntasks-per-gpu": "processes_per_node",
    "ntasks-per-node": "processes_per_node",
    "partition": "partition",
    "qos": "qos",
    "requeue": "continuation",
    "time": "time",
    "tres-per-task": "gpus_per_node",
}
"""Options of sbatch that the script sets from other keys."""


Step = Literal["download", "clean", "tokenize", "eval", "export"]
"""The steps of a chain whose resources are not those of the training."""
Resource = Literal[
    "nodes", "tasks_per_node", "gpus_per_node", "cpus_per_task", "mem", "time",
    "partition", "account", "qos", "exclude",
]  # fmt: skip
"""Keys of `launch` that a step may have of its own; `tasks_per_node` is `processes_per_node`."""


class NoContainer(Section):
    """No container: the processes run directly on the node."""

    type: Literal["none"] = resumable("none")


class ApptainerConfig(Section):
    """Apptainer or Singularity: the processes run inside an image."""

    type: Literal["apptainer"] = resumable("apptainer")
    command: Literal["apptainer", "singularity"] = resumable("apptainer")
    """Name of the program on this cluster."""
    image: Text | None = resumable(None)
    """Image file (`.sif`), or any other image that `apptainer exec` accepts."""
    binds: tuple[Text, ...] = resumable(())
    """Folders mounted in the container, such as `/scratch` or `/data:/mnt:ro`; the working
    directory is always mounted."""
    options: tuple[Option, ...] = resumable(())
    """Additional options of `apptainer exec`: `--nv` for NVIDIA GPUs, `--rocm` for AMD GPUs."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield an error if no image is given."""
        if self.image is None:
            yield "image", "is missing: the image file"


class PyxisConfig(Section):
    """Pyxis and enroot, or CSCS's container engine: `srun` itself starts the container."""

    type: Literal["pyxis"] = resumable("pyxis")
    image: Text | None = resumable(None)
    """Image, as `--container-image` takes it; null when an option below names the environment."""
    binds: tuple[Text, ...] = resumable(())
    """Folders mounted in the container, such as `/data:/mnt:ro`; with an `image`, the working
    directory is always mounted."""
    options: tuple[Option, ...] = resumable(())
    """Additional options of `srun`, such as `--environment=/path/edf.toml` or
    `--container-writable`."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield an error if neither an image nor an option names the container."""
        if self.image is None and not self.options:
            yield "image", "is missing: the image, or options that name an environment"


ContainerConfig = Annotated[
    NoContainer | ApptainerConfig | PyxisConfig, Field(discriminator="type")
]


class LaunchConfig(Section):
    """The Slurm job: resources, how processes start, and how it resumes after a time limit."""

    nodes: Annotated[int, Field(gt=0, le=10**6)] = resumable(1)
    """Number of nodes of the job; `download`, `eval` and `export` use one."""
    gpus_per_node: Gpus = resumable(0)
    """GPUs to request on each node, of one type (`a100:4`) or of any type (`4`); 0: none."""
    processes_per_node: Processes = resumable(0)
    """Processes of `train` or `tokenize` on each node; 0: one per GPU, or one without GPUs."""
    cpus_per_task: Annotated[int, Field(gt=0, le=10**6)] | None = resumable(None)
    """CPU cores per Slurm task. Under torchrun, a task is all processes of a node; under srun, it
    is one process. Null: the cluster's default, which is often a single core."""
    mem: Memory | None = resumable(None)
    """Memory of each node, such as `480G` (no letter: megabytes); 0: all of it; null: the cluster's
    default."""
    time: Time | None = resumable(None)
    """Time limit in a format of Slurm: minutes, `MM:SS`, `HH:MM:SS`, `D-HH`, `D-HH:MM` or
    `D-HH:MM:SS`; null: the limit of the partition."""
    partition: Name | None = resumable(None)
    """Partition, or several separated by commas; null: the cluster's default."""
    account: Name | None = resumable(None)
    """Slurm account that is charged for the job."""
    qos: Name | None = resumable(None)
    """Quality of service."""
    exclude: Nodes | None = resumable(None)
    """Nodes to exclude, such as `n[1-3],n7`."""
    directives: tuple[Directive, ...] = resumable(())
    """Additional options of `sbatch`, such as `--exclusive`, `--constraint=a100&nvlink` or
    `--reservation=maintenance`; each becomes a `#SBATCH` line. `--gres=gpu:4` may take the place of
    `gpus_per_node`."""
    start: Literal["torchrun", "srun"] = resumable("torchrun")
    """Launcher of the processes of `train`: `torchrun` on each node, or `srun` for every
    process."""
    mpi: Name | None = resumable(None)
    """Launcher of the processes of `tokenize`: `mpirun`, or a plugin of `srun --mpi=…`, such as
    `pmix` or `pmi2`; null: `srun` with the cluster's default plugin."""
    continuation: Literal["requeue", "none"] = resumable("requeue")
    """Continuation of a job after its time limit or a transient failure: `requeue` puts it back
    into the queue under the same id; `none` does not continue it. After three consecutive attempts
    without a new checkpoint, or a finished unit of another command, the job gives up."""
    modules: tuple[Module, ...] = resumable(())
    """Environment modules to load on every node."""
    environment: dict[Variable, Value] = resumable({})
    """Environment variables to export to every process, by name; a `$` in a value is not
    expanded."""
    setup: tuple[Line, ...] = resumable(())
    """Shell lines to run on every node (inside the container, if any) before the processes start,
    in the folder in which `dtt submit` was called; for example `source env.sh`."""
    container: ContainerConfig = NoContainer()
    """Container in which the processes run."""
    preflight: bool = resumable(False)
    """Run `dtt doctor` with all processes before training: it reports a faulty disk, GPU or link,
    and training does not start on it."""
    steps: dict[Step, dict[Resource, Value]] = resumable({})
    """Resources of other steps than the training, by step (`download`, `clean`, `tokenize`, `eval`,
    `export`): `nodes`, `tasks_per_node`, `gpus_per_node`, `cpus_per_task`, `mem`, `time`,
    `partition`, `account`, `qos`, `exclude`; the others are those of `launch`."""

    @property
    def gpus(self) -> int:
        """The number of GPUs on each node, by `gpus_per_node` or by `directives`."""
        asked = int(str(self.gpus_per_node).rpartition(":")[2])
        return asked or self._gpus_of_gres

    @property
    def _gpus_of_gres(self) -> int:
        """The number of GPUs on each node that `--gres` among the directives requests."""
        found = 0
        for directive in self.directives:  # sbatch lets the last of several win
            name, _, text = directive[2:].partition("=")
            if "gres".startswith(name):  # sbatch accepts abbreviated options
                asked = [one.partition("(")[0].split(":") for one in text.split(",")]
                found = sum(int(p[-1]) if p[-1].isdecimal() else 1 for p in asked if p[0] == "gpu")
        return found

    @property
    def processes(self) -> int:
        """The number of processes on each node."""
        return self.processes_per_node or self.gpus or 1

    def of_step(self, step: str, *, tasks: int | None = None) -> LaunchConfig:
        """Return the section for a command: what `steps` sets for it, else what it needs.

        `download` and `export` need no GPU, and `eval` one. With `tasks`, for a step of a chain:
        one node without GPUs, and this number of processes, or one per core if it is 0.
        """
        values = self.model_dump()
        given = dict(self.steps.get(step, {}))  # type: ignore[call-overload]
        without_gpus = tuple(left for one in self.directives if (left := with_gpus(one, 0)))
        if step == "eval":  # one process on one GPU, or without any if there are none
            cores = self.cpus_per_task  # of a whole node, if torchrun is Slurm's one task there
            share = max(1, self.gpus) if self.start != "srun" else 1
            values |= {
                "nodes": 1,
                "processes_per_node": 1,
                "gpus_per_node": _at_most_one(str(self.gpus_per_node)),
                "cpus_per_task": cores and max(1, cores // share),
                "directives": tuple(with_gpus(one, 1) for one in self.directives),
            }
        elif tasks is not None or step in ("download", "export"):
            cores = self.cpus_per_task or 1
            values |= {"gpus_per_node": 0, "directives": without_gpus}
            if tasks is not None:
                values |= {"nodes": 1, "processes_per_node": tasks or cores}
            if tasks is not None and step in ("clean", "tokenize") and self.cpus_per_task:
                values["cpus_per_task"] = max(1, cores // values["processes_per_node"])
        if "gpus_per_node" in given:  # in place of those of the directives
            given["directives"] = without_gpus
        if "tasks_per_node" in given:
            given["processes_per_node"] = given.pop("tasks_per_node")
        return type(self).model_validate({**values, **given, "steps": {}})

    @property
    def time_limit(self) -> int | None:
        """The time limit `time` in seconds; None if there is none."""
        if self.time is None:
            return None
        days, dash, clock = str(self.time).rpartition("-")
        parts = [int(part) for part in clock.split(":")]
        units = [3600, 60, 1] if dash or len(parts) == 3 else [60, 1]
        given = zip(parts, units, strict=False)
        return 86_400 * int(days or 0) + sum(part * unit for part, unit in given)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield an error for each combination of values that cannot work."""
        if self.time_limit == 0:
            yield "time", "must be greater than 0"
        for directive in self.directives:
            option = directive.partition("=")[0][2:]
            # sbatch accepts abbreviated options: --part means --partition.
            keys = [k for own, k in OF_KEYS.items() if own.startswith(option)]
            if keys:
                key = OF_KEYS.get(option, keys[0])
                yield "directives", f"--{option} has a key of its own: set launch.{key} instead"
            elif any(own.startswith(option) for own in OF_DTT):
                yield "directives", f"--{option} is set by dtt itself"
        if self._gpus_of_gres and self.gpus_per_node not in (0, "0"):
            yield "directives", "--gres requests GPUs, as gpus_per_node does: omit one of them"
        for step in self.steps:
            try:
                self.of_step(step)
            except ValidationError as error:
                for one in error.errors():
                    name = ".".join(map(str, one["loc"])).replace("processes_", "tasks_")
                    yield f"steps.{step}.{name}", one["msg"]
        if self.mpi == "mpirun" and isinstance(self.container, PyxisConfig):
            yield "mpi", "a pyxis container is started by srun: omit mpirun"


def with_gpus(directive: str, number: Literal[0, 1]) -> str:
    """Return an option of sbatch with at most this number of GPUs; "" if it requests nothing else.

    Of several types, the first. `--gres` also requests other resources, such as a local disk, which
    a step keeps.
    """
    name, _, text = directive[2:].partition("=")
    if not "gres".startswith(name):
        return directive
    asked = text.split(",")
    gpus = [one for one in asked if re.match(r"gpu\b", one)]
    kept = [*map(_at_most_one, gpus[:number]), *(one for one in asked if one not in gpus)]
    return f"--{name}={','.join(kept)}" if kept else ""


def _at_most_one(gpus: str) -> str:
    """Return a request such as `4`, `a100:4` or `gpu:a100:4(S:0-1)` for one GPU, or for none."""
    text = gpus.partition("(")[0]  # one GPU is not on several sockets
    return re.sub(r"(?<![^:])[0-9]+$", lambda number: str(min(1, int(number[0]))), text)
