"""State of a run in a checkpoint: how it is collected from the running objects and restored.

position.json has
    step, samples, tokens       optimizer steps, samples and target tokens so far
    ledger, previous_ledger     the data hash, and that of one step earlier
    evaluated, eval_loss        step and loss of the last evaluation before the save; that of the
                                step itself follows it
    tasks_evaluated, sampled    step of the last evaluation of tasks, and of the last sample
    trained                     number of steps that changed the weights
    skipped                     recent anomalous steps that were skipped
    run_id                      the id of the job in trackers
    sources                     by name, the position of each source that tokenizes on the fly, one
                                step earlier
    warmup                      length of the warm-up, in steps
    decay                       first step and end of the decay
    fp8_gains                   inputs, outputs and speedup of each shape of linear layers in fp8
    own_actions                 by label, the last step and the state of each action of the user
    ended_by                    the action that ended the run, if one did
    speed                       with a time budget: the seconds spent in steps and the tokens of
                                these steps, exponentially weighted, and the seconds of the last
                                evaluation, evaluation of tasks, sample and save
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dtt.base.errors import ConfigError, DamagedError
from dtt.base.reading import Kind, fits, is_kind
from dtt.checkpoint.store import POSITION, Checkpoint
from dtt.config.objective import Objective
from dtt.config.own import own_code
from dtt.data.samples.dataset import Dataset
from dtt.data.samples.shuffle import EMPTY_DATA_HASH, extend_data_hash
from dtt.mesh.dist import World
from dtt.mesh.sharding import FullTensor, fill, zeros_sharded_as
from dtt.optim import ema
from dtt.optim.built import NUMBER, named, saved_state, variant_of
from dtt.optim.resolved_schedule import DECAY
from dtt.params.table import Params
from dtt.track.base import OWN

RNG, GUARD, EXPERTS, OBJECTIVE = "rng", "guard", "experts", "objective"
"""First components of the paths of state that belongs to no optimizer. `objective` is also the name
of an own loss in an evaluation."""
NONE = type(None)
FIELDS: dict[str, Kind] = {
    "step": int, "samples": int, "tokens": int, "ledger": str, "previous_ledger": str,
    "evaluated": (int, NONE), "run_id": str, "sources": dict,
}  # fmt: skip
"""Fields that position.json must have for a run to resume, and their types."""
OPTIONAL: dict[str, Kind] = {
    "trained": int, "skipped": list, "warmup": int, "decay": (dict, NONE),
    "speed": (dict, NONE), "tasks_evaluated": (int, NONE), "sampled": (int, NONE),
    "own_actions": dict, "ended_by": (str, NONE), "fp8_gains": list,
}  # fmt: skip
"""Fields that position.json may have, and their types."""
ACTIONS = {"validate": "evaluated", "tasks": "tasks_evaluated", "sample": "sampled"}
"""Field of position.json with the step of each action that a stop request may have postponed."""


DATA_HASH = rf"[0-9a-f]{{{2 * len(EMPTY_DATA_HASH)}}}"
Owners = set[tuple[str, str]]
"""Pairs of an optimizer and a parameter that it updates."""


@dataclass
class Position:
    """Progress of a run. Together with the seed, it is all that the data loader needs."""

    step: int = 0
    """Optimizer steps done."""
    samples: int = 0
    """Samples trained on, which is also the index of the next one in the run's order."""
    tokens: int = 0
    """Target tokens trained on."""
    data_hash: bytes = EMPTY_DATA_HASH
    """Sample hash chain: rolling hash of the samples trained on; `ledger` in files."""
    previous_data_hash: bytes = EMPTY_DATA_HASH
    """The hash chain one step earlier, with which a resume checks that the order is the same."""
    done: dict[str, int] = field(default_factory=dict)
    """Step after which each action was last finished, by the name of the action."""
    eval_loss: float | None = None
    """Loss of the last validation."""
    trained: int = 0
    """Number of steps that changed the weights, and so were not skipped."""
    recent_skips: list[int] = field(default_factory=list)
    """Anomalous steps among the last ones that were skipped."""

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object that a checkpoint keeps."""
        return {
            "step": self.step,
            "samples": self.samples,
            "tokens": self.tokens,
            "ledger": self.data_hash.hex(),
            "previous_ledger": self.previous_data_hash.hex(),
            "eval_loss": self.eval_loss,
            **{field: self.done.get(name) for name, field in ACTIONS.items()},
            "trained": self.trained,
            "skipped": self.recent_skips,
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Position:
        """Return the position in the JSON object of a checkpoint."""
        step, evaluated = record["step"], record["evaluated"]
        # A sample follows each evaluation. Older checkpoints record only the evaluation.
        recorded = {"sampled": evaluated, **record}
        done = {name: recorded.get(field) for name, field in ACTIONS.items()}
        # The checkpoint itself is saved, and what was logged before it as well.
        done |= {"log": step, "save": step}
        done |= {f"{OWN}{name}": one["done"] for name, one in record.get("own_actions", {}).items()}
        return cls(
            step=step,
            done={name: at for name, at in done.items() if at is not None},
            samples=record["samples"],
            tokens=record["tokens"],
            data_hash=bytes.fromhex(record["ledger"]),
            previous_data_hash=bytes.fromhex(record["previous_ledger"]),
            eval_loss=record["eval_loss"],
            trained=record.get("trained", record["step"]),  # absent from older checkpoints
            recent_skips=record.get("skipped", []),
        )


def check_position(checkpoint: Checkpoint) -> None:
    """Raise DamagedError unless a run can resume from the checkpoint's position.json."""
    record = checkpoint.position()
    given = {name: kind for name, kind in OPTIONAL.items() if name in record}
    wrong = [n for n, kind in {**FIELDS, **given}.items() if not fits(record, {n: kind})]
    # The plain types first: the conditions below index and compare, which would raise on others.
    if not wrong:
        decay, gains = record.get("decay"), record.get("fp8_gains", [])
        shape = [int, int, float]  # inputs, outputs and speedup of layers
        chains = record["ledger"], record["previous_ledger"]
        sound = {
            "step": record["step"] == checkpoint.step,
            "ledger": all(map(re.compile(DATA_HASH).fullmatch, chains)),
            "eval_loss": isinstance(record.get("eval_loss", ""), float | int | NONE),
            "skipped": all(is_kind(step, int) for step in record.get("skipped", [])),
            "decay": decay is None or (fits(decay, DECAY) and decay["begin"] < decay["end"]),
            "fp8_gains": all(isinstance(g, list) and [*map(type, g)] == shape for g in gains),
            "speed": all(is_kind(n, float) for n in (record.get("speed") or {}).values()),
        }
        wrong = [name for name, is_sound in sound.items() if not is_sound]
    if wrong:
        why = f"{POSITION}: {', '.join(wrong)} missing or of the wrong type"
        raise DamagedError(f"checkpoint {checkpoint.path} is damaged", why=why)


