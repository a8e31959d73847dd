"""Small parts of heads. Letters: B batch, T positions, D hidden."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ResidualBlock(nn.Module):
    """S x + SiLU(W x + b) for x of `num_inputs` vectors side by side; S is the identity for one, else a matrix.

    W and b begin as zero and S as what keeps the first vector, so that an untrained block changes nothing.
    """

    def __init__(self, width: int, num_inputs: int = 1) -> None:
        super().__init__()
        self.linear = nn.Linear(num_inputs * width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.skip = nn.Linear(num_inputs * width, width, bias=False) if num_inputs > 1 else nn.Identity()
        if isinstance(self.skip, nn.Linear):
            self.skip.weight.data = torch.eye(width, num_inputs * width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.skip(x) + F.silu(self.linear(x))
        return out


def after(value_BTD: Tensor, ahead: int) -> Tensor:
    """Return at position t what is at t + ahead (at least 1); zeros past the end."""
    T = value_BTD.shape[1]
    return F.pad(value_BTD[:, ahead:], (0, 0, 0, min(ahead, T)))[:, :T]
