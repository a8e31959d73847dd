"""The draft vocabulary and its maps."""

from __future__ import annotations

import pytest
import torch

from headway.heads.common.errors import HeadwayError
from headway.heads.common.vocab import choose_draft_vocab, from_d2t, to_d2t, to_t2d


def counts(vocab_size: int, **seen: int) -> torch.Tensor:
    value = torch.zeros(vocab_size, dtype=torch.int64)
    for name, count in seen.items():
        value[int(name[1:])] = count
    return value


def test_offsets_by_hand() -> None:
    ids = choose_draft_vocab(counts(16, t5=9, t7=4, t8=8, t11=2, t13=1), 6, 16, always_keep=[0, 2])
    assert ids.tolist() == [0, 2, 5, 7, 8, 11]
    assert to_d2t(ids).tolist() == [0, 1, 3, 4, 4, 6]
    assert to_d2t(ids).dtype == torch.int64
    assert from_d2t(to_d2t(ids)).equal(ids)
    mask = to_t2d(ids, 16)
    assert mask.dtype == torch.bool
    assert mask.nonzero()[:, 0].equal(ids)


def test_a_small_corpus_is_filled_with_unseen_ids() -> None:
    seen = torch.zeros(272, dtype=torch.int64)
    seen[65:85] = torch.arange(1, 21)
    ids = choose_draft_vocab(seen, 128, 264)
    assert ids.numel() == ids.unique().numel() == 128
    assert set(range(65, 85)) <= set(ids.tolist())
    assert to_t2d(ids, 272).sum() == 128


def test_padding_rows_of_the_lm_head_are_never_chosen() -> None:
    ids = choose_draft_vocab(counts(272, t270=50, t3=1), 264, 264, always_keep=[271])
    assert ids.tolist() == list(range(264))


def test_ties_go_to_the_lowest_id() -> None:
    assert choose_draft_vocab(torch.ones(10), 3, 10).tolist() == [0, 1, 2]


@pytest.mark.parametrize(("size", "keep", "named"), [(265, (), "264"), (0, (), "264"), (2, (1, 2, 3), "3 ids")])
def test_impossible_sizes_are_refused(size: int, keep: tuple[int, ...], named: str) -> None:
    with pytest.raises(HeadwayError, match=named):
        choose_draft_vocab(torch.ones(272), size, 264, keep)
