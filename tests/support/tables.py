"""Tables of parameters for tests that need no model."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from dtt.mesh.sharding import layout_of, world_size
from dtt.params.table import Param, Params


def table(named: Mapping[str, Tensor], roles: str | Mapping[str, str] = "matrix") -> Params:
    """These parameters, of one role or each of its own; plain ones are on every rank."""
    return Params(
        Param(name, p, roles if isinstance(roles, str) else roles[name], layout_of(p, world_size()))  # type: ignore[arg-type]
        for name, p in named.items()
    )
