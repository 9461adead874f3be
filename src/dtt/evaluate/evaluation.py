"""`dtt eval`: evaluate a model on benchmark tasks, or compare two."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtt.artifacts.manifest import fingerprint
from dtt.base.errors import ConfigError, DamagedError, DttError, InputError, Preempted
from dtt.base.files import sha256_file
from dtt.base.log import log, log_on_terminal
from dtt.base.ranks import Ranks
from dtt.config.evaluation import EvalConfig
from dtt.config.load import resolve
from dtt.evaluate import result_table
from dtt.evaluate.models import ALL, EvaluatedModel, checkpoint_model, find_steps, folder_model
from dtt.hf.model_source import find_chat_format, find_folder, job_of, on_device, on_first
from dtt.jobs import job_paths

if TYPE_CHECKING:
    from dtt.evaluate.tasks.metrics import TaskResult
    from dtt.evaluate.tasks.result_files import ResultFile
    from dtt.evaluate.tasks.runner import TaskRunner
    from dtt.evaluate.tasks.task_data import TaskData
    from dtt.hf.chat_format import ChatFormat
    from dtt.hf.read import LoadedModel
    from dtt.jobs.stop import Requests
    from dtt.mesh.dist import World


def run(arguments: Sequence[str], **options: Any) -> None:
    """Evaluate a model, or compare the results of two: `compare A B`; see `evaluate`."""
    match arguments:
        case ["compare", one, other]:
            from dtt.evaluate import compare

            compare.run(one, other, **options)
        case [source] if source != "compare":
            evaluate(source, **options)
        case _:
            first, *rest = arguments or ["SOURCE"]
            folders = [Path(name.partition("@")[0]).is_dir() for name in rest]
            several = first == "compare" or any(folders)
            raise ConfigError(
                "dtt eval takes one model, or `compare` and two",
                why=f"got {' '.join(arguments)}",
                next="dtt eval SOURCE, or dtt eval compare JOB[@STEP] JOB[@STEP]"
                if several
                else f"dtt eval {first} --tasks {','.join(rest)}",  # --tasks was forgotten
            )


def with_keys(arguments: Sequence[str], tasks: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Split arguments into models and `eval.KEY=VALUE`; return the models, and the values by key.

    The values include `tasks`, if there are any. Raises ConfigError for keys of other sections,
    which do not affect an evaluation, and for tasks that are given twice.
    """
    given = [one for one in arguments if re.match(r"[a-z_.]+=", one) and not Path(one).exists()]
    sources = [one for one in arguments if one not in given]
    options: dict[str, Any] = {"tasks": tasks} if tasks else {}
    section = resolve(None, given).config.eval
    for key in dict.fromkeys(one.partition("=")[0] for one in given):
        name = key.removeprefix("eval.")
        if name == key or name == "every":
            raise ConfigError(f"dtt eval does not read {key}", next="dtt config explain eval")
        if name in options:
            raise ConfigError(f"--{name} and {key} are both given")
        options[name] = getattr(section, name)
    return sources, options


def evaluate(
    source: str,
    *,
    step: str | None = None,
    ema: bool = False,
    chat: bool = False,
    as_json: bool = False,
    **options: Any,
) -> None:
    """Evaluate the model that `source` names, and print the results.

    `load_model` describes `source` and `ema`; `step` is a step of a job, or `all`. `options` are
    keys of the section `eval`; the others have the values of the job's configuration. With `chat`,
    prompts are messages in the model's conversation format. The result files are in the
    job or in `evals/`; those that exist are not computed again. Damaged checkpoints are named and
    skipped if there are others; with `all`, DamagedError is raised at the end.
    """
    from dtt.jobs.stop import Requests

    requests, ranks = Requests(), Ranks.detect()
    with all_ranks(ranks, requests) as world:
        models = choose_models(source, step, world, ema=ema)
        cfg = configured(source, options)
        chat_format = find_chat_format(source, None) if chat else None
        evaluation = open_evaluation(cfg, world, chat_format)
        requests.defer()

        def results(model: EvaluatedModel) -> list[TaskResult]:
            return evaluation.run(model, world, lambda: bool(requests.reason))

        for model, found in evaluate_each(models, world, results, every=step == ALL):
            if ranks.first:
                result_table.show(model, evaluation.files(model), found, as_json=as_json)


