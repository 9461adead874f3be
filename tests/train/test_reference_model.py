"""The pass of the reference model writes the log-probabilities of every target, once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.preference_pairs import prepare, settings
from support.running import Dtt
from support.tiny_job import make_tokenizer

from dtt.base.ranks import Ranks
from dtt.base.targets import IGNORE_INDEX
from dtt.config.load import resolve
from dtt.config.model import ModelConfig
from dtt.data.samples.dataset import Dataset, open_dataset
from dtt.data.samples.loader import BatchReader
from dtt.data.samples.reference import ReferenceManifest, reference_files, with_reference
from dtt.data.samples.token_source import TokenSource
from dtt.mesh.dist import World
from dtt.mesh.mesh import Mesh
from dtt.model import families
from dtt.model.decoder import Decoder
from dtt.model.init import initialize
from dtt.train.objectives import reference_pass
from dtt.train.objectives.reference_pass import ReferencePass, is_complete
from dtt.train.step import Passes

SEQ_LEN, KEY = 192, "a key"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with token files of pairs."""
    folder = tmp_path_factory.mktemp("reference")
    prepare(Dtt(folder))
    return folder


@pytest.fixture
def dataset(folder: Path) -> Dataset:
    return open_dataset(resolve(None, settings(data__tokens=folder / "tokens")).config)


def reference() -> Decoder:
    cfg = ModelConfig(dim=32, n_layers=2, n_heads=2)
    vocab_size = make_tokenizer("<|im_start|>", "<|im_end|>").get_vocab_size()
    model = Decoder(families.get(cfg.family).architecture(cfg, vocab_size, SEQ_LEN))
    initialize(model, seed=0)
    return model


def the_pass(micro_batch: int = 2) -> ReferencePass:
    reader = BatchReader(0, 1, micro_batch, CPU)
    world = World(Ranks(0, 1, 0, 1, "none"), CPU, None)
    return ReferencePass(Passes(reference(), "fp32"), reader, Mesh(), world)


def test_every_target_has_the_log_probability_that_it_has_in_its_conversation_alone(
    dataset: Dataset, tmp_path: Path
) -> None:
    the_pass().write(dataset, tmp_path, KEY, SEQ_LEN)
    model, source = reference(), with_reference(dataset, tmp_path).sources[0]
    rows = source.read(np.arange(len(source), dtype=np.uint64))
    assert rows.doc_ids is not None
    logprobs, masks = rows.extra["reference_logprobs"], rows.targets != IGNORE_INDEX
    assert not logprobs[~masks].any()
    checked = 0
    for ids, documents, mask, got in zip(rows.ids[:4], rows.doc_ids, masks, logprobs, strict=False):
        for number in np.unique(documents[ids != IGNORE_INDEX]):
            mine = np.flatnonzero((documents == number) & (ids != IGNORE_INDEX))
            alone = torch.from_numpy(ids[mine])
            logp = model(alone[None, :-1]).log_softmax(-1)[0].gather(1, alone[1:, None])[:, 0]
            places = mine[1:] - 1
            wanted = torch.where(torch.from_numpy(mask[places]), logp, 0.0).detach().numpy()
            np.testing.assert_allclose(got[places], wanted, rtol=1e-5, atol=1e-5)
            checked += int(mask[places].sum())
    assert checked > 40


def test_chosen_and_rejected_of_a_pair_follow_each_other_in_one_sample(dataset: Dataset) -> None:
    tokenizer = make_tokenizer("<|im_start|>", "<|im_end|>")
    source = dataset.sources[0]
    samples = np.arange(len(source), dtype=np.uint64)
    rows = source.read(samples)
    assert rows.doc_ids is not None
    masks = rows.targets != IGNORE_INDEX
    questions, pairs = set(), 0
    for ids, documents, mask in zip(rows.ids, rows.doc_ids, masks, strict=True):
        targets = np.append(False, mask)
        texts = []
        for number in range(documents[ids != IGNORE_INDEX].max() + 1):
            mine = (documents == number) & (ids != IGNORE_INDEX)
            prompt, answer = (
                tokenizer.decode(ids[mine & which].tolist(), skip_special_tokens=False)
                for which in (~targets, targets)
            )
            texts.append((prompt, answer))
        for (prompt, chosen), (same, rejected) in zip(texts[::2], texts[1::2], strict=True):
            assert prompt == same
            a, b = map(int, prompt.split("user\n")[1].split("?")[0].split("+"))
            assert chosen == f"{a + b}.<|im_end|>"
            assert rejected.startswith("I do not know")
            questions.add(prompt)
            pairs += 1
    assert pairs == source.counts(samples).terms
    assert source.counts(samples).targets == int(masks.sum())
    assert sum(source.counts(samples[i : i + 1]).terms for i in range(len(source))) == pairs
    held_out = dataset.validation[0]
    assert held_out is not None
    assert pairs + held_out.counts(np.arange(len(held_out), dtype=np.uint64)).terms == 200


