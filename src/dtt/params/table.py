"""The table of parameters: all that optimizers, clipping and checkpoints know of a model."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dtt.mesh.dtypes import wide_dtype
from dtt.mesh.mesh import Mesh
from dtt.mesh.sharding import LaidOut, Placed, TensorLayout, layout_of, local, world_size


@dataclass(frozen=True, eq=False)
class Param:
    """One parameter, as this rank holds it."""

    name: str
    tensor: nn.Parameter
    """A DTensor if it is sharded."""
    role: str
    """Part that it plays in the model, which decides how it is trained: matrix | embed | head |
    vector | router | balance (corrections of experts) | adapter for those of a Decoder."""
    layout: TensorLayout
    """The ranks that hold it."""
    divisor: int | None = None
    """Number of ranks over which its gradient is averaged; None: those that the loss is averaged
    over. Experts, which see the tokens of all ranks, have a smaller one."""

    @property
    def trainable(self) -> bool:
        """True unless it is frozen: a step then neither updates nor averages it."""
        # torch's own flag, as autograd, DDP and FSDP2 read it.
        return self.tensor.requires_grad


class Params(Mapping[str, Param]):
    """The parameters that this rank holds, by name, in the order of the model."""

    def __init__(self, params: Iterable[Param], mesh: Mesh | None = None) -> None:
        """Collect the parameters of a model that is parallelised over `mesh`; None: over no mesh.

        Some ranks may lack parameters that others hold; each rank lists its own.
        """
        self.mesh = mesh or Mesh()
        self._by_name = {param.name: param for param in params}

    def __getitem__(self, name: str) -> Param:
        """Return the parameter of this name."""
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._by_name)

    def __len__(self) -> int:
        """Return the number of parameters."""
        return len(self._by_name)

    def trainable(self) -> Params:
        """Return the parameters that are not frozen."""
        return Params((param for param in self.values() if param.trainable), self.mesh)

    def subset(self, roles: Container[str]) -> Params:
        """Return the parameters with one of these roles."""
        return Params((param for param in self.values() if param.role in roles), self.mesh)

    def laid_out(self, state: Mapping[str, Tensor]) -> dict[str, LaidOut]:
        """Return the tensors of a checkpoint's state, by path, with their layouts.

        State of a parameter has the path OWNER/PARAMETER/KEY and is on the ranks that hold the
        parameter. State of nothing here is equal on every rank.
        """
        placed: dict[str, LaidOut] = {}
        for path, tensor in state.items():
            param = self.get(path.split("/")[1])
            # Step counts are plain, also those of parameters that only some ranks hold.
            holders = world_size() if param is None else param.layout.mesh or world_size()
            placed[path] = Placed(tensor, layout_of(tensor, holders))
        return placed

    @torch.no_grad()
    def norm(self) -> Tensor:
        """Return the norm of all gradients of all ranks in fp32, []; 0 without any gradient.

        Each rank sums the squares of its parts, divided by the number of ranks that hold the same
        part, and one all-reduce adds them up. All ranks must call this if the model is sharded.
        """
        held = [param for param in self.values() if param.tensor.grad is not None]
        # In fp32 at least: torch's own norm of bf16 gradients has three digits.
        dtype = wide_dtype(held[0].tensor) if held else None
        norms = torch._foreach_norm(_gradients(held), dtype=dtype) if held else ()  # noqa: SLF001  (as torch's own clipping)
        if self.mesh.sharded and held:
            # Replicas hold the same part, and each element counts once. Norms are divided by the
            # root, as their squares are added.
            torch._foreach_mul_(norms, [param.layout.replica_count**-0.5 for param in held])
        device = next((param.tensor.device for param in self.values()), None)
        stacked = torch.stack(tuple(norms)) if held else torch.zeros(1, device=device)
        if not self.mesh.sharded:
            # Every rank holds everything, so there is nothing to add up.
            norm: Tensor = torch.linalg.vector_norm(stacked)
            return norm
        # Also on a rank without gradients: the others would wait for it.
        return self.mesh.sum(stacked.square().sum()).sqrt()

    @torch.no_grad()
    def align(self) -> None:
        """Scale gradients that were averaged over other ranks than the loss, as if over these."""
        replicas = self.mesh.gradient_replicas
        for param in self.values():
            if param.divisor not in (None, replicas) and param.tensor.grad is not None:
                local(param.tensor.grad).mul_(param.divisor / replicas)

    @torch.no_grad()
    def clip(self, limit: float) -> Tensor:
        """Scale gradients to a total norm of at most `limit`; return the norm before, [].

        It drops the gradients that no optimizer uses, and calls `align`, first. All ranks must call
        this if the model is sharded.
        """
        for param in self.subset({"balance"}).values():
            # No optimizer would use and clear it, and each rank has that of its own tokens only.
            param.tensor.grad = None
        self.align()
        norm = self.norm()
        gradients = _gradients(param for param in self.values() if param.tensor.grad is not None)
        if gradients:
            # On the device: whether to clip is never known to the host. The constant is that of
            # torch.
            torch._foreach_mul_(gradients, (limit / (norm + 1e-6)).clamp(max=1.0))
        return norm


def _gradients(params: Iterable[Param]) -> list[Tensor]:
    """Return this rank's parts of the gradients of parameters that have one."""
    return [local(param.tensor.grad) for param in params if param.tensor.grad is not None]
