"""Checkpoints: stored formats load, subsets of the parameters load, and damage is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dtt.artifacts.jobdir import JobDir
from dtt.artifacts.manifest import fingerprint, manifest_text
from dtt.artifacts.manifests import CheckpointManifest, sealed
from dtt.base.errors import ConfigError, DamagedError
from dtt.checkpoint import store, tensors
from dtt.checkpoint.saver import Saver
from dtt.checkpoint.store import Checkpoint
from dtt.config.parallel import Sizes
from dtt.config.schedule import RunFacts
from dtt.config.train import CheckpointConfig
from dtt.mesh.dist import World
from dtt.mesh.mesh import Mesh
from dtt.mesh.sharding import layout_of, local_shard, on_every_rank
from dtt.optim import built
from dtt.optim.adamw import AdamWConfig
from dtt.optim.ema import Ema
from dtt.params.table import Param, Params
from dtt.train.state import load_optimizers, load_parameters, optimizer_tensors

FACTS: dict[str, Any] = {"config_sha256": "c" * 64, "data_key": "d" * 64, "versions": {}}
MANIFEST = CheckpointManifest.filename
WEIGHTS = {"w": torch.arange(4.0)}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A checkpoint of one tensor."""
    staging = tmp_path / store.staging_name(3, 1)
    staging.mkdir()
    shards = tensors.cut(on_every_rank(WEIGHTS, 1), 0)
    written = [
        tensors.write(staging / store.rank_file(store.MODEL, 0), shards),
        tensors.write_bytes(staging / store.POSITION, [b'{"step": 3}']),
    ]
    return store.commit(staging, written, step=3, attempt=1, world_size=1, **FACTS).path


# ---- formats -------------------------------------------------------------------------------------


def test_every_flipped_byte_is_found(small: Path) -> None:
    for path in sorted(small.iterdir()):
        whole = path.read_bytes()
        for i, byte in enumerate(whole):
            path.write_bytes(whole[:i] + bytes([byte ^ (1 << i % 8)]) + whole[i + 1 :])
            with pytest.raises(DamagedError):
                store.verify(small)
        path.write_bytes(whole)
    assert store.verify(small).step == 3


