"""Commands on multimodal folders: what they compute is that of the whole class of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.multimodal_folders import write_multimodal
from support.running import Dtt
from tokenizers import Tokenizer

KINDS = ("gemma4", "qwen3_5", "llama4", "mistral3")
"""Types with parts for images whose text model the library computes."""
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}<|endoftext|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
TASK = """
data: {file: rows.jsonl}
type: multiple_choice
prompt: "{question}"
choices: "{choices}"
gold: "{gold}"
"""
ROWS: list[dict[str, Any]] = [
    {"question": "def main", "choices": ["a word", "None", "another"], "gold": 1},
    {"question": "return", "choices": ["and", "a longer answer of words"], "gold": 0},
]
NEW = 8
"""Tokens that are generated."""
pytestmark = pytest.mark.slow(except_for=["qwen3_5"])


class Folder:
    """A multimodal folder, and what transformers computes with its whole class."""

    def __init__(self, kind: str, root: Path, tokenizer: Path) -> None:
        """Write the folder into `root`, where commands run."""
        whole = write_multimodal(kind, root / "whole", tokenizer)
        (root / "whole/chat_template.jinja").write_text(TEMPLATE)
        self.dtt, self.tokenizer = Dtt(root), Tokenizer.from_file(str(tokenizer))
        # The class around Llama 4's text model fails without an image.
        self.theirs: Any = whole.language_model if kind == "llama4" else whole
        text = whole.language_model if kind == "llama4" else whole.model.language_model
        parts = (text.state_dict(), whole.get_output_embeddings().state_dict())
        tensors = {one.data_ptr(): one.numel() for part in parts for one in part.values()}
        self.parameters = sum(tensors.values())

    def ids(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        found: list[int] = self.tokenizer.encode(text).ids
        return found

    @torch.no_grad()
    def greedy(self, prompt: list[int]) -> list[int]:
        """Return the tokens that transformers appends to a prompt, without that of the end."""
        ids = torch.tensor([prompt])
        whole = self.theirs.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW
        )
        return [one for one in whole[0, len(prompt) :].tolist() if one != 0]

    @torch.no_grad()
    def log_likelihood(self, question: str, answer: str) -> float:
        """Return the log-likelihood of an answer after a question, in nats."""
        first, ids = len(self.ids(question)), torch.tensor([self.ids(f"{question} {answer}")])
        by_token = self.theirs(input_ids=ids).logits[0].double().log_softmax(-1)
        return float(by_token[first - 1 : -1].gather(1, ids[0, first:, None]).sum())


@pytest.fixture(scope="module", params=KINDS)
def folder(
    request: pytest.FixtureRequest, tokenizer_json: Path, tmp_path_factory: pytest.TempPathFactory
) -> Folder:
    return Folder(request.param, tmp_path_factory.mktemp(request.param), tokenizer_json)


def test_generate_appends_the_greedy_tokens_of_the_whole_class(folder: Folder) -> None:
    prompts = ("def main", "a longer prompt, and another word")
    given = [part for prompt in prompts for part in ("-p", prompt)]
    options = ("--temperature", 0, "--max-new-tokens", NEW, "--json")
    done = folder.dtt("generate", "whole", *given, *options)
    for prompt, line in zip(prompts, map(json.loads, done.stdout.splitlines()), strict=True):
        expected = folder.greedy(folder.ids(prompt))
        assert line["completion_tokens"] == len(expected)
        assert line["text"] == folder.tokenizer.decode(expected)


def test_chat_answers_with_the_greedy_tokens_of_the_whole_class(folder: Folder) -> None:
    options = ("--temperature", 0, "--max-new-tokens", NEW, "--json", "--ids")
    done = folder.dtt("chat", "whole", *options, stdin="one\nand two?\n")
    first, second = map(json.loads, done.stdout.splitlines())
    assert first["prompt_ids"] == folder.ids("user: one<|endoftext|>assistant:")
    for answer in (first, second):
        assert answer["completion_ids"] == folder.greedy(answer["prompt_ids"])


def test_eval_scores_choices_as_the_whole_class_does(folder: Folder) -> None:
    (folder.dtt.folder / "words.yaml").write_text(TASK)
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    (folder.dtt.folder / "rows.jsonl").write_text(lines)
    done = folder.dtt("eval", "hf:whole", "--tasks", "words.yaml", "--json")
    [result] = map(json.loads, done.stdout.splitlines())
    found = map(json.loads, (folder.dtt.folder / result["file"]).read_text().splitlines())
    records = [record for record in found if "log_likelihoods" in record]
    right = 0
    for row, record in zip(ROWS, records, strict=True):
        expected = [folder.log_likelihood(row["question"], one) for one in row["choices"]]
        assert record["log_likelihoods"] == pytest.approx(expected, abs=1e-4)
        right += expected.index(max(expected)) == row["gold"]
    assert result["scores"]["acc"]["value"] == right / len(ROWS)


def test_plan_counts_the_parameters_of_the_text_model(folder: Folder) -> None:
    keys = ("init.from=hf:whole", "data.type=synthetic", "data.vocab_size=300", "train.seq_len=64")
    batch = ("train.global_batch_tokens=256", "train.micro_batch=2", "train.precision=fp32")
    done = folder.dtt("plan", *keys, *batch, "--gpu", "H100", "--json")
    assert json.loads(done.stdout)["parameters"] == folder.parameters