def test_pairs_that_do_not_fit_are_left_out_and_counted(folder: Path, dataset: Dataset) -> None:
    def opened(seq_len: int) -> Dataset:
        arguments = settings(data__tokens=folder / "tokens", train__seq_len=seq_len)
        size = f"train.global_batch_tokens={8 * seq_len}"
        return open_dataset(resolve(None, [*arguments, size]).config)

    def pairs(dataset: Dataset) -> int:
        source = dataset.sources[0]
        return source.counts(np.arange(len(source), dtype=np.uint64)).terms

    (source,) = dataset.sources
    assert isinstance(source, TokenSource)
    assert source.packing_counts is not None
    longest = source.packing_counts.longest
    assert pairs(opened(longest - 1)) == pairs(dataset)
    shorter = opened(longest - 2)
    missing = pairs(dataset) - pairs(shorter)
    assert missing > 0
    (line,) = shorter.left_out()
    assert f"{missing} of {pairs(dataset)} preference pairs are longer" in line


class Killed(Exception):
    """Stands for the end of the process in the middle of the pass."""


@pytest.mark.parametrize("damage", ["none", "torn", "changed"])
def test_a_pass_that_was_killed_continues_after_the_rows_on_record(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    monkeypatch.setattr(reference_pass, "SECONDS_BETWEEN_RECORDS", 0.0)
    whole, other = tmp_path / "whole", tmp_path / "other"
    the_pass().write(dataset, whole, KEY, SEQ_LEN)
    source: Any = dataset.sources[0]
    real, reads = source.read, []

    def read(samples: Any, **options: Any) -> Any:
        reads.append(samples)
        if len(reads) == 6:
            raise Killed
        return real(samples, **options)

    source.read = read
    with pytest.raises(Killed):
        the_pass().write(dataset, other, KEY, SEQ_LEN)
    assert not is_complete(other, None)
    file = other / "train-00000.f32"
    content = file.read_bytes()
    if damage == "torn":  # a row of which only a part is on disk, after the last record
        file.write_bytes(content + b"torn")
    if damage == "changed":
        file.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    the_pass(micro_batch=3).write(dataset, other, KEY, SEQ_LEN)
    assert is_complete(other, KEY)
    assert reads[6][0] == (0 if damage == "changed" else 10), "five reads of two samples"
    for name, _ in reference_files(dataset):
        a, b = (np.fromfile(part / name, "<f4") for part in (whole, other))
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_files_that_are_torn_or_of_another_key_are_not_used(
    dataset: Dataset, tmp_path: Path
) -> None:
    assert not is_complete(tmp_path, None)
    the_pass().write(dataset, tmp_path, KEY, SEQ_LEN)
    assert is_complete(tmp_path, KEY)
    assert is_complete(tmp_path, None)
    assert not is_complete(tmp_path, "another key")
    file = tmp_path / "validation-00000.f32"
    file.write_bytes(file.read_bytes()[:-4])
    assert not is_complete(tmp_path, KEY)
    manifest = tmp_path / ReferenceManifest.filename
    manifest.write_text(manifest.read_text()[:-10])
    assert not is_complete(tmp_path, KEY)


def test_rows_of_another_key_are_computed_anew(dataset: Dataset, tmp_path: Path) -> None:
    the_pass().write(dataset, tmp_path, KEY, SEQ_LEN)
    before = (tmp_path / "train-00000.f32").read_bytes()
    other = the_pass()
    initialize(other.passes.module, seed=1)  # type: ignore[arg-type]
    other.write(dataset, tmp_path, "another key", SEQ_LEN)
    assert is_complete(tmp_path, "another key")
    assert (tmp_path / "train-00000.f32").read_bytes() != before
