"""Looks a row's last tokens up in its text, and asks another drafter for the rows in which nothing is found."""

from __future__ import annotations

import torch

from headway.heads.common.protocol import State
from headway.inference.drafter import Ask, Committed, Drafter
from headway.inference.drafters.ngram import NgramDrafter, cut_to_pay, tree_of
from headway.inference.target import Target
from headway.inference.tree import Tree


class HybridDrafter(Drafter):
    """An n-gram drafter where it matches, `other` where not. A round in which every row matches costs no draft."""

    def __init__(self, other: Drafter, ngram: NgramDrafter | None = None) -> None:
        """`ngram` None looks for three tokens or four: two match too often by chance to stand in for a head."""
        self.other, self.ngram = other, ngram if ngram is not None else NgramDrafter(shortest=3)
        self.taps, self.targets = other.taps, other.targets

    def fit(self, target: Target) -> HybridDrafter:
        """Return the hybrid of what fits."""
        return HybridDrafter(self.other.fit(target), self.ngram.fit(target))

    def describe(self) -> str:
        """Return both texts."""
        return f"{self.ngram.describe()} or {self.other.describe()}"

    def start(self, committed: Committed, state: State | None, rows: int) -> State:
        """Have both take what is committed."""
        looked, others = (None, None) if state is None else state
        return self.ngram.start(committed, looked, rows), self.other.start(committed, others, rows)

    def propose(self, state: State, ask: Ask) -> tuple[Tree, State]:
        """Return the found chain of each row that has one, the other drafter's tree of the rest."""
        looked, others = state
        found = self.ngram.guesses(looked, ask)
        guesses = cut_to_pay(found, ask)
        if all(guesses):
            return tree_of(guesses, ask.root_B), state
        tree, others = self.other.propose(others, ask)
        guesses = cut_to_pay(found, ask, free=tree.token_BN.shape[1] - 1)
        return (_replaced(tree, guesses, ask.root_B) if any(guesses) else tree), (looked, others)

    def select_rows(self, state: State, kept: list[int]) -> State:
        """Ask both."""
        return self.ngram.select_rows(state[0], kept), self.other.select_rows(state[1], kept)

    def join_rows(self, state: State, other: State) -> State:
        """Ask both."""
        return self.ngram.join_rows(state[0], other[0]), self.other.join_rows(state[1], other[1])


def _replaced(tree: Tree, guesses: list[list[int]], root_B: torch.Tensor) -> Tree:
    """Return the tree with the guessed chains in their rows; shorter rows are padded from their last node with copies of the
    root, as `tree_of` does."""
    chains = tree_of(guesses, root_B)
    width = max(tree.token_BN.shape[1], chains.token_BN.shape[1])
    rows, parents, sizes = [], [], []
    for b, guess in enumerate(guesses):
        source = chains if guess else tree
        more = width - source.token_BN.shape[1]
        rows.append(torch.cat([source.token_BN[b], root_B[b].expand(more)]))
        size = len(source.parents[b])
        parents.append(source.parents[b] + list(range(size - 1, size - 1 + more)))
        sizes.append(source.size_B[b] if source.size_B is not None else size)
    padded = Tree.from_parents(torch.stack(rows), parents)
    padded.size_B = sizes
    return padded
