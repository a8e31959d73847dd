"""The draft vocabulary: which target ids a head can propose, and the two maps other runtimes read.

draft id d:      0   1   2   3   4   5
target id:       0   2   5   7   8   11        sorted
d2t[d]:          0   1   3   4   4   6         offsets: target id = d + d2t[d]
t2d[target id]:  whether the id is in the draft vocabulary
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from headway.heads.common.errors import HeadwayError


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
