"""Keys of the training run: duration, batches, precision, intervals, checkpoints and trackers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

from dtt.config.base import MAX_INT, Length, LengthKey, Processes, Section, Tokens32, resumable
from dtt.config.value_types import Stretch

AttentionKernel = Literal["auto", "cudnn", "flash", "efficient", "math"]

WRITABLE = r"/|(s3a?|gs|gcs|abfss?|az|file)://."
"""The beginning of a folder into which dtt can write: a path, or a URL."""
SAMPLE_TEMPERATURE = 0.8
"""Of the samples of a run; the rate of answers that stop is that of greedy ones."""

BatchStages = tuple[tuple[LengthKey, PositiveInt], ...]
"""Pairs of start and size from there on, such as `[[0, 512], [20%, 1024]]`."""


class ConstantBatch(Section):
    """A constant batch size: every step takes `train.global_batch_tokens`."""

    type: Literal["constant"] = "constant"


class DoublingBatch(Section):
    """A batch size that doubles at regular intervals; the last increase may be smaller."""

    type: Literal["doubling"] = "doubling"
    start: PositiveInt = 8_192
    """Tokens per step at the start of the run."""
    every: LengthKey = Length(0.05)
    """Interval between doublings: steps, a share of the run (`5%`), or `50M tokens`."""


class ListedBatch(Section):
    """An explicit list of batch sizes."""

    type: Literal["list"] = "list"
    stages: BatchStages = ()
    """Pairs of start (steps, a share of the run, or tokens) and tokens per step:
    `[[0, 8192], [50M tokens, 65536]]`. The last size must be the full batch."""


BatchSchedule = Annotated[ConstantBatch | DoublingBatch | ListedBatch, Field(discriminator="type")]


def batch_problems(schedule: BatchSchedule, full: int, seq_len: int) -> Iterator[tuple[str, str]]:
    """Yield `(key, why)` for each invalid value of a batch-size schedule.

    `full` is the full batch in tokens; the caller has checked that it is a multiple of `seq_len`.
    """
    if isinstance(schedule, ListedBatch):
        for why in stage_problems(schedule.stages, full, "train.global_batch_tokens"):
            yield "stages", why
        for _, tokens in schedule.stages:
            if tokens % seq_len:
                yield "stages", f"{tokens} is not a multiple of train.seq_len = {seq_len}"
    elif isinstance(schedule, DoublingBatch):
        if schedule.start >= full:
            yield "start", f"{schedule.start} is not below train.global_batch_tokens = {full}"
        if schedule.start % seq_len:
            yield "start", f"{schedule.start} is not a multiple of train.seq_len = {seq_len}"


def stage_problems(stages: BatchStages, last: int, key: str) -> Iterator[str]:
    """Yield reasons why `stages` is not a valid schedule that ends at the value `last` of `key`."""
    sizes = [size for _, size in stages]
    if not stages or stages[0][0].amount != 0:
        yield "the first must begin at 0"
    elif sizes != sorted(set(sizes)):
        yield f"must grow from stage to stage (got {', '.join(map(str, sizes))})"
    elif sizes[-1] != last:
        yield f"the last must be {key} = {last} (got {sizes[-1]})"


class TrainConfig(Section):
    """The training run: duration, batch sizes, precision, device and intervals."""

    epochs: Annotated[float, Field(gt=0, le=10**6)] | None = None
    """Passes over the data, in place of `steps`: the run ends with the first step after which that
    many times the samples of all sources have been trained on. The job records the number of steps
    as `steps`. null: `steps` determines the length."""
    steps: NonNegativeInt = 1000
    """Optimizer steps of the whole run; with `budget` an upper bound. 0: the number that `epochs`
    resolves to."""
    budget: Stretch | None = None
    """Time budget within which the run decays the learning rate, validates and saves: `6h`,
    `1h 30m`. Only the run time of attempts counts, each from the start of its first process, not
    the time between them. The decay of `schedule.type: wsd` starts as late as the measured speed
    allows; from then on the number of steps is fixed. Its length may be a share of the run; other
    shares refer to `steps`."""
    seq_len: Tokens32 = 1024
    """Tokens in one training sequence."""
    context_schedule: BatchStages = ()
    """Shorter contexts at the start of the run: pairs of start (steps, a share of the run, or
    tokens) and tokens, such as `[[0, 256], [20%, 1024]]`. Each length divides `seq_len`; the last
    equals it. A sequence is split into several rows without attention between them; the tokens and
    their order are unchanged."""
    global_batch_tokens: PositiveInt = 65_536
    """Tokens in one optimizer step, over all devices and accumulation steps."""
    batch_schedule: BatchSchedule = ConstantBatch()
    """Schedule of smaller batches at the start of the run."""
    micro_batch: PositiveInt = resumable(8)
    """Sequences of `seq_len` tokens that one device processes at once; gradients are accumulated up
    to the global batch."""
    clip_norm: PositiveFloat | None = 1.0
    """Maximum global gradient norm; null: no clipping."""
    z_loss: NonNegativeFloat = 0.0
    """Coefficient, such as 1e-4, of the z-loss logsumexp(logits)^2 per token, which keeps the
    logits from drifting (PaLM). It contributes to the gradients only: the reported loss is the
    cross-entropy."""
    balance_loss: NonNegativeFloat | None = None
    """Coefficient of the balance loss of mixtures: for each sequence, the share of its tokens that
    each expert computes times its mean score (DeepSeek-V3). Null: 0.001, with a correction of the
    choice (dots1) 0.0001, and with `objective.type: dpo` 0."""
    router_z_loss: NonNegativeFloat = 0.0
    """Coefficient, such as 0.001, of the mean of logsumexp(logits)^2 of the routers of mixtures,
    which keeps them from drifting (ST-MoE)."""
    balance_rate: NonNegativeFloat = 0.001
    """Change in each step of the correction of the choice of an expert, up if it computed fewer
    tokens of the step than the mean, down if more (dots1)."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay, such as 0.999, of an exponential moving average of the weights for evaluation
    (`ema_loss`), `dtt export --ema` and `dtt generate --ema`. Half of the average comes from the
    last ln 2 / (1 - decay) steps: 693 for 0.999. After t steps the decay is at most (1 + t) / (10 +
    t), so that the initial weights fade quickly. Costs 4 bytes per parameter; null: no average."""
    device: Literal["auto", "cpu", "cuda", "cuda:0"] = resumable("auto")
    """Device of the run; `auto`: a GPU if there is one. With `cuda:0`, all processes of a machine
    share its first GPU: slow, to check a layout and NCCL without more GPUs."""
    precision: Literal["auto", "fp64", "fp32", "bf16", "bf16-pure", "fp8"] = resumable("auto")
    """Precision of the forward and backward pass. With `bf16`, weights and optimizer state stay
    fp32; with `bf16-pure`, they and the gradients are bf16 too, which halves their memory and loses
    small updates. `fp8` is `bf16` with those linear layers in fp8 that a benchmark at the start
    finds faster in fp8. `fp64` is for comparing layouts: slow, but sums in another
    order differ by 1e-13 at most. `auto`: bf16 where the hardware multiplies it natively,
    else fp32."""
    stochastic_rounding: bool = resumable(False)
    """Round updated weights up or down at random with `precision: bf16-pure`, so that updates too
    small for bf16 take effect on average."""
    attention: AttentionKernel = resumable("auto")
    """Kernel of causal attention (a backend of PyTorch's scaled_dot_product_attention): `cudnn`,
    `flash`, `efficient` (CUTLASS, also in fp32) or `math` (the slow reference). `auto` selects
    FlashAttention 3 where it is installed, else cuDNN on Hopper and newer GPUs, else the first of
    flash, efficient and math that is supported. The log names the selected kernel. Attention within
    documents or a window has separate kernels."""
    remat: Literal["none", "full", "selective"] = resumable("none")
    """Activation checkpointing, which recomputes activations in the backward pass instead of
    storing them: `full` recomputes all of a block, which saves most memory and costs a third more
    time; `selective` recomputes all but the outputs of attention, every second matrix
    multiplication and collectives."""
    compile: bool | None = resumable(None)
    """Compile each block with torch.compile; null: on a GPU only. If compilation fails, the run
    continues without it."""
    log_every: PositiveInt = resumable(10)
    """Steps between console lines; metrics.jsonl always records every step."""
    eval_every: NonNegativeInt = resumable(200)
    """Steps between validation losses; 0: only at the start and the end."""
    eval_tokens: PositiveInt = resumable(1_000_000)
    """Number of tokens from the start of the held-out text to validate on, or all if it has fewer.
    Several sources share them equally; the overall loss weights each by its share of the run."""
    eval_answers: NonNegativeInt = resumable(16)
    """Number of held-out conversations to answer at each evaluation, with `data.type: chat`: the
    share of greedy answers that stop by themselves is recorded as `answer_stop_rate`. A sharded
    model is first copied to each rank; where half of the free memory does not hold all weights, it
    answers without a KV cache, one forward pass per token. 0: none."""
    eval_answer_tokens: PositiveInt = resumable(128)
    """Maximum tokens of such an answer; a longer one counts as not stopping."""
    sample_every: NonNegativeInt = resumable(0)
    """Steps between printed samples; 0: only at the start and the end."""
    sample_prompt: str = resumable("")
    """Prompt of the samples, with `data.type: chat` the message of a user; empty: the first words
    of a held-out document, or a held-out conversation up to its first answer."""
    sample_tokens: NonNegativeInt = resumable(64)
    """Tokens per sample; 0: no samples."""
    hang_seconds: NonNegativeFloat | None = resumable(600.0)
    """Timeout of a step in seconds. A step that takes longer than this, and longer than 20 typical
    recent steps, counts as a hang: the stacks of all ranks are written, the rank responsible is
    named, and the job ends. 0 or null: no timeout."""

    @property
    def timed(self) -> bool:
        """True if the end of the run is determined by time rather than by `steps`."""
        return self.budget is not None

    @field_validator("steps")
    @classmethod
    def _positive_without_epochs(cls, steps: int, others: ValidationInfo) -> int:
        if steps == 0 and others.data.get("epochs") is None:
            raise PydanticCustomError("steps", "input should be greater than 0")
        return steps

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield an error for each combination of values that cannot work."""
        full, seq_len = self.global_batch_tokens, self.seq_len
        if self.steps * full > MAX_INT:
            yield "steps", f"{self.steps} steps of {full} tokens are more than 2^63 tokens"
        if self.stochastic_rounding and self.precision != "bf16-pure":
            yield "stochastic_rounding", "it requires train.precision = bf16-pure"
        if full % seq_len:
            yield "global_batch_tokens", f"{full} is not a multiple of train.seq_len = {seq_len}"
        for key, why in batch_problems(self.batch_schedule, full, seq_len):
            yield f"batch_schedule.{key}", why
        if self.context_schedule:
            for why in stage_problems(self.context_schedule, seq_len, "train.seq_len"):
                yield "context_schedule", why
        for _, context in self.context_schedule:
            if seq_len % context:
                yield "context_schedule", f"{context} does not divide train.seq_len = {seq_len}"


class CheckpointConfig(Section):
    """Intervals and retention of checkpoints."""

    every: PositiveInt = resumable(500)
    """Steps between checkpoints; one is always written at the end and on a stop request."""
    asynchronous: bool = resumable(True)
    """Write checkpoints in the background; training waits only for a copy in memory. false:
    training waits until the checkpoint is on disk and verified."""
    keep_last: PositiveInt = resumable(2)
    """Number of newest verified checkpoints to keep."""
    keep_every: NonNegativeInt = resumable(0)
    """Keep checkpoints at multiples of this number of steps permanently; 0: none."""
    keep_best: NonNegativeInt = resumable(0)
    """Number of checkpoints with the lowest validation loss to keep as well; needs an evaluation at
    each save."""
    mirror: str | None = resumable(None)
    """Folder to which each verified checkpoint is copied in the background, kept by the same rules:
    `s3://bucket/prefix`, `gs://`, `abfs://`, `file://` or an absolute path on another disk. A
    failed upload is logged and repeated, and never stops training; `dtt ckpt fetch` brings a copy
    back. Credentials come from the environment."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield an error for a mirror into which dtt cannot write."""
        if self.mirror is not None and not re.match(WRITABLE, self.mirror):
            yield "mirror", "must be an absolute path, or a URL: s3://, gs://, abfs:// or file://"


class WandbConfig(Section):
    """Weights & Biases. A resumed job continues the same run. Failures never stop training.

    The run is online if there is an API key, else offline. The environment variable `WANDB_MODE`
    takes precedence.
    """

    type: Literal["wandb"] = "wandb"
    project: str = "dtt"
    """Project of the run."""
    entity: str | None = None
    """Team or user; null: the account's default."""


class TensorBoardConfig(Section):
    """Event files in `jobs/<name>/tensorboard/`."""

    type: Literal["tensorboard"] = "tensorboard"


TrackerConfig = Annotated[WandbConfig | TensorBoardConfig, Field(discriminator="type")]


class PipelineConfig(Section):
    """The number of processes that `dtt pipeline` starts for each stage on this machine."""

    tokenize_processes: Processes = resumable(0)
    """Processes for `tokenize`, under mpirun; 0: one per core, at most 8. Without MPI: one."""
    train_processes: Processes = resumable(0)
    """Processes for `train`, under torchrun, also of `dtt train` on a machine with several GPUs; 0:
    one per visible GPU, at most `launch.gpus_per_node` if that is set, or one on a CPU."""


class GuardConfig(Section):
    """Handling of non-finite and spiking steps.

    Such a step never changes weights or optimizer state, whatever the action. `stop` ends the
    run with exit code 76; the newest checkpoint is from before the step, and `--from-step` resumes
    from an earlier one. `skip` continues as if the batch of the step did not exist.
    """

    non_finite: Literal["stop", "skip"] = resumable("stop")
    """Action when the loss or the gradient norm is NaN or infinite. With fp32 and bf16 the cause is
    usually a learning rate that is too high, a hardware fault or a bug, which should be
    investigated."""
    spike: Literal["none", "stop", "skip"] = resumable("none")
    """Action when the gradient norm is far above that of the preceding steps. The default is none:
    clipping bounds the effect of such a step, and a change in the data may look like a spike.

    A norm is a spike if its logarithm is six standard deviations above the mean of the last 128
    steps, without skipped ones, and the norm is at least four times the usual one. Until there are
    128, no step is judged a spike."""


ProfileKind = Literal["torch", "memory", "nsys"]


class ProfileConfig(Section):
    """A profile of a few steps, in `jobs/<name>/profiles/`.

    To profile a running job, use `dtt job profile`.
    """

    steps: tuple[PositiveInt, PositiveInt] | None = resumable(None)
    """First and last step to profile, such as `[20, 24]`; null: none. The first steps of a run
    compile."""
    ranks: tuple[NonNegativeInt, ...] = resumable((0,))
    """Ranks to profile."""
    kind: ProfileKind = resumable("torch")
    """`torch`: a trace for https://ui.perfetto.dev, and a table of the most expensive operations.
    `memory`, on a GPU: every allocation, for https://pytorch.org/memory_viz. `nsys`, on a GPU:
    marks the steps for `nsys profile --capture-range=cudaProfilerApi dtt train …`."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield an error if the first step is after the last."""
        if self.steps is not None and self.steps[0] > self.steps[1]:
            yield (
                "steps",
                f"{self.steps[0]} is after {self.steps[1]}: specify the first and the last step",
            )
