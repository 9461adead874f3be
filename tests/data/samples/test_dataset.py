"""What a run reads, put together from its configuration."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from support.tiny_job import make_tokenizer
from support.token_files import read_doc_ids

from dtt.artifacts.jobdir import JobDir
from dtt.artifacts.manifests import TokensManifest
from dtt.base.errors import ConfigError, DamagedError, InputError
from dtt.config.load import resolve
from dtt.data.samples import compatibility
from dtt.data.samples.dataset import NUMBER_MASK, Dataset, open_dataset
from dtt.data.samples.protocol import SOURCE_SHIFT
from dtt.data.token_file import bin_path

SEQ_LEN, SEQUENCES = 32, 8


def opened(*arguments: object, steps: int = 100) -> Dataset:
    lengths = (f"train.seq_len={SEQ_LEN}", f"train.global_batch_tokens={SEQUENCES * SEQ_LEN}")
    settings = [*lengths, "data.mask_documents=true", f"train.steps={steps}", *map(str, arguments)]
    return open_dataset(resolve(None, settings).config)


def sources(**given: tuple[Path, float | None]) -> str:
    parts = (
        f"{{name: {name}, path: {path}" + ("}" if weight is None else f", weight: {weight}}}")
        for name, (path, weight) in given.items()
    )
    return f"data.sources=[{', '.join(parts)}]"


@pytest.fixture(scope="module")
def twice(tokens: Path) -> Dataset:
    return opened(sources(a=(tokens, 0.75), b=(tokens, 0.25)))


def test_the_order_does_not_depend_on_the_path_of_the_folder(tokens: Path, tmp_path: Path) -> None:
    shutil.copytree(tokens, tmp_path / "elsewhere")
    here, there = opened(f"data.tokens={tokens}"), opened(f"data.tokens={tmp_path / 'elsewhere'}")
    assert np.array_equal(here.order(0, 800), there.order(0, 800))
    assert here.manifest.key == there.manifest.key


def test_sources_in_one_folder_are_shuffled_independently(twice: Dataset) -> None:
    samples = twice.order(0, 400)
    a, b = (samples[samples >> np.uint64(SOURCE_SHIFT) == n] & NUMBER_MASK for n in (0, 1))
    assert (len(a), len(b)) == (300, 100)
    assert (a[:100] == b).mean() < 0.05


def test_rows_come_from_the_source_that_their_number_names(twice: Dataset) -> None:
    samples = twice.order(0, 40)
    ids = twice.read(samples).ids
    documents = read_doc_ids(twice, samples)
    for sample, row, where in zip(samples.tolist(), ids, documents, strict=True):
        source, own = twice.sources[sample >> SOURCE_SHIFT], sample & int(NUMBER_MASK)
        alone = np.array([own], dtype=np.uint64)
        assert np.array_equal(source.read(alone).ids[0], row)
        assert np.array_equal(read_doc_ids(source, alone)[0], where)
        found, pieces = twice.origin(sample)
        assert found is source
        assert pieces == source.origin(own)
    assert twice.counts(samples).targets == 40 * SEQ_LEN


def test_without_weights_sources_are_weighted_by_size(tokens: Path) -> None:
    dataset = opened(sources(a=(tokens, None), b=(tokens, None)), "data.on_exhausted=stop")
    assert dataset.shares() == {"a": 0.5, "b": 0.5}
    sizes = sum(map(len, dataset.sources))
    everything = opened(
        sources(a=(tokens, None), b=(tokens, None)), "data.on_exhausted=renormalise", steps=10**6
    )
    assert everything.mixture.end == sizes
    assert everything.steps == sizes // SEQUENCES


def test_different_tokenizers_are_refused_and_named(tokens: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(tokens, other)
    manifest = TokensManifest.read(other).model_copy(update={"tokenizer_sha256": "0" * 64})
    (other / manifest.filename).write_text(manifest.dump())
    with pytest.raises(ConfigError, match="a and b have different tokenizers"):
        opened(sources(a=(tokens, 1), b=(other, 1)))


def test_token_files_of_other_tools_need_a_tokenizer(tokens: Path, tmp_path: Path) -> None:
    stem = tmp_path / "theirs"
    shard = TokensManifest.read(tokens).shards[0].stem
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{tokens / shard}{suffix}", f"{stem}{suffix}")
    with pytest.raises(
        ConfigError, match="it is unknown which tokenizer created the token files of x"
    ):
        opened(sources(x=(stem, 1)))
    with pytest.raises(InputError, match="there is no tokenizer"):
        opened(sources(x=(stem, 1)), "data.tokenizer=nix.json")
    dataset = opened(sources(x=(stem, 1)), f"data.tokenizer={tokens / 'tokenizer.json'}")
    with_ours = opened(f"data.tokens={tokens}")
    assert dataset.manifest.vocab_size == with_ours.manifest.vocab_size
    assert dataset.manifest.end_of_document == with_ours.manifest.end_of_document
    assert dataset.validation == (None,)
    mixed = sources(x=(stem, 1), ours=(tokens, 1))
    assert opened(mixed, f"data.tokenizer={tokens / 'tokenizer.json'}").steps == 100
    other, smaller = tmp_path / "tokenizer.json", make_tokenizer()
    smaller.save(str(other))
    narrow = opened(sources(x=(stem, 1)), f"data.tokenizer={other}")
    with pytest.raises(DamagedError, match=r"outside the vocabulary of 257[\s\S]*theirs\.bin"):
        narrow.read(narrow.order(0, 100))
    smaller.add_tokens([f"<{i}>" for i in range(100)])
    smaller.save(str(other))
    assert opened(sources(x=(stem, 1)), f"data.tokenizer={other}").manifest.key != (
        dataset.manifest.key
    )
    with pytest.raises(ConfigError, match=r"data\.tokenizer and ours have different tokenizers"):
        opened(sources(ours=(tokens, 1)), f"data.tokenizer={other}")


def test_a_source_without_a_complete_sample_is_refused(tokens: Path) -> None:
    with pytest.raises(ConfigError, match="shorter than one sequence: b"):
        open_dataset(
            resolve(
                None,
                [sources(b=(tokens, 1)), "train.seq_len=65536", "train.global_batch_tokens=65536"],
            ).config
        )


def test_the_key_names_the_sources_and_their_content(tokens: Path) -> None:
    one = opened(sources(a=(tokens, 1), b=(tokens, 1))).manifest.key
    assert opened(sources(a=(tokens, 1), b=(tokens, 2))).manifest.key == one
    assert opened(sources(a=(tokens, 1), c=(tokens, 1))).manifest.key != one
    content = TokensManifest.read(tokens).key
    assert compatibility.data_key([("a", content), ("b", content)]) == one


def test_nothing_is_read_when_it_is_opened(tokens: Path, tmp_path: Path) -> None:
    copy = tmp_path / "tokens"
    shutil.copytree(tokens, copy)
    for shard in TokensManifest.read(copy).shards:
        bin_path(copy / shard.stem).unlink()
    dataset = opened(f"data.tokens={copy}")
    dataset.order(0, 10)
    with pytest.raises(InputError, match="missing"):
        dataset.read(dataset.order(0, 10))


ONE, TWO = "data.sources=[{path: a}]", "data.sources=[{path: a, weight: 1}, {path: b}]"


@pytest.mark.parametrize(
    ("sources", "more", "problem"),
    [
        (ONE, ["data.tokens=x"], "cannot be combined with sources"),
        ("data.sources=[{path: a}, {path: b/a}]", [], "two are called a"),
        (TWO, [], "some have a weight"),
        ("data.sources=[{path: a, weight: 0}]", [], "greater than 0"),
        (ONE, ["data.weights=[{step: 5, weights: {b: 1}}]"], "every source, and no other: a"),
        (ONE, ["data.weights=[{step: 1, weights: {a: 1}}]"], "greater than or equal to 2"),
        (ONE, ["data.weights=[{step: 5, weights: {a: 0}}]"], "at least one must be positive"),
        (ONE, ["data.weights=[{step: 5, weights: {a: 1}}, {step: 5, weights: {a: 2}}]"], "ascend"),
    ],
)
def test_invalid_mixtures_are_refused(sources: str, more: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        resolve(None, [sources, *more])


def test_a_vocabulary_that_is_not_that_of_the_token_files_is_reported(
    tokens: Path, tmp_path: Path
) -> None:
    """An error where `tokenize` would make them, a warning where others are named; no more."""
    made = TokensManifest.read(tokens)
    job = JobDir(tmp_path / "j")

    def check(*arguments: str, size: int | None = made.vocab_size) -> list[str]:
        return compatibility.check_vocabulary(resolve(None, arguments), job, size)

    own, other = f"tokenize.out={tokens}", "tokenizer.vocab_size=512"
    for size in (made.vocab_size, None):
        with pytest.raises(ConfigError, match=rf"vocab_size=512 \(argument\).*{made.vocab_size}"):
            check(own, other, size=size)
        for named in (f"data.tokens={tokens}", sources(x=(tokens, 1))):
            (line,) = check(named, other, size=size)
            assert "tokenizer.vocab_size=512 (argument), but the token files have" in line
            assert check(named) == check(named, "tokenizer.vocab_size=300") == []
        assert check(own) == check(own, "tokenizer.vocab_size=300") == []
        given = "tokenizer={type: file, path: x.json}"
        assert check(own, given, size=size) == []
    (tmp_path / "j").mkdir()
    job.config.write_text(f"tokenize: {{out: {tokens}}}\ntokenizer: {{vocab_size: 512}}\n")
    assert (
        compatibility.check_vocabulary(resolve(job_config=job.config), job, made.vocab_size) == []
    )
