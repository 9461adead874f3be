"""Conversations of your own, as rows: `dtt train -c examples/times.yaml`."""

import dtt


class Times(dtt.Rows):
    """Multiplication tables, asked and answered."""

    largest: int = 20
    """Largest factor."""

    def __len__(self) -> int:
        """Return the number of rows, those held out included."""
        return self.largest**2

    def __getitem__(self, row: int) -> list[dict[str, str]]:
        """Return a question and its answer; only the answer is a target."""
        one, other = (factor + 1 for factor in divmod(row, self.largest))
        return [
            {"role": "user", "content": f"What is {one} times {other}?"},
            {"role": "assistant", "content": f"{one * other}"},
        ]
