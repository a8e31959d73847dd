"""Verifies chains on a model's own cache, where that cannot drop what was rejected: recurrent and hybrid models.

Letters: B rows, N new tokens, P tokens that wait, F tap width, V vocabulary.

Each row has a cache that the model made and that holds committed tokens only. A chain runs on a copy of it. Accepted whole,
the copy becomes the row's cache; otherwise the copy is dropped, and the tokens that were accepted wait and run again at the
front of the next pass. So a round stays one pass, of at most `MOST_WAITING` tokens more, and one copy of the state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headway.heads.common.protocol import Tap

Run = Callable[[list[int], int, Any, int, Sequence[Tap]], tuple[Tensor, Tensor | None, Any]]
MOST_WAITING = 12
"""Accepted tokens that may wait; more are read at once, in a pass of their own."""


@dataclass
class _Row:
    """One row: the model's cache after `read` tokens, and what is committed beyond them."""

    cache: Any = None
    read: int = 0
    waiting: list[int] = field(default_factory=list)
    tried: Any = None
    tokens: list[int] = field(default_factory=list)
    """The cache after the last pass, and that pass's new tokens."""


class ReplayCache:
    """Stands where a SlotCache does; `slots` is itself. Rows run one after another."""

    def __init__(self, run: Run, rows: int) -> None:
        """`run(tokens, start, cache, keep, taps)` runs the model on its own cache; it returns the logits of the last `keep`
        tokens [1, keep, V], the features of all [1, P + N, F], and the cache, None where the model hands out none."""
        self._run = run
        self._rows = [_Row() for _ in range(rows)]
        self.capacity = 0

    @property
    def slots(self) -> ReplayCache:
        """What the decoder commits to."""
        return self

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self._rows)

    @property
    def length(self) -> list[int]:
        """Committed tokens of each row."""
        return [row.read + len(row.waiting) for row in self._rows]

    def forward(self, token_BN: Tensor, keep: int | Tensor, taps: Sequence[Tap]) -> tuple[Tensor, Tensor | None]:
        """Return logits [B, n, V] of the new tokens that `keep` names, as a model takes `logits_to_keep`, and features
        [B, N, F]. Each row is a chain; nothing is committed."""
        logits, features = [], []
        N = token_BN.shape[1]
        count = keep if isinstance(keep, int) and keep else N  # a long prompt needs the last token's logits, not all
        for row, tokens in zip(self._rows, token_BN.tolist(), strict=True):
            row.tokens = tokens
            # One token alone is the root, which is committed whatever comes after it: no copy is needed.
            cache = row.cache if N == 1 or row.cache is None else deepcopy(row.cache)
            logits_1NV, tap_1TF, row.tried = self._run([*row.waiting, *tokens], row.read, cache, count, taps)
            logits.append(logits_1NV)
            if tap_1TF is not None:
                features.append(tap_1TF[:, len(row.waiting) :])
        logits_BNV = torch.cat(logits)
        return logits_BNV[:, keep] if isinstance(keep, Tensor) else logits_BNV, torch.cat(
            features
        ) if features else None

    def commit(self, kept: list[list[int]]) -> None:
        """Keep the first tokens of each row's chain: `kept[b]` is 0, 1, ... without a gap."""
        for row, path in zip(self._rows, kept, strict=True):
            count = len(path)
            if count == len(row.tokens):
                row.read += len(row.waiting) + count
                row.cache, row.waiting = row.tried, []
            else:
                row.waiting = [*row.waiting, *row.tokens[:count]]
            row.tried, row.tokens = None, []
            if len(row.waiting) > MOST_WAITING:
                self._catch_up(row)

    def _catch_up(self, row: _Row) -> None:
        _, _, row.cache = self._run(row.waiting, row.read, row.cache, 1, ())
        row.read, row.waiting = row.read + len(row.waiting), []

    def append_rows(self, other: ReplayCache, rows: list[int], length: int | None = None) -> None:
        """Take copies of rows of another cache as the new last rows, whole."""
        assert length is None or all(other.length[b] == length for b in rows), "a recurrent state cannot be cut"
        if not any(row.read or row.waiting for row in self._rows):
            self._rows = []
        self._rows += [deepcopy(other._rows[b]) for b in rows]

    def keep_rows(self, order: list[int]) -> None:
        """Keep the rows of `order`, in that order."""
        self._rows = [self._rows[b] for b in order]