def check_order(position: Position, dataset: Dataset) -> None:
    """Raise DamagedError unless the data still yields the samples that the last step trained on.

    It compares the sample hash chain over these samples with the one in `position`.
    """
    if position.step == 0:
        return
    first = dataset.first_sample(position.step - 1)
    following = dataset.first_sample(position.step)
    samples = dataset.order(first, following - first)
    if extend_data_hash(position.previous_data_hash, samples) != position.data_hash:
        raise DamagedError(
            "the data is not in the order that this job was trained in",
            why=f"step {position.step} would now use different samples",
            next="use the token files, the seed and the batches (train.steps, too, if these "
            "are given as shares of it) the job was started with",
        )


def check_nodes(dataset: Dataset, world: World) -> None:
    """Raise DamagedError, on every rank, unless all ranks have opened the same data.

    Text or tokens on the local disks of nodes may be of different revisions, and their samples have
    the same numbers, so that the sample hash chain cannot tell them apart.
    """
    found = world.gather((dataset.manifest.key, socket.gethostname()))
    key, first = found[0]
    other = next((node for theirs, node in found if theirs != key), None)
    if other is not None:
        raise DamagedError(
            "the nodes of this run do not have the same data",
            why=f"its content on {other} differs from that on {first}",
            next="download it on every node again, with download.revision=COMMIT for a Hub dataset",
        )


def check_ranks(position: Position, world: World) -> None:
    """Raise DamagedError, on every rank, unless all ranks have trained on the same samples."""
    progress = (position.data_hash, position.tokens)
    if world.maximum(progress != world.from_first(progress)):
        raise DamagedError(
            "the processes of this run do not read the same data",
            why=f"the samples of some step since the last save, up to {position.step}, differ",
            next="make every node see the same files, and resume from the last checkpoint",
        )


