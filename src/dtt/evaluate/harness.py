"""`dtt eval --harness`: tasks of lm-evaluation-harness, run by its own `hf` model.

A checkpoint is exported to a temporary folder beside its results; a Hugging Face folder is read as
it is. lm-eval's model computes each option with its complete context, so it takes longer than the
tasks of dtt; in exchange nothing of lm-eval is implemented twice.
"""

from __future__ import annotations

import difflib
import json
import logging
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dtt
from dtt.artifacts.manifest import fingerprint
from dtt.base.errors import ConfigError, EnvironmentUnfit, InputError
from dtt.base.files import remove, sha256_file, write_atomically
from dtt.base.log import log
from dtt.base.ranks import Ranks
from dtt.evaluate.evaluation import choose_models, configured, evaluate_each
from dtt.evaluate.models import ALL, EvaluatedModel
from dtt.hf.model_source import find_chat_format
from dtt.mesh.environment import install

if TYPE_CHECKING:
    from dtt.config.evaluation import EvalConfig
    from dtt.hf.chat_format import ChatFormat

SUFFIXES = (".yaml", ".yml")
SEED, SEED_OF_PYTHON = 1234, 0
"""Seeds of lm-eval's command line."""
ADD_BOS = {"tokenizer": None, "always": True, "never": False}
"""`add_bos_token` of lm-eval's model by `eval.bos`."""


def run(
    source: str,
    harness: Sequence[str],
    *,
    tasks: Sequence[str] = (),
    step: str | None = None,
    ema: bool = False,
    chat: bool = False,
    as_json: bool = False,
    **options: Any,
) -> None:
    """Evaluate tasks of lm-eval, print its table or JSON, and write a file of the results.

    `harness` has names of its tasks, or paths of its YAML files. The other arguments are those of
    `evaluation.evaluate`; `limit` and `shots` are lm-eval's: the first questions, and the number of
    examples in front of each. Raises EnvironmentUnfit if lm-eval is not installed.
    """
    from dtt.jobs.stop import Requests

    requests, ranks = Requests(), Ranks.detect()
    if tasks:
        raise ConfigError("--tasks and --harness are both given")
    if ranks.size > 1:
        raise ConfigError(
            f"--harness runs in one process, not in {ranks.size}",
            why="lm-eval's model computes on one device",
        )
    requests.act_at_once(ranks)  # lm-eval cannot be interrupted and continued
    cfg = configured(source, options)
    chat_format = find_chat_format(source, None) if chat else None
    log.warning("tasks of lm-eval may run Python code of their own, and use the network")
    index = _task_index(harness)
    models = choose_models(source, step, None, ema=ema)
    evaluation = Harness(cfg, tuple(harness), index, chat_format)
    for model, record in evaluate_each(models, None, evaluation.evaluate, every=step == ALL):
        if as_json:
            print(json.dumps(record), flush=True)
            continue
        from lm_eval.utils import make_table

        print(
            f"{model.name}, lm-eval {record['lm_eval']}", make_table(record), sep="\n", flush=True
        )
        if record.get("groups"):
            print(make_table(record, "groups"), flush=True)


def _task_index(tasks: Sequence[str]) -> Any:
    """Return lm-eval's index of tasks; ConfigError if one of `tasks` is not in it.

    Reading the index takes 10 s, so YAML files are evaluated without it.
    """
    try:
        import accelerate  # noqa: F401  lm-eval's `hf` model needs it
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise EnvironmentUnfit(
            "--harness requires lm-eval and accelerate", why=str(error), next=install("harness")
        ) from None
    files = [task for task in tasks if Path(task).suffix in SUFFIXES]
    for file in files:
        if not Path(file).is_file():
            raise InputError(f"no task file {file}")
    index = TaskManager(include_defaults=len(files) < len(tasks))
    for name in tasks:
        if name not in files and name not in index.all_tasks:
            close = difflib.get_close_matches(name, index.all_tasks, n=3)
            raise ConfigError(
                f"lm-eval {metadata.version('lm_eval')} has no task {name!r}",
                next=f"did you mean {' or '.join(close)}?" if close else "lm-eval ls tasks",
            )
    return index


