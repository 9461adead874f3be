"""Trees of tokens: every branch is computed as if it were a sequence of its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from dtt.model import tree_attention
from dtt.model.architecture import Architecture
from dtt.model.attention_backend import Flex
from dtt.model.decoder import Decoder
from dtt.model.init import initialize
from dtt.model.token_context import GivenContext
from dtt.model.tree_attention import PackedTrees, make_tree_attention_fns

CPU = torch.device("cpu")


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(100, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


Tree = tuple[list[int], list[list[int]]]


def forest() -> list[Tree]:
    """A single sequence; trees whose branches are short and long; and one without a prefix."""
    leaves = [tokens(n, n) for n in range(1, 6)]
    return [
        (tokens(20, 0), [[]]),
        (tokens(9, 1), [*leaves, []]),
        (tokens(8, 2), [tokens(7, 10), leaves[4]]),
        ([], leaves[3:]),
    ]


def pack(trees: list[Tree], multiple: int = 1) -> tuple[PackedTrees, list[list[int]]]:
    """Return packed trees, and the indices of the tokens of each sequence."""
    packed = PackedTrees()
    paths = [path for tree in trees for path in packed.add(*tree)]
    packed.pad(multiple)
    return packed, paths


def make(arch: Architecture) -> Decoder:
    model = Decoder(arch)
    initialize(model, seed=1)
    return model.eval()


@torch.no_grad()
def logits(model: Decoder, packed: PackedTrees) -> Tensor:
    tokens, positions = torch.tensor([packed.tokens]), torch.tensor([packed.positions])
    attention_fns = make_tree_attention_fns(model.arch, packed, CPU)
    return model(tokens, context=GivenContext(tokens, positions, attention_fns))[0]


def test_every_branch_is_computed_as_a_sequence_of_its_own(arch: Architecture) -> None:
    model = make(arch)
    packed, paths = pack(forest(), multiple=8)
    assert len(packed.tokens) % 8 == 0
    got = logits(model, packed)
    for path, expected in zip(paths, sequences(forest()), strict=True):
        assert [packed.tokens[i] for i in path] == expected
        assert [packed.positions[i] for i in path] == list(range(len(path)))
        with torch.no_grad():
            alone = model(torch.tensor([expected]))[0]
        torch.testing.assert_close(got[path], alone, rtol=1e-5, atol=1e-5)


def sequences(trees: list[Tree]) -> list[list[int]]:
    return [prefix + branch for prefix, branches in trees for branch in branches]


def test_other_trees_and_padding_change_nothing(arch: Architecture) -> None:
    model, trees = make(arch), forest()
    one, paths = pack(trees[1:2])
    several, others = pack(trees[:3], multiple=16)
    alone, together = logits(model, one), logits(model, several)
    for path, other in zip(paths, others[1:], strict=False):
        torch.testing.assert_close(together[other], alone[path], rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 5])
def test_flex_attention_over_trees_equals_tiles(window: int | None) -> None:
    packed, _ = pack(forest(), multiple=8)
    T = len(packed.tokens)
    q, k, v = torch.randn(3, 1, 4, T, 16, generator=torch.Generator().manual_seed(0)).unbind()
    ends, positions = torch.tensor(packed.ends), torch.tensor(packed.positions)
    rule = tree_attention._mask_mod(ends, positions, window)
    masks = [tree_attention._mask(*tile, ends, positions, window) for tile in packed.tiles]
    expected = tree_attention.tree_attention(q, k, v, packed.tiles, masks, 0.3)
    blocks = create_block_mask(rule, None, None, T, T, device="cpu", BLOCK_SIZE=16)
    got = flex_attention(q, k, v, block_mask=blocks, scale=0.3)
    dense = Flex(0.3, rule, (1, T, T), CPU, None, {}).dense(q, k, v)
    real = packed.tiles[-1][0]  # positions of padding are all 0
    for out in (got, dense):
        torch.testing.assert_close(out[:, :, :real], expected[:, :, :real], rtol=1e-5, atol=1e-5)
