"""A job directory as `dtt train` leaves it, made in no time."""

from __future__ import annotations

import hashlib
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from dtt.artifacts.corpus import CorpusSource
from dtt.artifacts.jobdir import JobDir
from dtt.artifacts.manifests import CHAT_TEMPLATE, ChatFacts, DataManifest, SourceFacts
from dtt.base.files import sha256_file
from dtt.checkpoint import store, tensors
from dtt.config.load import load_job
from dtt.data.conversations.template import CHATML
from dtt.mesh.sharding import on_every_rank
from dtt.model import families
from dtt.model.decoder import Decoder, params_of
from dtt.model.init import initialize
from dtt.optim.ema import Ema

END_OF_DOCUMENT, IM_START, IM_END = 256, 257, 258
KEY = "0" * 64


def make_tokenizer(*more: str) -> Tokenizer:
    """One token for each of the 256 bytes, <|endoftext|>, and `more` special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", *more])
    return tokenizer


def write_data(job: Path, tokenizer: Tokenizer, chat: ChatFacts | None = None) -> None:
    """What `train` keeps of the data in the folder of a job."""
    path = JobDir(job).tokenizer
    tokenizer.save(str(path))
    corpus = CorpusSource(kind="stdlib", id="python-stdlib")
    source = SourceFacts(
        name="tokens", path="tokens", key=KEY, corpus=corpus, tokens=1000, samples=15,
        bytes_per_token=1.0,
    )  # fmt: skip
    manifest = DataManifest(
        key=KEY,
        tokenizer_sha256=sha256_file(path),
        vocab_size=tokenizer.get_vocab_size(),
        end_of_document=END_OF_DOCUMENT,
        chat=chat,
        sources=(source,),
    )
    (job / manifest.filename).write_text(manifest.dump())


def write_checkpoint(
    job: Path,
    step: int,
    says: dict[int, int] | None = None,
    average_says: dict[int, int] | None = None,
) -> None:
    """A checkpoint with seeded weights; or of a model that `says` which token follows which, as
    does the average of its weights."""
    kinds = {store.MODEL: dict(make_model(job, step, says).state_dict())}
    if average_says is not None:
        average = Ema(params_of(make_model(job, step, average_says)), decay=0.9)
        kinds[store.STATE] = average.tensors()
    staging = job / "checkpoints" / store.staging_name(step, 1)
    staging.mkdir(parents=True)
    position = json.dumps({"step": step, "tokens": 640 * step}).encode()
    store.commit(
        staging,
        [
            *(
                tensors.write(
                    staging / store.rank_file(kind, 0), tensors.cut(on_every_rank(state, 1), 0)
                )
                for kind, state in kinds.items()
            ),
            tensors.write_bytes(staging / store.POSITION, [position]),
        ],
        step=step,
        attempt=1,
        world_size=1,
        config_sha256="0" * 64,
        data_key=KEY,
        versions={},
    )


def make_model(job: Path, seed: int, says: dict[int, int] | None) -> Decoder:
    """The model of a job, with seeded weights or such as say which token follows which."""
    cfg, vocab_size = load_job(job), DataManifest.read(job).vocab_size
    arch = families.get(cfg.model.family).architecture(cfg.model, vocab_size, cfg.train.seq_len)
    model = Decoder(arch)
    initialize(model, seed)
    if says is not None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.fill_(1.0 if name == "norm.weight" else 0.0)
            assert model.head is not None
            for axis, (token, follower) in enumerate(says.items()):
                model.embed.weight[token, axis] = 1.0
                model.head.weight[follower, axis] = 1.0
    return model


def write_job(folder: Path, seq_len: int = 64) -> Path:
    """The job: a tiny Llama with checkpoints of steps 5 and 10."""
    job = folder / "jobs" / "tiny"
    job.mkdir(parents=True)
    write_data(job, make_tokenizer())
    _write_config(job, seq_len)
    for step in (5, 10):
        write_checkpoint(job, step)
    return job


def write_chat_job(
    folder: Path,
    answer: str | None = None,
    *,
    name: str = "tiny",
    seq_len: int = 256,
    template: str = CHATML,
    kwargs: dict[str, Any] | None = None,
) -> Path:
    """A job that was trained on conversations: a tiny Llama with a checkpoint of step 10.

    It gives the `answer`, whose characters all differ, to everything; without one its weights are
    seeded.
    """
    job = folder / "jobs" / name
    job.mkdir(parents=True)
    tokenizer = make_tokenizer("<|im_start|>", "<|im_end|>")
    (job / CHAT_TEMPLATE).write_text(template)
    sha256 = hashlib.sha256(template.encode()).hexdigest()
    facts = ChatFacts(template_sha256=sha256, kwargs=kwargs or {}, stop_tokens=(IM_END,))
    write_data(job, tokenizer, facts)
    _write_config(
        job, seq_len, {"name": name, "data": {"type": "chat"}, "chat": {"kwargs": kwargs or {}}}
    )
    says = None
    if answer is not None:
        ids = tokenizer.encode(f"\n{answer}<|im_end|>").ids
        says = dict(pairwise(ids))
        assert len(says) == len(ids) - 1, "a character appears twice"
    write_checkpoint(job, 10, says)
    return job


def _write_config(job: Path, seq_len: int, more: dict[str, Any] | None = None) -> None:
    config = {
        "name": "tiny",
        "model": {"family": "llama", "dim": 32, "n_layers": 2, "n_heads": 2},
        "train": {"seq_len": seq_len, "global_batch_tokens": seq_len, "micro_batch": 1},
    }
    (job / "config.yaml").write_text(yaml.safe_dump(config | (more or {})))
