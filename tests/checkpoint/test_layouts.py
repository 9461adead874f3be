"""What one layout of ranks wrote every other reads, bit for bit, and each rank its part alone."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from support.ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from dtt.artifacts.jobdir import JobDir
from dtt.base.ranks import Ranks
from dtt.checkpoint import store
from dtt.checkpoint.saver import Saver
from dtt.config.model import ModelConfig
from dtt.config.parallel import ParallelConfig, Sizes
from dtt.config.schedule import RunFacts
from dtt.config.train import CheckpointConfig
from dtt.mesh.dist import World, start
from dtt.mesh.mesh import Mesh, make_mesh
from dtt.mesh.sharding import LaidOut, on_this_rank
from dtt.model import families
from dtt.model.decoder import Decoder, params_of
from dtt.model.experts import MixtureMLP, routers
from dtt.model.init import RESIDUAL_WRITERS, initialize
from dtt.model.layers import held_layers
from dtt.optim import built
from dtt.optim.ema import Ema
from dtt.optim.muon.variant import MuonConfig
from dtt.parallel.expert import shard_experts
from dtt.train.state import load_optimizers, load_parameters, optimizer_tensors, rng_tensors
from dtt.train.warm_start import take_weights

LAYOUTS = {
    "alone": Sizes(),
    "ddp-2": Sizes(replicate=2),
    "fsdp-2": Sizes(shard=2),
    "tp-2": Sizes(tensor=2),
    "fsdp-4": Sizes(shard=4),
    "hsdp-2x2": Sizes(replicate=2, shard=2),
    "fsdp-2-tp-2": Sizes(shard=2, tensor=2),
    "pp-2": Sizes(pipeline=2),
    "pp-2-fsdp-2": Sizes(pipeline=2, shard=2),
}
FACTS = {"config_sha256": "c" * 64, "data_key": "d" * 64, "versions": {}}
SMALL = {
    "family": "qwen3", "dim": 10, "n_layers": 2, "n_heads": 5, "n_kv_heads": 5,
    "tie_embeddings": False,
}  # fmt: skip
"""Hardly any of it can be cut into even parts; of norms of two numbers some ranks get none."""
LARGE = {"family": "llama", "dim": 256, "n_layers": 1, "n_heads": 4}


class State:
    """All that a checkpoint holds, laid out over the ranks."""

    def __init__(
        self,
        world: World,
        sizes: Sizes,
        vocabulary: int = 64,
        config: Mapping[str, Any] = SMALL,
        expert: int = 1,
    ) -> None:
        """No values are set."""
        self.world, self.vocabulary = world, vocabulary
        model = ModelConfig.model_validate(config)
        arch = families.get(model.family).architecture(model, vocabulary, 16)
        layout = make_mesh(sizes, world, None if arch.mixture is None else expert)
        stages = ParallelConfig(pipeline=sizes.pipeline).stage_layers(arch.n_layers)
        with torch.device("meta" if layout.sharded else "cpu"):
            self.model = Decoder(arch, [stages[layout.index("pipeline")]])
        lay_out(self.model, layout)
        self.params = params_of(self.model, layout)
        self.optimizers = built.build(
            MuonConfig(momentum_warmup=4, normuon_beta2=0.9),  # all the state there is
            self.params,
            RunFacts(1),
        )
        self.ema = Ema(self.params, decay=0.9)

    def tensors(self) -> dict[str, LaidOut]:
        """All but the parameters, as the trainer has them."""
        return self.params.laid_out(optimizer_tensors(self.optimizers) | self.ema.tensors())

    def train(self) -> None:
        """Give everything values."""
        initialize(self.model, seed=0)
        self.ema = Ema(self.params, decay=0.9)
        for step in range(2):
            ids = torch.arange(4 * 17).view(4, 17) * (step + 3) % self.vocabulary
            (self.model(ids[:, :-1], ids[:, 1:]).loss / 64).backward()
            for optimizer in self.optimizers.values():
                optimizer.step()
                optimizer.zero_grad()
            self.ema.update(torch.tensor(0.0))

    def save(self, folder: Path) -> int:
        """As step 1 of a job in `folder`; the bytes that all ranks wrote."""
        job = JobDir(folder)
        if self.world.first:
            job.checkpoints.mkdir(parents=True)
        self.world.barrier()
        saver = Saver(job, 1, self.world, CheckpointConfig(), FACTS)
        own = on_this_rank(rng_tensors(self.world.rank, self.world.device))
        saver.begin(1, self.params, self.tensors() | own, {"step": 1})
        saver.wait()
        return saver.finished()[0].bytes

    def restore(self, found: store.Checkpoint) -> None:
        """From `save`."""
        load_parameters(self.params, found.stored(store.MODEL))
        state = found.stored(store.STATE)
        load_optimizers(self.optimizers, state, self.params.mesh.gather)
        self.ema.restore(state)

    def differing(self, truth: Mapping[str, Mapping[str, Tensor]]) -> list[str]:
        """Names of what is not as it is in `truth`."""
        return [
            f"{kind} {name}"
            for kind, named in ((store.MODEL, self.params), (store.STATE, self.tensors()))
            for name in named.keys() | truth[kind].keys()
            if self.holds(name)
            and (name not in named or not same(named[name].tensor, truth[kind][name]))
        ]

    def holds(self, name: str) -> bool:
        """Whether this stage has the parameter that something is, or is the state of."""
        parameter = name.split("/")[1] if "/" in name else name
        return "." not in parameter or self.model.holds(parameter)


def lay_out(model: Decoder, layout: Mesh) -> None:
    """Cut the parameters as tensor parallelism and FSDP2 do."""
    if not layout.sharded:
        return
    if layout.sizes.tensor > 1:
        for name, parameter in list(model.named_parameters()):
            cut = Shard(int(name.endswith(RESIDUAL_WRITERS))) if parameter.ndim > 1 else Replicate()
            mesh = layout.part("tensor")
            laid = nn.Parameter(distribute_tensor(parameter.detach(), mesh, [cut]))
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, laid)
    dims = ("replicate", "shard") if layout.sizes.replicate > 1 else ("shard",)
    own = {r.balance for r in routers(model).values() if r.balance is not None}
    for module in (*held_layers(model).values(), model):
        if layout.experts is not None and isinstance(getattr(module, "mlp", None), MixtureMLP):
            shard_experts(module.mlp.experts, layout, MixedPrecisionPolicy(), reshard=True)
        fully_shard(module, mesh=layout.part(*dims), ignored_params=own)
    model.to_empty(device="cpu")


def same(tensor: Tensor, right: Tensor) -> bool:
    """Whether torch puts the parts of a tensor together to `right`."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return torch.equal(whole, right)


