"""The training run: lengths, batches, precision, how often things happen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from dtt.config.base import Section, free
from dtt.config.batch import BatchSchedule, ConstantBatch, Sizes, batch_problems, stage_problems
from dtt.config.budget import Moment, Stretch

AttentionKernel = Literal["auto", "cudnn", "flash", "efficient", "math"]


class TrainConfig(Section):
    """How long, how large, on what."""

    steps: PositiveInt = 1000
    """Optimizer steps of the whole run; with `budget` or `finish_by` at most so many."""
    budget: Stretch | None = None
    """Time in which the run ends annealed, validated and saved: `6h`, `1h 30m`. What counts is how
    long attempts run, from the start of their first process, not the time between them. The decay
    of `schedule.type: wsd` begins as late as the measured speed allows. Its length may be a share
    of the run; other shares are of `steps`."""
    finish_by: Moment | None = None
    """The same for a time on the clock: `07:00`, which is the next one after the job was first
    started, or `2026-11-22 07:00`."""
    seq_len: PositiveInt = 1024
    """Tokens in one training sequence."""
    context_schedule: Sizes = ()
    """Shorter contexts at first: from when on (steps, a share of the run, or tokens), and tokens,
    as `[[0, 256], [20%, 1024]]`. Each divides `seq_len`, the last one. A sequence is then read as
    several rows, which do not see each other: the tokens and their order stay the same."""
    global_batch_tokens: PositiveInt = 65_536
    """Tokens in one optimizer step, over all devices and accumulation steps."""
    batch_schedule: BatchSchedule = ConstantBatch()
    """Smaller batches at first."""
    micro_batch: PositiveInt = free(8)
    """Sequences of `seq_len` one device takes at once; gradients accumulate up to the global
    batch."""
    clip_norm: PositiveFloat | None = 1.0
    """Largest global gradient norm; null: no clipping."""
    z_loss: NonNegativeFloat = 0.0
    """Coefficient, as 1e-4, of logsumexp(logits)^2 per token, which keeps the logits from drifting
    (PaLM). It acts through the gradients: the loss that is shown stays the cross-entropy."""
    ema_decay: float | None = Field(default=None, gt=0.0, lt=1.0)
    """Also keep an exponential moving average of the weights, as 0.999, for evaluation
    (`ema_loss`), `dtt export --ema` and `dtt generate --ema`. Half of it comes from the last
    ln 2 / (1 - decay) steps: 693 for 0.999. After t steps the decay is at most (1 + t) / (10 + t),
    so that it soon forgets where it began. Costs 4 bytes a parameter; null: none."""
    device: Literal["auto", "cpu", "cuda"] = free("auto")
    """`auto`: a GPU if there is one."""
    precision: Literal["auto", "fp32", "bf16", "bf16-pure", "fp8"] = free("auto")
    """Arithmetic of the forward and backward pass. With `bf16` weights and optimizer stay fp32;
    with `bf16-pure` they, and gradients, are bf16 too, which halves their memory and loses small
    updates. `fp8` is `bf16` with those linear layers in fp8 that a trial at the start finds faster
    so (needs torchao). `auto`: bf16 where the hardware multiplies it natively, else fp32."""
    stochastic_rounding: bool = free(False)
    """With `precision: bf16-pure`, round new weights up or down at random, so that updates too
    small for bf16 count on average."""
    attention: AttentionKernel = free("auto")
    """Kernel of causal attention (a backend of PyTorch's scaled_dot_product_attention): `cudnn`,
    `flash`, `efficient` (CUTLASS, also in fp32) or `math` (the slow reference). `auto` takes
    FlashAttention 3 where it is installed, else cuDNN on Hopper and newer GPUs, else the first of
    flash, efficient and math that serves. The log names the one that runs. Attention within
    documents or a window has kernels of its own."""
    remat: Literal["none", "full", "selective"] = free("none")
    """Activations that the backward pass computes again rather than keeps: `full`, all within a
    block, which saves most memory and costs a third more time; `selective`, all but what attention,
    every second matrix product and exchanges between processes give."""
    remat_every: PositiveInt = free(1)
    """Of so many blocks, `remat` is for one."""
    compile: bool | None = free(None)
    """torch.compile each block; null: on a GPU only. Where that fails, the run goes on without."""
    log_every: PositiveInt = free(10)
    """Steps between console lines; metrics.jsonl always gets every step."""
    eval_every: NonNegativeInt = free(200)
    """Steps between validation losses; 0: only at the start and the end."""
    eval_tokens: PositiveInt = free(1_000_000)
    """Validate on the first so many tokens of the held-out text, or all if it has fewer. Several
    sources share them equally; each counts for its share of the run in the overall loss."""
    sample_every: NonNegativeInt = free(0)
    """Steps between printed samples; 0: only at the start and the end."""
    sample_prompt: str = free("")
    """Text that samples continue; empty: the start of a document."""
    sample_tokens: NonNegativeInt = free(64)
    """Length of a sample; 0: none at all."""
    hang_seconds: NonNegativeFloat | None = free(600.0)
    """A run whose step takes longer than this, and longer than 20 recent steps, hangs: the stacks
    of all ranks are written, the rank it is due to is named, and the job ends; 0 or null: never."""

    @property
    def timed(self) -> bool:
        """Whether the clock says when the run ends."""
        return self.budget is not None or self.finish_by is not None

    def problems(self) -> Iterator[tuple[str, str]]:
        """Batches hold whole sequences, and sequences whole contexts."""
        full, seq_len = self.global_batch_tokens, self.seq_len
        if self.stochastic_rounding and self.precision != "bf16-pure":
            yield "stochastic_rounding", "it is for train.precision = bf16-pure"
        if self.precision == "fp8" and seq_len % 16:
            yield "precision", f"fp8 takes a train.seq_len that is a multiple of 16, not {seq_len}"
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
    """How often the state is saved, and how many are kept."""

    every: PositiveInt = free(500)
    """Steps between checkpoints; one is always written at the end and on a stop request."""
    asynchronous: bool = free(True)
    """Write in the background while training goes on; training waits only for a copy in memory.
    false: training waits until the checkpoint is on the disk and verified."""
    keep_last: PositiveInt = free(2)
    """Newest verified checkpoints that are kept."""
    keep_every: NonNegativeInt = free(0)
    """Also keep, for ever, those of steps that are a multiple of this; 0: none."""
    keep_best: NonNegativeInt = free(0)
    """Also keep so many with the lowest validation loss; needs an evaluation at each save."""
    on_full: Literal["wait", "stop"] = free("stop")
    """When the disk is full: `wait` for space (training goes on until the next save is due), or
    `stop` with exit code 74. The checkpoints before it stay whole either way."""


class WandbConfig(Section):
    """Weights & Biases; the same run goes on after a resume. Its failure never stops training."""

    type: Literal["wandb"] = "wandb"
    project: str = "dtt"
    """Project the run appears in."""
    entity: str | None = None
    """Team or user; null: the account's default."""
    mode: Literal["auto", "online", "offline"] = "auto"
    """`auto`: online with an API key, offline without."""


class TensorBoardConfig(Section):
    """Event files in `jobs/<name>/tensorboard/`."""

    type: Literal["tensorboard"] = "tensorboard"


TrackerConfig = Annotated[WandbConfig | TensorBoardConfig, Field(discriminator="type")]


class PipelineConfig(Section):
    """How `dtt pipeline` starts each stage on this machine."""

    tokenize_processes: NonNegativeInt = free(0)
    """Processes for `tokenize`, under mpirun; 0: one per core, at most 8. Without MPI: one."""
    train_processes: NonNegativeInt = free(0)
    """Processes for `train`, under torchrun; 0: one per GPU, or one on a CPU."""
