"""A mistake in a class of a user's own ends with its key, its line and what is wrong."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest
from support import own_classes, resumed
from support.running import Dtt

from dtt.base.errors import ExitCode


class Kind(NamedTuple):
    """A class, the key that the messages name, and the run that uses it."""

    code: str
    key: str
    section: str
    settings: tuple[str, ...] = resumed.SETTINGS
    command: str = "train"


FEW = ("train.seq_len=8", "train.global_batch_tokens=16", "train.device=cpu", "train.steps=1")
KINDS = {
    "schedule": Kind(
        own_classes.POLYNOMIAL, "schedule.type=mine.py:Polynomial",
        "schedule: {type: mine.py:Polynomial, power: 1.5}",
    ),
    "loss": Kind(
        own_classes.LOSS, "objective.type=mine.py:Mine", "objective: {type: mine.py:Mine}"
    ),
    "optimizer": Kind(own_classes.LION, "optim.type=mine.py:Lion", "optim: {type: mine.py:Lion}"),
    "action": Kind(
        own_classes.NORMS, "actions.type=mine.py:Norms", "actions: [{type: mine.py:Norms}]"
    ),
    "source": Kind(
        own_classes.NUMBERS, "data.type=mine.py:Numbers",
        "data: {type: mine.py:Numbers, tokenizer: TOKENS/tokenizer.json}",
        FEW,
    ),
    "rows": Kind(
        own_classes.ROWS.replace("GIVEN", "'a'"), "data.type=mine.py:Mine",
        "data: {type: mine.py:Mine, tokenizer: TOKENS/tokenizer.json}", FEW,
    ),
    "documents": Kind(
        own_classes.WORDS, "download.documents.type=mine.py:Words",
        "download: {documents: {type: mine.py:Words}}", (), "download",
    ),
}  # fmt: skip
TALK = "[{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': 'b'}]"
DATE = "import datetime\n            yield {'text': datetime.date.max} or f"
MISTAKES = {
    "schedule, syntax": ("def multiplier(", "de multiplier(", "SyntaxError"),
    "schedule, import": ("import dtt", "import dttt", "No module named 'dttt'"),
    "schedule, no class": ("class Poly", "class Polly", "['Pollynomial']"),
    "schedule, no schedule": ("(dtt.Schedule)", "", "no class Polynomial that is a dtt.Schedule"),
    "schedule, key without a type": ("power: float", "power", "non-annotated attribute"),
    "schedule, unknown key": ("power: float", "exponent: float", "schedule.power: unknown key"),
    "schedule, another type": (
        "power: float = 2.0", "power: str = ''", "schedule.power: input should be"
    ),
    "schedule, signature": ("step: int, run", "step: int, run, x", "missing 1 required positional"),
    "schedule, exception": ("run.steps)", "run.stps)", "has no attribute 'stps'"),
    "schedule, exception in a step": (
        "return", "assert step < 2, 'step 2'\n        return", "AssertionError: step 2"
    ),
    "schedule, no number": ("return", "return None #", "returned None"),
    "schedule, not finite": ("return", "return float('nan') #", "returned nan"),
    "loss, shape": ("out.sum()", "out", "not a tensor []"),
    "loss, number": ("out.sum()", "1.0", "returned float for the loss"),
    "loss, constant": ("out.sum()", "out.detach().sum()", "does not depend on the model"),
    "loss, metric": ("out.sum()", "out.sum(), {'x': out}", "for x, not a tensor []"),
    "loss, other terms": ("out.sum()", "out.sum(), {str(out.sum()): out.sum()}", "at first"),
    "loss, a term elsewhere": (
        "out.sum()", "out.sum(), {'x': out.sum().to('meta')}", "x on meta, not on cpu"
    ),
    "loss, exception": ("out.sum()", "out.nothing()", "has no attribute 'nothing'"),
    "optimizer, none": ("return _Lion(", "return (", "not a torch.optim.Optimizer"),
    "optimizer, parameter left out": (
        "params.values()]", "list(params.values())[1:]]", "more parameters are in no"
    ),
    "optimizer, another tensor": (
        "param.tensor for", "torch.nn.Parameter(param.tensor.clone()) for", "none of the parameters"
    ),
    "optimizer, no rate": ("self.lr, self.betas", "0.0, self.betas", "the learning rate 0.0"),
    "optimizer, text": ('state["step"] += 1', 'state["kind"] = "x"', "state['kind'] is a str"),
    "optimizer, state of no parameter": (
        'state["step"] += 1', 'self.state["all"] = 1', "belongs to no parameter"
    ),
    "optimizer, state in a group": (
        'state["step"] += 1', 'group["n"] = 1', "a group has changed"
    ),
    "optimizer, exception in a step": (
        'state["step"] += 1', "p.grad.nothing", "has no attribute 'nothing'"
    ),
    "action, no method": ("def run(self, run):", "def go(self, run):", "NotImplementedError"),
    "action, exception": ("run.mean(run.rank)", "run.nothing", "has no attribute 'nothing'"),
    "action, no number": ("run.mean(run.rank)", "'x'", "could not convert string to float"),
    "action, no mapping": ("return found |", "return 1 or found |", "returned int"),
    "action, a reserved name": ('"rank":', '"step":', "'step', of every record"),
    "action, no JSON": (
        '"seen": self._seen}\n\n', '"seen": {1}}\n\n', "set is not JSON serializable"
    ),
    "action, no such parameter": ("embed.weight", "embedding", "KeyError: 'embedding'"),
    "source, too long": ("(2 + number % (tokens - 2))", "(tokens + 1)", "not 2 to 9 token ids"),
    "source, no ids": ("return ids, ", "return 'ab', ", "not 2 to 9 token ids"),
    "source, of no token": ("number + 1", "10**6", "sample 0 has ids from 1000000"),
    "source, a mask of another length": ("range(len(ids))]", "range(1)]", "2 ids and a mask of 1"),
    "source, exception": ("return ids, ", "return self.ids, ", "has no attribute 'ids'"),
    "source, none": ("return self.count", "return 0", "`samples` returned 0"),
    "source, changing": (
        "[number + 1]", "[next(self.__dict__.setdefault('_n', iter(range(1, 99))))]", "read again"
    ),
    "rows, none": ("return self.count", "return 0", "`__len__` returned 0"),
    "rows, a wrong length": ("return self.count", "return '12'", "`__len__` returned '12'"),
    "rows, another type": ("'a'", "5.0 if row == 7 else 'a'", "row 7 is of the type float"),
    "rows, no list of ids": ("'a'", "[[1], [1, 2]]", "row 0 is a list of neither token ids nor"),
    "rows, a mapping": ("'a'", "{'text': 'a'}", "row 0 is a mapping with `text`"),
    "rows, an empty one": ("'a'", "'' if row == 7 else 'a'", "row 7 is empty"),
    "rows, of no token": ("'a'", "[1, -row]", "row 1 has ids from -1 to 1"),
    "rows, changing": ("'a'", "f'{__import__(\"time\").time_ns()}'", "row 0 differs"),
    "rows, exception in row 7": ("'a'", "'a' * (1 // (7 - row)) or 'a'", "Mine, row 7"),
    "rows, half a character": (
        "'a'", "'a' if row else '\\ud800'", "row 0 cannot be used: not UTF-8"
    ),
    "rows, two kinds": ("'a'", f"'a' if row < 7 else {TALK}", "row 7 is a conversation, unlike"),
    "documents, a number": ("yield f", "yield 7 or f", "`rows` yielded int"),
    "documents, a date": ("yield f", DATE, "date is not JSON serializable"),
    "documents, not a number of JSON": (
        "yield f", "yield {'x': float('nan')} or f", "not JSON compliant"
    ),
    "documents, half a character": ("yield f", "yield '\\ud800' or f", "surrogates not allowed"),
    "documents, exception": ("yield f", "yield self.nothing or f", "has no attribute 'nothing'"),
    "documents, no method": ("def rows(", "def go(", "NotImplementedError"),
}  # fmt: skip
"""Text of the class, what stands there instead, and what is said."""


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_names_its_key_and_what_is_wrong(dtt: Dtt, tokens: Path, case: str) -> None:
    kind = KINDS[case.split(",")[0]]
    old, new, said = MISTAKES[case]
    assert old in kind.code
    (dtt.folder / "mine.py").write_text(kind.code.replace(old, new, 1))
    (dtt.folder / "run.yaml").write_text(kind.section.replace("TOKENS", str(tokens)))
    (dtt.folder / "version").write_text("1")
    stderr = dtt(kind.command, "-c", "run.yaml", *kind.settings, expect=ExitCode.USAGE).stderr
    assert said in stderr
    assert kind.key in stderr or "schedule.power: " in said
    assert "this is a bug" not in stderr
    if any(how in case for how in ("syntax", "import", "exception")):
        assert 'mine.py", line ' in stderr
    if case.startswith(("source", "rows")):  # the line that raised, or of the method
        assert re.search(r'mine.py(:\d+|", line \d+), ', stderr)
    assert not (dtt.folder / "data/corpus/Words/manifest.json").exists()


TWICE = "[{type: mine.py:Norms}, {type: mine.py:Norms}]"
NUMBERS = "type: mine.py:Numbers, tokenizer: t"
TWO_FILES = f"actions: [{{type: mine.py:Norms}}]\ndata: {{{NUMBERS.replace('m', 'other/m', 1)}}}"
ENTRIES = {
    f"data: {{sources: [{{{NUMBERS}, cuont: 3}}]}}": "data.sources.0.cuont: unknown key",
    "data: {sources: [{type: token, path: t}]}": "data.sources.0.type: input should be 'tokens'",
    f"data: {{sources: [{{{NUMBERS}, held_out: 3, validation: t}}]}}": "0.held_out: must be 0",
    f"data: {{sources: [{{{NUMBERS}, validation: {{{NUMBERS}, held_out: 3}}}}]}}": "must be 0",
    f"data: {{type: preference, sources: [{{{NUMBERS}}}]}}": "preference needs token files",
    f"data: {{sources: [{{{NUMBERS.replace('Numbers', 'Weighted')}}}]}}": "key of every entry",
    TWO_FILES: "two files have one name",
    "schedule: {type: other.py:Polynomial}": "there is no file other.py",
    "actions: [{every: 2}]": "actions.0.type: must name a class",
    "actions: [{type: nothing}]": "actions.0.type: must name a class",
    "actions: [{type: mine.py:Norms, evry: 1}]": "actions.0.evry: unknown key",
    f"actions: {TWICE}": "actions.1.name: two are called Norms",
    "actions: [{type: mine.py:Norms, name: a/b}]": "actions.0.name: takes letters",
    "download: {documents: {}}": "download.documents.type: must name a class",
    "download: {documents: {type: words}}": "download.documents.type: must name a class",
    "download: {documents: {type: mine.py:Words, cuont: 1}}": "documents.cuont: unknown key",
    "download: {documents: {type: mine.py:Words}, dataset: x}": "dataset: is for datasets",
    "download: {documents: {type: mine.py:Words}, split: x}": "split: is for datasets",
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_wrong_entry_is_refused_by_name(dtt: Dtt, entry: str) -> None:
    code = own_classes.NORMS + own_classes.WORDS + own_classes.NUMBERS
    weighted = "\n\nclass Weighted(Numbers):\n    weight: int = 1\n"
    (dtt.folder / "mine.py").write_text(code + weighted)
    (dtt.folder / "other").mkdir()
    (dtt.folder / "other/mine.py").write_text(own_classes.NUMBERS)
    (dtt.folder / "run.yaml").write_text(entry)
    command = "download" if entry.startswith("download") else "train"
    assert ENTRIES[entry] in dtt(command, "-c", "run.yaml", expect=ExitCode.USAGE).stderr