def optimizer_tensors(optimizers: Mapping[str, Optimizer]) -> dict[str, Tensor]:
    """Return all optimizer state, by `optimizer/parameter/key`."""
    return {
        f"{name}/{path}": value
        for name, optimizer in optimizers.items()
        for path, value in saved_state(optimizer).items()
    }


def objective_tensors(objective: Objective) -> dict[str, Tensor]:
    """Return the tensors of an objective, by their paths in a checkpoint."""
    with own_code(objective, OBJECTIVE):
        return {f"{OBJECTIVE}/{name}": tensor for name, tensor in objective.state().items()}


def restore_objective(objective: Objective, saved: Mapping[str, FullTensor]) -> None:
    """Give an objective its tensors of a checkpoint."""
    prefix = f"{OBJECTIVE}/"
    own = {
        path.removeprefix(prefix): tensor[()]
        for path, tensor in saved.items()
        if path.startswith(prefix)
    }
    with own_code(objective, OBJECTIVE):
        objective.restore(own)


def load_parameters(params: Params, saved: Mapping[str, FullTensor]) -> None:
    """Load each rank's part of the weights; raise ConfigError if the model differs.

    All ranks call it together.
    """
    # All names are compared before anything is loaded: a refusal leaves the model untouched.
    if why := difference(params, saved):
        raise ConfigError(
            "the model of this run does not match that of the checkpoint",
            why=why,
            next="keep model unchanged, or start a new job with these weights: init.from=JOB",
        )
    for name in params.keys() & saved.keys():
        fill(params[name].tensor, saved[name])


def difference(params: Params, saved: Mapping[str, FullTensor]) -> str | None:
    """Return the first difference in name or shape, or None; all ranks call it together."""
    theirs = {name: tuple(whole.shape) for name, whole in saved.items()}
    wrong = {
        name: f"{name} is {param.layout.shape} here, {theirs.get(name)} there"
        for name, param in params.items()
        if theirs.get(name) != param.layout.shape
    }
    # What this rank lacks another one may hold. Only these names are sent: usually there are none.
    of_ranks = params.mesh.gather((wrong, theirs.keys() - params.keys()))
    wrong = {name: line for some, _ in of_ranks for name, line in some.items()}
    for name in set.intersection(*(lacking for _, lacking in of_ranks)):
        wrong[name] = f"{name} is None here, {theirs[name]} there"
    return wrong[min(wrong)] if wrong else None


def load_optimizers(
    optimizers: Mapping[str, Optimizer],
    saved: Mapping[str, FullTensor],
    gather: Callable[[Owners], list[Owners]] = lambda owners: [owners],
) -> None:
    """Load the optimizer state; raise ConfigError if optimizers or parameters differ.

    Each rank loads its part: state is sharded as its parameter is. Parameters without state in the
    checkpoint have none here: an optimizer makes it at the first gradient, and some parameters may
    not have had one. `load_parameters` has compared the names of all parameters before. `gather`
    collects the values of all ranks, as some may not hold all parameters.

    Tensors that belong to no optimizer (such as `rng/…` and `ema/…`) are ignored. Raise
    DamagedError for any other tensor that an optimizer cannot have written.
    """
    by_parameter: dict[tuple[str, str], dict[str, FullTensor]] = {}
    for path, whole in saved.items():
        owner, *rest = path.split("/")
        if owner not in (RNG, GUARD, EXPERTS, OBJECTIVE, ema.OWNER):
            if len(rest) != 2:
                raise _unexpected_state(f"{path!r} is not the state of an optimizer")
            name, key = rest
            by_parameter.setdefault((owner, name), {})[key] = whole
    if not by_parameter:  # saved before the first step, in which optimizers make their state
        for optimizer in optimizers.values():
            optimizer.state.clear()
        return
    owners = {(o, name) for o, optimizer in optimizers.items() for name, _ in named(optimizer)}
    if unknown := sorted(set.intersection(*gather(by_parameter.keys() - owners))):
        owner, name = unknown[0]
        raise ConfigError(
            "the optimizers of this run do not match those of the checkpoint",
            why=f"there, {name} has state of {owner}, which does not train it here",
            next="keep optim unchanged, or start a new job with these weights: init.from=JOB",
        )
    for optimizer_name, optimizer in optimizers.items():
        of_one = [state for (owner, _), state in by_parameter.items() if owner == optimizer_name]
        uniform = variant_of(optimizer).uniform_state
        if uniform and any(one.keys() != of_one[0].keys() for one in of_one):
            raise _unexpected_state(f"parameters of {optimizer_name} have state of different names")
        for name, parameter in named(optimizer):
            # Dropped also without saved state: the parameter then had no gradient yet.
            optimizer.state.pop(parameter, None)
            if found := by_parameter.get((optimizer_name, name)):
                optimizer.state[parameter] = _restored(optimizer, parameter, found)