@contextmanager
def all_ranks(ranks: Ranks, requests: Requests) -> Iterator[World | None]:
    """Yield the World of all ranks of this command, which have met; None without others.

    Rank 0 reports an error that all ranks raise. Stop signals end the process until
    `requests.defer()`.
    """
    from dtt.jobs.attempt import after_rank_0

    requests.act_at_once(ranks)
    try:
        with after_rank_0(ranks, requests):
            if ranks.size == 1:  # torch is not imported
                yield None
                return
            from dtt.mesh import dist

            with dist.lost_peers_reported():
                yield dist.start(ranks, "auto")
    finally:
        requests.defer()
        if ranks.size > 1:
            from dtt.mesh import dist

            dist.stop()


def configured(source: str, options: dict[str, Any]) -> EvalConfig:
    """Return the section `eval` of the job that `source` names, changed by `options`.

    Relative paths in it start from the folder that contains `jobs/`. For other models, returns the
    defaults changed by `options`.
    """
    if find_folder(source) is not None:
        return EvalConfig().model_copy(update=options)
    return job_paths.evaluation(job_of(source).root).model_copy(update=options)


def choose_models(
    source: str, step: str | None, world: World | None, *, ema: bool = False
) -> list[EvaluatedModel]:
    """Return the models that `source` and `step` name, as `find_steps`; rank 0 chooses them.

    A job that is running saves and deletes checkpoints meanwhile, so each rank could find others.
    """
    steps = on_first(world, lambda: find_steps(source, step, ema=ema))
    if steps is not None:
        return [checkpoint_model(job_of(source), step, ema=ema) for step in steps]
    folder = find_folder(source)
    assert folder is not None, "a job has steps"
    return [folder_model(source, folder)]


@cache
def _alone() -> World:
    """Return the World of a single process, on its GPU if there is one."""
    from dtt.mesh import dist

    return dist.start(Ranks(), "auto")


@dataclass(frozen=True)
class Evaluation:
    """Benchmark tasks, and how models answer them."""

    cfg: EvalConfig
    tasks: Sequence[TaskData]
    chat: ChatFormat | None = None
    """Conversation format of the prompts; None: plain text."""

    def files(self, model: EvaluatedModel) -> list[ResultFile]:
        """Return the result file of each task; its header is everything that decides answers."""
        from dtt.evaluate.tasks.result_files import SCORING_VERSION, ResultFile

        chat = None if self.chat is None else fingerprint(self.chat.facts.model_dump())
        tokenizer, weights, files = sha256_file(model.tokenizer), model.identity(), []
        for data in self.tasks:
            settings = {
                "task": data.task.name,
                "type": data.task.type,
                "chance": data.task.chance,
                "task_sha256": fingerprint(data.task.identity()),
                "data_sha256": data.sha256,
                "revision": data.revision,
                "shots": data.shots,
                "limit": self.cfg.limit,
                "bos": self.cfg.bos,
                "chat": chat,  # hash of the conversation format; None: prompts are plain text
                "tokenizer": tokenizer,
                "weights": weights,
                "ema": model.ema,
                "precision": "fp32",
                "scoring": SCORING_VERSION,
                # The records then include the texts.
                **({"samples": True} if self.cfg.keep_samples else {}),
            }
            files.append(ResultFile.of(model.results, settings))
        return files

    def run(
        self, model: EvaluatedModel, world: World | None, stop: Callable[[], bool]
    ) -> list[TaskResult]:
        """Evaluate a model on the tasks that have no result, and return all results; collective.

        Without other ranks, `world` is None, and torch is only imported if a result is missing.
        Raises Preempted as soon as `stop()`, which is called between batches, is true on any rank,
        and DamagedError on every rank if the weights are damaged.
        """
        files = on_first(world, lambda: self.files(model))
        results = on_first(world, lambda: [file.result() for file in files])
        found = [result for result in results if result is not None]
        if len(found) == len(results):
            return found
        this = world or _alone()
        runner = self.runner(load_verified(model, this), this)
        runner.check(self.tasks)
        found = []
        for data, file, result in zip(self.tasks, files, results, strict=True):
            result = result or runner.run(data, file, lambda: bool(this.maximum(int(stop()))))
            if result is None:
                raise Preempted(
                    f"stopped on request while evaluating {model.name}",
                    where=model.results,
                    next="run the same command again to continue with the next question",
                )
            found.append(result)
        return found

    def runner(self, trained: LoadedModel, world: World) -> TaskRunner:
        """Return the runner for a model, which is moved to the device of this rank in fp32."""
        from dtt.data.conversations.rows import Conversation, RefusedRow
        from dtt.evaluate.tasks.encoding import QuestionEncoder
        from dtt.evaluate.tasks.runner import TaskRunner
        from dtt.evaluate.tasks.scorer import Generator, Scorer

        state = {name: tensor.float() for name, tensor in trained.tensors.items()}
        model = on_device(replace(trained, state=state), world.device)
        chat = None if self.chat is None else self.chat.encoder()

        def render(text: str) -> list[int]:
            """Return the ids of a text as the message of a user, up to the answer."""
            assert chat is not None, "called with a chat format only"
            try:
                return chat.prompt_ids(Conversation(({"role": "user", "content": text},)))
            except RefusedRow as refused:
                raise ConfigError(
                    "a question cannot be rendered with the chat template", why=refused.why
                ) from None

        return TaskRunner(
            Scorer(model, world, batch_tokens=self.cfg.batch_tokens),
            Generator(model, world, batch_tokens=self.cfg.batch_tokens),
            QuestionEncoder(
                trained.open_tokenizer(),
                trained.end_of_document,
                trained.arch.max_seq_len,
                self.cfg.bos,
                None if chat is None else render,
                trained.check_ids,
            ),
            world,
            until_ids=trained.stop_tokens(chat),
            keep_samples=self.cfg.keep_samples,
        )


