"""Shapes that are few: what a compiled pass runs in.

Letters: B rows, N new tokens, M uncommitted tokens, S slots, H key heads, d head size.

A compiled pass is made for one set of shapes, a CUDA graph for one set of addresses too. So the new tokens, the rows and the
slots of a pass are padded to a few sizes. What is padding sees itself and nothing else, and is cut off; it is written to slots
that are free.

A head drafts through `cached_pass` and `free_pass`; where its `static` is set, they are compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from headway.heads.common.slots import Pair, Slots, seen_slots

TOKENS = (1, 2, 4, 8, 16, 32, 64)
"""Sizes that new tokens are padded to. A pass of more, a prompt mostly, is not compiled."""

Outputs = tuple[Tensor, ...]
Run = Callable[[Callable[..., Outputs], tuple[Any, ...], tuple[int, ...]], Outputs]
"""run(function, arguments, cut) returns `function(*arguments)`, compiled, each output cut to the leading sizes `cut`."""


def token_bucket(count: int) -> int | None:
    """Return the size that many new tokens are padded to, or None for more than a compiled pass takes."""
    return next((size for size in TOKENS if size >= count), None)


def row_bucket(count: int) -> int:
    """Return the number of rows that many are padded to: the next power of two."""
    return 1 << max(0, count - 1).bit_length()


seen_bucket = row_bucket
"""Of uncommitted tokens."""


class Drafts(Protocol):
    """A head, as far as its passes are concerned."""

    static: Run | None


class Writes(Protocol):
    """What keeps the keys and values of layers: `Slots`, or `Placed` in a static pass."""

    def write(self, layer: int, key: Tensor, value: Tensor) -> Pair:
        """Store the keys and values of new tokens; return all that may be seen."""


def cached_pass(
    head: Drafts, forward: Callable[..., Outputs], slots: Slots, ancestor_BNM: Tensor, *inputs: Tensor
) -> Outputs:
    """Return what `forward(head, writes, seen_BNS, *inputs)` returns, each [B, N, ...], as each of the inputs is.

    The N new nodes of each row are the last of its M uncommitted ones; node n sees the row's committed tokens and the nodes m
    with ancestor_BNM[b, n, m]. `forward` is no closure: it is compiled once for each head and shape.
    """
    place = places(slots, ancestor_BNM) if head.static is not None else None
    if head.static is None or place is None:
        (N, M), device = ancestor_BNM.shape[1:], ancestor_BNM.device
        slots.place(N, device, offset=M - N)
        return forward(head, slots, seen_slots(slots.relative(device), ancestor_BNM), *inputs)
    whole = slots.whole(place.rows)
    buffers = [t for layer in range(slots.num_layers) for t in whole[layer]]
    padded = [filled(x, place.rows, place.tokens) for x in inputs]
    arguments = (forward, head, place.slot_BN, place.length_B, place.ancestor_BNM, len(buffers), *buffers, *padded)
    return head.static(_static_pass, arguments, tuple(ancestor_BNM.shape[:2]))


def _static_pass(
    forward: Callable[..., Outputs],
    head: Drafts,
    slot_BN: Tensor,
    length_B: Tensor,
    ancestor_BNM: Tensor,
    count: int,
    *tensors: Tensor,
) -> Outputs:
    placed = Placed({i: (tensors[2 * i], tensors[2 * i + 1]) for i in range(count // 2)}, slot_BN, length_B)
    return forward(head, placed, seen_slots(placed.relative(), ancestor_BNM), *tensors[count:])


def free_pass(head: Drafts, forward: Callable[..., Outputs], step: int, x_BND: Tensor) -> Tensor:
    """Return the one output of `forward(head, step, x_BND)`, [B, N, ...], where nodes see nothing but themselves."""
    B, N = x_BND.shape[:2]
    tokens = None if head.static is None else token_bucket(N)
    if head.static is None or tokens is None:
        return forward(head, step, x_BND)[0]
    return head.static(forward, (head, step, filled(x_BND, row_bucket(B), tokens)), (B, N))[0]


@dataclass
class Places:
    """Where a padded pass writes, and what it sees."""

    rows: int
    tokens: int
    """Sizes with padding."""
    slot_BN: Tensor
    length_B: Tensor
    """Committed tokens of each row; 0 of padding."""
    ancestor_BNM: Tensor
    """As `seen_slots` takes it."""


def places(slots: Slots, ancestor_BNM: Tensor) -> Places | None:
    """Return the padded places of N new tokens of each row, the last of its M uncommitted ones, after making room for them.

    None where the pass is too large to be padded, the slots are not in static sizes, or nothing was written yet: then there
    are no buffers.
    """
    B, N, M = ancestor_BNM.shape
    tokens = token_bucket(N)
    if tokens is None or not slots.static or not slots.stacks:
        return None
    rows, before, device = row_bucket(B), M - N, ancestor_BNM.device
    seen = seen_bucket(before + tokens)
    slots.make_room(max(slots.length) + before + tokens)
    length_B = torch.tensor(slots.length + [0] * (rows - B), device=device)
    slot_BN = length_B[:, None] + (torch.arange(tokens, device=device) + before)
    whole_BNM = _itself(rows, tokens, seen, before, device).clone()
    whole_BNM[:B, :N, :M] = ancestor_BNM
    return Places(rows, tokens, slot_BN, length_B, whole_BNM)


@functools.lru_cache(maxsize=256)
@torch.inference_mode()
def _itself(rows: int, tokens: int, seen: int, before: int, device: torch.device) -> Tensor:
    """Return what padding sees: bool [B, N, M], itself alone."""
    own_NM = torch.arange(seen, device=device) == torch.arange(tokens, device=device)[:, None] + before
    return own_NM.expand(rows, -1, -1).contiguous()


def filled(x: Tensor, *sizes: int) -> Tensor:
    """Return x with its leading axes padded with zeros to `sizes`, laid out in the one way that a compiled pass is made for."""
    whole_shape = (*sizes, *x.shape[len(sizes) :])
    strides, step = [], 1
    for size in reversed(whole_shape):
        strides.append(step)
        step *= size
    # A view leaves any stride at an axis of size 1.
    if x.shape == whole_shape and x.stride() == tuple(reversed(strides)):
        return x
    whole = x.new_zeros(whole_shape)
    whole[tuple(slice(size) for size in x.shape[: len(sizes)])] = x
    return whole


@dataclass
class Placed:
    """Stands for `Slots` in a static pass: whole buffers of layers, and the slots of the new tokens."""

    pairs: dict[int, Pair]
    slot_BN: Tensor
    length_B: Tensor
    """Committed tokens of each row; 0 of padding."""

    @property
    def used(self) -> int:
        """Slots that a query may see: all."""
        return next(iter(self.pairs.values()))[0].shape[2]

    @property
    def longest(self) -> Tensor:
        """Committed tokens of the longest row."""
        return self.length_B.max()

    def relative(self) -> Tensor:
        """Return [B, S], as `Slots.relative` does."""
        return torch.arange(self.used, device=self.length_B.device) - self.length_B[:, None]

    def write(self, layer: int, key: Tensor, value: Tensor) -> Pair:
        """Store the new tokens; return whole buffers."""
        row_B1 = torch.arange(self.slot_BN.shape[0], device=self.slot_BN.device)[:, None]
        for buffer_BHSd, new_BHNd in zip(self.pairs[layer], (key, value), strict=True):
            buffer_BHSd[row_B1, :, self.slot_BN] = new_BHNd.transpose(1, 2)
        return self.pairs[layer]
