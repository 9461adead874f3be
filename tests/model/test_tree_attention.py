"""Trees of tokens: every branch is computed as if it were a sequence of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from dtt.model import tree_attention
from dtt.model.architecture import Architecture
from dtt.model.attention_backend import Flex
from dtt.model.decoder import Decoder
from dtt.model.init import initialize
from dtt.model.tree_attention import PackedTrees, TokenTree, make_tree_attention_fns

CPU = torch.device("cpu")


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(100, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def forest() -> list[TokenTree]:
    """A single sequence; a tree of two levels; one of three; and one without a root."""
    leaves = [TokenTree(tokens(n, n)) for n in range(1, 6)]
    middle = [TokenTree(tokens(4, 10), leaves[:3]), TokenTree(tokens(2, 11), leaves[2:])]
    return [
        TokenTree(tokens(20, 0)),
        TokenTree(tokens(9, 1), leaves),
        TokenTree(tokens(8, 2), [*middle, leaves[4]]),
        TokenTree([], leaves[3:]),
    ]


def paths(tree: TokenTree, start: int, above: list[tuple[int, int]]) -> Iterator[list[int]]:
    """Yield the indices of the tokens of each sequence of a packed tree."""
    above = [*above, (start, start + len(tree.tokens))]
    start += len(tree.tokens)
    if not tree.branches:
        yield [i for first, stop in above for i in range(first, stop)]
    for branch in tree.branches:
        yield from paths(branch, start, above)
        start += branch.size


def pack(trees: list[TokenTree], multiple: int = 1) -> PackedTrees:
    packed = PackedTrees()
    for tree in trees:
        packed.add(tree)
    packed.pad(multiple)
    return packed


def make(arch: Architecture) -> Decoder:
    model = Decoder(arch)
    initialize(model, seed=1)
    return model.eval()


@torch.no_grad()
def logits(model: Decoder, packed: PackedTrees) -> Tensor:
    return model(
        torch.tensor([packed.tokens]),
        positions_BT=torch.tensor([packed.positions]),
        attention_fns=make_tree_attention_fns(model.arch, packed, CPU),
    )[0]


@pytest.mark.parametrize("tile", [0, 16, 512])
def test_every_path_of_a_tree_is_computed_as_a_sequence_of_its_own(
    arch: Architecture, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree_attention, "TILE", tile)
    model, trees = make(arch), forest()
    packed = pack(trees, multiple=8)
    assert len(packed.tokens) % 8 == 0
    got, start = logits(model, packed), 0
    for tree in trees:
        for path in paths(tree, start, []):
            assert [packed.positions[i] for i in path] == list(range(len(path)))
            with torch.no_grad():
                expected = model(torch.tensor([[packed.tokens[i] for i in path]]))[0]
            torch.testing.assert_close(got[path], expected, rtol=1e-5, atol=1e-5)
        start += tree.size


def test_other_trees_and_padding_change_nothing(arch: Architecture) -> None:
    model, trees = make(arch), forest()
    alone = logits(model, pack(trees[1:2]))
    together = logits(model, pack(trees[:3], multiple=16))
    own = together[trees[0].size : trees[0].size + trees[1].size]
    torch.testing.assert_close(own, alone, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 5])
def test_flex_attention_over_trees_equals_tiles(window: int | None) -> None:
    packed = pack(forest(), multiple=8)
    T = len(packed.tokens)
    q, k, v = torch.randn(3, 1, 4, T, 16, generator=torch.Generator().manual_seed(0)).unbind()
    ends, positions = torch.tensor(packed.ends), torch.tensor(packed.positions)
    rule = tree_attention._mask_mod(ends, positions, window)
    masks = [tree_attention._mask(tile, ends, positions, window) for tile in packed.tiles]
    expected = tree_attention.TreeAttention(0.3, packed.tiles, masks, window)(q, k, v)
    blocks = create_block_mask(rule, None, None, T, T, device="cpu", BLOCK_SIZE=16)
    got = flex_attention(q, k, v, block_mask=blocks, scale=0.3)
    dense = Flex(0.3, rule, (1, T, T), CPU, None, {}).dense(q, k, v)
    real = packed.tiles[-1].own.start  # positions of padding are all 0
    for out in (got, dense):
        torch.testing.assert_close(out[:, :, :real], expected[:, :, :real], rtol=1e-5, atol=1e-5)
