"""`train.steps` and `train.epochs`, of which the one that the highest layer sets counts."""

from __future__ import annotations

from collections.abc import Sequence

from dtt.config.key_types import Key
from dtt.config.source import Layer, Leaf

STEPS: Key = ("train", "steps")
EPOCHS: Key = ("train", "epochs")


def with_both_lengths(keys: Sequence[str]) -> set[str]:
    """Return `keys`, with both `train.steps` and `train.epochs` if one is among them.

    A change of either is a change of the other, which it resets.
    """
    lengths = {".".join(STEPS), ".".join(EPOCHS)}
    return {*keys, *(lengths if lengths & set(keys) else ())}


def length_layer(layers: Sequence[Layer]) -> Layer:
    """Return the layer that makes `train.steps` and `train.epochs` are mutually exclusive.

    The one that the highest layer sets counts, and the other is reset. A layer that sets both is
    left as it is: a job records both, and `open_dataset` checks that they agree.
    """
    if all(layer.get(EPOCHS, Leaf(None, "")).value is None for layer in layers):
        return {}
    steps: Leaf | None = None
    epochs: Leaf | None = None
    for layer in layers:
        given_steps, given_epochs = layer.get(STEPS), layer.get(EPOCHS)
        if given_epochs is not None and given_epochs.value is not None:
            if given_steps is not None:
                steps = given_steps
            elif epochs is None or epochs.value != given_epochs.value:
                steps = Leaf(0, given_epochs.origin)  # not known before the data is open
            epochs = given_epochs
        elif given_steps is not None:
            steps, epochs = given_steps, Leaf(None, given_steps.origin)
        elif given_epochs is not None:
            epochs = given_epochs
    return {key: leaf for key, leaf in ((STEPS, steps), (EPOCHS, epochs)) if leaf is not None}