def of_size(world: World) -> Iterator[tuple[str, Sizes]]:
    """The layouts of so many ranks."""
    torch.set_num_threads(1)
    for name, sizes in LAYOUTS.items():
        if math.prod(sizes) == world.size:
            yield name, sizes


def checkpoint(folder: Path) -> store.Checkpoint:
    """The one of a job."""
    return store.at_step(JobDir(folder).checkpoints, 1)


EXPERTS = {
    "family": "dots1", "dim": 8, "n_layers": 2, "n_heads": 2, "n_experts": 6, "n_dense_layers": 1,
    "tie_embeddings": False, "expert_ffn_dim": 12,
}  # fmt: skip
WITH_EXPERTS = {
    "alone": (Sizes(), 1),
    "pp-2": (Sizes(pipeline=2), 1),
    "ep-2": (Sizes(shard=2), 2),
    "fsdp-2": (Sizes(shard=2), 1),
    "pp-2-ep-2": (Sizes(pipeline=2, shard=2), 2),
    "fsdp-4-ep-2": (Sizes(shard=4), 2),
    "hsdp-2x2-ep-2": (Sizes(replicate=2, shard=2), 2),
}
"""Sizes, and the number of ranks that share experts."""


def experts_of_all_layouts(world: World, folder: Path, sources: list[str]) -> dict[str, list[str]]:
    """What differs when each layout reads what others wrote; each writes what it read last."""
    torch.set_num_threads(1)
    first = checkpoint(folder / "alone")
    truth = {kind: first.tensors(kind) for kind in (store.MODEL, store.STATE)}
    truth[store.STATE].pop("rng/00000/cpu")
    found = {}
    for name, (sizes, expert) in WITH_EXPERTS.items():
        if math.prod(sizes) != world.size:
            continue
        state = State(world, sizes, config=EXPERTS, expert=expert)
        for source in sources:
            state.restore(checkpoint(folder / source))
            found[f"{source} to {name}"] = state.differing(truth)
        if name not in sources:
            state.save(folder / name)
    return found


