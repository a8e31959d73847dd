"""Rows, the held-out split, batches and their order."""

from __future__ import annotations

import pytest
import torch

from headway.data.dialogs import Dialog
from headway.heads.common.errors import HeadwayError
from headway.train.batches import Order, Supervise, count_tokens, make_batches, make_rows, pad

SUPERVISE: tuple[Supervise, Supervise] = ("all", "answers")


def dialog(i: int, size: int, start: int = 2) -> Dialog:
    return Dialog(f"id-{i}", list(range(size)), [(start, size)] if start < size else [], "stop")


def test_every_dialog_is_counted_once() -> None:
    dialogs = [dialog(i, 10 + i) for i in range(20)] + [dialog(30, 12, start=12), dialog(31, 30, start=25)]
    rows = make_rows(dialogs, max_length=20, eval_fraction=0.2, eval_rows=100)
    assert len(rows.train) + len(rows.held_out) + rows.num_without_goal == len(dialogs)
    assert rows.num_without_goal == 2  # one was answered by nobody, one is cut before its answer
    assert rows.num_cut == 10
    assert len(rows.held_out) == 4
    assert max(len(row.token_ids) for row in rows.train) <= 20


def test_the_split_does_not_depend_on_the_order() -> None:
    dialogs = [dialog(i, 10) for i in range(30)]
    split = {row.id for row in make_rows(dialogs, 20, 0.1, 10).held_out}
    assert {row.id for row in make_rows(dialogs[::-1], 20, 0.1, 10).held_out} == split
    assert len(split) == 3
    assert make_rows(dialogs, 20, 0.0, 10).held_out == []


def test_a_conversation_is_held_out_as_a_whole() -> None:
    """Its later turns have its earlier answers in their prompts, which are goals too with `all`."""
    ids = [f"talk-{i}{turn}" for i in range(10) for turn in ("", " turn 2", " turn 3")]
    ids += [f"text-{i} part {n}" for i in range(10) for n in (1, 2)]
    for eval_rows in range(1, 12):
        rows = make_rows([Dialog(i, list(range(9)), [(2, 9)], "stop") for i in ids], 20, 0.5, eval_rows, "all")
        held, trained = ({row.id.split(" ")[0] for row in part} for part in (rows.held_out, rows.train))
        assert not held & trained
        assert eval_rows <= len(rows.held_out) <= eval_rows + 2
        assert len(rows.held_out) + len(rows.train) == len(ids)


def test_all_tokens_of_training_rows_can_be_goals() -> None:
    dialogs = [dialog(i, 12, start=8) for i in range(20)]
    rows, answers = (make_rows(dialogs, 20, 0.2, 10, supervise) for supervise in SUPERVISE)
    assert all(all(row.supervised) for row in rows.train)
    assert sum(row.num_goals for row in rows.train) == 16 * 10
    assert rows.held_out == answers.held_out  # judged by what the target wrote, either way


def test_nothing_to_train_on_is_refused() -> None:
    with pytest.raises(HeadwayError, match="give 0 rows"):
        make_rows([dialog(0, 12, start=12)], 20, 0.0, 10)
    with pytest.raises(HeadwayError, match="1 are held out; make more .*, or lower eval_rows or eval_fraction"):
        make_rows([dialog(0, 12)], 20, 0.5, 10)


def test_batches_hold_the_budget_and_every_row_once() -> None:
    rows = make_rows([dialog(i, 5 + (7 * i) % 40) for i in range(50)], 100, 0.0, 1).train
    batches = make_batches(rows, 100)
    assert sorted(row.id for rows in batches for row in rows) == sorted(row.id for row in rows)
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(len(row.token_ids) for row in batch) <= 100


def test_a_long_row_is_a_batch_of_its_own() -> None:
    rows = make_rows([dialog(0, 300), dialog(1, 20), dialog(2, 20)], 400, 0.0, 1).train
    assert sorted(len(batch) for batch in make_batches(rows, 100)) == [1, 2]


def test_order_visits_every_batch_each_epoch_and_follows_the_seed() -> None:
    order = Order(7, seed=3)
    epochs = [[order[e * 7 + i] for i in range(7)] for e in range(3)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert [order[i] for i in range(7)] == epochs[0]  # going back gives the same
    assert [Order(7, seed=4)[i] for i in range(7)] != epochs[0]


def test_padding_is_no_goal() -> None:
    rows = make_rows([dialog(0, 9), dialog(1, 5)], 100, 0.0, 1).train
    token_BT, length_B, supervised_BT = pad(rows, torch.device("cpu"))
    assert token_BT.shape == (2, 9)
    for b, row in enumerate(rows):
        assert length_B[b] == len(row.token_ids)
        assert supervised_BT[b].sum() == len(row.token_ids) - 2
        assert not supervised_BT[b, length_B[b] :].any()


def test_only_goals_are_counted_for_the_draft_vocabulary() -> None:
    counts = count_tokens(make_rows([dialog(0, 6), dialog(1, 4)], 100, 0.0, 1).train, 10)
    assert counts.tolist() == [0, 0, 2, 2, 1, 1, 0, 0, 0, 0]
