"""Token ids of questions: the joint encoding, one BOS, truncation, and what has no tokens."""

from __future__ import annotations

import pytest
from support.tiny_job import END_OF_DOCUMENT, make_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from dtt.base.errors import ConfigError, InputError
from dtt.evaluate.tasks.encoding import QuestionEncoder
from dtt.evaluate.tasks.prompts import Question
from dtt.evaluate.tasks.scorer import Option

BOS = 257


def with_bos(after: str = "") -> Tokenizer:
    """Bytes as tokens; the post-processor adds <s> in front, and `after` behind."""
    tokenizer = make_tokenizer("<s>", "</s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"<s> $A {after}".strip(), special_tokens=[("<s>", BOS), ("</s>", BOS + 1)]
    )
    return tokenizer


def ids(text: str) -> tuple[int, ...]:
    return tuple(make_tokenizer().encode(text).ids)


def question(context: str, *continuations: str) -> Question:
    return Question("id", (context,), continuations, 0)


@pytest.mark.parametrize("tokenizer", [with_bos(), with_bos("</s>"), make_tokenizer()])
def test_a_context_begins_with_one_token_of_the_beginning(tokenizer: Tokenizer) -> None:
    """What the tokenizer adds in front, or else the end-of-document token only if told."""

    def first(context: str, bos: str) -> Option:
        encoder = QuestionEncoder(tokenizer, END_OF_DOCUMENT, 64, bos)  # type: ignore[arg-type]
        return encoder.options(question(context, " b")).options[0]

    adds = tokenizer.post_processor is not None
    begin = BOS if adds else END_OF_DOCUMENT
    for bos, before in (
        ("tokenizer", (BOS,) * adds), ("always", (begin,)), ("never", ())
    ):  # fmt: skip
        assert first("a", bos) == Option((*before, *ids("a")), ids(" b"))
        empty = begin if bos != "never" else END_OF_DOCUMENT
        assert first("", bos) == Option((empty,), ids(" b"))
    if adds:
        assert first("<s>a", "tokenizer") == Option((BOS, *ids("a")), ids(" b"))
        assert first("<s>a", "always") == Option((BOS, *ids("a")), ids(" b"))


def test_trailing_space_of_the_context_belongs_to_the_continuation() -> None:
    encoder = QuestionEncoder(make_tokenizer(), END_OF_DOCUMENT, 64, "tokenizer")
    encoded = encoder.options(question("a: \n", "é"))
    assert encoded.options == (Option(ids("a:"), ids(" \né")),)
    assert encoded.bytes == (4,)
    assert encoder.options(question("  ", "b")).options == (Option((END_OF_DOCUMENT,), ids("  b")),)


def test_options_are_the_continuations_or_the_contexts() -> None:
    encoder = QuestionEncoder(make_tokenizer(), END_OF_DOCUMENT, 64, "tokenizer")
    several = encoder.options(question("a", " b", " cd"))
    assert several.options == (Option(ids("a"), ids(" b")), Option(ids("a"), ids(" cd")))
    assert several.bytes == (2, 3)
    schema = encoder.options(Question("id", ("a", "xyz"), (" b",), 1))
    assert schema.options == (Option(ids("a"), ids(" b")), Option(ids("xyz"), ids(" b")))


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 6, 7, 8])
def test_the_start_is_cut_off_and_a_token_of_context_remains(length: int) -> None:
    encoder = QuestionEncoder(with_bos(), END_OF_DOCUMENT, length, "tokenizer")
    encoded = encoder.options(question("abc", " de"))
    [option] = encoded.options
    whole = (BOS, *ids("abc de"))[-(length + 1) :]
    assert (*option.context, *option.continuation) == whole
    assert len(option.continuation) == min(3, length)
    assert encoded.truncated == (length < 6)


def merging() -> Tokenizer:
    """A tokenizer that joins `a` and `b`, so that `b` after `a` has no token of its own."""
    vocab = {"a": 0, "b": 1, "ab": 2, "<eod>": 3}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")]))
    tokenizer.add_special_tokens(["<eod>"])
    return tokenizer


def test_a_continuation_without_tokens_is_encoded_separately_and_reported() -> None:
    encoder = QuestionEncoder(merging(), 3, 64, "tokenizer")
    encoded = encoder.options(question("a", "b"))
    assert encoded.options == (Option((0,), (1,)),)
    assert encoded.separate
    assert not encoder.options(question("a", "a")).separate
    nothing = encoder.options(question("a", "?"))  # the tokenizer does not know it
    assert nothing.options == (Option((0,), (3,)),)
    assert nothing.separate
    with pytest.raises(InputError, match="no tokens"):
        QuestionEncoder(merging(), None, 64, "tokenizer").options(question("a", "?"))


def test_without_a_first_token_an_empty_context_is_an_error() -> None:
    encoder = QuestionEncoder(make_tokenizer(), None, 64, "tokenizer")
    assert encoder.options(question("a", " b")).options[0].context == ids("a")
    with pytest.raises(ConfigError, match="no token to begin with"):
        encoder.options(question("", " b"))
    with pytest.raises(ConfigError, match="no token to begin with"):
        QuestionEncoder(make_tokenizer(), None, 64, "always")


def test_with_chat_the_context_is_a_message_and_the_answer_starts_without_a_space() -> None:
    def chat(text: str) -> list[int]:
        return [300, *ids(text), 301]

    encoder = QuestionEncoder(with_bos(), END_OF_DOCUMENT, 64, "tokenizer", chat)
    encoded = encoder.options(question("Q?\n", " yes", " no"))
    assert encoded.options[0] == Option((300, *ids("Q?"), 301), ids("yes"))
    assert encoder.prompt_ids(Question("id", ("Q?",), (), 0), 8) == ([300, *ids("Q?"), 301], False)


def test_a_prompt_leaves_room_for_the_answer() -> None:
    encoder = QuestionEncoder(with_bos(), END_OF_DOCUMENT, 10, "tokenizer")
    prompt = Question("id", ("abcdefgh",), (), 0)
    assert encoder.prompt_ids(prompt, 1) == ([BOS, *ids("abcdefgh")], False)
    assert encoder.prompt_ids(prompt, 7) == ([*ids("fgh")], True)
    assert encoder.prompt_ids(Question("id", ("",), (), 0), 4) == ([BOS], False)
    with pytest.raises(ConfigError, match="no room for a prompt"):
        encoder.prompt_ids(prompt, 10)


def test_a_pretokenizer_that_adds_a_space_adds_it_only_to_the_context() -> None:
    tokenizer = make_tokenizer()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    encoder = QuestionEncoder(tokenizer, END_OF_DOCUMENT, 64, "tokenizer")
    assert encoder.options(question("a", "b")).options == (Option(ids(" a"), ids("b")),)
