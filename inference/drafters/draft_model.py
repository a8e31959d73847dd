"""Drafts with a smaller model of the same tokenizer.

Letters: B rows, N tokens of a pass, M drafted tokens so far.

Trees as a head grows them, greedy or following the noise (draft.py). Under sampling no draft probabilities enter the
acceptance: the token emitted is the target's own draw, and a draft that follows the same noise often holds it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headway.heads.common.errors import HeadwayError
from headway.heads.common.protocol import Frontier
from headway.heads.common.protocol import State as AnyState
from headway.inference.cache import SlotCache
from headway.inference.draft import grow
from headway.inference.drafter import Ask, Committed, Drafter, verifiable
from headway.inference.host import fetch
from headway.inference.target import Target
from headway.inference.tree import Policy, Tree, chain

WAITING = 32
"""Committed tokens of a row that may wait for the next draft, which reads them in its first pass."""


@dataclass
class State:
    """The draft model's cache, what it has not read yet, and what is drafted beyond its committed tokens."""

    cache: SlotCache
    waiting: list[list[int]]
    ancestor_BNM: Tensor | None = None
    position_BM: Tensor | None = None


class ModelDrafter(Drafter):
    """A model, loaded as a Target of its own, and the policy that shapes its trees."""

    draft_vocab: Tensor | None = None

    def __init__(self, model: Target, policy: Policy | None = None) -> None:
        """`policy` None is a chain of 4. Raises HeadwayError for a model whose cache is not understood."""
        if model.mode not in ("tree", "chain"):
            raise HeadwayError(
                f"{model.info.name} cannot draft: it runs in {model.mode} mode ({model.mode_reason}); use another model"
            )
        self.targets = (model,)
        self.model, self.policy = model, verifiable(policy if policy is not None else chain(4), model)

    def fit(self, target: Target) -> ModelDrafter:
        """Return it with its tree, or the chain of the tree's depth. Raises HeadwayError for another tokenizer or device."""
        ours, theirs = self.model.tokenizer, target.tokenizer
        if ours is not None and theirs is not None:
            same = ours.get_vocab() == theirs.get_vocab()
        else:
            same = self.model.info.num_tokens == target.info.num_tokens
        if not same:
            raise HeadwayError(
                f"{self.model.info.name} has another vocabulary than {target.info.name}; a draft model needs the target's "
                "tokenizer"
            )
        if self.model.device != target.device:
            raise HeadwayError(
                f"the draft model is on {self.model.device}, the target on {target.device}; load both on one device"
            )
        return ModelDrafter(self.model, verifiable(self.policy, target))

    def describe(self) -> str:
        """Return the policy's text."""
        return self.policy.describe()

    def start(self, committed: Committed, state: State | None, rows: int) -> State:
        """Take newly committed tokens: many are read now, a few wait for the next draft."""
        new = state is None
        if state is None:
            state = State(self.model.new_cache(rows, committed.token_BT.shape[1] + 256), [[] for _ in range(rows)])
        length = state.cache.slots.length
        pairs = zip(*fetch(committed.token_BT, committed.position_BT), committed.count_B, strict=True)
        for b, (tokens, positions, count) in enumerate(pairs):
            # The last draft read the root that it began with.
            have = length[b] + len(state.waiting[b])
            state.waiting[b] += [t for t, p in zip(tokens[:count], positions[:count], strict=True) if p >= have]
        # New rows are read at once: rows that join bring keys and values along.
        if new or max(map(len, state.waiting)) > WAITING:
            self._read(state)
        return state

    def propose(self, state: State, ask: Ask) -> tuple[Tree, State]:
        """Grow the policy's tree."""
        return grow(self, state, ask.shape(self.policy), ask.root_B, ask.draws)

    def step(self, state: State, frontier: Frontier) -> tuple[Tensor, State]:
        """Return logits [B, N, V] of the children of each frontier node, as a head's `step` does."""
        if frontier.depth == 0:
            for row, root in zip(state.waiting, frontier.token_BN[:, 0].tolist(), strict=True):
                row.append(root)
            return self._read(state)[:, None], state
        B, N = frontier.token_BN.shape
        device = frontier.token_BN.device
        itself = torch.eye(N, dtype=torch.bool, device=device).expand(B, -1, -1)
        start_B = torch.tensor(state.cache.slots.length, device=device)
        position_BN = (start_B[:, None] + frontier.depth - 1).expand(-1, N)
        if state.ancestor_BNM is None or state.position_BM is None:
            ancestor, before = itself, position_BN[:, :0]
        else:
            before = state.position_BM
            above = state.ancestor_BNM.gather(1, frontier.parent_BN[:, :, None].expand(-1, -1, before.shape[1]))
            ancestor = torch.cat([above, itself], dim=2)
        out = self.model.forward(
            frontier.token_BN.clamp(max=self.model.info.vocab_size - 1),
            position_BN,
            ancestor,
            state.cache,
            before_BM=before,
        )
        state.ancestor_BNM, state.position_BM = ancestor, torch.cat([before, position_BN], 1)
        return out.logits_BNV, state

    def _read(self, state: State) -> Tensor:
        """Run what waits; return the logits of each row's last token [B, V]."""
        slots, device = state.cache.slots, self.model.device
        count = [len(row) for row in state.waiting]
        width = max(count)
        # A vocabulary may be padded to different sizes: what the draft model has no row for is read as some other token.
        most = self.model.info.vocab_size - 1
        padded = [[min(token, most) for token in row] + [0] * (width - len(row)) for row in state.waiting]
        token_BN = torch.tensor(padded, device=device)
        position_BN = torch.tensor(slots.length, device=device)[:, None] + torch.arange(width, device=device)
        causal = torch.ones(width, width, dtype=torch.bool, device=device).tril().expand(len(padded), -1, -1)
        last = [max(0, n - 1) for n in count]
        ends = sorted(set(last))
        keep = torch.tensor(ends, device=device)
        out = self.model.forward(token_BN, position_BN, causal, state.cache, logits_to_keep=keep)
        slots.commit([list(range(n)) for n in count])
        state.waiting = [[] for _ in count]
        state.ancestor_BNM = state.position_BM = None
        return out.logits_BNV[torch.arange(len(last), device=device), [ends.index(n) for n in last]]

    def select_rows(self, state: AnyState, kept: list[int]) -> State:
        """Keep these rows of the cache."""
        state.cache.slots.keep_rows(kept)
        return State(state.cache, [state.waiting[b] for b in kept])

    def join_rows(self, state: AnyState, other: AnyState) -> State:
        """Append the other rows."""
        state.cache.slots.append_rows(other.cache.slots, list(range(other.cache.slots.rows)))
        return State(state.cache, [*state.waiting, *other.waiting])
