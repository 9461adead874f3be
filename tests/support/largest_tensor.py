"""The size of the largest tensor that a computation makes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements any operation put out, but for tensors of the shape `ignored`."""

    def __init__(self, ignored: Sequence[int] = ()) -> None:
        super().__init__()
        self.elements = 0
        self._ignored = tuple(ignored)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tuple(tensor.shape) != self._ignored:
                self.elements = max(self.elements, tensor.numel())
        return out
