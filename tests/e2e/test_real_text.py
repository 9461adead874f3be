"""Real corpora of three formats, through real mpirun, torchrun and transformers."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from support import forked_runs
from support.running import Dtt
from support.token_files import read_documents
from tokenizers import Tokenizer

from dtt.artifacts.manifests import TokensManifest
from dtt.base.local import dtt_argv, mpi_argv

SMALL = (
    "model.dim=32", "model.n_layers=1", "model.n_heads=2", "train.steps=4", "train.seq_len=64",
    "train.global_batch_tokens=1024", "train.micro_batch=4", "train.eval_tokens=1024",
    "train.sample_tokens=4",
)  # fmt: skip
GPT2 = "data/tokenizers/gpt2/tokenizer.json"


def mpirun(dtt: Dtt, ranks: int, *arguments: object) -> None:
    """`mpirun -n RANKS dtt ARGUMENTS`, which must succeed."""
    argv = mpi_argv(ranks, dtt_argv(*map(str, arguments)))
    assert argv is not None
    done = subprocess.run(argv, cwd=dtt.folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dataset", "tokenizer"),
    [
        ("tinyshakespeare/input.txt", ["tokenizer.type=bpe", "tokenizer.vocab_size=2048"]),
        ("web/c4_sample.jsonl", ["tokenizer.type=file", f"tokenizer.path={GPT2}"]),
        ("novels", ["tokenizer.type=bpe", "tokenizer.vocab_size=1000", "download.max_files=1"]),
    ],
    ids=["txt", "jsonl", "parquet"],
)
def test_from_a_real_corpus_to_text_that_transformers_writes(
    dtt: Dtt, shared: Path, dataset: str, tokenizer: list[str]
) -> None:
    (dtt.folder / "data").mkdir()
    (dtt.folder / "data/tokenizers").symlink_to(shared / "data/tokenizers")
    settings = [*tokenizer, *SMALL, "name=real", "tokenize.out=tokens",
                "tokenize.validation_fraction=0.05", "download.out=corpus"]  # fmt: skip
    dtt("download", "-d", shared / "data" / dataset, *settings)
    mpirun(dtt, 2, "tokenize", *settings)
    if dataset == "novels":  # with the launcher itself; it takes longer than the training
        train = dtt.start_torchrun(2, "-m", "dtt.main", "train", *settings)
        assert dtt.wait(train).returncode == 0
    else:
        forked_runs.run(dtt, "train", *settings, ranks=2)
    dtt("export", "jobs/real")

    from transformers import pipeline

    write = pipeline("text-generation", str(dtt.folder / "exports/real"))
    [result] = write("The", max_new_tokens=5)
    assert result["generated_text"].startswith("The")


def test_ids_are_those_of_the_hugging_face_library_over_the_whole_corpus(
    dtt: Dtt, shared: Path
) -> None:
    corpus = shared / "data/web/c4_sample.jsonl"
    dtt("download", "-d", corpus, "download.out=corpus")
    path = shared / GPT2
    mpirun(dtt, 2, "tokenize", "download.out=corpus", "tokenize.out=tokens",
           "tokenizer.type=file", f"tokenizer.path={path}",
           "tokenize.validation_fraction=0.05")  # fmt: skip
    manifest = TokensManifest.read(dtt.folder / "tokens")
    ours = sorted(
        document.tolist()
        for shard in manifest.shards
        for document in read_documents(dtt.folder / "tokens" / shard.stem)
    )
    tokenizer = Tokenizer.from_file(str(path))
    texts = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    assert ours == sorted([*e.ids, manifest.end_of_document] for e in encoded if e.ids)
