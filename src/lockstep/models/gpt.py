"""A small GPT: a decoder-only transformer as GPT-2 has it (normalisation before each part, GELU, learned positions), for a CPU."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from lockstep.models.layers import Dropout

DEVIATION = 0.02


class Gpt(nn.Module):
    """Scores for the token that follows each one. With its defaults it is for ASCII text."""

    def __init__(
        self,
        vocabulary: int = 128,
        context: int = 64,
        width: int = 96,
        heads: int = 4,
        layers: int = 3,
        *,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width={width} does not divide by heads={heads}")
        self.context = context
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.layers = nn.Sequential(*(Layer(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                # What is added to the residual stream, twice in a layer, keeps its size with depth.
                scale = 1 / math.sqrt(2 * layers) if name.endswith("out.weight") else 1.0
                nn.init.normal_(parameter, std=DEVIATION * scale)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        if length > self.context:
            raise ValueError(f"sequences of {length} tokens, but model_args.context={self.context}")
        values = self.tokens(tokens) + self.positions(torch.arange(length, device=tokens.device))
        scores: torch.Tensor = self.head(self.norm(self.layers(values)))
        return scores


class Layer(nn.Module):
    """Attention to what came before, then two linear layers, each added to what goes in."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self._heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.wide = nn.Linear(width, 4 * width)
        self.wide_out = nn.Linear(4 * width, width)
        self.dropout1 = Dropout(dropout) if dropout else nn.Identity()
        self.dropout2 = Dropout(dropout) if dropout else nn.Identity()

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        samples, length, width = values.shape
        parts = self.queries(self.norm1(values)).view(samples, length, 3, self._heads, width // self._heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        found = found.transpose(1, 2).reshape(samples, length, width)
        values = values + self.dropout1(self.attention_out(found))
        wide = functional.gelu(self.wide(self.norm2(values)), approximate="tanh")
        result: torch.Tensor = values + self.dropout2(self.wide_out(wide))
        return result
