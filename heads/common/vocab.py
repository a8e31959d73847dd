"""The draft vocabulary: which target ids a head can propose, and the two maps other runtimes read.

draft id d:      0   1   2   3   4   5
target id:       0   2   5   7   8   11        sorted
d2t[d]:          0   1   3   4   4   6         offsets: target id = d + d2t[d]
t2d[target id]:  whether the id is in the draft vocabulary

A head keeps its draft vocabulary as plain ids (`IdsHead`), or as the two maps (`MapsHead`), whatever its family.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from headway.heads.common.errors import HeadwayError
from headway.heads.common.protocol import Head


def choose_draft_vocab(counts: Tensor, size: int, num_tokens: int, always_keep: Iterable[int] = ()) -> Tensor:
    """Return `size` sorted target ids: `always_keep`, then the most frequent; ties and unseen ids go by lowest id.

    `counts[id]` says how often the target emitted an id. Ids from `num_tokens` on are padding rows of the LM head and
    are never chosen. Raises HeadwayError when there are not that many tokens, or more to keep than room.
    """
    kept = sorted({int(i) for i in always_keep if 0 <= int(i) < num_tokens})
    if size < 1 or size > num_tokens:
        raise HeadwayError(
            f"draft_vocab_size is {size}, the tokenizer has {num_tokens} tokens; "
            f"set head.draft_vocab_size to 1..{num_tokens}"
        )
    if len(kept) > size:
        raise HeadwayError(
            f"draft_vocab_size is {size}, but {len(kept)} ids must be kept; "
            f"set head.draft_vocab_size to {len(kept)} or more"
        )
    rank = torch.zeros(num_tokens, dtype=torch.int64)
    seen = counts[:num_tokens].to(torch.int64)
    rank[: seen.numel()] = seen
    rank[kept] = torch.iinfo(torch.int64).max
    return rank.argsort(descending=True, stable=True)[:size].sort().values


def to_d2t(ids: Tensor) -> Tensor:
    """Return the int64 offsets of sorted target ids: draft id + offset = target id."""
    ids = ids.to(torch.int64)
    return ids - torch.arange(ids.numel(), device=ids.device)


def from_d2t(d2t: Tensor) -> Tensor:
    """Return the target ids that offsets stand for."""
    return d2t + torch.arange(d2t.numel(), device=d2t.device)


def to_t2d(ids: Tensor, vocab_size: int) -> Tensor:
    """Return bool [vocab_size]: which target ids are in the draft vocabulary."""
    mask = torch.zeros(vocab_size, dtype=torch.bool, device=ids.device)
    mask[ids.to(torch.int64)] = True
    return mask


class IdsHead(Head):
    """A head whose draft vocabulary, if it has one, is the buffer `vocab_ids`."""

    def add_vocab(self, size: int) -> None:
        """Register a draft vocabulary of that many words; none for 0. The first ids stand there until it is chosen."""
        if size:
            self.register_buffer("vocab_ids", torch.arange(size))

    @property
    def draft_vocab(self) -> Tensor | None:
        """Target ids of the draft vocabulary [V], or None."""
        return getattr(self, "vocab_ids", None)

    def set_draft_vocab(self, target_ids: Tensor) -> None:
        """Take the draft vocabulary: sorted target ids."""
        if self.draft_vocab is not None:
            self.draft_vocab.copy_(target_ids)


class MapsHead(Head):
    """A head whose draft vocabulary, if it has one, is the buffers `d2t` and `t2d`, as EAGLE-3 heads have everywhere."""

    def add_vocab(self, size: int) -> None:
        """Register a draft vocabulary of that many words; none for 0. The first ids stand there until it is chosen."""
        if size:
            self.register_buffer("d2t", torch.zeros(size, dtype=torch.long))
            self.register_buffer("t2d", torch.zeros(self.config.vocab_size, dtype=torch.bool))
            self.set_draft_vocab(torch.arange(size))

    @property
    def draft_vocab(self) -> Tensor | None:
        """Target ids of the draft vocabulary [V], or None."""
        d2t = getattr(self, "d2t", None)
        return None if d2t is None else from_d2t(d2t)

    def set_draft_vocab(self, target_ids: Tensor) -> None:
        """Take the draft vocabulary: sorted target ids."""
        if getattr(self, "d2t", None) is not None:
            self.d2t.copy_(to_d2t(target_ids))  # type: ignore[operator]
            self.t2d.copy_(to_t2d(target_ids, self.config.vocab_size))  # type: ignore[operator]
