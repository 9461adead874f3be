"""The load of experts in a step: what is reported of it, and the correction that follows it.

Shapes: L layers with a mixture, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dtt.mesh.mesh import Mesh
from dtt.mesh.sharding import FullTensor
from dtt.model.contract import Model
from dtt.model.experts import routers
from dtt.train.state import EXPERTS

LOAD = f"{EXPERTS}/load/count"
"""Path of the load of the last step in a checkpoint."""
METRICS = ("expert_violation", "expert_entropy", "expert_idle")
"""Names of the numbers that `described` returns for each layer."""


@dataclass(frozen=True)
class ExpertLoad:
    """The experts of a model, on all ranks."""

    model: Model
    mesh: Mesh
    rate: float
    """Change of a correction in a step."""
    recent: dict[int, Tensor] = field(default_factory=dict)
    """The load of the last step by layer, [E]."""

    @property
    def layers(self) -> list[int]:
        """The layers with a mixture, also those of other ranks."""
        arch = self.model.arch
        return [i for i in range(arch.n_layers) if arch.mixture_of(i) is not None]

    def total(self, loads: Mapping[int, Tensor], device: torch.device) -> Tensor:
        """Return the number of targets of all ranks that each expert computed, [L, E] int64.

        `loads` are those of this rank's layers. All ranks call this together.
        """
        mixture = self.model.arch.mixture
        assert mixture is not None
        none = torch.zeros(mixture.experts, dtype=torch.int64, device=device)
        # Each target is counted once, also under tensor parallelism, which divides tokens there. In
        # integers, so that every layout makes the same correction.
        load_LE = self.mesh.sum(torch.stack([loads.get(i, none) for i in self.layers]))
        self.recent.update(zip(self.layers, load_LE, strict=True))
        return load_LE

    def record(self) -> dict[str, dict[str, list[float]]]:
        """Return the share of each expert in the tokens of the last step, for an `eval` record."""
        shares = {i: load_E / load_E.sum().clamp(min=1) for i, load_E in self.recent.items()}
        named = {str(i): [round(x, 5) for x in share.tolist()] for i, share in shares.items()}
        return {"expert_load": named} if named else {}

    def tensors(self) -> dict[str, Tensor]:
        """Return the state for a checkpoint: a resumed run may have to evaluate before a step."""
        return {LOAD: torch.stack([*self.recent.values()])} if self.recent else {}

    def load(self, tensors: Mapping[str, FullTensor]) -> None:
        """Restore the state from a checkpoint; older ones have none."""
        self.recent.clear()
        if LOAD in tensors:
            self.recent.update(zip(self.layers, tensors[LOAD][()], strict=True))

    @torch.no_grad()
    def follow(self, load_LE: Tensor, skip: Tensor) -> None:
        """Correct the choice of the next step, unless `skip` [] is 1.0 (arXiv 2408.15664).

        An expert with fewer targets than the mean is preferred by `rate` more, and one with more by
        `rate` less.
        """
        for i, router in routers(self.model).items():
            balance = router.balance
            if balance is None or not balance.requires_grad:
                continue
            load_E = load_LE[self.layers.index(i)]
            # E * load against the sum: no rounding decides whether a load equals the mean.
            direction_E = (load_E.sum() - len(load_E) * load_E).sign()
            balance.add_(self.rate * (1 - skip) * direction_E)


def described(load_LE: Tensor) -> Tensor:
    """Return three numbers for each layer, [3, L]: see `METRICS`.

    They are the largest load divided by the mean, minus 1; the entropy of the load divided by that
    of an even one; and the share of experts without a target.
    """
    share_LE = load_LE / load_LE.sum(1, keepdim=True).clamp(min=1)
    experts = load_LE.shape[1]
    entropy_L = torch.special.entr(share_LE).sum(1)
    even = max(math.log(experts), 1e-9)
    idle_L = (load_LE == 0).float().mean(1)
    return torch.stack([share_LE.amax(1) * experts - 1, entropy_L / even, idle_L])