def _restored(
    optimizer: Optimizer, parameter: nn.Parameter, saved: Mapping[str, FullTensor]
) -> dict[str, Tensor | float]:
    """Return the state of `parameter` as the optimizer had it when it was saved."""
    if empty := getattr(optimizer, "empty_state", None):
        made: dict[str, Any] = empty(parameter)
        if odd := sorted(made.keys() ^ saved.keys()):
            raise _unexpected_state(f"a parameter has, or lacks, the state {odd[0]}")
        for key, value in made.items():
            fill(value, saved[key])
        return made
    state: dict[str, Tensor | float] = {}
    variant = variant_of(optimizer)
    for key, whole in saved.items():
        if key.startswith(NUMBER):
            state[key.removeprefix(NUMBER)] = whole[()].item()
        elif variant.uniform_state:
            state[key] = _beside(parameter, whole, parameter.dtype)
        elif key in variant.whole_state or tuple(whole.shape) != tuple(parameter.shape):
            state[key] = whole[()].to(parameter.device)
        else:
            state[key] = _beside(parameter, whole, whole.dtype)
    return state


def _beside(parameter: nn.Parameter, saved: FullTensor, dtype: torch.dtype) -> Tensor:
    """Return a state of `parameter` with this dtype, sharded as it is.

    Step counts, which are scalars, are replicated in the dtype in which they were saved.
    """
    shape = tuple(saved.shape)
    if shape and not (
        len(shape) == parameter.ndim
        and all(n in (1, full) for n, full in zip(shape, parameter.shape, strict=True))
    ):
        raise _unexpected_state(
            f"a state of shape {list(shape)} belongs to a weight {list(parameter.shape)}"
        )
    # Scalars keep their dtype: a step count in bf16 would stop at 256.
    if shape == ():
        state = torch.zeros((), dtype=saved.dtype, device=parameter.device)
    else:
        state = zeros_sharded_as(parameter, saved.shape, dtype=dtype)
    fill(state, saved)
    return state


def _unexpected_state(why: str) -> DamagedError:
    return DamagedError(
        "the checkpoint contains state that no optimizer wrote",
        why=why,
        next="resume from the checkpoint before: --from-step N; `dtt ckpt ls` lists them",
    )


def rng_tensors(rank: int, device: torch.device) -> dict[str, Tensor]:
    """Return the state of this rank's random number generators, by `rng/rank/device`."""
    # Dropout draws from these. Each rank has its own, because ranks have different samples.
    tensors = {f"{RNG}/{rank:05d}/cpu": torch.get_rng_state()}
    if device.type == "cuda":
        tensors[f"{RNG}/{rank:05d}/cuda"] = torch.cuda.get_rng_state(device)
    return tensors


def restore_rng(
    saved: Mapping[str, FullTensor], rank: int, seed: int, device: torch.device
) -> None:
    """Restore this rank's random number generators; a rank without saved state uses `seed`."""
    prefix = f"{RNG}/{rank:05d}/"
    if f"{prefix}cpu" not in saved:
        seed_rank(seed, rank)
        return
    state = saved[f"{prefix}cpu"][()]
    if (state.dtype, state.shape) != (torch.uint8, torch.get_rng_state().shape):
        raise _unexpected_state(f"{prefix}cpu is not the state of a random number generator")
    torch.set_rng_state(state)
    if device.type == "cuda" and f"{prefix}cuda" in saved:
        torch.cuda.set_rng_state(saved[f"{prefix}cuda"][()], device)


def seed_rank(seed: int, rank: int) -> None:
    """Seed the random number generators, used for dropout only, differently on every rank."""
    torch.manual_seed((seed * 1_000_003 + rank) % 2**63)  # torch takes no larger seed