def open_evaluation(
    cfg: EvalConfig,
    world: World | None = None,
    chat: ChatFormat | None = None,
) -> Evaluation:
    """Read the tasks that `cfg` names, and their questions; downloads what is missing.

    With several ranks, `world` is theirs, and rank 0 reads first.
    """
    from dtt.evaluate.tasks.definition import load_tasks
    from dtt.evaluate.tasks.task_data import open_task

    if not cfg.tasks:
        raise ConfigError(
            "no tasks to evaluate",
            where="eval.tasks",
            why="neither the command line nor the configuration of the job names any",
            next="dtt eval SOURCE --tasks core, or --tasks hellaswag,lambada_openai",
        )
    tasks = load_tasks(cfg.tasks)
    found: list[TaskData] = []

    def read() -> None:
        how = {"limit": cfg.limit, "shots": cfg.shots}
        found.extend(open_task(task, cfg.data, **how) for task in tasks)

    on_first(world, read)
    if not found:  # of another rank
        read()
    return Evaluation(cfg, found, chat)


def fetch_questions(cfg: EvalConfig) -> None:
    """Fetch the questions of `eval.tasks`, so that they can be read without a network."""
    tasks = open_evaluation(cfg).tasks
    questions = sum(len(data.questions) for data in tasks)
    print(f"tasks   {len(tasks)} with {questions:,} questions, in {cfg.data}")


def load_verified(model: EvaluatedModel, world: World) -> LoadedModel:
    """Return the weights of a model, which rank 0 verifies; collective.

    If a rank cannot read them, all raise the same error: a checkpoint may be deleted meanwhile.
    """
    log_on_terminal("reading %s", model.name)
    world.on_first(model.verify)
    trained: LoadedModel | None = None
    error: Exception | None = None
    try:
        trained = model.load()
    except (DttError, OSError) as raised:
        error = raised
    for one in world.gather(error):
        if one is not None:
            raise one
    assert trained is not None, "its rank has no error"
    return trained


def evaluate_each(
    models: Sequence[EvaluatedModel],
    world: World | None,
    evaluate: Callable[[EvaluatedModel], list[TaskResult]],
    *,
    every: bool,
) -> Iterator[tuple[EvaluatedModel, list[TaskResult]]]:
    """Yield `evaluate(model)` of all models if `every` is true, else of the first that is intact.

    `evaluate` has the same outcome on every rank; `world` is None without other ranks. Skips
    models that are damaged, and those that were deleted meanwhile. Raises DamagedError at the end
    if a model was damaged, and InputError if all were deleted.
    """
    damaged, done = 0, 0
    for model in models:
        try:
            result = evaluate(model)
        except (DamagedError, InputError, FileNotFoundError) as error:
            if not on_first(world, model.path.exists):
                log.info("skipped %s: it was deleted meanwhile", model.name)
                continue
            if len(models) == 1 or not isinstance(error, DamagedError):
                raise
            damaged += 1
            log.error("skipped %s: %s", model.name, error)
            continue
        yield model, result
        done += 1
        if not every:
            return
    if damaged:
        raise DamagedError(
            f"{damaged} of {len(models)} checkpoints are damaged",
            why="the lines above report what is wrong with each",
            next="delete or restore them; `dtt ckpt ls JOB --verify` lists them",
        )
    if not done:
        raise InputError(
            f"{', '.join(model.name for model in models)}: deleted before the evaluation",
            why="training deletes old checkpoints when it saves new ones",
            next="run the same command again; dtt eval JOB --watch protects checkpoints meanwhile",
        )
