"""Prompts and token ids equal those of lm-evaluation-harness."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from dtt.evaluate.tasks.definition import Task, load_tasks, shipped_tasks
from dtt.evaluate.tasks.encoding import QuestionEncoder
from dtt.evaluate.tasks.prompts import Question, example_of, question_of

lm_eval = pytest.importorskip("lm_eval", reason="the oracle, lm-eval, is not installed")

TASKS = Path(lm_eval.__file__).parent / "tasks"
ARC = {
    "question": "Why is  the sky blue?",
    "choices": {"text": ["it is", "ocean", "Rayleigh ", "é"], "label": ["1", "2", "3", "4"]},
    "answerKey": "3",
}
ROWS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "hellaswag": ("hellaswag/hellaswag.yaml", [
        {"activity_label": " Baking", "ctx_a": "A man [header] bakes.  He", "ctx_b": "then IS",
         "endings": ["[title] eats", " runs  [step] off", "sleeps.", "é"], "label": "2"},
        {"activity_label": "Home", "ctx_a": "How to [title] fold", "ctx_b": "",
         "endings": ["a", "b [title] c", "d", "e"], "label": "0"},
    ]),
    "piqa": ("piqa/piqa.yaml", [
        {"goal": "open a {jar}", "sol1": "turn it", "sol2": "{{smash}} it", "label": 1},
    ]),
    "openbookqa": ("openbookqa/openbookqa.yaml", [
        {"question_stem": "Frogs", "choices": {"text": ["swim", "fly"], "label": ["A", "B"]},
         "answerKey": " A"},
    ]),
    "lambada_openai": ("lambada/lambada_openai.yaml", [
        {"text": "She said \n\nhello  to  the cat"}, {"text": "one two,"},
    ]),
    "arc_easy": ("arc/arc_easy.yaml", [ARC]),
    "arc_challenge": ("arc/arc_easy.yaml", [ARC]),
    "winogrande": ("winogrande/default.yaml", [
        {"sentence": "The cup broke the table since the _ was heavy_. ", "option1": "cup",
         "option2": "table", "answer": "1"},
        {"sentence": "_ is tall.", "option1": "Ann", "option2": "Bob", "answer": "2"},
    ]),
    "boolq": ("super_glue/boolq/default.yaml", [
        {"passage": "Cats -- cats purr.", "question": "do cats purr", "label": 1},
    ]),
    "copa": ("super_glue/copa/default.yaml", [
        {"premise": "The man fell. ", "question": "cause", "choice1": "It was icy.",
         "choice2": "He Ran.", "label": 0},
        {"premise": "Rain fell!", "question": "effect", "choice1": "A", "choice2": "B", "label": 1},
    ]),
    "sciq": ("sciq/sciq.yaml", [
        {"support": "  Iron\nrusts. ", "question": "What rusts?", "distractor1": "a",
         "distractor2": "b", "distractor3": "c", "correct_answer": "iron"},
    ]),
    "commonsense_qa": ("commonsense_qa/default.yaml", [
        {"question": " Where? ", "choices": {"text": [*"vwxyz"], "label": [*"ABCDE"]},
         "answerKey": "D"},
    ]),
    "social_iqa": ("siqa/siqa.yaml", [
        {"context": "Al fell.", "question": "Why?", "answerA": "a", "answerB": "b",
         "answerC": "c", "label": "3"},
    ]),
    "gsm8k": ("gsm8k/gsm8k.yaml", [
        {"question": "1 + 1?", "answer": "It is <<1+1=2>>2.\n#### 2"},
        {"question": "9 - 1?", "answer": "8\n#### 8"},
    ]),
    "bigbench_dyck_languages": ("bigbench/generate_until/dyck_languages.yaml", [
        {"inputs": "Complete: ( [", "targets": ["] )"], "multiple_choice_targets": [],
         "multiple_choice_scores": []},
    ]),
    "wikitext": ("wikitext/wikitext.yaml", [
        {"page": " = Robert = \n Rob 's ( an actor ) @-@ born 1 @,@ 000 ° N , said \" hi \" ' o '"
                 " [ 1 ] { x } ; he : was . No ! Why ? 2 @.@ 5 = = A = = \n"},
        {"page": "\n"},
    ]),
}  # fmt: skip
"""The definition of each task in lm-eval, and rows that are hard to render."""


def theirs(path: str, rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the task of lm-eval over these rows."""
    from lm_eval.api import task
    from lm_eval.tasks._yaml_loader import load_yaml

    config = load_yaml(TASKS / path, resolve_func=True)
    splits = dict.fromkeys(
        ("train", "validation", "test", "default"), datasets.Dataset.from_list(rows)
    )
    monkeypatch.setattr(
        task.datasets, "load_dataset", lambda *_, **__: datasets.DatasetDict(splits)
    )
    return task.ConfigurableTask(config={**config, "fewshot_config": {"sampler": "first_n"}})


def requests(task: Any, doc: Any, shots: int) -> list[tuple[str, ...]]:
    """Return the contexts and continuations that lm-eval would score."""
    task.set_fewshot_seed(1)
    context = task.fewshot_context(doc, num_fewshot=shots)
    found = task.construct_requests(doc=doc, ctx=context)
    return [one.args for one in (found if isinstance(found, list) else [found])]


def ours(task: Task, row: dict[str, Any], examples: list[dict[str, Any]]) -> Question:
    return question_of(task, row, "id", "".join(example_of(task, one) for one in examples))


