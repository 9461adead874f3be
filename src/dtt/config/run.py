"""The complete configuration: one file for all commands, each of which reads its own sections."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, NonNegativeInt

from dtt.config.action import Action
from dtt.config.adapter import AdapterConfig, LoraConfig, NoAdapterConfig
from dtt.config.base import Section, must_be, resumable
from dtt.config.clean import CleanConfig
from dtt.config.data import (
    ChatConfig,
    DownloadConfig,
    GivenTokenizerConfig,
    TokenizeConfig,
    TokenizerConfig,
    TrainedTokenizerConfig,
    slug,
)
from dtt.config.evaluation import EvalConfig, ExportConfig
from dtt.config.init import InitConfig
from dtt.config.key_types import tag_of
from dtt.config.launch import LaunchConfig
from dtt.config.model import MIXTURES, Family, ModelConfig
from dtt.config.objective import Objective
from dtt.config.optim import Optimizer, horizon_keys
from dtt.config.parallel import ParallelConfig
from dtt.config.scaling import ScalingConfig, StandardConfig
from dtt.config.schedule import Schedule
from dtt.config.sources import AnySource, OneSource, SourceConfig, TokenData
from dtt.config.train import (
    CheckpointConfig,
    GuardConfig,
    PipelineConfig,
    ProfileConfig,
    TrackerConfig,
    TrainConfig,
)
from dtt.config.variants import any_of, variant

if TYPE_CHECKING:  # or one of a user's own
    DataConfig = TokenData | OneSource
    ObjectiveConfig = Objective
    OptimConfig = Optimizer
    ModelSection = ModelConfig | Family
    ScheduleConfig = Schedule
else:
    DataConfig = any_of("data")
    ObjectiveConfig = any_of("objective")
    OptimConfig = any_of("optim")
    ModelSection = Annotated[
        ModelConfig | variant("model", "transformers"), Field(discriminator="family")
    ]
    ScheduleConfig = any_of("schedule")

PRE_TOKENIZER_OF_TYPE = {
    "qwen2": "qwen2",
    "qwen3_5": "qwen3.5",
    "qwen3_5_moe": "qwen3.5",
    "qwen3_5_moe_text": "qwen3.5",
    "qwen4_exp": "qwen3.5",
}
"""For these `model_type`s, AutoTokenizer of transformers 5 ignores how tokenizer.json splits text:
the export after days of training would be refused."""
MAX_JOINED = 100
"""Maximum length of the joined names of several datasets; the name of a folder has 255 bytes."""
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
JobName = Annotated[
    str,
    must_be(
        rf"{NAME}(/{NAME}){{0,3}}",
        "letters, digits and . _ -, such as small-2; up to four such names are joined by /",
    ),
]


class RunConfig(Section):
    """The complete configuration of dtt."""

    name: JobName = "run"
    """Name of the job: its folder is `jobs/<name>`. A trial of a sweep is
    `<sweep>/<trial>`."""
    seed: NonNegativeInt = 0
    """Random seed of the initial weights, the data order and dropout."""
    download: DownloadConfig = DownloadConfig()
    """Raw documents to download."""
    clean: CleanConfig | None = None
    """Documents to leave out; null: none."""
    tokenizer: TokenizerConfig = TrainedTokenizerConfig()
    """Tokenizer to train or to use."""
    tokenize: TokenizeConfig = TokenizeConfig()
    """Conversion of documents to token files."""
    chat: ChatConfig = ChatConfig()
    """Conversations: chat template and loss mask."""
    data: DataConfig = variant("data", "tokens")()
    """Training data."""
    model: ModelSection = ModelConfig()
    """Model family and sizes."""
    scaling: ScalingConfig = StandardConfig()
    """Scaling of learning rates and initial weights with the shape of the model."""
    init: InitConfig = InitConfig()
    """Initial weights."""
    adapter: AdapterConfig = NoAdapterConfig()
    """Adapter to train instead of the weights."""
    objective: ObjectiveConfig = variant("objective", "next_token")()
    """Loss that the run minimises."""
    optim: OptimConfig = variant("optim", "muon")()
    """Optimizer."""
    schedule: ScheduleConfig = variant("schedule", "wsd")()
    """Learning-rate schedule."""
    train: TrainConfig = TrainConfig()
    """Training run."""
    parallel: ParallelConfig = ParallelConfig()
    """Parallelism: how the run is spread over devices."""
    guard: GuardConfig = GuardConfig()
    """Detection of non-finite and spiking steps."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""
    eval: EvalConfig = EvalConfig()
    """Benchmark tasks."""
    actions: tuple[Action, ...] = resumable(())
    """What the run does after some of its steps, by classes of your own: a list of
    `{type: FILE.py:CLASS, every: N}`, with their keys."""
    track: tuple[TrackerConfig, ...] = resumable(())
    """Trackers that receive metrics besides metrics.jsonl and the console: a list of
    `{type: wandb, …}`, `{type: tensorboard}`."""
    profile: ProfileConfig = ProfileConfig()
    """Profiler: time and memory of a few steps."""
    export: ExportConfig = ExportConfig()
    """Export to a Hugging Face folder."""
    pipeline: PipelineConfig = PipelineConfig()
    """Number of processes per stage of `dtt pipeline`."""
    launch: LaunchConfig = LaunchConfig()
    """Slurm job of `dtt submit`."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield problems that involve several sections."""
        train, model = self.train, self.model
        if train.timed and self.schedule.type != "wsd":
            yield (
                "train.budget",
                f"needs schedule.type=wsd, not {self.schedule.type}: only its decay can be timed",
            )
        if train.timed and self.schedule.warmup.unit == "share":
            yield (
                "schedule.warmup",
                "the time budget determines the length of the run: specify steps or tokens",
            )
        for key in dict.fromkeys(horizon_keys(self.optim) if train.timed else ()):
            why = "the time budget determines the length of the run: specify the weight decay as a "
            yield key, why + "number, not by horizon"
        warmup = self.schedule.warmup
        most = {"steps": train.steps, "tokens": train.steps * train.global_batch_tokens}
        if train.steps and warmup.unit in most and warmup.amount > most[warmup.unit]:
            why = f"{warmup} is longer than the run ({train.steps} steps): "
            yield "schedule.warmup", why + "the learning rate would never reach its peak"
        every = self.checkpoint.every
        if self.checkpoint.keep_best and (not train.eval_every or every % train.eval_every):
            why = f"checkpoint.every ({every}) is not a multiple of eval_every ({train.eval_every})"
            yield "checkpoint.keep_best", f"needs an evaluation at each save: {why}"
        if model.max_seq_len is not None and model.max_seq_len < train.seq_len:
            yield (
                "train.seq_len",
                f"{train.seq_len} is longer than model.max_seq_len = {model.max_seq_len}",
            )
        if train.epochs is not None and not self.data.is_counted:
            yield (
                "train.epochs",
                f"needs token files, which data.type={self.data.type} does not read",
            )
        yield from self.data.run_problems(self)
        yield from self._tokenizer_problems()
        yield from self._objective_problems()
        yield from self._optimizer_problems()
        yield from self._adapter_problems()
        yield from self._mixture_problems()
        yield from self._action_problems()
        if isinstance(model, Family):
            yield from self._built_model_problems()

    def _built_model_problems(self) -> Iterator[tuple[str, str]]:
        """Yield problems of a model that its family builds itself with the rest of the run."""
        why = f"model.family={tag_of(self.model)} builds a model whose inside dtt does not know"
        for key in ("tensor", "context", "pipeline", "expert"):
            if getattr(self.parallel, key) > 1:
                yield f"parallel.{key}", f"must be 1: {why}"
        if self.scaling.type != "standard":
            yield "scaling.type", f"must be standard: {why}"
        if self.train.precision == "fp8":
            yield "train.precision", f"cannot be fp8: {why}"
        if self.objective.per_pair and (term := getattr(self.model, "loss_per_token", None)):
            what = f"objective.type={self.objective.type}, whose loss is per pair"
            yield f"model.{term}", f"adds a loss per token to {what}: set it to false"

    def _action_problems(self) -> Iterator[tuple[str, str]]:
        """Yield an error for actions whose records would mix."""
        labels = [action.label for action in self.actions]
        for i, label in enumerate(labels):
            if label in labels[:i]:
                yield f"actions.{i}.name", f"two are called {label}: set a name for each"

    def _tokenizer_problems(self) -> Iterator[tuple[str, str]]:
        """Yield problems of the tokenizer with the model."""
        tokenizer = self.tokenizer
        model_type = getattr(self.model, "model_type", self.model.family)
        needed = PRE_TOKENIZER_OF_TYPE.get(model_type)
        if (
            needed is not None
            and isinstance(tokenizer, TrainedTokenizerConfig)
            and tokenizer.pre_tokenizer != needed
            and self.reads_corpus
        ):
            why = f"{model_type} needs {needed}: transformers splits text in no other way for it"
            yield "tokenizer.pre_tokenizer", why

    def _objective_problems(self) -> Iterator[tuple[str, str]]:
        """Yield problems of the objective with the rest of the run."""
        objective = self.objective
        if objective.per_pair and not self.data.has_pairs:
            why = f"objective.type={objective.type} needs preference, not {self.data.type}"
            yield "data.type", why
        if objective.needs != "sum" and self.train.z_loss:
            yield "train.z_loss", f"objective.type={objective.type} has no z-loss: set 0"
        if objective.needs == "logits":
            for key in ("tensor", "context", "pipeline"):
                if getattr(self.parallel, key) > 1:
                    why = "no rank would have the logits of all words, tokens or layers"
                    yield f"parallel.{key}", f"must be 1 for a loss that needs logits: {why}"
        if objective.per_pair and self.train.context_schedule:
            why = f"cannot be combined with objective.type={objective.type}: it would cut pairs"
            yield "train.context_schedule", why

    def _mixture_problems(self) -> Iterator[tuple[str, str]]:
        """Yield problems of a mixture of experts with the rest of the run."""
        train, mixture = self.train, self.model.family in MIXTURES
        if not mixture and self.init.source is None:
            for key, without in (("train.balance_loss", None), ("train.router_z_loss", 0.0)):
                if getattr(train, key.removeprefix("train.")) != without:
                    yield key, f"{self.model.family} has no experts: omit it"
            if self.parallel.expert > 1:
                yield "parallel.expert", f"{self.model.family} has no experts: omit it"
        if not mixture:
            return
        if train.precision == "fp8":
            yield "train.precision", "fp8 is for linear layers, not for stacks of experts: use bf16"
        if self.scaling.type != "standard":
            why = "muP has no rule for routers, whose outputs are not as wide as the model"
            yield "scaling.type", f"{self.model.family} needs standard: {why}"
        if self.objective.per_pair and (train.balance_loss or train.router_z_loss):
            what = f"objective.type={self.objective.type} cannot have losses of a router"
            why = "the loss is per pair, and these are per token: set 0"
            yield "train.balance_loss", f"{what}: {why}"

    def _optimizer_problems(self) -> Iterator[tuple[str, str]]:
        """Yield problems of an optimizer with the rest of the run."""
        optim = self.optim
        if self.scaling.type != "standard" and not optim.supports_mup:
            yield "scaling.type", f"needs standard: optim.type={optim.type} has no rule for muP"
        if self.train.stochastic_rounding and not optim.supports_rounding:
            yield "train.stochastic_rounding", f"optim.type={optim.type} does not support it"

    def _adapter_problems(self) -> Iterator[tuple[str, str]]:
        """Yield problems of the adapter with the rest of the run."""
        adapter, init = self.adapter, self.init
        if not isinstance(adapter, LoraConfig):
            if init.adapter is not None:
                yield "init.adapter", "needs adapter.type=lora, with the settings of that adapter"
            return
        if init.source is None:
            yield "adapter.type", f"{adapter.type} needs trained weights to adapt: set init.from"
        if init.optimizer == "carry":
            yield "init.optimizer", "must be fresh: the other job's optimizer knows no adapter"
        if self.optim.type == "muon":
            why = "Muon on the factors of a product is another method"
            yield (
                "optim.type",
                f"adapter.type={adapter.type} needs adamw, not {self.optim.type}: {why}",
            )
        if self.scaling.type != "standard":
            yield "scaling.type", f"adapter.type={adapter.type} needs standard"
        if self.train.precision == "bf16-pure":
            why = "bf16 keeps the frozen weights in bf16 and the adapter in fp32"
            yield "train.precision", f"adapter.type={adapter.type} does not support it: {why}"
        if adapter.base == "nf4" and self.train.precision == "fp8":
            why = "its products decode 4 bits to bf16: use bf16"
            yield "train.precision", f"adapter.base=nf4 does not support fp8: {why}"
        if adapter.base == "nf4" and self.parallel.tensor > 1:
            why = "it would divide the blocks of 64 weights that have one scale"
            yield "adapter.base", f"nf4 does not support parallel.tensor > 1: {why}"
        if adapter.dropout and self.parallel.tensor > 1:
            why = "the ranks of a layer would drop different elements of one input"
            yield "adapter.dropout", f"must be 0 with parallel.tensor > 1: {why}"

    @property
    def separates_documents(self) -> bool:
        """True if a row may hold several documents that must not see each other."""
        return self.data.mask_documents and self.data.packing != "none"

    @property
    def dataset_name(self) -> str:
        """The short name of the dataset in folder names: Hub name and subset, or file stem."""
        labels = [one.label for one in self.download.datasets]
        joined = "+".join(labels)
        if len(joined) > MAX_JOINED:
            return f"{labels[0]}+{len(labels) - 1}"
        return joined or self.download.slug

    @property
    def tokenizer_name(self) -> str:
        """The short name of the tokenizer in folder names: `bpe4096`, or its file or repository."""
        tokenizer = self.tokenizer
        if isinstance(tokenizer, TrainedTokenizerConfig):
            return f"bpe{tokenizer.vocab_size}" + ("-chat" if tokenizer.chat_tokens else "")
        path = Path(tokenizer.path)
        return slug(path.resolve().parent.name if path.suffix == ".json" else path.name)

    @property
    def corpora(self) -> tuple[RunConfig, ...]:
        """Configurations of one corpus each: this one, or one for each of `download.datasets`.

        The latter have one tokenizer, which `tokenize` trains into the folder above theirs.
        """
        if not self.download.datasets:
            return (self,)
        out, tokenizer = self.tokenize_dir, self.tokenizer
        if isinstance(tokenizer, TrainedTokenizerConfig):
            tokenizer = GivenTokenizerConfig(
                path=str(out / "tokenizer.json"), end_of_document=tokenizer.special_tokens[0]
            )
        return tuple(
            self.model_copy(
                update={
                    "download": type(self.download)(**dict(one)),
                    "tokenizer": tokenizer,
                    "tokenize": self.tokenize.model_copy(update={"out": out / one.label}),
                }
            )
            for one in self.download.datasets
        )

    @property
    def corpus_dir(self) -> Path:
        """The folder that `download` writes; `tokenize`, and training from text, read it.

        With `download.datasets`, each of `corpora` has its own.
        """
        return self.download.out or Path("data/corpus") / self.dataset_name

    @property
    def tokenize_dir(self) -> Path:
        """The folder that `tokenize` writes; with `download.datasets`, the one above them."""
        dataset = self.dataset_name if self.download.is_named else self.corpus_dir.name
        return self.tokenize.out or Path("data/tokens") / f"{dataset}-{self.tokenizer_name}"

    @property
    def sources(self) -> tuple[AnySource, ...]:
        """The sources that `train` reads: token files, and classes in their place.

        Empty when it trains from text, or from one class alone.
        """
        if not self.data.reads_token_files:
            return ()
        if self.data.sources:
            return self.data.sources
        if self.data.tokens is None and self.download.datasets:
            return tuple(
                SourceConfig(path=self.tokenize_dir / one.label, name=one.label)
                for one in self.download.datasets
            )
        # The name is fixed, because it affects the sample order: the folder may be moved.
        return (SourceConfig(path=self.data.tokens or self.tokenize_dir, name="tokens"),)

    @property
    def token_sources(self) -> tuple[SourceConfig, ...]:
        """The entries of `sources` that are token files.

        `dtt.artifacts.token_folders` replaces patterns by the folders that they match.
        """
        return tuple(source for source in self.sources if isinstance(source, SourceConfig))

    @property
    def token_paths(self) -> tuple[Path, ...]:
        """All token files that `train` reads, also held-out ones; of a pattern, its folder."""
        paths = [s.folder for s in self.token_sources] + [s.validation for s in self.sources]
        return tuple(path for path in paths if isinstance(path, Path))

    @property
    def reads_corpus(self) -> bool:
        """True if the run needs its corpus: to tokenize it, or to train straight from it."""
        outs = [one.tokenize_dir for one in self.corpora]
        # A pattern may be meant for other folders only: then no corpus is named.
        named = self.download.is_named or self.download.out is not None
        roots = {source.folder for source in self.token_sources if source.is_pattern and named}
        read = any(out in self.token_paths or not roots.isdisjoint(out.parents) for out in outs)
        return self.data.reads_text or read

    @property
    def job_dir(self) -> Path:
        """The folder of the job."""
        return Path("jobs") / self.name

    @property
    def max_seq_len(self) -> int:
        """The maximum context length of the model, in tokens."""
        return self.model.max_seq_len or self.train.seq_len