def written_in_all_layouts(world: World, folder: Path, source: str) -> dict[str, int]:
    """Read what `source` wrote and write it again, in each layout; the bytes it came to."""
    counts = {}
    for name, sizes in of_size(world):
        state = State(world, sizes)
        state.restore(checkpoint(folder / source))
        counts[name] = state.save(folder / name)
    return counts


def wrong_after_reading(world: World, folder: Path) -> dict[str, list[str]]:
    """What differs when each layout reads what each other one wrote."""
    first = checkpoint(folder / "alone")
    truth = {kind: first.tensors(kind) for kind in (store.MODEL, store.STATE)}
    truth[store.STATE].pop("rng/00000/cpu")
    found = {}
    for name, sizes in of_size(world):
        state = State(world, sizes)
        for source in LAYOUTS:
            state.restore(checkpoint(folder / source))
            found[f"{source} to {name}"] = state.differing(truth)
    return found


def wrong_after_beginning(world: World, folder: Path) -> dict[str, list[str]]:
    """What each layout takes otherwise than a single process, for a model with more tokens."""
    theirs = checkpoint(folder / "fsdp-2").stored(store.MODEL)
    alone = State(start(Ranks(), "cpu"), Sizes(), vocabulary=131)
    initialize(alone.model, seed=5)
    report = take_weights(alone.model, theirs, "there")
    assert "embed.weight: 64 rows copied, 192 here, 64 there; the others get their mean" in report
    found = {}
    for name, sizes in of_size(world):
        state = State(world, sizes, vocabulary=131)
        initialize(state.model, seed=5)
        assert (take_weights(state.model, theirs, "there") == report) == (sizes.pipeline == 1)
        right = dict(alone.model.named_parameters())
        found[name] = [n for n, p in state.model.named_parameters() if not same(p, right[n])]
    return found


def wrong_after_swapping(world: World, folder: Path) -> dict[str, list[str]]:
    """Parameters that do not hold their averages meanwhile, or not their own values afterwards."""
    saved = checkpoint(folder / "alone")
    weights, rest = saved.tensors(store.MODEL), saved.tensors(store.STATE)
    found = {}
    for name, sizes in of_size(world):
        state = State(world, sizes)
        state.restore(saved)
        named = state.model.named_parameters()
        with state.ema.swapped():
            found[name] = [n for n, p in named if not same(p, rest[f"ema/{n}/value"])]
        found[name] += [n for n, p in named if not same(p, weights[n])]
    return found


def two_ranks(world: World, folder: Path) -> tuple[dict[str, list[str]], ...]:
    """All that two ranks show."""
    return wrong_after_reading(world, folder), wrong_after_swapping(world, folder)


def four_ranks(world: World, folder: Path) -> tuple[dict[str, Any], ...]:
    """All that four ranks show."""
    counts = written_in_all_layouts(world, folder, "fsdp-2")
    return counts, wrong_after_reading(world, folder), wrong_after_beginning(world, folder)


class Seen(NamedTuple):
    """What came of it all, by rank where several made it."""

    folder: Path
    """A checkpoint of each layout."""
    bytes: list[dict[str, int]]
    """Of each."""
    read: list[dict[str, list[str]]]
    started: list[dict[str, list[str]]]
    swapped: list[dict[str, list[str]]]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder = tmp_path_factory.mktemp("layouts")
    world = start(Ranks(), "cpu")
    state = State(world, Sizes())
    state.train()
    alone = {"alone": state.save(folder / "alone")}
    two = on_ranks(2, written_in_all_layouts, folder, "alone")
    counts, read, started = zip(*on_ranks(4, four_ranks, folder), strict=True)
    read_by_two, swapped = zip(*on_ranks(2, two_ranks, folder), strict=True)
    read_alone = wrong_after_reading(world, folder)
    return Seen(
        folder, [alone, *two, *counts], [read_alone, *read_by_two, *read], [*started], [*swapped]
    )


