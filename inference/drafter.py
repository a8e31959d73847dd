"""The contract between the decoder and whatever proposes its trees: a head, a smaller model, the text itself.

Letters: B rows, T positions, F tap width.

The decoder verifies any tree of any drafter by the same rule, so a poor proposal costs time and never the answer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headway.heads.common.protocol import Context, Head, State, Tap
from headway.inference.draft import Draws, grow
from headway.inference.packed import pack
from headway.inference.target import Target
from headway.inference.tree import OFF, ByRows, Policy, Shape, Tree, chain, check_policy, each_shape


@dataclass
class Committed:
    """Newly committed positions of each row. Rows are ragged: entries at and beyond count_B[b] are padding."""

    token_BT: Tensor
    """The token at each position."""
    next_BT: Tensor
    """The token after it; for the newest entry that is the root."""
    position_BT: Tensor
    count_B: list[int]
    tap_BTF: Tensor | None
    """Features of the drafter's taps; None where it has none."""

    def row(self, b: int) -> Committed:
        """Return one row, without its padding."""
        count = self.count_B[b]
        return Committed(
            self.token_BT[b : b + 1, :count],
            self.next_BT[b : b + 1, :count],
            self.position_BT[b : b + 1, :count],
            [count],
            None if self.tap_BTF is None else self.tap_BTF[b : b + 1, :count],
        )

    @staticmethod
    def of_rows(rows: list[list[Committed]]) -> Committed:
        """Return rows as one, each given as its parts, which follow one another and have no padding."""
        count = [sum(part.count_B[0] for part in parts) for parts in rows]
        width = max(count)

        def padded(row: list[Tensor]) -> Tensor:
            whole_1T = torch.cat(row, 1)
            short = width - whole_1T.shape[1]
            return torch.cat([whole_1T, whole_1T.new_zeros(1, short, *whole_1T.shape[2:])], 1) if short else whole_1T

        taps = [[part.tap_BTF for part in parts if part.tap_BTF is not None] for parts in rows]
        return Committed(
            torch.cat([padded([part.token_BT for part in parts]) for parts in rows]),
            torch.cat([padded([part.next_BT for part in parts]) for parts in rows]),
            torch.cat([padded([part.position_BT for part in parts]) for parts in rows]),
            count,
            torch.cat([padded(row) for row in taps]) if all(taps) else None,
        )


@dataclass
class Ask:
    """What a tree is wanted for."""

    root_B: Tensor
    """The newest committed token of each row."""
    histories: list[list[int]]
    """Prompt and answer of each row so far, the root last. Not to be changed."""
    draws: Draws | None = None
    """The noise under which the target's tokens will be drawn, where there is any."""
    lossy: bool = False
    """Whether acceptance is: then a row's answer depends on what is proposed for it, and that must not depend on the other
    rows, on their number or on what was learned from them."""

    def shape(self, policy: Policy) -> Shape:
        """Return the policy's shape for these rows."""
        return policy.of(1 if self.lossy else len(self.histories)) if isinstance(policy, ByRows) else policy


class Drafter:
    """Base of all drafters. What it knows of a row is in the state that it returns, never in itself."""

    taps: tuple[Tap, ...] = ()
    """Target layers whose features it reads."""
    targets: tuple[Target, ...] = ()
    """Models of its own that it runs."""

    def fit(self, target: Target) -> Drafter:
        """Return the drafter as this target can verify it: one that proposes chains where the target takes no trees.

        Raises HeadwayError where it cannot draft for the target.
        """
        raise NotImplementedError

    def describe(self) -> str:
        """Return a short text of what it proposes."""
        raise NotImplementedError

    def start(self, committed: Committed, state: State | None, rows: int) -> State:
        """Return the state after newly committed tokens; `state` None begins `rows` empty rows."""
        raise NotImplementedError

    def propose(self, state: State, ask: Ask) -> tuple[Tree, State]:
        """Return each row's tree, its root first, and the state; nothing that is drafted is committed."""
        raise NotImplementedError

    def select_rows(self, state: State, kept: list[int]) -> State:
        """Return the state of the given rows, in that order (kept[b] >= b); the others are gone."""
        raise NotImplementedError

    def join_rows(self, state: State, other: State) -> State:
        """Return one state holding the rows of `state`, then those of `other`."""
        raise NotImplementedError


class HeadDrafter(Drafter):
    """A head, and the policy that shapes its trees."""

    def __init__(self, head: Head, policy: Policy) -> None:
        check_policy(policy, head.max_depth)
        self.head, self.policy = head, policy
        self.taps = head.config.taps

    def fit(self, target: Target) -> HeadDrafter:
        """Return it with its tree, or the chain of the tree's depth; compiled where the target is."""
        self.head.static = target.compiled.drafts(self.head) if target.compiled is not None else None
        return HeadDrafter(self.head, verifiable(self.policy, target))

    def describe(self) -> str:
        """Return the policy's text."""
        return self.policy.describe()

    def start(self, committed: Committed, state: State | None, rows: int) -> State:
        """Have the head absorb the features."""
        assert committed.tap_BTF is not None
        context = Context(committed.tap_BTF, committed.next_BT, committed.position_BT, committed.count_B)
        with pack(self.head):
            return self.head.start(context, state, rows)

    def propose(self, state: State, ask: Ask) -> tuple[Tree, State]:
        """Grow the policy's tree."""
        with pack(self.head):
            return grow(self.head, state, ask.shape(self.policy), ask.root_B, ask.draws)

    def select_rows(self, state: State, kept: list[int]) -> State:
        """Ask the head."""
        return self.head.select_rows(state, kept)

    def join_rows(self, state: State, other: State) -> State:
        """Ask the head."""
        return self.head.join_rows(state, other)


def verifiable(policy: Policy, target: Target) -> Policy:
    """Return the policy as a target can verify it: chains of its depths, where the target takes no trees."""
    if target.mode == "tree" or policy.is_chain:
        return policy
    return each_shape(policy, lambda shape: shape if shape.is_chain else chain(shape.depth))


def default_policy(head: Head) -> Policy:
    """Return the tree used when none is asked for: a chain of what the head drafts, at most 3."""
    return chain(min(3, head.max_depth or 3))


def as_drafter(head: Head | Drafter | None, policy: Policy | None = None) -> Drafter | None:
    """Return what proposes the trees: a head with its policy (None: the default), a drafter as it is, or None where
    nothing is drafted.

    Raises HeadwayError for a tree deeper than the head.
    """
    if head is None or isinstance(head, Drafter):
        return head
    drafter = HeadDrafter(head, policy if policy is not None else default_policy(head))
    # A head whose tree is off would read along and draft nothing.
    return None if drafter.policy == OFF else drafter
