"""Rows for training: the held-out split, length-bucketed batches of fixed composition, and their order.

Letters: B rows, T positions.

Which rows form a batch never changes during a run; only the order of the batches does, from seed and epoch. So the
features of a batch are the same bits whether they are computed again or kept, and the place in the data is a function
of the step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from headway.data.dialogs import Dialog, conversation
from headway.heads.common.errors import HeadwayError

Supervise = Literal["answers", "all"]


@dataclass(frozen=True)
class Row:
    """A dialog cut to the longest length, and which of its tokens are goals."""

    id: str
    token_ids: list[int]
    supervised: list[bool]
    prompt: list[int]
    """The tokens before the first one the target emitted."""

    @property
    def num_goals(self) -> int:
        """Goals that have an anchor: the token after some feature's next token."""
        return sum(self.supervised[2:])


@dataclass
class Rows:
    """The rows of a run and what was left out of them."""

    train: list[Row]
    held_out: list[Row]
    num_cut: int = 0
    num_without_goal: int = 0


def make_rows(
    dialogs: Sequence[Dialog], max_length: int, eval_fraction: float, eval_rows: int, supervise: Supervise = "answers"
) -> Rows:
    """Return the rows of the dialogs, split by the hash of their id without its turn or part: a later turn repeats the
    earlier ones as its prompt, so a conversation is held out as a whole.

    With `supervise` "all" every token of a row to train on is a goal, prompts and template included: the teacher is the
    target's distribution there, which is as good after words it did not write. Held-out rows are judged by answers.

    Raises HeadwayError when nothing is left to train on.
    """
    kept, num_cut, num_without_goal = [], 0, 0
    for dialog in dialogs:
        num_cut += len(dialog.token_ids) > max_length
        first = dialog.spans[0][0] if dialog.spans else len(dialog.token_ids)
        row = Row(dialog.id, dialog.token_ids[:max_length], dialog.supervised()[:max_length], dialog.token_ids[:first])
        if row.num_goals:
            kept.append(row)
        else:
            num_without_goal += 1
    num_held_out = min(eval_rows, max(1, int(len(kept) * eval_fraction))) if eval_fraction else 0
    kept.sort(key=lambda row: (_hash(conversation(row.id)), row.id))
    of = [conversation(row.id) for row in kept]
    while 0 < num_held_out < len(kept) and of[num_held_out - 1] == of[num_held_out]:
        num_held_out += 1
    if len(kept) <= num_held_out:
        remedy = "lower eval_rows or eval_fraction (0 holds out none)" if kept else "raise max_length"
        raise HeadwayError(
            f"{len(dialogs)} dialogs give {len(kept)} rows with a supervised token in the first {max_length}, and "
            f"{num_held_out} are held out; make more with `headway distill`, or {remedy}"
        )
    train = kept[num_held_out:]
    if supervise == "all":
        train = [replace(row, supervised=[True] * len(row.token_ids)) for row in train]
    return Rows(train, kept[:num_held_out], num_cut, num_without_goal)


def make_batches(rows: Sequence[Row], tokens_per_batch: int) -> list[list[Row]]:
    """Return the rows in batches of like length, none of more than that many padded tokens unless of a single row."""
    batches: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: (len(row.token_ids), _hash(row.id))):
        # Rows come in ascending length, so the new one sets the width.
        if batches and len(row.token_ids) * (len(batches[-1]) + 1) <= tokens_per_batch:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


class Order:
    """Which batch is the n-th of a run: each epoch is a fresh permutation from the seed."""

    def __init__(self, num_batches: int, seed: int) -> None:
        self.num_batches, self.seed = num_batches, seed
        self._epoch, self._permutation = -1, [0]

    def __getitem__(self, n: int) -> int:
        epoch, place = divmod(n, self.num_batches)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(((self.seed << 20) + epoch) % (1 << 63))
            self._permutation = torch.randperm(self.num_batches, generator=generator).tolist()
            self._epoch = epoch
        return self._permutation[place]


def pad(rows: Sequence[Row], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return token_BT, length_B and supervised_BT of right-padded rows."""
    width = max(len(row.token_ids) for row in rows)
    token_BT = torch.zeros(len(rows), width, dtype=torch.long)
    supervised_BT = torch.zeros(len(rows), width, dtype=torch.bool)
    for b, row in enumerate(rows):
        size = len(row.token_ids)
        token_BT[b, :size] = torch.tensor(row.token_ids)
        supervised_BT[b, :size] = torch.tensor(row.supervised)
    length_B = torch.tensor([len(row.token_ids) for row in rows])
    return token_BT.to(device), length_B.to(device), supervised_BT.to(device)


def count_tokens(rows: Sequence[Row], vocab_size: int) -> Tensor:
    """Return how often each id is a goal, int64 [vocab_size]."""
    ids = [t for row in rows for t, goal in zip(row.token_ids, row.supervised, strict=True) if goal]
    return torch.bincount(torch.tensor(ids, dtype=torch.long), minlength=vocab_size)


def _hash(row_id: str) -> str:
    return hashlib.sha256(row_id.encode()).hexdigest()