def content_of(small: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((small / MANIFEST).read_text())
    content.pop("seal")
    return content


def test_checkpoints_of_the_format_before_load_and_their_damage_is_found(small: Path) -> None:
    """Its seal is a hash of the values."""
    content = content_of(small) | {"format": "dtt-checkpoint-3"}
    del content["base"]
    text = manifest_text(content | {"seal": fingerprint(content)})
    (small / MANIFEST).write_text(text)
    assert torch.equal(store.verify(small).tensors(store.MODEL)["w"], WEIGHTS["w"])
    for i, letter in enumerate(text):
        (small / MANIFEST).write_text(text[:i] + chr(ord(letter) ^ 1) + text[i + 1 :])
        with pytest.raises(DamagedError):
            store.verify(small)


def test_optional_fields_may_be_absent_or_unknown(small: Path) -> None:
    content = content_of(small)
    del content["base"]
    (small / MANIFEST).write_text(sealed(content | {"added_later": [1]}))
    assert store.verify(small).base() is None
    (small / MANIFEST).write_text(sealed(content | {"format": "dtt-checkpoint-5"}))
    with pytest.raises(DamagedError, match="format"):
        store.verify(small)


# ---- a part of the parameters --------------------------------------------------------------------

SHAPES = {"base": (6, 4), "adapter.a": (5, 4), "adapter.b": (8, 3), "adapter.half": (3, 2)}


def values(name: str) -> Tensor:
    return torch.arange(20.0 if name == "base" else 1.0, 99.0)[: torch.Size(SHAPES[name]).numel()]


class Model:
    """A frozen base with adapters: plain, sharded, or on the second half of the ranks alone."""

    def __init__(self, world: World) -> None:
        mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("shard",))
        second = list(range(world.size // 2, world.size))
        half = DeviceMesh("cpu", second)
        found = []
        for name, shape in SHAPES.items():
            full = torch.zeros(shape)
            if name in ("base", "adapter.b"):
                full = distribute_tensor(full, mesh, [Shard(0)])
            tensor = nn.Parameter(full, requires_grad=name != "base")
            layout = layout_of(tensor, half if name == "adapter.half" else world.size)
            if world.rank in layout.ranks:
                found.append(Param(name, tensor, name.split(".")[0], layout))
        layout = Mesh(Sizes(shard=world.size), world.rank, mesh, world=world)
        self.world, self.params = world, Params(found, layout)
        self.optimizers = built.build(AdamWConfig(), self.params, RunFacts(1))
        self.ema = Ema(self.params, 0.9)

    def fill(self) -> None:
        """Give weights and state values, as a step does."""
        for name, param in self.params.items():
            part = local_shard(param.tensor)
            with torch.no_grad():
                part.local.copy_(values(name).view(SHAPES[name])[part.box.slices])
            if param.trainable:
                param.tensor.grad = torch.zeros_like(param.tensor) + 0.5
        self.optimizers["adamw"].step()
        self.ema.update(torch.tensor(0.0))

    def save(self, job: JobDir, step: int, roles: set[str], base: Checkpoint | None) -> None:
        saver = Saver(job, 1, self.world, CheckpointConfig(keep_last=9), FACTS)
        state = self.params.laid_out(optimizer_tensors(self.optimizers) | self.ema.tensors())
        reference = None if base is None else base.reference()
        saver.begin(step, self.params.subset(roles), state, {"step": step}, base=reference)
        saver.wait()

    def whole(self) -> dict[str, list[Any]]:
        """All tensors that this rank holds, put together."""
        state = optimizer_tensors(self.optimizers) | self.ema.tensors()
        held = {name: param.tensor.detach() for name, param in self.params.items()} | state
        return {
            name: (t.full_tensor() if isinstance(t, DTensor) else t).tolist()
            for name, t in held.items()
        }


def save_adapter(world: World, folder: Path) -> dict[str, list[Any]]:
    model, job = Model(world), JobDir(folder)
    if world.first:
        job.checkpoints.mkdir(parents=True)
    world.barrier()
    model.fill()
    model.save(job, 1, {"base", "adapter"}, None)
    with torch.no_grad():
        for param in model.params.trainable().values():
            param.tensor.mul_(2.0)
    model.save(job, 2, {"adapter"}, store.at_step(job.checkpoints, 1))
    return model.whole()


def load_adapter(world: World, folder: Path) -> tuple[str, list[Any], dict[str, list[Any]]]:
    model, found = Model(world), store.at_step(JobDir(folder).checkpoints, 2)
    weights, base = found.stored(store.MODEL), found.base()
    assert base is not None
    try:
        load_parameters(model.params, weights)
        message = "none"
    except ConfigError as error:
        message = str(error)
    load_parameters(model.params, weights, "initialise")
    initial = model.whole()["base"]
    load_parameters(model.params, weights, "base", base.stored(store.MODEL))
    state = found.stored(store.STATE)
    load_optimizers(model.optimizers, state, world.gather)
    model.ema.restore(state)
    return message, initial, model.whole()


@pytest.mark.slow
def test_an_adapter_saved_on_four_ranks_loads_on_two_over_its_base(tmp_path: Path) -> None:
    saved: dict[str, list[Any]] = {}
    for of_rank in on_ranks(4, save_adapter, tmp_path / "job"):
        saved |= of_rank
    loaded: dict[str, list[Any]] = {}
    for message, initial, of_rank in on_ranks(2, load_adapter, tmp_path / "job"):
        assert "base is (6, 4) here, None there" in message
        assert initial == torch.zeros(SHAPES["base"]).tolist()
        assert all(loaded.get(name, value) == value for name, value in of_rank.items())
        loaded |= of_rank
    assert loaded == saved
    assert "adapter.half" in loaded
    found = store.at_step(JobDir(tmp_path / "job").checkpoints, 2)
    assert set(found.stored(store.MODEL)) == {*SHAPES} - {"base"}


def test_a_base_that_is_another_checkpoint_by_now_is_refused(small: Path) -> None:
    base = store.verify(small)
    above = Checkpoint(
        small, base.manifest.model_copy(update={"base": base.reference(), "step": 4})
    )
    found = above.base()
    assert found is not None
    assert found.path == small
    (small / MANIFEST).write_text(sealed(content_of(small) | {"attempt": 2}))
    with pytest.raises(DamagedError, match="builds on another checkpoint"):
        above.base()
