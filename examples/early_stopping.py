"""An action of your own: `dtt train -c examples/early_stopping.yaml`."""

from collections.abc import Mapping
from typing import Any

import dtt


class EarlyStopping(dtt.Action):
    """End the run when the validation loss has not improved for a while."""

    patience: int = 3
    """Number of validations without an improvement after which the run ends."""
    least: float = 0.001
    """Smallest change of the loss, in nats, that counts as an improvement."""

    _best: float | None = None
    _waited: int = 0

    def run(self, run: dtt.StepView) -> Mapping[str, float]:
        """Compare the last validation with the best one."""
        if run.eval_loss is None:
            raise ValueError("there is no validation: set train.eval_every")
        if self._best is None or run.eval_loss < self._best - self.least:
            self._best, self._waited = run.eval_loss, 0
        else:
            self._waited += 1
        if self._waited >= self.patience:
            run.end(f"no better validation than {self._best:.4f} for {self._waited} times")
        return {"best": self._best, "waited": self._waited}

    def state(self) -> Mapping[str, Any]:
        """Return the best loss so far, and for how long there was none better."""
        return {"best": self._best, "waited": self._waited}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue with these."""
        self._best, self._waited = state["best"], state["waited"]
