"""A small causal transformer over bytes: no tokenizer to fetch, nothing to tune."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PADDING = 256  # the one token that is not a byte; never a target
NUM_TOKENS = 257


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual stream after this block."""
        x = x + self.attend(self.attention_norm(x))
        return x + self.feed_forward(x)

    def attend(self, x: Tensor) -> Tensor:
        """Return what each position takes from those before it."""
        # (batch, time, width) -> 3 x (batch, heads, time, width of a head)
        query, key, value = (
            self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.projection(mixed.transpose(1, 2).flatten(2))


class ByteTransformer(nn.Module):
    """Predicts the next byte of each position."""

    def __init__(self, *, width: int, num_layers: int, num_heads: int, context: int) -> None:
        super().__init__()
        self.token = nn.Embedding(NUM_TOKENS, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, NUM_TOKENS, bias=False)
        self.head.weight = self.token.weight
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)

    def forward(self, rows: Tensor) -> Tensor:
        """Return the loss of a batch of token rows of length ``context + 1``."""
        inputs, targets = rows[:, :-1], rows[:, 1:]
        hidden = self.token(inputs) + self.position.weight[: inputs.shape[1]]
        logits = self.head(self.norm(self.blocks(hidden)))
        losses = F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=PADDING
        ).view_as(targets)
        num_targets = (targets != PADDING).sum(1).clamp(min=1)
        # A mean of each sample, then over samples: so the mean over ranks is that of the whole
        # global batch, however it is divided.
        return (losses.sum(1) / num_targets).mean()


def tokens(text: bytes, *, length: int) -> Tensor:
    """Return the first bytes of a text as int64 tokens, padded to ``length``."""
    row = torch.full((length,), PADDING)
    data = text[:length]
    row[: len(data)] = torch.tensor(list(data))
    return row
