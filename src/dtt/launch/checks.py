"""Checks of a job on the login node, before it waits in the queue.

Imports neither torch nor numpy.
"""

from __future__ import annotations

import math
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from dtt.artifacts.jobdir import JobDir
from dtt.artifacts.manifests import CheckpointManifest, TokensManifest
from dtt.artifacts.token_folders import token_paths, token_sources
from dtt.base.errors import ConfigError, DttError, EnvironmentUnfit, InputError
from dtt.base.files import check_space, sha256_file
from dtt.base.reading import read_text
from dtt.base.terminal import Message
from dtt.checkpoint import store
from dtt.config.data import GivenTokenizerConfig, TrainedTokenizerConfig
from dtt.config.init import HF
from dtt.config.launch import ApptainerConfig, LaunchConfig, NoContainer, PyxisConfig
from dtt.config.parallel import mesh_sizes
from dtt.config.run import RunConfig
from dtt.data.corpus.described import check_tokens, read_corpus
from dtt.data.samples import compatibility
from dtt.model import count
from dtt.model.mesh_divisibility import check_layout
from dtt.model.scaling import scaled

BYTES_PER_PARAMETER = 12
"""Size of a checkpoint in bytes per parameter: fp32 weights and two moments."""


def raise_all(problems: list[DttError]) -> None:
    """Raise a single problem as it is, several as one ConfigError; return if there are none."""
    different = dict.fromkeys(map(str, problems))  # several stages may have the same one
    if len(different) == 1:
        raise problems[0]
    if problems:
        listed = "\n".join(different)
        raise ConfigError(Message(f"{len(different)} problems, nothing was submitted\n{listed}"))


def problems(command: str, cfg: RunConfig, job: JobDir) -> Iterator[DttError]:
    """Yield all problems that would make `dtt COMMAND` fail at its start; `job` is for `train`."""
    if command == "download" and not cfg.download.is_named and not cfg.eval.tasks:
        yield ConfigError("no dataset is named", next="set download.dataset=org/name, or a folder")
    elif command == "clean":
        if cfg.clean is None:
            why = "the configuration has no section `clean`"
            yield ConfigError(why, next="set clean.exact=true")
        for one in cfg.corpora:
            yield from caught(partial(read_corpus, one))
    elif command == "tokenize":
        for one in cfg.corpora:
            yield from caught(partial(_open_selection, one))
    elif command == "train":
        yield from _train_problems(cfg, job)
    elif command == "export" and job.newest_checkpoint_name() is None:
        yield InputError(f"no checkpoint in {job.root}", next=f"dtt train {job.root}")
    elif command == "eval" and not cfg.eval.tasks:
        yield ConfigError(
            "no tasks to evaluate",
            where="eval.tasks",
            next=f"dtt submit eval {job.root} eval.tasks=[core]",
        )
    if command in ("train", "eval") and cfg.eval.tasks:
        from dtt.evaluate.tasks.definition import load_tasks  # most runs evaluate no tasks

        yield from caught(lambda: load_tasks(cfg.eval.tasks))


def caught(check: Callable[[], object]) -> Iterator[DttError]:
    """Call `check` and yield the DttError that it raises, if any."""
    try:
        check()
    except DttError as error:
        yield error


def _open_selection(cfg: RunConfig) -> None:
    from dtt.data.corpus.selection import open_selection  # training on tokens needs none

    open_selection(cfg.clean, read_corpus(cfg), cfg.corpus_dir)


