"""Keys and values in named slots: what the target's cache and a drafting layer's cache are made of.

Letters: L layers, B rows, H key heads, S slots, T new tokens, M drafted tokens, d head size.

A row's committed tokens fill slots 0..length-1, so a committed token's slot is its position; tokens not yet committed
sit in the slots after them. Rows differ in length; what lies beyond a row's length is garbage that the mask hides.
Nothing is concatenated: buffers are preallocated and double when they are full.
"""

from __future__ import annotations

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]
SLOTS = 256
"""Static slots come in multiples of it."""


def slot_bucket(count: int) -> int:
    """Return the number of slots that many are padded to: a multiple of SLOTS, at most half too many beyond 2 SLOTS.

    Each doubling has two sizes, so that a text that grows passes through few.
    """
    step = max(SLOTS, 1 << max(0, (count - 1).bit_length() - 2))
    return -(-max(1, count) // step) * step


class Slots:
    """Preallocated keys and values of `num_layers` layers for `rows` ragged rows.

    `length[b]` is the number of committed tokens of row b. Before a forward, `place(T)` says that T new tokens of each row
    go to the slots after the committed ones (and after `offset` others not yet committed); `commit` keeps some.

    With `static`, slots come in the few sizes of `slot_bucket`.
    """

    def __init__(self, num_layers: int, rows: int, capacity: int = 256, static: bool = False) -> None:
        self.num_layers = num_layers
        self.rows = rows
        self.static = static
        self.capacity = slot_bucket(capacity) if static else capacity
        self.length: list[int] = [0] * rows
        self.used = 0
        # One stack [L, B, H, S, d] holds every layer of one shape, so that a commit is one copy, not one per layer.
        self.stacks: list[Pair] = []
        self.view: dict[int, tuple[int, int]] = {}
        self._whole: tuple[int, list[Pair], dict[int, Pair]] | None = None
        self._slot_BT: Tensor | None = None
        self._start: int | None = None

    def place(self, num_tokens: int, device: torch.device | str, offset: int = 0) -> None:
        """Name the slots of the next `num_tokens` tokens: after each row's committed ones and `offset` more."""
        self.make_room(max(self.length) + offset + num_tokens)
        if len(set(self.length)) == 1:
            self._start, self._slot_BT = self.length[0] + offset, None
        else:
            start_B = torch.tensor(self.length, device=device) + offset
            self._start, self._slot_BT = None, start_B[:, None] + torch.arange(num_tokens, device=device)

    @property
    def longest(self) -> int:
        """Committed tokens of the longest row."""
        return max(self.length, default=0)

    def make_room(self, used: int) -> None:
        """Say that slots up to `used` are in use."""
        self.used = used
        if used > self.capacity:
            self._grow(used)

    def allocate(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Give a layer its buffers, in the stack of its shape; the first layer makes a stack for all."""
        shapes = (key.shape[1], key.shape[3], value.shape[1], value.shape[3])
        if self.stacks:
            k, v = self.stacks[0]
            if (k.shape[2], k.shape[4], v.shape[2], v.shape[4]) == shapes:
                self.view[layer] = (0, layer)
                return
        depth = 1 if self.stacks else self.num_layers
        k = key.new_zeros(depth, self.rows, key.shape[1], self.capacity, key.shape[3])
        v = value.new_zeros(depth, self.rows, value.shape[1], self.capacity, value.shape[3])
        self.view[layer] = (len(self.stacks), layer if depth > 1 or self.num_layers == 1 else 0)
        self.stacks.append((k, v))

    def write(self, layer: int, key: Tensor, value: Tensor) -> Pair:
        """Store the placed tokens of a layer; return all keys and values up to the highest slot in use, [B, H, S, d]."""
        if layer not in self.view:
            self.allocate(layer, key, value)
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

    def append_rows(self, other: Slots, rows: list[int], length: int | None = None) -> None:
        """Take copies of rows of another cache of the same model as the new last rows, in that order; a row may repeat.

        With `length`, only that many of each row's committed tokens.
        """
        if not self.stacks:
            self.stacks = [tuple(self._longer(t[:, :0, :, :0], self.capacity) for t in stack) for stack in other.stacks]  # type: ignore[misc]
            self.view = dict(other.view)
            self.rows, self.length = 0, []
        if self.rows + len(rows) > self.stacks[0][0].shape[1]:
            self._reserve(max(2 * self.rows, self.rows + len(rows)))
        sizes = [other.length[row] if length is None else length for row in rows]
        if max(sizes) > self.capacity:
            self._grow(max(sizes))
        for row, size in zip(rows, sizes, strict=True):
            for (k, v), (ok, ov) in zip(self.stacks, other.stacks, strict=True):
                k[:, self.rows, :, :size] = ok[:, row, :, :size]
                v[:, self.rows, :, :size] = ov[:, row, :, :size]
            self.length.append(size)
            self.rows += 1

    def keep_rows(self, order: list[int]) -> None:
        """Keep the rows of `order`, which become rows 0, 1, ...; the others are gone.

        A row may only move up, so that none is written over before it has moved: order[b] >= b.
        """
        assert all(source >= goal for goal, source in enumerate(order)), order
        longest = max((self.length[b] for b in order), default=0)
        for goal, source in enumerate(order):
            if goal != source:
                for k, v in self.stacks:
                    k[:, goal, :, :longest] = k[:, source, :, :longest]
                    v[:, goal, :, :longest] = v[:, source, :, :longest]
        self.length = [self.length[b] for b in order]
        self.rows = len(order)

    def whole(self, rows: int) -> dict[int, Pair]:
        """Return the keys and values of each layer, [B, H, S, d] with all slots, in buffers of that many rows at least."""
        if self.stacks[0][0].shape[1] < rows:
            self._reserve(rows)
        if self._whole is None or self._whole[0] != rows or self._whole[1] is not self.stacks:
            pairs = {}
            for layer, (stack, index) in self.view.items():
                k, v = (t[index, :rows] for t in self.stacks[stack])
                # A CUDA graph reads these where they lie; without a guard a new address means a new graph, no new code.
                torch._dynamo.mark_static_address(k, guard=False)
                torch._dynamo.mark_static_address(v, guard=False)
                pairs[layer] = (k, v)
            self._whole = (rows, self.stacks, pairs)
        return self._whole[2]

    def _reserve(self, rows: int) -> None:
        """Make room for `rows` rows."""
        self.stacks = [
            tuple(torch.cat([t, t.new_zeros(t.shape[0], rows - t.shape[1], *t.shape[2:])], 1) for t in stack)  # type: ignore[misc]
            for stack in self.stacks
        ]

    def _grow(self, needed: int) -> None:
        """Make every row hold at least `needed` slots; doubles, so that growth is rare."""
        capacity = slot_bucket(needed) if self.static else max(2 * self.capacity, needed)
        self.stacks = [tuple(self._longer(t, capacity) for t in stack) for stack in self.stacks]  # type: ignore[misc]
        self.capacity = capacity

    @staticmethod
    def _longer(t: Tensor, capacity: int) -> Tensor:
        grown = t.new_zeros(*t.shape[:3], capacity, t.shape[4])
        grown[:, :, :, : t.shape[3]] = t
        return grown

    def relative(self, device: torch.device | str) -> Tensor:
        """Return [B, S]: for each slot in use, its index among the row's uncommitted slots; negative where committed."""
        length_B = torch.tensor(self.length, device=device)
        return torch.arange(self.used, device=device) - length_B[:, None]


def seen_slots(relative_BS: Tensor, ancestor_BNM: Tensor) -> Tensor:
    """Return bool [B, N, S]: query n sees every committed slot, and uncommitted slot m where ancestor_BNM[b, n, m]."""
    N, M = ancestor_BNM.shape[1:]
    index_BS = relative_BS.clamp(0, M - 1)
    new_BS = (relative_BS >= 0) & (relative_BS < M)
    return (ancestor_BNM.gather(2, index_BS[:, None].expand(-1, N, -1)) & new_BS[:, None]) | (relative_BS < 0)[:, None]