@pytest.mark.slow
def test_every_layout_reads_checkpoints_of_every_other(seen: Seen) -> None:
    tried = {names for found in seen.read for names in found}
    assert len(tried) == len(LAYOUTS) ** 2
    for found in seen.read:
        assert {names: wrong for names, wrong in found.items() if wrong} == {}


@pytest.mark.slow
def test_warm_start_with_more_tokens_does_not_depend_on_the_layout(seen: Seen) -> None:
    of_four = "fsdp-4", "hsdp-2x2", "fsdp-2-tp-2", "pp-2-fsdp-2"
    assert seen.started == [{name: [] for name in of_four}] * 4


@pytest.mark.slow
def test_shards_are_swapped_with_their_averages(seen: Seen) -> None:
    assert seen.swapped == [{"ddp-2": [], "fsdp-2": [], "tp-2": [], "pp-2": []}] * 2


@pytest.mark.slow
def test_a_checkpoint_holds_each_number_once_and_every_rank_writes_its_share(seen: Seen) -> None:
    # The state of the random numbers of a rank belongs to it alone.
    own = rng_tensors(0, torch.device("cpu"))["rng/00000/cpu"].nbytes
    whole = seen.bytes[0]["alone"] - own
    for found in seen.bytes:
        for name, size in found.items():
            assert size == whole + math.prod(LAYOUTS[name]) * own, name
    for name, sizes in LAYOUTS.items():
        found, ranks = checkpoint(seen.folder / name), math.prod(sizes)
        for kind in (store.MODEL, store.STATE):
            for stored in found.stored(kind).values():
                parts = [math.prod(shape) for _, (_, shape) in stored.boxes]
                assert all(parts), stored.name
                assert sum(parts) == math.prod(stored.shape), stored.name
            written = [f.bytes for f in found.manifest.files if f.path.startswith(f"{kind}-")]
            assert len(written) == ranks
            assert max(written) < 1.35 * sum(written) / ranks  # uneven shards, and headers


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A job with one checkpoint, and its bytes."""
    state = State(start(Ranks(), "cpu"), Sizes(), 16384, LARGE)
    state.train()
    folder = tmp_path_factory.mktemp("large")
    return folder, state.save(folder)


def memory(which: str) -> int:
    """Bytes of this process's memory, pages of files included."""
    found = re.search(rf"{which}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def peak_of_one_of_64(world: World, folder: Path) -> int:
    """Bytes that a process takes to read its part."""
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=64)
    state = State(World(Ranks(5, 64), world.device, None), Sizes(shard=64), 16384, LARGE)
    found = checkpoint(folder)
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    before = memory("VmRSS")
    state.restore(found)
    return memory("VmHWM") - before


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="no /proc")
def test_each_rank_reads_only_its_own_part(large: tuple[Path, int]) -> None:
    folder, size = large
    (peak,) = on_ranks(1, peak_of_one_of_64, folder)
    assert size > 100e6
    # A 64th, and what the kernel maps around each part: 0.14 to 0.17 of all were seen, by chance. A
    # rank that read all would have the whole.
    assert peak < size / 3


@pytest.mark.slow
def test_experts_are_the_same_in_checkpoints_of_every_layout(tmp_path: Path) -> None:
    world = start(Ranks(), "cpu")
    state = State(world, Sizes(), config=EXPERTS)
    state.train()
    with torch.no_grad():
        state.model.layers[1].mlp.router.balance.copy_(torch.arange(6.0))
    state.save(tmp_path / "alone")
    sources = ["alone"]
    for ranks in (2, 4, 2, 1):
        work = experts_of_all_layouts, tmp_path, sources
        results = (
            on_ranks(ranks, *work) if ranks > 1 else [experts_of_all_layouts(world, *work[1:])]
        )
        for found in results:
            assert {names: wrong for names, wrong in found.items() if wrong} == {}
        sources = [name for name in WITH_EXPERTS if (tmp_path / name).exists()]
    assert sources == [*WITH_EXPERTS]