@pytest.mark.parametrize("name", ROWS)
def test_prompts_equal_those_of_lm_eval(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, rows = ROWS[name]
    [task] = load_tasks([name])
    oracle = theirs(path, rows, monkeypatch)
    for row, doc in zip(rows, oracle.task_docs, strict=True):
        for shots in (0, 1) if len(rows) > 1 and name not in ("wikitext",) else (0,):
            # lm-eval leaves the question itself out of examples of the same split.
            same = oracle.fewshot_cfg.split == oracle.config.test_split
            examples = [other for other in rows if not (same and other == row)][:shots]
            if name.startswith("bigbench"):
                monkeypatch.setattr(oracle, "OUTPUT_TYPE", "loglikelihood")
            question = ours(task, row, examples)
            expected = requests(oracle, doc, shots)
            if task.type == "rolling":
                assert [(question.continuations[0],)] == expected
                assert question.answers == (row["page"],)
            elif task.type == "generation":
                assert question.contexts[0] == expected[0][0]
                assert question.answers == (oracle.doc_to_target(doc),)
            elif name.startswith("bigbench"):  # lm-eval generates the answer
                assert question.contexts[0] == expected[0][0]
                assert question.continuations == (" " + oracle.doc_to_target(doc),)
            else:
                pairs = [(c, t) for c in question.contexts for t in question.continuations]
                if shots and name == "lambada_openai":  # its examples there have two spaces
                    expected = [
                        (c.replace("  cat", " cat").replace("  two,", " two,"), t)
                        for c, t in expected
                    ]
                assert pairs == expected
            if task.type in ("multiple_choice", "schema"):
                gold = (
                    oracle.doc_to_text(doc) if oracle.multiple_input else oracle.doc_to_target(doc)
                )
                choices = oracle.doc_to_choice(doc)
                right = gold if isinstance(gold, int) else None
                if name == "copa":
                    right = choices.index(gold)
                elif isinstance(gold, str):
                    right = choices.index(gold) if gold in choices else int(gold)
                assert question.gold == right


def test_every_shipped_task_is_compared_or_has_its_reason() -> None:
    shipped = {path.stem for path in shipped_tasks().glob("*.yaml")}
    without = {"suites", "squad", "agieval_lsat_ar", "bigbench_language_identification"}
    without |= {f"bigbench_{name}" for name in ("operators", "repeat_copy_logic", "qa_wikidata")}
    assert shipped - without == ROWS.keys()


TOKENIZERS = {
    "gpt2": "<|endoftext|>",
    "gpt-neox-20b": "<|endoftext|>",
    "dolma2": "<|endoftext|>",
    "mistral-v1": "<s>",
    "qwen": "<|endoftext|>",
}
"""The token that lm-eval puts in front of an empty context, of each tokenizer."""


def hflm(path: Path, prefix: str) -> Any:
    """Return lm-eval's Hugging Face backend with a tokenizer, without a model."""
    from lm_eval.models.huggingface import HFLM

    lm = HFLM.__new__(HFLM)
    lm.tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_file=str(path), bos_token=prefix
    )
    lm.add_bos_token = lm.custom_prefix_token_id = None
    lm.backend, lm.enable_thinking = "causal", None
    return lm


PIECES = (
    "the", " the", "  ", " ", "\n", "\n\n", "\t", "Answer:", "é", "e\u0301", "日本語", "🙂",
    "\u00a0", "\U0001f469\u200d\U0001f467", "\u200b", "\u2028", "'s", "12", "1234567", ".", "...",
    "Q", "ﬁ", "ß", "مرحبا", "<s>", "</s>", "_", "▁", "{x}", "\\n", "İ", "\u3000", "a" * 40, "\r\n",
    "—",
)  # fmt: skip


def pairs(count: int) -> Iterator[tuple[str, str]]:
    """Yield contexts and continuations that are hard to split; some contexts are empty."""
    rng = random.Random(18)
    for _ in range(count):
        context = "".join(rng.choices(PIECES, k=rng.randrange(6)))
        continuation = rng.choice((" ", "", "\n", "  ")) + "".join(
            rng.choices(PIECES, k=rng.randrange(1, 4))
        )
        yield context, continuation


@pytest.mark.parametrize("name", TOKENIZERS)
def test_ids_and_truncation_equal_those_of_lm_eval(
    shared: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, length = shared / f"data/tokenizers/{name}/tokenizer.json", 12
    lm = hflm(path, TOKENIZERS[name])
    tokenizer = Tokenizer.from_file(str(path))
    encoder = QuestionEncoder(tokenizer, lm.prefix_token_id, length, "tokenizer")
    scored: list[Any] = []
    monkeypatch.setattr(
        lm, "_loglikelihood_tokens", lambda found, **_: scored.extend(found), raising=False
    )
    truncated = separate = 0
    for context, continuation in pairs(1000):
        encoded = encoder.options(Question("id", (context,), (continuation,), 0))
        [option] = encoded.options
        scored.clear()
        if context and not context.strip():
            assert encoded.truncated or option.context == (lm.prefix_token_id,)  # lm-eval fails
            continue
        lm.loglikelihood([Arguments((context, continuation))], disable_tqdm=True)
        [(_, before, after)] = scored
        separate += encoded.separate
        if encoded.separate:
            assert after == []
            continue
        whole = (before + after)[-(length + 1) :]
        assert (*option.context, *option.continuation) == (*whole,)
        assert len(option.continuation) == min(len(after), length, len(whole) - 1)
        truncated += encoded.truncated
        assert encoded.truncated == (len(before) + len(after) > length + 1)
    assert truncated > 50
    assert separate < 20


class Arguments:
    """A request of lm-eval, as far as its encoding reads it."""

    def __init__(self, args: tuple[str, str]) -> None:
        self.args = args
