"""A short training has the losses of the run that it stands for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.running import Dtt

from dtt.base.ranks import Ranks
from dtt.checkpoint import store
from dtt.config.load import load_job, resolve
from dtt.hf import export
from dtt.mesh.dist import World
from dtt.mup.run import ShortTraining, at_width, final_loss, with_rate
from dtt.track import jsonl


@pytest.mark.slow
def test_a_probe_under_mup_has_the_losses_of_the_run_whose_export_transformers_agrees_with(
    dtt: Dtt, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    mup = {
        "model__family": "qwen3", "model__tie_embeddings": "true", "scaling__type": "mup",
        "scaling__base_dim": 4, "scaling__depth": "sqrt", "scaling__base_layers": 1,
    }  # fmt: skip
    dtt("train", *tiny(train__micro_batch=3, checkpoint__every=12, train__eval_every=0, **mup))
    job = dtt.folder / "jobs/t"
    world = World(Ranks(), torch.device("cpu"), None)
    monkeypatch.chdir(dtt.folder)
    training = ShortTraining(load_job(job), world)
    assert training.plan.arch.logit_scale == 1 / 4
    losses = [loss.item() for loss in training.losses()]
    assert losses == [record["loss"] for record in jsonl.read(job / "metrics.jsonl", "train")]

    export.run(
        str(job), ["export.dtype=fp32"], ema=False, out=Path("out"), upload=None,
        private=False,
    )  # fmt: skip
    exported = load_file("out/model.safetensors")["model.norm.weight"]
    kept = store.at_step(job / "checkpoints", 12).tensors(store.MODEL)["norm.weight"]
    assert torch.equal(exported, kept / 4)


def test_a_transfer_trains_as_a_run_with_this_rate_does(
    dtt: Dtt, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    horizon = "{value: 0.5, horizon: true}"
    arguments = tiny(
        optim__type="muon", optim__weight_decay=horizon, optim__adamw__lr=8e-3,
        optim__groups=f"[{{match: embed, lr: 4e-3, weight_decay: {horizon}}}]",
        train__steps=6, schedule__type="wsd",
    )  # fmt: skip
    dtt("train", *arguments)
    monkeypatch.chdir(dtt.folder)
    world = World(Ranks(), torch.device("cpu"), None)
    cfg = load_job(dtt.folder / "jobs/t")
    doubled = resolve(None, [*arguments, f"optim.lr={2 * cfg.optim.lr}", "optim.adamw.lr=1.6e-2",
        f"optim.groups=[{{match: embed, lr: 8e-3, weight_decay: {horizon}}}]",
    ]).config  # fmt: skip
    assert with_rate(cfg.optim, 2 * cfg.optim.lr) == doubled.optim
    width = cfg.model.dim
    own = final_loss(doubled, width, doubled.optim.lr, world)
    assert final_loss(cfg, width, doubled.optim.lr, world) == own
    assert own != final_loss(cfg, width, cfg.optim.lr, world)


def test_another_width_scales_the_heads_and_the_mlp_in_proportion(tiny: Any) -> None:
    arguments = tiny(
        model__dim=48, model__n_heads=6, model__n_kv_heads=3, model__ffn_dim=96, model__head_dim=10
    )
    wide = at_width(resolve(None, arguments).config, 80).model
    sizes = wide.n_heads, wide.n_kv_heads, wide.head_dim, wide.ffn_dim
    assert sizes == (10, 5, 10, 160)
