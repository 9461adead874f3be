"""A model of your own: `dtt train -c examples/residual_values.yaml`."""

import torch.nn.functional as F
from torch import Tensor, nn

import dtt


class Block(nn.Module):
    """Attention and an MLP with squared ReLU; values are mixed with those of the first block."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(dim) for _ in range(2))

    def forward(self, x: Tensor, first: Tensor | None, context: dtt.Context) -> tuple[Tensor, ...]:
        """Return the stream [B, T, D], and the values of the first block."""
        parts = self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        # [B, T, D] becomes [B, heads, T, D / heads].
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        first = v if first is None else first
        attended = context.attend(q, k, (v + first) / 2)  # within documents
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(self.norms[1](x))).square()), first


class Decoder(dtt.Model):
    """A decoder with value residuals (arXiv 2410.17897) and learned positions."""

    def __init__(self, keys: "ValueResiduals", vocab_size: int, context: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, keys.dim)
        self.places = nn.Embedding(context, keys.dim)
        self.layers = nn.ModuleList(Block(keys.dim, keys.heads) for _ in range(keys.layers))
        self.norm = nn.RMSNorm(keys.dim)
        self.head = nn.Linear(keys.dim, vocab_size, bias=False)

    def hidden(self, tokens_BT: Tensor, context: dtt.Context) -> Tensor:
        """Return what the head is applied to, [B, T, D]."""
        x, first = self.embed(tokens_BT) + self.places(context.positions), None
        for layer in self.layers:
            x, first = layer(x, first, context)
        return self.norm(x)


class ValueResiduals(dtt.Family):
    """A decoder with value residuals and squared ReLU."""

    dim: int = 128
    """Width of the residual stream."""
    layers: int = 4
    """Number of blocks."""
    heads: int = 4
    """Number of heads."""

    def build(self, vocab_size: int, context: int) -> dtt.Model:
        """Return the model."""
        return Decoder(self, vocab_size, context)
