"""A key-value cache whose tokens live in named slots.

Letters: L layers, B rows, H key heads, S slots, T new tokens, d head size.

A row's committed tokens fill slots 0..length-1, so a committed token's slot is its position; the tree being verified
sits in the slots after them. Rows differ in length; what lies beyond a row's length is garbage that the mask hides.
Nothing is concatenated: buffers are preallocated and double when they are full.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class _SlotLayer(CacheLayerMixin):
    """One decoder layer's view of the stacked buffers."""

    is_sliding = False
    is_croppable = False
    is_compileable = False

    def __init__(self, owner: SlotCache, index: int) -> None:
        super().__init__()
        self.owner = owner
        self.index = index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.owner.allocate(self.index, key_states, value_states)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self.owner.write(self.index, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.used, 0

    def get_seq_length(self) -> int:
        return max(self.owner.length, default=0)

    def get_max_length(self) -> int:
        return -1


class SlotCache(Cache):
    """Preallocated cache for `rows` ragged rows.

    `length[b]` is the number of committed tokens of row b. Before a forward, `place(T)` says that T new tokens of each row
    go to the slots length[b]..length[b]+T-1; `commit` keeps some of them.
    """

    def __init__(self, num_layers: int, rows: int, capacity: int = 256) -> None:
        super().__init__(layers=[_SlotLayer(self, i) for i in range(num_layers)])
        self.rows = rows
        self.capacity = capacity
        self.length: list[int] = [0] * rows
        self.used = 0
        # One stack [L, B, H, S, d] holds every layer of one shape, so that a commit is one copy, not one per layer.
        self.stacks: list[tuple[Tensor, Tensor]] = []
        self.view: dict[int, tuple[int, int]] = {}
        self._slot_BT: Tensor | None = None
        self._start: int | None = None

    def place(self, num_tokens: int, device: torch.device | str) -> None:
        """Name the slots of the next forward's tokens: the `num_tokens` after each row's committed ones."""
        self.used = max(self.length) + num_tokens
        if self.used > self.capacity:
            self._grow(self.used)
        if len(set(self.length)) == 1:
            self._start, self._slot_BT = self.length[0], None
        else:
            start_B = torch.tensor(self.length, device=device)
            self._start, self._slot_BT = None, start_B[:, None] + torch.arange(num_tokens, device=device)

    def allocate(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Give a layer its buffers, in the stack of its shape; the first layer makes a stack for all."""
        shapes = (key.shape[1], key.shape[3], value.shape[1], value.shape[3])
        if self.stacks:
            k, v = self.stacks[0]
            if (k.shape[2], k.shape[4], v.shape[2], v.shape[4]) == shapes:
                self.view[layer] = (0, layer)
                return
        depth = 1 if self.stacks else len(self.layers)
        k = key.new_zeros(depth, self.rows, key.shape[1], self.capacity, key.shape[3])
        v = value.new_zeros(depth, self.rows, value.shape[1], self.capacity, value.shape[3])
        self.view[layer] = (len(self.stacks), layer if depth > 1 or len(self.layers) == 1 else 0)
        self.stacks.append((k, v))

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new tokens of a layer; return all keys and values up to the highest slot in use, [B, H, S, d]."""
        stack, index = self.view[layer]
        k, v = self.stacks[stack][0][index, : self.rows], self.stacks[stack][1][index, : self.rows]
        if self._start is not None:
            end = self._start + key.shape[2]
            k[:, :, self._start : end] = key
            v[:, :, self._start : end] = value
        else:
            row_B1 = torch.arange(self.rows, device=key.device)[:, None]
            k[row_B1, :, self._slot_BT] = key.transpose(1, 2)
            v[row_B1, :, self._slot_BT] = value.transpose(1, 2)
        return k[:, :, : self.used], v[:, :, : self.used]

    def commit(self, kept: list[list[int]]) -> None:
        """Keep entries `kept[b]` (ascending) of the tokens just placed: move them behind the row's committed ones."""
        moves = [(b, path) for b, path in enumerate(kept) if path != list(range(len(path)))]
        if moves:
            device = self.stacks[0][0].device
            row = torch.tensor([b for b, path in moves for _ in path], device=device)
            source = torch.tensor([self.length[b] + i for b, path in moves for i in path], device=device)
            goal = torch.tensor([self.length[b] + i for b, path in moves for i in range(len(path))], device=device)
            for k, v in self.stacks:
                k[:, row, :, goal] = k[:, row, :, source]
                v[:, row, :, goal] = v[:, row, :, source]
        for b, path in enumerate(kept):
            self.length[b] += len(path)

    def append_row(self, other: SlotCache) -> None:
        """Take the single row of another cache of the same model as the new last row."""
        size = other.length[0]
        if not self.stacks:
            raise AssertionError("a cache takes rows after its first forward")
        if self.rows == self.stacks[0][0].shape[1]:
            self._reserve(max(2 * self.rows, 4))
        if size > self.capacity:
            self._grow(size)
        for (k, v), (ok, ov) in zip(self.stacks, other.stacks, strict=True):
            k[:, self.rows, :, :size] = ok[:, 0, :, :size]
            v[:, self.rows, :, :size] = ov[:, 0, :, :size]
        self.length.append(size)
        self.rows += 1

    def remove_rows(self, rows: list[int]) -> None:
        """Drop rows; those after them move up, in order."""
        kept = [b for b in range(self.rows) if b not in rows]
        longest = max((self.length[b] for b in kept), default=0)
        for goal, source in enumerate(kept):
            if goal != source:
                for k, v in self.stacks:
                    k[:, goal, :, :longest] = k[:, source, :, :longest]
                    v[:, goal, :, :longest] = v[:, source, :, :longest]
        self.length = [self.length[b] for b in kept]
        self.rows = len(kept)

    def _reserve(self, rows: int) -> None:
        """Make room for `rows` rows."""
        self.stacks = [
            tuple(torch.cat([t, t.new_zeros(t.shape[0], rows - t.shape[1], *t.shape[2:])], 1) for t in stack)  # type: ignore[misc]
            for stack in self.stacks
        ]

    def _grow(self, needed: int) -> None:
        capacity = max(2 * self.capacity, needed)
        grown = []
        for k, v in self.stacks:
            new_k = k.new_zeros(*k.shape[:3], capacity, k.shape[4])
            new_v = v.new_zeros(*v.shape[:3], capacity, v.shape[4])
            new_k[:, :, :, : self.capacity] = k
            new_v[:, :, :, : self.capacity] = v
            grown.append((new_k, new_v))
        self.stacks = grown
        self.capacity = capacity