@dataclass(frozen=True)
class Harness:
    """Tasks of lm-eval, and how models answer them."""

    cfg: EvalConfig
    tasks: tuple[str, ...]
    index: Any
    """A TaskManager of lm-eval."""
    chat: ChatFormat | None
    """Conversation format of the prompts; None: plain text."""

    def evaluate(self, model: EvaluatedModel) -> dict[str, Any]:
        """Return the record of a model's results, and write it.

        Tasks are loaded first: without network, this fails before any weights are read.
        """
        import lm_eval
        from lm_eval.utils import handle_non_serializable

        loaded = self._load()
        identity = {
            "model": model.name,
            "step": model.step,
            "weights": model.identity(),
            "ema": model.ema,
            "tokenizer": sha256_file(model.tokenizer),
            "precision": "fp32",
            "bos": self.cfg.bos,
            "chat": None if self.chat is None else fingerprint(self.chat.facts.model_dump()),
            "shots": self.cfg.shots,
            "limit": self.cfg.limit,
            "tasks": list(self.tasks),
            "lm_eval": metadata.version("lm_eval"),
        }
        found = {"format": "dtt-harness-1", "dtt": dtt.__version__, **identity}
        with self._hf_folder(model) as folder:
            lm = self._open(folder)
            with self._failures():
                # Its `simple_evaluate` would also run git and pip to describe the machine.
                found |= lm_eval.evaluate(
                    lm,
                    loaded,
                    limit=self.cfg.limit,
                    log_samples=False,
                    apply_chat_template=self.chat is not None,
                    fewshot_as_multiturn=True,
                )
        # The configurations of tasks may contain functions and classes.
        record: dict[str, Any] = json.loads(json.dumps(found, default=handle_non_serializable))
        name = f"harness-{fingerprint(identity)[:12]}.json"
        text = json.dumps(record, indent=1, ensure_ascii=False)
        write_atomically(model.results / name, text + "\n")
        return record

    @contextmanager
    def _hf_folder(self, model: EvaluatedModel) -> Iterator[Path]:
        """Yield the Hugging Face folder of a model, which is temporary for a checkpoint."""
        if model.step is None:
            yield model.path
            return
        from dtt.hf import publish, write_folder

        model.verify()
        # Beside the results: /tmp is often too small. The same name replaces what a kill left.
        folder = model.results / ".harness"
        origin = publish.ExportSource(model.name, model.step, model.identity(), model.ema)
        try:
            write_folder.export(
                model.load(), origin, folder, dtype="fp32", max_shard_size="5GB", card="",
                chat=self.chat,
            )  # fmt: skip
            yield folder
        finally:
            remove(folder)

    def _open(self, folder: Path) -> Any:
        """Return lm-eval's own model of a Hugging Face folder, on the GPU if there is one."""
        import torch
        from lm_eval.models.huggingface import HFLM

        # It would log a warning for each request that is longer than the context.
        logging.getLogger("lm_eval.models.huggingface").setLevel(logging.ERROR)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        bos, name = ADD_BOS[self.cfg.bos], str(folder)
        lm = HFLM(name, device=device, dtype="float32", add_bos_token=bos, trust_remote_code=False)
        lm.batch_size_per_gpu = max(1, self.cfg.batch_tokens // lm.max_length)
        return lm

    def _load(self) -> Any:
        """Return lm-eval's tasks, with the seeds and numbers of examples of its command line."""
        import numpy as np
        import torch

        torch.manual_seed(SEED)  # of tasks that draw their answers
        random.seed(SEED_OF_PYTHON)
        np.random.seed(SEED)  # noqa: NPY002  tasks use the global generator
        with self._failures():
            loaded = self.index.load(list(self.tasks))
            for task in loaded["tasks"].values():
                own = task.get_config("num_fewshot")
                if own != 0 or self.cfg.shots is None:  # tasks with 0 must not have any
                    shots = own if self.cfg.shots is None else self.cfg.shots
                    task.set_config(key="num_fewshot", value=shots or 0)
                task.set_fewshot_seed(seed=SEED)
        return loaded

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Raise InputError for tasks that lm-eval cannot load or evaluate."""
        try:
            yield
        except (OSError, ImportError, KeyError, ValueError) as error:
            raise InputError(
                f"lm-eval cannot evaluate {', '.join(self.tasks)}",
                why=f"{type(error).__name__}: {error}".splitlines()[0],
                next="if it is the network: evaluate once where there is one, with eval.limit=1 "
                "and the same HF_HOME; then set HF_HUB_OFFLINE=1"
                if isinstance(error, OSError)
                else "DTT_DEBUG=1 shows where",
            ) from error
