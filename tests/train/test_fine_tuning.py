"""Fine-tuning on conversations in real processes: metrics, validation, kills and layouts."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.records import assert_same_tensors, reached, records
from support.running import Dtt, kill_when
from support.tokenized_conversations import write_conversations

from dtt.artifacts.jobdir import JobDir
from dtt.base.targets import IGNORE_INDEX
from dtt.checkpoint import store
from dtt.config.data import ChatConfig
from dtt.config.load import load_job
from dtt.data.conversations.chat_encoder import ChatEncoder
from dtt.data.conversations.dialects import parse_row
from dtt.data.conversations.template import CHATML
from dtt.data.samples.dataset import Dataset, open_dataset
from dtt.evaluate.answers import first_prompts
from dtt.model.decoder import Decoder
from dtt.model.scaling import scaled

SEQ_LEN = 128


@pytest.fixture(scope="module")
def chat_tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_conversations(tmp_path_factory.mktemp("conversations"))


def settings(tokens: Path, **changes: object) -> list[str]:
    """`key=value` arguments of two short epochs."""
    values: dict[str, object] = {
        "name": "t", "data.type": "chat", "data.tokens": tokens, "train.epochs": 2,
        "model.dim": 32, "model.n_layers": 2, "model.n_heads": 4, "train.seq_len": SEQ_LEN,
        "train.global_batch_tokens": 8 * SEQ_LEN, "train.micro_batch": 4, "train.precision": "fp32",
        "train.eval_every": 10, "train.log_every": 5, "train.eval_answers": 6,
        "train.eval_answer_tokens": 12, "train.sample_tokens": 4, "schedule.warmup": 2,
        "checkpoint.every": 4, "optim.lr": "1e-2",
    }  # fmt: skip
    values |= {key.replace("__", "."): value for key, value in changes.items()}
    return [f"{key}={value}" for key, value in values.items()]


@pytest.fixture(scope="module")
def undisturbed(chat_tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job of two epochs that nothing disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    Dtt(folder)("train", *settings(chat_tokens))
    return folder / "jobs/t"


def opened(job: Path) -> Dataset:
    return open_dataset(load_job(job))


def model_of(job: Path, step: int) -> Decoder:
    dataset = opened(job)
    model = Decoder(scaled(load_job(job), dataset.manifest.vocab_size).arch)
    checkpoint = store.at_step(JobDir(job).checkpoints, step)
    model.load_state_dict(checkpoint.tensors(store.MODEL))
    return model.eval()


def test_each_step_records_how_full_it_is_and_the_share_of_trained_tokens(
    undisturbed: Path,
) -> None:
    dataset, trained = opened(undisturbed), 0
    steps = records(undisturbed, "train")
    assert len(steps) == dataset.steps
    for record in steps:
        first = dataset.first_sample(record["step"] - 1)
        rows = dataset.read(dataset.order(first, 8))
        tokens, targets = (rows.ids != IGNORE_INDEX).sum(), (rows.targets != IGNORE_INDEX).sum()
        trained += targets
        assert record["tokens"] == trained
        assert record["padding_efficiency"] == pytest.approx(tokens / rows.ids.size, abs=1e-6)
        assert record["trained_share"] == pytest.approx(targets / tokens, abs=1e-6)
        assert 0.1 < record["trained_share"] < record["padding_efficiency"] <= 1


def test_the_console_shows_how_full_the_steps_are_and_the_answers_that_stop(
    dtt: Dtt, chat_tokens: Path
) -> None:
    stderr = dtt("train", *settings(chat_tokens, train__sample_prompt="7, two?")).stderr
    assert "% full, " in stderr
    assert "% trained" in stderr
    assert "% of the greedy answers stop" in stderr
    assert "<|im_start|>user\n    7, two?<|im_end|>\n    <|im_start|>assistant\n" in stderr


@pytest.mark.slow
def test_a_sample_prompt_that_the_template_refuses_is_reported_before_the_first_step(
    dtt: Dtt, chat_tokens: Path
) -> None:
    refuses = (
        "{% for message in messages %}{% if message.content == 'No.' %}"
        "{{ raise_exception('never say no') }}{% endif %}{% endfor %}"
    )
    (dtt.folder / "template.jinja").write_text(refuses + CHATML)
    rows = chat_tokens.parent
    arguments = settings(
        dtt.folder / "tokens", tokenize__out="tokens", chat__template="template.jinja",
        tokenizer__type="file", tokenizer__path=rows / "tokenizer.json",
        download__dataset=rows / "rows.jsonl", download__out=rows / "corpus",
        tokenize__validation_fraction=0.2, train__sample_prompt="No.",
    )  # fmt: skip
    dtt("tokenize", *arguments)
    stderr = dtt("train", *arguments, expect=2).stderr
    assert "the chat template rejects train.sample_prompt" in stderr
    assert "never say no" in stderr
    dtt("train", *arguments, "train.sample_prompt=", "train.epochs=1")


def test_a_run_on_text_records_neither(dtt: Dtt, tiny: Callable[..., list[str]]) -> None:
    stderr = dtt("train", *tiny(data__packing="best-fit")).stderr
    job = dtt.folder / "jobs/t"
    assert not records(job, "train")[-1].keys() & {"padding_efficiency", "trained_share"}
    assert "answer_stop_rate" not in records(job, "eval")[-1]
    assert "% trained" not in stderr


def test_prompts_are_what_inference_gives_for_the_messages_before_the_first_trained_answer(
    undisturbed: Path, chat_tokens: Path
) -> None:
    dataset = opened(undisturbed)
    (source,) = dataset.validation
    assert source is not None
    prompts = first_prompts([source], 1000)
    content = dataset.tokenizer.read_bytes()
    encoder = ChatEncoder(content, ChatConfig(), dataset.tokenizer, CHATML)
    expected = set()
    for line in (chat_tokens.parent / "rows.jsonl").read_text().splitlines():
        conversation = parse_row(json.loads(line))
        answers = [
            i
            for i, (message, trained) in enumerate(
                zip(conversation.messages, conversation.trained, strict=True)
            )
            if message["role"] == "assistant" and trained
        ]
        if answers:
            expected.add(tuple(encoder.prompt_ids(conversation.until(answers[0]))))
    assert len(prompts) > 20
    assert set(map(tuple, prompts)) <= expected
    assert first_prompts([source], 3) == prompts[:3]
    assert len(first_prompts([source, source], 6)) == 6
    assert first_prompts([source, source], 6)[::2] == prompts[:3]


def test_answers_are_the_same_where_each_conversation_has_a_row_of_its_own(
    dtt: Dtt, undisturbed: Path, chat_tokens: Path
) -> None:
    alone = {"data__packing": "none", "train__epochs": "null", "train__steps": 2}
    dtt("train", *settings(chat_tokens, **alone))
    job = dtt.folder / "jobs/t"
    [(first,), (second,)] = [opened(one).validation for one in (undisturbed, job)]
    assert first is not None
    assert second is not None
    prompts, others = (first_prompts([source], 1000) for source in (first, second))
    assert sorted(others) == sorted(prompts)
    rates = [record["answer_stop_rate"] for record in records(job, "eval")]
    assert len(rates) == 2
    assert all(round(6 * rate, 9) in range(7) for rate in rates)


def test_the_validation_loss_is_the_mean_over_the_targets_of_each_conversation_alone(
    undisturbed: Path,
) -> None:
    last = records(undisturbed, "eval")[-1]
    model, (source,) = model_of(undisturbed, last["step"]), opened(undisturbed).validation
    assert source is not None
    rows = source.read(np.arange(len(source), dtype=np.uint64))
    assert rows.doc_ids is not None
    masks = rows.targets != IGNORE_INDEX
    total, count = 0.0, 0
    for ids, mask, documents in zip(rows.ids, masks, rows.doc_ids, strict=True):
        for number in np.unique(documents[ids >= 0]):
            where = np.flatnonzero((documents == number) & (ids >= 0))
            tokens, kept = torch.from_numpy(ids[where]), torch.from_numpy(mask[where[:-1]])
            with torch.no_grad():
                logits = model(tokens[None, :-1])[0]
            total += F.cross_entropy(logits[kept], tokens[1:][kept], reduction="sum").item()
            count += int(kept.sum())
    assert last["loss"] == pytest.approx(total / count, rel=1e-5)


@pytest.mark.slow
def test_answers_change_no_bit_of_training(dtt: Dtt, chat_tokens: Path, undisturbed: Path) -> None:
    dtt("train", *settings(chat_tokens, train__eval_answers=0))
    job = dtt.folder / "jobs/t"
    assert "answer_stop_rate" not in records(job, "eval")[0]
    assert "answer_stop_rate" in records(undisturbed, "eval")[0]
    last = records(job, "train")[-1]["step"]
    assert_same_tensors(job, undisturbed, last)


@pytest.mark.slow
def test_killed_in_both_epochs_it_ends_bit_for_bit_equal(
    dtt: Dtt, chat_tokens: Path, undisturbed: Path
) -> None:
    job, steps = dtt.folder / "jobs/t", records(undisturbed, "train")[-1]["step"]
    generator, killed = random.Random(0), [0]
    while not killed[0] < steps // 2 < killed[-1] < steps:
        if job.exists():  # too late: again from the start
            shutil.rmtree(job)
        killed.clear()
        for target in (steps // 4, steps // 2 - 1, steps // 2 + 1, 3 * steps // 4):
            process, after = dtt.start("train", *settings(chat_tokens)), generator.random() * 0.02
            kill_when(lambda: reached(job) >= target, process, after)  # noqa: B023
            killed.append(reached(job))
    dtt("train", *settings(chat_tokens))
    assert_same_tensors(undisturbed, job, steps)
    kinds = "train", "eval", "sample"
    assert records(job, *kinds) == records(undisturbed, *kinds)
