"""Conversion between dtt's and Hugging Face's state dicts: renaming, stacking and transposition."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from dtt.base.errors import DamagedError
from dtt.mesh.sharding import FullTensor
from dtt.model import families
from dtt.model.architecture import Architecture
from dtt.model.decoder import Decoder
from dtt.model.families.base import WeightRule

HEAD = "lm_head.weight"
# Buffers that older versions of transformers saved with the weights; they are not trained.
NOT_WEIGHTS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
FOLDER = "the Hugging Face folder"


class HFTensors(Mapping[str, Tensor]):
    """The tensors of a Hugging Face model by name, each converted from dtt's when it is read.

    Reading one file's tensors at a time limits the memory of an export to `state` and one file.
    """

    def __init__(self, state: Mapping[str, Tensor], rules: Iterable[WeightRule]) -> None:
        """Map the parameters in `state` by `rules`, in their order.

        Raises DamagedError unless the rules cover exactly the parameters.
        """
        self._state = state
        rules = list(rules)
        names = [name for rule in rules for name in rule.dtt_names]
        _compare(names, state, "the checkpoint")
        self._sources = {name: (rule, e) for rule in rules for name, e in self._names(rule)}

    def __getitem__(self, name: str) -> Tensor:
        """Convert one tensor; it shares no memory with the parameters."""
        rule, e = self._sources[name]
        parts = [self._state[n] if e is None else self._state[n][e] for n in rule.dtt_names]
        stacked = torch.cat(parts, dim=_output_axis(parts[0]))
        return stacked.mT.contiguous() if rule.transpose else stacked

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names, in the order of the rules."""
        return iter(self._sources)

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self._sources)

    def _names(self, rule: WeightRule) -> Iterator[tuple[str, int | None]]:
        """Yield the name of each tensor of a rule, with its expert if it belongs to one."""
        if not rule.per_expert:
            yield rule.hf_name, None
            return
        yield from ((rule.of_expert(e), e) for e in range(len(self._state[rule.dtt_names[0]])))


def to_hf(state: Mapping[str, Tensor], arch: Architecture) -> HFTensors:
    """Convert the state dict of a Decoder to that of the family's transformers class.

    A tied head is left out.
    """
    return HFTensors(state, families.get(arch.family).weight_rules(arch))


def from_hf(tensors: Mapping[str, Tensor], arch: Architecture) -> dict[str, Tensor]:
    """Convert the state dict of the family's transformers class to that of a Decoder.

    The state dict of its base class, whose names lack the prefix, is accepted as well; the released
    GPT-2 is one. Raises DamagedError if names, shapes or dtypes do not match `arch`.
    """
    rules = list(families.get(arch.family).weight_rules(arch))
    base = f"{rules[0].hf_name.split('.')[0]}."
    if not any(name.startswith(base) for name in tensors):
        tensors = {n if n == HEAD else f"{base}{n}": t for n, t in tensors.items()}
    tied = {HEAD} if arch.tie_embeddings else set()
    embed = tensors.get(rules[0].hf_name)
    if tied & tensors.keys() and embed is not None and not torch.equal(tensors[HEAD], embed):
        raise _mismatch(FOLDER, f"the head is tied, but {HEAD} is another matrix")
    with torch.device("meta"):
        expected = Decoder(arch).state_dict()
    weights = {
        name: tensor
        for name, tensor in tensors.items()
        if not name.endswith(NOT_WEIGHTS) and name not in tied
    }
    return apply_rules(weights, rules, expected)


def apply_rules(
    tensors: Mapping[str, Tensor], rules: Sequence[WeightRule], expected: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Convert Hugging Face tensors to parameters of the shapes in `expected`, by `rules`.

    Each tensor is read once. Parameters keep their dtype; those that need no conversion are shared,
    not copied. Raises DamagedError if names, shapes or dtypes do not match.
    """
    converted = HFTensors({name: t.to("meta") for name, t in expected.items()}, rules)
    _compare(converted, tensors, FOLDER)
    state: dict[str, Tensor] = {}
    for rule in rules:
        if not rule.per_expert:
            state |= _split(rule, rule.hf_name, tensors, converted, expected)
            continue
        for e in range(len(expected[rule.dtt_names[0]])):
            matrices = _split(rule, rule.of_expert(e), tensors, converted, expected)
            for name, matrix in matrices.items():
                if e == 0:
                    state[name] = matrix.new_empty(expected[name].shape)
                elif matrix.dtype != state[name].dtype:
                    dtypes = f"{matrix.dtype}, expert 0 is {state[name].dtype}"
                    raise _mismatch(FOLDER, f"{rule.of_expert(e)} is {dtypes}")
                state[name][e] = matrix
    return state


def write_shards(tensors: Mapping[str, FullTensor], folder: Path, max_shard_size: str) -> None:
    """Write safetensors files of at most `max_shard_size` each, reading one at a time."""
    from huggingface_hub import split_torch_state_dict_into_shards

    sizes = {n: torch.empty(t.shape, dtype=t.dtype, device="meta") for n, t in tensors.items()}
    shards = split_torch_state_dict_into_shards(sizes, max_shard_size=max_shard_size)
    for name, keys in shards.filename_to_tensors.items():
        path = folder / name
        path.touch()
        mode = path.stat().st_mode  # as set by the umask; safetensors creates files with mode 0600
        save_file({key: tensors[key][()] for key in keys}, path, metadata={"format": "pt"})
        path.chmod(mode)
    if shards.is_sharded:
        index = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
        text = json.dumps(index, indent=2, ensure_ascii=False) + "\n"
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _split(
    rule: WeightRule,
    hf_name: str,
    tensors: Mapping[str, Tensor],
    converted: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Return the parameters, or their slices of one expert, that one tensor contains."""
    tensor, shape = tensors[hf_name], list(converted[hf_name].shape)
    if list(tensor.shape) != shape:
        raise _mismatch(FOLDER, f"{hf_name} is {list(tensor.shape)}, not {shape}")
    if not tensor.is_floating_point():
        raise _mismatch(FOLDER, f"{hf_name} is {tensor.dtype}")
    if rule.transpose:
        tensor = tensor.mT
    axis = _output_axis(tensor)
    sizes = [expected[name].shape[axis - tensor.ndim] for name in rule.dtt_names]
    parts = tensor.split_with_sizes(sizes, dim=axis)
    return {name: part.contiguous() for name, part in zip(rule.dtt_names, parts, strict=True)}


def _output_axis(tensor: Tensor) -> int:
    """Return the axis of the outputs: that of rows in matrices and stacks, the first in vectors."""
    return max(0, tensor.ndim - 2)


def _compare(expected: Iterable[str], given: Iterable[str], where: str) -> None:
    """Raise DamagedError unless both have the same names."""
    expected, given = set(expected), set(given)
    if expected != given:
        missing, extra = sorted(expected - given), sorted(given - expected)
        raise _mismatch(
            where, f"{len(missing)} missing {missing[:3]}, {len(extra)} unknown {extra[:3]}"
        )


def _mismatch(where: str, why: str) -> DamagedError:
    return DamagedError(
        f"the weights in {where} are not those that its configuration describes", why=why
    )
