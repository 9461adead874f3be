"""A schedule of your own: `dtt train -c examples/polynomial.yaml`."""

import dtt


class Polynomial(dtt.Schedule):
    """Polynomial decay to zero."""

    power: float = 2.0
    """Exponent of the decay."""

    def multiplier(self, step: int, run: dtt.RunFacts) -> float:
        """Return the learning rate of a step as a fraction of the peak."""
        return float((1 - step / run.steps) ** self.power)
