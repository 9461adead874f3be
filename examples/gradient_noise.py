"""An action of your own that measures: `dtt train -c examples/gradient_noise.yaml`."""

import math

import dtt


class GradientNoise(dtt.Action):
    """Simple gradient noise scale (McCandlish et al. 2018, arXiv 1812.06162, appendix A.1).

    Batches of far fewer tokens train as well for each token; larger ones waste some.
    """

    smoothing: float = 0.9
    """Share of the averages that an older measurement keeps: single ones vary a lot."""

    _noise: float = 0.0
    _signal: float = 0.0

    def run(self, run: dtt.StepView) -> dict[str, float]:
        """Return the noise scale in tokens, by gradients of two sizes of batches."""
        each, whole, small = run.gradient_norms()
        if len(each) < 2:
            raise ValueError("a step needs two micro-batches: lower train.micro_batch")
        big = small * len(each)
        of_small, of_big = math.fsum(norm**2 for norm in each) / len(each), whole**2
        # Unbiased estimates of the squared norm of the true gradient, and of its variance.
        signal = (big * of_big - small * of_small) / (big - small)
        noise = (of_small - of_big) / (1 / small - 1 / big)
        kept = self.smoothing if self._noise else 0.0
        self._signal = kept * self._signal + (1 - kept) * signal
        self._noise = kept * self._noise + (1 - kept) * noise
        found = {"noise": self._noise, "signal": self._signal}
        # An estimate of the squared norm can be negative: then there is no scale yet.
        if self._signal > 0:
            found["scale_tokens"] = self._noise / self._signal
        return found

    def state(self) -> dict[str, float]:
        """Return the averages, with which a resumed run continues."""
        return {"noise": self._noise, "signal": self._signal}

    def restore(self, state: dict[str, float]) -> None:
        """Continue from the averages of a checkpoint."""
        self._noise, self._signal = state["noise"], state["signal"]
