"""Keys of the family `transformers`. Imports neither torch nor the library before `build`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from dtt.config.model import Family


class TransformersFamily(Family):
    """Any causal model of the library `transformers`, computed by the library's own module.

    `init.from` chooses it for a model_type that dtt has no family for. dtt's own families are
    faster, and run on every layout.
    """

    family: Literal["transformers"] = "transformers"
    """`transformers`: the module of that library computes the model."""
    config: dict[str, Any] = Field(default={})
    """What config.json has: `model_type`, and the sizes by their names there. Keys that are left
    out have the library's defaults; `vocab_size` follows from the tokenizer."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield an error without a type, or for code that a folder would bring along."""
        if not isinstance(self.config.get("model_type"), str):
            yield "config", "needs model_type, as config.json has it, such as {model_type: lfm2}"
        for key in ("auto_map", "trust_remote_code"):
            if key in self.config:
                yield f"config.{key}", "names code of the folder, which dtt never runs"

    @property
    def model_type(self) -> str | None:
        """The type as config.json names it."""
        return self.config.get("model_type")

    @property
    def loss_per_token(self) -> str | None:
        """The key that adds a loss of routers; None if there is none."""
        return "config.output_router_logits" if self.config.get("output_router_logits") else None

    def build(self, vocab_size: int, context: int) -> Any:
        """Return the model of the library as a `dtt.Model`."""
        from dtt.model.library.model import LibraryModel

        return LibraryModel(self.config, vocab_size, context)