def _train_problems(cfg: RunConfig, job: JobDir) -> Iterator[DttError]:
    train = cfg.train
    yield from _init_problems(cfg, job)
    if cfg.data.reads_text:
        yield from caught(partial(_open_selection, cfg))
        return
    try:
        sources = token_sources(cfg)
    except DttError as error:
        yield error
        return
    for path in token_paths(cfg):
        yield from compatibility.file_problems(path)
    # Token files of other tools have no manifest, so nothing more is known about them here.
    made_by_dtt = [s for s in sources if TokensManifest.is_in(s.path)]
    try:
        found = [(source, TokensManifest.read(source.path)) for source in made_by_dtt]
    except DttError:
        return
    for source, tokens in found:
        yield from caught(partial(check_tokens, cfg, source.path, tokens))
        yield from _tokenizer_problems(cfg, source.path, tokens)
        if cfg.data.packing == "concat":
            total = tokens.counts("train").tokens
            windows = max(0, (total - 1) // train.seq_len)
            yield from caught(
                partial(compatibility.check_length, source.label, total, windows, train.seq_len)
            )
    if found:
        named = [(s.label, s.path / "tokenizer.json", t.tokenizer_sha256) for s, t in found]
        yield from caught(lambda: compatibility.check_one_tokenizer(named))
        yield from _model_problems(cfg, found[0][1].vocab_size, job)
    if len(found) == len(sources) and len(cfg.token_sources) == len(cfg.sources):
        keys = [(source.label, tokens.key) for source, tokens in found]
        for step in reversed(store.steps(job.checkpoints)):
            try:
                newest = CheckpointManifest.read(store.folder_of(job.checkpoints, step))
            except DttError:  # training skips a damaged checkpoint, too
                continue
            # The job must have been trained on the same token files or text.
            yield from caught(partial(compatibility.check_data, newest, keys, job))
            break


def _init_problems(cfg: RunConfig, job: JobDir) -> Iterator[DttError]:
    weights = cfg.init.source or HF
    # The config.json of an hf: source was read when the configuration was resolved.
    if not weights.startswith(HF) and job.newest_checkpoint_name() is None:
        yield from caught(lambda: store.locate(weights))


def problems_before_data(cfg: RunConfig, job: JobDir) -> Iterator[DttError]:
    """Yield the problems of a training that are known before its token files exist."""
    yield from _init_problems(cfg, job)
    if isinstance(cfg.tokenizer, TrainedTokenizerConfig):
        size = cfg.tokenizer.vocab_size
        yield from _model_problems(cfg, size, job)
    elif cfg.reads_corpus:
        from dtt.data.text.tokenizer import find_tokenizer, is_hub_id  # training needs none

        if not is_hub_id(cfg.tokenizer.path):  # the step itself fetches one
            yield from caught(partial(find_tokenizer, cfg.tokenizer))
    if cfg.eval.tasks:
        from dtt.evaluate.tasks.definition import load_tasks  # most runs evaluate no tasks

        yield from caught(lambda: load_tasks(cfg.eval.tasks))


def _tokenizer_problems(cfg: RunConfig, folder: Path, tokens: TokensManifest) -> Iterator[DttError]:
    sha256 = tokens.tokenizer_sha256
    yield from caught(lambda: compatibility.check_tokenizer(folder / "tokenizer.json", sha256))
    if isinstance(cfg.tokenizer, GivenTokenizerConfig):
        given = Path(cfg.tokenizer.path).expanduser()
        given = given / "tokenizer.json" if given.is_dir() else given
        if given.is_file() and sha256_file(given) != sha256:
            yield ConfigError(
                f"the token files in {folder} were created with another tokenizer",
                where=given,
                next="run dtt tokenize, or set data.tokens=FOLDER",
            )


def _model_problems(cfg: RunConfig, vocab_size: int, job: JobDir) -> Iterator[DttError]:
    """Yield a problem if vocabulary or context do not fit, or checkpoints or the mesh will not."""
    try:
        arch = scaled(cfg, vocab_size).arch
    except DttError as error:
        yield error
        return
    checkpoint, train = cfg.checkpoint, cfg.train
    # Those kept for ever do not count if time ends the run, which may be long before `train.steps`.
    permanent = 0
    if checkpoint.keep_every and not train.timed:
        permanent = train.steps // math.lcm(checkpoint.every, checkpoint.keep_every)
    saved = math.ceil(train.steps / checkpoint.every)
    # One is written before one is deleted.
    most = min(checkpoint.keep_last + permanent + checkpoint.keep_best, saved) + 1
    more = max(1, most - len(store.steps(job.checkpoints)))
    needed = more * BYTES_PER_PARAMETER * count.parameters(arch)
    yield from caught(lambda: check_space(job.checkpoints, needed, f"{more} checkpoints"))
    try:
        sizes = mesh_sizes(cfg.parallel, cfg.launch.nodes * cfg.launch.processes)
    except ConfigError:  # `batch_problems` reports it
        return
    yield from caught(lambda: check_layout(cfg, sizes, arch))


def launch_problems(command: str, cfg: RunConfig, job: JobDir) -> Iterator[DttError]:
    """Yield every conflict between `launch` and what Slurm or its nodes can do.

    `job` is that of the training, which has measured how long it takes to save.
    """
    yield from _setup_problems(cfg.launch)
    if command != "train":
        return
    yield from _time_problems(job, cfg.launch)
    # Training processes need a GPU each.
    launch, device = cfg.launch, cfg.train.device
    gpus = launch.gpus if device != "cpu" else 0
    each = launch.processes
    if gpus and each > gpus and device != "cuda:0":
        yield ConfigError(
            f"{each} processes per node, but {gpus} GPUs",
            why="each process needs its own GPU",
            next="set launch.processes_per_node=0, "
            f"launch.gpus_per_node={each} or train.device=cpu",
        )
    requested = any(d.startswith(("--exclusive", "--gres=")) for d in launch.directives)
    if device.startswith("cuda") and not gpus and not requested:
        yield ConfigError(
            f"train.device={device}, but the job requests no GPU from Slurm",
            next="set launch.gpus_per_node=1 or more, or for exclusive nodes "
            'launch.directives=["--exclusive"]',
        )


def _time_problems(job: JobDir, launch: LaunchConfig) -> Iterator[DttError]:
    """Yield a problem if the time limit is too short to save."""
    limit = launch.time_limit
    measured = (read_text(job.lead) or "").strip()
    if limit is None or not measured.isdecimal():
        return
    needed = int(measured)
    if 2 * needed > limit:
        yield ConfigError(
            f"launch.time ({launch.time}) is too short for this job",
            where=job.lead,
            why=f"it needs {needed} s to save and stop, measured from its steps and saves, and "
            "cannot start to stop before half of the time limit",
            next=f"set launch.time={math.ceil(2 * needed / 60)} or more",
        )


def batch_problems(cfg: RunConfig, job: JobDir) -> Iterator[DttError]:
    """Yield a problem if the training processes cannot divide a batch that is left to train."""
    processes = cfg.launch.processes * cfg.launch.nodes
    done = max(store.steps(job.checkpoints), default=0)
    yield from caught(
        lambda: compatibility.check_batches(cfg.train, mesh_sizes(cfg.parallel, processes), done)
    )


def _setup_problems(launch: LaunchConfig) -> Iterator[DttError]:
    """Yield problems with the user's set-up lines and the container image."""
    inside = not isinstance(launch.container, NoContainer)
    for line in launch.setup:
        parsed = subprocess.run(["bash", "-nc", line], capture_output=True, text=True, check=False)
        if parsed.returncode != 0:
            why = parsed.stderr.strip().splitlines()
            yield ConfigError(
                f"a line of launch.setup is not valid bash: {line}", why=why[0] if why else None
            )
        words = line.split()
        if len(words) > 1 and words[0] in (".", "source"):
            yield from _missing(words[1], "launch.setup", inside=inside)
    image = getattr(launch.container, "image", None)
    if image is not None and (
        (isinstance(launch.container, ApptainerConfig) and "://" not in image)
        or (isinstance(launch.container, PyxisConfig) and image.startswith(("/", ".")))
    ):
        yield from _missing(image, "launch.container.image", inside=False)


def _missing(name: str, key: str, *, inside: bool) -> Iterator[DttError]:
    """Yield a problem if a file does not exist here.

    Paths that only bash can expand and absolute paths inside a container are not checked.
    """
    path = Path(name)
    known = not any(c in name for c in "$~`'\"\\*") and not (inside and path.is_absolute())
    if known and not path.exists():
        yield InputError(
            f"{key}: file not found",
            where=path.absolute(),
            next="submit from the folder in which it lies, such as a checkout of dtt, or set "
            + (f"{key}=[]" if key == "launch.setup" else key),
        )


def sbatch_problems() -> Iterator[DttError]:
    """Yield a problem if this machine has no sbatch."""
    if shutil.which("sbatch") is None:
        yield EnvironmentUnfit(
            "sbatch is not installed",
            next="submit from a login node; --dry-run and --print-script work everywhere",
        )
