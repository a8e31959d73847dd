"""Drafts by looking the last tokens up in the text so far: prompt lookup. No weights, no features.

Where the last n tokens stood before, what followed then is proposed; the longest n that is found counts, and of equals the
newest place (transformers takes the oldest). How far a match is followed is learned while decoding: for each n, how often a
guess as deep as that was right.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from headway.heads.common.errors import HeadwayError
from headway.heads.common.protocol import State
from headway.inference.drafter import Ask, Committed, Drafter
from headway.inference.target import Target, pass_tokens
from headway.inference.tree import Tree

LEAST = 0.2
"""A guess is proposed while it is right at least so often; a node that is wrong more often costs more than it gives."""
USUAL = {1: 0.5, 2: 0.6, 3: 0.75}
"""How often one more guess is right, by the tokens that matched, before any was seen; more than three as three."""
WEIGHT = 6.0
"""Guesses that this belief counts for."""


@dataclass(frozen=True)
class Guess:
    """What a row's text suggests comes next."""

    tokens: list[int]
    shares: list[float]
    """Of each token, how often a guess as deep as that is right, and all before it."""


@dataclass
class Index:
    """Where in one row's text each run of tokens was last followed by something."""

    end: dict[tuple[int, ...], int] = field(default_factory=dict)
    """Run -> the place after it."""
    size: int = 0
    """Tokens that are indexed."""
    guess: list[int] = field(default_factory=list)
    matched: int = 0
    """Of the last proposal: its tokens, and how many had matched."""
    proposed_at: int = 0


class NgramDrafter(Drafter):
    """Proposes up to `depth` tokens that followed the last `longest` to `shortest` tokens before."""

    def __init__(self, depth: int = 10, longest: int = 4, shortest: int = 2) -> None:
        if depth < 1 or not 1 <= shortest <= longest:
            raise HeadwayError(
                f"an n-gram drafter needs depth >= 1 and 1 <= shortest <= longest; got depth={depth}, "
                f"longest={longest}, shortest={shortest}"
            )
        self.depth, self.longest, self.shortest = depth, longest, shortest
        # [right, tried] of each depth, by the tokens that matched, over all rows there were.
        self._seen = {n: [[0.0, 0.0] for _ in range(depth)] for n in range(shortest, longest + 1)}

    def fit(self, target: Target) -> NgramDrafter:
        """Return itself: it proposes chains, for any target."""
        return self

    def describe(self) -> str:
        """Return its settings."""
        return f"ngram:depth={self.depth},longest={self.longest},shortest={self.shortest}"

    def start(self, committed: Committed, state: State | None, rows: int) -> State:
        """Return an index per row; the text itself comes with each proposal."""
        return [Index() for _ in range(rows)] if state is None else state

    def propose(self, state: State, ask: Ask) -> tuple[Tree, State]:
        """Return a chain per row, as long as the longest that pays; a row without a match has the root alone."""
        return tree_of(cut_to_pay(self.guesses(state, ask), ask), ask.root_B), state

    def guesses(self, state: list[Index], ask: Ask) -> list[Guess]:
        """Return what each row's text suggests, nothing where nothing matched."""
        return [self._guess(index, history, ask.lossy) for index, history in zip(state, ask.histories, strict=True)]

    def select_rows(self, state: State, kept: list[int]) -> State:
        """Keep the indices of these rows."""
        return [state[b] for b in kept]

    def join_rows(self, state: State, other: State) -> State:
        """Append the other rows' indices."""
        return [*state, *other]

    def _guess(self, index: Index, history: list[int], lossy: bool) -> Guess:
        self._learn(index, history)
        sizes = range(self.shortest, self.longest + 1)
        # A run that ends the text has nothing after it yet.
        for end in range(index.size + 1, len(history)):
            for n in sizes:
                if end >= n:
                    index.end[tuple(history[end - n : end])] = end
        index.size = max(index.size, len(history) - 1)
        index.guess, index.proposed_at = [], len(history)
        shares: list[float] = []
        for n in reversed(sizes):
            at = index.end.get(tuple(history[-n:])) if len(history) >= n else None
            if at is not None:
                index.matched = n
                shares = self._shares(n, learned=not lossy)
                for d in range(len(shares)):
                    # What followed may run into the proposal itself: text that repeats goes on repeating.
                    index.guess.append(history[at + d] if at + d < len(history) else index.guess[at + d - len(history)])
                break
        return Guess(index.guess, shares)

    def _learn(self, index: Index, history: list[int]) -> None:
        """Count how far the last proposal was right."""
        came = history[index.proposed_at :]
        for d, token in enumerate(index.guess[: len(came)]):
            seen = self._seen[index.matched][d]
            seen[1] += 1
            if token != came[d]:
                return
            seen[0] += 1

    def _shares(self, n: int, learned: bool = True) -> list[float]:
        """Return how often a guess after a match of n is right to each depth, by what was learned, or else by the usual shares;
        it ends where that is less than LEAST."""
        shares, share = [], 1.0
        usual = USUAL[min(n, 3)]
        for right, tried in self._seen[n]:
            share *= (right + WEIGHT * usual) / (tried + WEIGHT) if learned else usual
            if share < LEAST:
                break
            shares.append(share)
        return shares


def cut_to_pay(guesses: list[Guess], ask: Ask, free: int = 0) -> list[list[int]]:
    """Return the guessed tokens of each row, cut to one depth: that which gains the rows most tokens for what the pass costs.

    A pass over B rows is as wide as its longest row and costs `pass_tokens` + B x width, so one row's long guess is paid by all.
    The first `free` tokens cost nothing, as the pass has that width already. Lossy acceptance takes all of every guess: there a
    row's answer may not depend on the rows beside it.
    """
    depth = max((len(guess.tokens) for guess in guesses), default=0)
    if not ask.lossy and depth > free:
        rows, fixed = len(guesses), pass_tokens(ask.root_B.device)

        def pays(width: int) -> float:
            gained = sum(sum(guess.shares[:width]) for guess in guesses)
            return (rows + gained) / (fixed + rows * (1 + width))

        depth = max(range(free, depth + 1), key=pays)
    return [guess.tokens[:depth] for guess in guesses]


def tree_of(guesses: list[list[int]], root_B: torch.Tensor) -> Tree:
    """Return the tree of one chain per row. Shorter ones are padded with copies of the root: a chain still, for targets that
    take nothing else."""
    width = max(map(len, guesses), default=0)
    parents = [list(range(-1, width)) for _ in guesses]
    if not width:
        return Tree.from_parents(root_B[:, None], parents)
    tokens = [row + [root] * (width - len(row)) for row, root in zip(guesses, root_B.tolist(), strict=True)]
    drafted_BN = torch.tensor(tokens, device=root_B.device, dtype=root_B.dtype)
    tree = Tree.from_parents(torch.cat([root_B[:, None], drafted_BN], 1), parents)
    tree.size_B = [1 + len(row) for row in guesses]
    return tree
