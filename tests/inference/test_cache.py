"""Slots against the plainest thing that does the same: a list of committed entries per row."""

from __future__ import annotations

import random

import pytest
import torch

from headway.heads.common.slots import Slots, seen_slots

SHAPES = {"one shape": [(2, 3)] * 3, "layers differ": [(2, 3), (1, 4), (2, 3)]}


class Lists:
    """What Slots is to do: `rows[b][p]` is the number that names the entry at position p of row b."""

    def __init__(self, rows: int) -> None:
        self.rows: list[list[int]] = [[] for _ in range(rows)]


class Pair:
    """A Slots and its twin, driven together; every entry written is a number of its own."""

    def __init__(
        self,
        shapes: list[tuple[int, int]],
        rows: int,
        counter: list[int],
        capacity: int = 4,
        static: bool = False,
    ) -> None:
        self.shapes, self.counter = shapes, counter
        self.slots, self.lists = Slots(len(shapes), rows, capacity, static), Lists(rows)

    def write(self, count: int, offset: int = 0) -> list[list[int]]:
        """Place and write `count` new entries per row in every layer; return their numbers."""
        rows = len(self.lists.rows)
        first = self.counter[0]
        self.counter[0] += rows * count
        number_BT = torch.arange(first, first + rows * count).view(rows, count)
        self.slots.place(count, "cpu", offset)
        for layer, (heads, width) in enumerate(self.shapes):
            entry = (number_BT + 0.25 * layer)[:, None, :, None].expand(rows, heads, count, width).double()
            keys, values = self.slots.write(layer, entry, -entry)
            self.check(layer, keys, values)
            for b, row in enumerate(self.lists.rows):
                at = len(row) + offset
                assert keys[b, :, at : at + count].equal(entry[b])
        return number_BT.tolist()

    def check(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        for b, row in enumerate(self.lists.rows):
            want = torch.tensor(row, dtype=torch.double) + 0.25 * layer
            for head in range(keys.shape[1]):
                assert keys[b, head, : len(row), -1].equal(want), (layer, b)
                assert values[b, head, : len(row), 0].equal(-want), (layer, b)

    def commit(self, numbers: list[list[int]], kept: list[list[int]]) -> None:
        self.slots.commit(kept)
        for row, new, path in zip(self.lists.rows, numbers, kept, strict=True):
            row += [new[i] for i in path]
        assert self.slots.length == [len(row) for row in self.lists.rows]


def some(rng: random.Random, count: int) -> list[int]:
    return sorted(rng.sample(range(count), rng.randint(0, count)))


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("seed", range(8))
def test_random_operations(shapes: list[tuple[int, int]], seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, counter = random.Random(seed), [1]
    monkeypatch.setattr("headway.heads.common.slots.SLOTS", 4)
    static = seed % 2 == 1
    pair, longest = Pair(shapes, 3, counter, static=static), 0
    for _ in range(150):
        count = rng.randint(1, 6)
        action = rng.choice(["round"] * 8 + ["drafts", "append", "remove"] * 3 + ["fork"])
        if action == "drafts":  # entries of two levels, the second behind the first, neither kept
            pair.write(count)
            pair.write(rng.randint(1, 4), offset=count)
        elif action == "append" and pair.slots.stacks and len(pair.lists.rows) < 6:
            other = Pair(shapes, rng.randint(1, 3), counter, capacity=rng.choice([2, 64]), static=static)
            numbers = other.write(count)
            other.commit(numbers, [some(rng, count) for _ in numbers])
            rows = sorted(rng.sample(range(len(numbers)), rng.randint(1, len(numbers))))
            pair.slots.append_rows(other.slots, rows)
            pair.lists.rows += [list(other.lists.rows[b]) for b in rows]
        elif action == "fork" and pair.slots.stacks:  # a new cache of copies, cut to a common beginning
            rows = rng.choices(range(len(pair.lists.rows)), k=rng.randint(1, 4))
            size = rng.choice([None, rng.randint(0, min(len(pair.lists.rows[b]) for b in rows))])
            fork = Pair(shapes, len(rows), counter, capacity=rng.choice([2, 64]), static=static)
            fork.slots.append_rows(pair.slots, rows, size)
            fork.lists.rows = [pair.lists.rows[b][:size] for b in rows]
            pair.write(2)  # must not reach the copies
            pair = fork
        elif action == "remove" and len(pair.lists.rows) > 1:
            gone = rng.sample(range(len(pair.lists.rows)), rng.randint(1, len(pair.lists.rows) - 1))
            order = [b for b in range(len(pair.lists.rows)) if b not in gone]
            if rng.random() < 0.5:  # the last rows fill the holes
                count = len(order)
                last = iter([b for b in order if b >= count])
                order = [b if b in order else next(last) for b in range(count)]
            pair.slots.keep_rows(order)
            pair.lists.rows = [pair.lists.rows[b] for b in order]
        else:
            numbers = pair.write(count)
            pair.commit(numbers, [some(rng, count) for _ in numbers])
        assert pair.slots.rows == len(pair.lists.rows)
        longest = max(longest, *map(len, pair.lists.rows))
    assert longest > 20


def test_the_twin_notices_a_lost_entry() -> None:
    pair = Pair([(1, 1)], 2, [1])
    pair.commit(pair.write(3), [[0, 2], [1]])
    pair.lists.rows[0].reverse()
    with pytest.raises(AssertionError):
        pair.write(1)


def test_relative_and_seen() -> None:
    slots = Slots(1, 2)
    slots.length = [3, 1]
    slots.place(2, "cpu")
    relative_BS = slots.relative("cpu")
    assert relative_BS.tolist() == [[-3, -2, -1, 0, 1], [-1, 0, 1, 2, 3]]
    ancestor_BNM = torch.tensor([[[True, False], [True, True]], [[True, False], [False, True]]])
    seen = [[[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]], [[1, 1, 0, 0, 0], [1, 0, 1, 0, 0]]]
    assert seen_slots(relative_BS, ancestor_BNM).int().tolist() == seen
