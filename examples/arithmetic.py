"""Samples of your own, made as they are read: `dtt train -c examples/arithmetic.yaml`."""

import random

from tokenizers import Tokenizer

import dtt


class Arithmetic(dtt.Source):
    """Sums, of which only the result is a target."""

    digits: int = 3
    """Number of digits of the summands."""
    number: int = 100_000
    """Number of samples, those held out included."""

    def samples(self) -> int:
        """Return the number of samples."""
        return self.number

    def read(self, number: int, tokens: int) -> tuple[list[int], list[bool]]:
        """Return the ids of a sum, and which of them are targets."""
        draw = random.Random(number)  # of the number alone: every rank and resume reads the same
        one, other = (draw.randrange(10**self.digits) for _ in range(2))
        tokenizer = Tokenizer.from_file(str(self.tokenizer))
        question = tokenizer.encode(f"{one}+{other}=").ids
        answer = tokenizer.encode(f"{one + other}\n").ids
        ids = (question + answer)[:tokens]
        return ids, [place >= len(question) for place in range(len(ids))]
