"""Decodes: the plain twin, one token per pass, and the loop that drafts, verifies and commits.

Letters: B rows, T prompt positions, N tree nodes, F tap width, V vocabulary.

A round, for every row at once:

    draft    a drafter, a head mostly, proposes a tree below the root (the newest committed token)
    verify   the target runs root and tree in one pass
    accept   a rule keeps a path and emits one more token
    commit   the cache keeps the path; the drafter is given it, with the features; the last emitted token is the next root
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import islice
from os.path import commonprefix
from typing import Any

import torch
from torch import Tensor
from transformers import MinNewTokensLengthLogitsProcessor

from headway.heads.common.errors import HeadwayError
from headway.heads.common.protocol import Head, State, Tap
from headway.inference.cache import SlotCache
from headway.inference.draft import Draws
from headway.inference.drafter import Ask, Committed, Drafter, as_drafter
from headway.inference.economy import Economy
from headway.inference.host import clock, fetch
from headway.inference.sampling import Settings, check_chosen, choose, process
from headway.inference.target import Target, pass_tokens
from headway.inference.tree import Policy, Tree
from headway.inference.verify import walk_exact, walk_exact_rows, walk_greedy, walk_typical


@dataclass
class Request:
    """One prompt to be answered."""

    prompt_ids: list[int]
    settings: Settings = field(default_factory=Settings)
    id: Any = 0
    key: int = 0
    """With the seed, names this row's noise; two requests of one seed and key draw the same numbers."""
    ends: Callable[[list[int]], bool] | None = None
    """Asked after each emitted token, with the prompt and all tokens so far, whether the answer ends there."""


@dataclass
class Result:
    """An answer, and what it took."""

    id: Any
    token_ids: list[int]
    """The emitted tokens, the end token included when one was emitted."""
    finish_reason: str
    """`stop` (an end id), `stop_string`, `length` (max_new_tokens), `context` (the target's positions ran out) or `asked`
    (by the request's `ends`)."""
    rounds: int
    """Target passes after the prefill."""
    accepted_per_round: list[int]
    """Tokens emitted in each round, bonus included."""
    feature_TF: Tensor | None = None
    """What `record` asked for: bfloat16, at every position but the last token's, which the target never read."""
    text: str | None = None
    """The tokens as text, where a `Generator` of a target with a tokenizer answered: without the end token, cut before
    a stop string."""

    @property
    def new_tokens(self) -> int:
        """Number of emitted tokens."""
        return len(self.token_ids)

    @property
    def accepted_length(self) -> float:
        """Emitted tokens per target pass after the prefill (which emits the first token); 1 when there was none."""
        return sum(self.accepted_per_round) / self.rounds if self.rounds else 1.0


@dataclass
class Times:
    """Where the seconds of the rounds went."""

    draft: float = 0.0
    verify: float = 0.0
    other: float = 0.0
    rounds: int = 0
    drafted: int = 0
    """Rounds that drafted."""
    on: bool = True

    def clear(self) -> None:
        """Begin at nothing."""
        self.draft = self.verify = self.other = 0.0
        self.rounds = self.drafted = 0

    def add(self, more: Times) -> None:
        """Count what another counted."""
        self.draft += more.draft
        self.verify += more.verify
        self.other += more.other
        self.rounds += more.rounds
        self.drafted += more.drafted


def plain(
    target: Target,
    prompt_ids: list[int],
    settings: Settings,
    key: int = 0,
    ends: Callable[[list[int]], bool] | None = None,
) -> list[int]:
    """Return the new tokens of one prompt, by one stock forward per token on the model's own cache.

    The reference that everything else is compared with; it shares only the choice of a token with the fast path.
    """
    row = _Row(Request(prompt_ids, settings, key=key, ends=ends), target)
    for _ in _plain_tokens(target, row):
        pass
    return row.emitted


def check(target: Target, request: Request) -> None:
    """Raise the HeadwayError that `generate` would raise for the request, if any, before it is asked."""
    _Row(request, target)


@torch.inference_mode()
def _plain_tokens(target: Target, row: _Row) -> Iterator[int]:
    """Emit the row's tokens, and yield each."""
    tokens, cache = row.history, None
    while True:
        logits_1NV, cache = target.own_pass(tokens, len(row.history) - len(tokens), cache)
        score = process(logits_1NV[0, -1], row.settings, row.history)
        yield from row.emit([choose(score, row.settings, row.request.key, len(row.history))])
        if row.finish_reason:
            return
        # A model that hands out no cache reads everything again.
        tokens = row.emitted[-1:] if cache is not None else row.history


def generate(
    target: Target,
    requests: Iterable[Request | None],
    *,
    head: Head | Drafter | None = None,
    policy: Policy | None = None,
    batch_size: int = 1,
    on_tokens: Callable[[Request, list[int]], None] | None = None,
    times: Times | None = None,
    observe: Callable[[Tree, list[list[int]]], None] | None = None,
    record: Sequence[Tap] = (),
    economy: Economy | None = None,
) -> Iterator[Result]:
    """Yield one Result per request, in the order they finish.

    Up to `batch_size` rows run together; a row that ends makes room for the next request. Rows do not influence one
    another. `head` is a head with its `policy`, or another drafter; without one each round commits one token. `on_tokens`
    is called with each row's new tokens as they are committed. `times`, if given, is filled; `observe` is called with each
    round's tree and accepted paths. `record` names taps whose features come with each result; not together with a head,
    and a target in plain mode gives none. `economy` turns drafting off where it does not pay; without it every round drafts.

    `requests` may be an iterator that is fed while rows run: it is asked whenever there is room, and yields None for none at
    the moment. Then the rows that run go on and it is asked again after the next round, or at once where no row runs, so
    that it may wait there. It ends when no request will come any more.

    Raises HeadwayError for an empty prompt, one that does not fit the target's context, a tree the head cannot draft, or a
    batch_size below 1.
    """
    if batch_size < 1:
        raise HeadwayError(f"batch_size is {batch_size}; it must be at least 1")
    assert head is None or not record, "features are recorded without a head"
    drafter = as_drafter(head, policy)
    if target.mode == "plain":
        yield from _plain_rows(target, requests, on_tokens)
        return
    drafter = None if drafter is None else drafter.fit(target)
    batch = _Batch(target, drafter, on_tokens, times, observe, record, economy)
    waiting, more = iter(requests), True
    while more or batch.rows:
        free = batch_size - len(batch.rows)
        # A prefill reads all weights, for one row as for many: a large batch lets a few rows wait for one another.
        entering: list[Request] = []
        if more and (free >= max(1, batch_size // 16) or not batch.rows):
            entering, more = _entering(waiting, free)
        # A recurrent state cannot drop padding, so there each prompt is read by itself.
        alone = target.mode == "replay"
        groups = [[r] for r in entering] if alone else _like_length(entering, pass_tokens(target.device))
        for group in groups:
            yield from batch.admit(group)
        if batch.rows:
            yield from batch.round()


def _entering(waiting: Iterator[Request | None], free: int) -> tuple[list[Request], bool]:
    """Return the requests that are there, at most `free` of them, and whether more may come."""
    entering: list[Request] = []
    for request in islice(waiting, free):
        if request is None:
            return entering, True
        entering.append(request)
    return entering, 0 < free == len(entering)


@torch.inference_mode()
def branches(
    target: Target, prompt_ids: list[int], settings: Settings, keys: Sequence[int], drafter: Drafter
) -> list[Result]:
    """Return the answers to one prompt under each key, as `generate` would; the prompt is read once for all of them.

    Every token is drawn in a round, the first one too: the last token of the prompt, of two at least, is the root. Each
    result's `id` is its place in `keys`.
    """
    assert len(prompt_ids) > 1, "the root and something before it"
    if target.mode == "plain":
        return list(_plain_rows(target, [Request(prompt_ids, settings, n, key) for n, key in enumerate(keys)], None))
    drafter = drafter.fit(target)
    before, root = prompt_ids[:-1], prompt_ids[-1]

    def only_root(ids: Tensor, score_1V: Tensor) -> Tensor:
        return torch.full_like(score_1V, -torch.inf).index_fill(1, torch.tensor([root], device=score_1V.device), 0.0)

    longer = replace(settings, max_new_tokens=settings.max_new_tokens + 1)
    batch = _Batch(target, drafter, None, None, None, ())
    list(batch.admit([Request(before, replace(longer, eos_ids=(), stop=(), processors=(only_root,)))]))
    assert batch.cache is not None, "the context has room for a token"
    batch._catch_up()
    wide = target.new_cache(len(keys), capacity=batch.cache.slots.capacity)
    wide.slots.append_rows(batch.cache.slots, [0] * len(keys))
    batch.cache, copies = wide, 1
    while copies < len(keys):
        batch.state = drafter.join_rows(batch.state, deepcopy(batch.state))
        copies *= 2
    batch.state, batch.read = drafter.select_rows(batch.state, list(range(len(keys)))), len(keys)
    batch.rows = [_Row(Request(before, longer, id=n, key=key), target) for n, key in enumerate(keys)]
    for row in batch.rows:
        row.emit([root])
        row.finish_reason = ""  # an end id in the prompt ends nothing
    answers: dict[int, Result] = {}
    while batch.rows:
        answers |= {result.id: replace(result, token_ids=result.token_ids[1:]) for result in batch.round()}
    return [answers[n] for n in range(len(keys))]


MOST_BEHIND = 8192
"""Tokens of all rows that a drafter may be behind while it does not draft; their features are kept for it."""
PREFILL_TOKENS = 2048
"""Most prompt tokens prefilled in one pass."""


def _like_length(requests: list[Request], pass_tokens: int) -> list[list[Request]]:
    """Return the requests in groups to be prefilled in one padded pass each, longest prompts first.

    Of all ways to cut the sorted requests, the one that costs least: a pass costs its padded tokens and `pass_tokens` more.
    The longest come first, so that the cache that the first group leaves is long enough for the others.
    """
    ordered = sorted(requests, key=lambda request: len(request.prompt_ids))
    size = [len(request.prompt_ids) for request in ordered]
    # best[n]: the least cost of the first n requests, and where their last group begins.
    best: list[tuple[int, int]] = [(0, 0)]
    for n in range(1, len(ordered) + 1):
        fits = [m for m in range(n) if m == n - 1 or (n - m) * size[n - 1] <= PREFILL_TOKENS]
        best.append(min((best[m][0] + (n - m) * size[n - 1] + pass_tokens, m) for m in fits))
    groups = []
    while ordered:
        begin = best[len(ordered)][1]
        groups.append(ordered[begin:])
        del ordered[begin:]
    return groups


def _plain_rows(
    target: Target, requests: Iterable[Request | None], on_tokens: Callable[[Request, list[int]], None] | None
) -> Iterator[Result]:
    for request in requests:
        if request is None:
            continue
        row = _Row(request, target)
        for token in _plain_tokens(target, row):
            if on_tokens:
                on_tokens(request, [token])
        row.accepted = [1] * (len(row.emitted) - 1)
        yield row.result()


def _with_minimum(request: Request, target: Target) -> Settings:
    """Return the request's settings, its `min_new_tokens` made a processor."""
    settings = request.settings
    eos = list(target.eos_ids if settings.eos_ids is None else settings.eos_ids)
    if not settings.min_new_tokens or not eos:
        return settings
    minimum = MinNewTokensLengthLogitsProcessor(
        len(request.prompt_ids), settings.min_new_tokens, eos, device=str(target.device)
    )
    return replace(settings, processors=(minimum, *settings.processors), min_new_tokens=0)


class _Row:
    """A request under way: what it has emitted and whether it is done."""

    def __init__(self, request: Request, target: Target) -> None:
        self.request = request
        self.settings = _with_minimum(request, target)
        self.emitted: list[int] = []
        self.accepted: list[int] = []
        self.features: list[Tensor] = []
        self.behind: list[Committed] = []
        self.behind_tokens = 0
        self.finish_reason = ""
        self.eos = frozenset(target.eos_ids if self.settings.eos_ids is None else self.settings.eos_ids)
        self.tokenizer = target.tokenizer
        self.history = list(request.prompt_ids)
        size, limit = len(request.prompt_ids), target.max_positions
        if size == 0:
            raise HeadwayError("the prompt is empty; give at least one token")
        if size >= limit:
            raise HeadwayError(
                f"the prompt has {size} tokens, {target.info.name} takes {limit - 1} at most; shorten it"
            )
        unknown = [i for i in request.prompt_ids if not 0 <= i < target.info.vocab_size]
        if unknown:
            raise HeadwayError(
                f"the prompt has token id {unknown[0]}, {target.info.name} has ids 0..{target.info.vocab_size - 1}; "
                "was it made with another tokenizer?"
            )
        if self.settings.stop and self.tokenizer is None:
            raise HeadwayError("stop strings need the target's tokenizer; load the target with one or drop `stop`")
        self.budget = min(self.settings.max_new_tokens, limit - size)
        self.by_length = "length" if self.budget == self.settings.max_new_tokens else "context"

    def emit(self, tokens: list[int]) -> list[int]:
        """Take tokens up to the one that ends the answer; return those taken."""
        taken = []
        for token in tokens:
            taken.append(token)
            self.emitted.append(token)
            self.history.append(token)
            if token in self.eos:
                self.finish_reason = "stop"
            elif self.settings.stop and self._ends_in_stop_string():
                self.finish_reason = "stop_string"
            elif len(self.emitted) == self.budget:
                self.finish_reason = self.by_length
            elif self.request.ends is not None and self.request.ends(self.history):
                self.finish_reason = "asked"
            if self.finish_reason:
                break
        return taken

    def take(self, token: int) -> bool:
        """Take a token; return whether the answer goes on."""
        self.emit([token])
        return not self.finish_reason

    def _ends_in_stop_string(self) -> bool:
        # A token is at least one byte as a rule, so the last characters come from at most that many tokens and a few more.
        reach = max(len(s.encode()) for s in self.settings.stop) + 8
        text = self.tokenizer.decode(self.emitted[-reach:], skip_special_tokens=False)  # type: ignore[union-attr]
        before = self.tokenizer.decode(self.emitted[-reach:-1], skip_special_tokens=False)  # type: ignore[union-attr]
        return any(s in text and s not in before for s in self.settings.stop)

    def result(self) -> Result:
        feature_TF = torch.cat(self.features)[: len(self.history) - 1] if self.features else None
        return Result(self.request.id, self.emitted, self.finish_reason, len(self.accepted), self.accepted, feature_TF)


class _Batch:
    """Rows in flight, their cache and the drafter's state; row b of each belongs to rows[b].

    What is committed while nothing is drafted, a prompt too, waits in its row until something is: then the drafter reads it
    in one pass, and where drafting does not pay nothing is read at all. The state has the first `read` rows; rows after them
    are new to the drafter.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        on_tokens: Callable[[Request, list[int]], None] | None,
        times: Times | None,
        observe: Callable[[Tree, list[list[int]]], None] | None,
        record: Sequence[Tap],
        economy: Economy | None = None,
    ) -> None:
        self.target, self.drafter, self.economy = target, drafter, economy
        self.record = bool(record)
        self.observe = observe or (lambda tree, paths: None)
        self.on_tokens = on_tokens or (lambda request, tokens: None)
        self.times = times or Times(on=False)
        self.taps = drafter.taps if drafter is not None else tuple(record)
        self.rows: list[_Row] = []
        self.cache: SlotCache | None = None
        self.state: State = None
        self.read = 0
        # A prompt, its cache and its features, where they are wanted, for what the next ones share.
        self.prefilled: tuple[list[int], SlotCache, Tensor | None] | None = None

    @torch.inference_mode()
    def admit(self, requests: list[Request]) -> Iterator[Result]:
        """Prefill requests in one pass and emit their first tokens; yield the results of those that end there."""
        target, device = self.target, self.target.device
        rows = [_Row(request, target) for request in requests]
        size_B, count = [len(request.prompt_ids) for request in requests], len(rows)
        width = max(size_B)
        # Room for the answers, so that the cache rarely grows in flight; one that will be copied needs none.
        room = min(max(row.budget for row in rows), 512) + 64 if self.cache is None else 0
        cache = target.new_cache(count, capacity=width + room)
        known = self._shared_prefix(requests)
        if known:
            assert self.prefilled is not None
            cache.slots.append_rows(self.prefilled[1].slots, [0] * count, known)
        padded = [request.prompt_ids + [0] * (width - len(request.prompt_ids)) for request in requests]
        token_BT = torch.tensor(padded, device=device)
        position_BT = torch.arange(width, device=device).expand(count, -1)
        new = width - known
        # Padding stands after a row's tokens, which do not see it, and it is not committed.
        causal = torch.ones(new, new, dtype=torch.bool, device=device).tril().expand(count, -1, -1)
        ends = sorted({size - known - 1 for size in size_B})
        keep = 1 if len(ends) == 1 else torch.tensor(ends, device=device)
        out = target.forward(
            token_BT[:, known:], position_BT[:, known:], causal, cache, taps=self.taps, logits_to_keep=keep
        )
        cache.slots.commit([list(range(size - known)) for size in size_B])
        tap_BTF = out.tap_BNF
        if tap_BTF is not None and known:
            assert self.prefilled is not None
            assert self.prefilled[2] is not None
            tap_BTF = torch.cat([self.prefilled[2][:known].expand(count, -1, -1), tap_BTF], dim=1)
        if self.record:
            self._record(rows, [list(range(size)) for size in size_B], tap_BTF)
        if known < size_B[0] - 1 and target.mode != "replay":
            kept = target.new_cache(1, capacity=size_B[0])
            kept.slots.append_rows(cache.slots, [0])
            feature_TF = None if tap_BTF is None else tap_BTF[0, : size_B[0]].clone()
            self.prefilled = (requests[0].prompt_ids, kept, feature_TF)
        first = []
        for b, row in enumerate(rows):
            score = process(out.logits_BNV[b, ends.index(size_B[b] - known - 1)], row.settings, row.history)
            first.append(row.emit([choose(score, row.settings, row.request.key, size_B[b])]))
            self.on_tokens(row.request, first[-1])
        staying = [b for b, row in enumerate(rows) if not row.finish_reason]
        if staying:
            self._join([rows[b] for b in staying], cache, staying)
            if self.drafter is not None:
                next_BT = token_BT.roll(-1, dims=1)
                next_BT[torch.arange(count, device=device), torch.tensor(size_B, device=device) - 1] = torch.tensor(
                    [tokens[0] for tokens in first], device=device
                )
                self._later(Committed(token_BT, next_BT, position_BT, size_B, tap_BTF), rows)
        yield from (row.result() for row in rows if row.finish_reason)

    def _shared_prefix(self, requests: list[Request]) -> int:
        """Return how many tokens all prompts share with the one prefilled last: a chat template's system turn, often."""
        if self.prefilled is None:
            return 0
        shared = commonprefix([self.prefilled[0], *(request.prompt_ids for request in requests)])
        return min(
            len(shared), len(requests[0].prompt_ids) - 1
        )  # the shortest one's last token must run, for its logits

    def _join(self, rows: list[_Row], cache: SlotCache, kept: list[int]) -> None:
        if self.cache is None:
            cache.slots.keep_rows(kept)
            self.cache = cache
        else:
            self.cache.slots.append_rows(cache.slots, kept)
        self.rows += rows

    @torch.inference_mode()
    def round(self) -> Iterator[Result]:
        """Draft, verify, accept, commit; yield the rows that ended."""
        target, drafter, cache = self.target, self.drafter, self.cache
        assert cache is not None
        root_B = torch.tensor([row.emitted[-1] for row in self.rows], device=target.device)
        # Under typical acceptance the answer depends on what is drafted: there the clock has no say.
        lossy = any(row.settings.accept == "typical" and not row.settings.greedy for row in self.rows)
        drafting = drafter is not None and (self.economy is None or lossy or self.economy.drafts(len(self.rows)))
        began = clock()
        if drafting and self.read < len(self.rows):
            self._catch_up()  # prompts are no part of a round
            if self.economy is not None:
                self.economy.read(len(self.rows), clock() - began)
            began = clock()
        begin = self._now()
        if drafter is not None and drafting:
            self._catch_up()
            histories = [row.history for row in self.rows]
            draws = Draws.of(
                [row.settings for row in self.rows], [row.request.key for row in self.rows], list(map(len, histories))
            )
            tree, self.state = drafter.propose(self.state, Ask(root_B, histories, draws, lossy))
            # A drafter's vocabulary may be padded beyond the target's; any other id is a wrong guess as well.
            tree.token_BN = tree.token_BN.clamp(0, target.info.vocab_size - 1)
        else:
            tree = Tree.from_parents(root_B[:, None], [[-1]] * len(self.rows))
        drafted = self._now()
        start_B1 = torch.tensor(cache.slots.length, device=target.device)[:, None]
        out = target.forward(tree.token_BN, start_B1 + tree.depth_BN, tree.ancestor_BNN, cache, taps=self.taps)
        verified = self._now()
        paths, emitted = self._accept(tree, out.logits_BNV)
        self.observe(tree, paths)
        cache.slots.commit(paths)
        if self.record:
            self._record(self.rows, paths, out.tap_BNF)
        for row, tokens in zip(self.rows, emitted, strict=True):
            row.accepted.append(len(tokens))
            self.on_tokens(row.request, tokens)
        done = [b for b, row in enumerate(self.rows) if row.finish_reason]
        yield_rows = [self.rows[b].result() for b in done]
        absorb = 0.0
        if drafter is not None and len(done) < len(self.rows):
            before = self._now()
            committed = self._committed(tree, paths, emitted, out.tap_BNF, start_B1)
            if drafting:
                self.state = drafter.start(committed, self.state, len(paths))
            else:
                self._later(committed, self.rows)
            absorb = self._now() - before
        if done:
            self._drop(done)
        if self.economy is not None and drafter is not None and not lossy:
            gained, nodes = [len(tokens) for tokens in emitted], tree.token_BN.shape[1]
            self.economy.count(len(paths), drafting, nodes > 1, gained, clock() - began)
        times = self.times
        times.draft += drafted - begin + absorb
        times.verify += verified - drafted
        times.other += self._now() - verified - absorb
        times.rounds += 1
        times.drafted += drafting
        yield from yield_rows

    def _now(self) -> float:
        """Return the time, after what a GPU was asked for is done when the times are wanted."""
        if self.times.on and self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return clock()

    def _record(self, rows: list[_Row], paths: list[list[int]], tap_BNF: Tensor | None) -> None:
        """Keep the features of what was committed."""
        assert tap_BNF is not None
        feature_BNF = tap_BNF.to("cpu", torch.bfloat16)
        for b, (row, path) in enumerate(zip(rows, paths, strict=True)):
            row.features.append(feature_BNF[b, path])

    def _accept(self, tree: Tree, logits_BNV: Tensor) -> tuple[list[list[int]], list[list[int]]]:
        """Return each row's accepted path and the tokens that the row has taken, to the end of its answer at most."""
        if any(row.settings.greedy and not row.settings.needs_history for row in self.rows):
            best_BN1 = logits_BNV.argmax(-1, keepdim=True)
            token_BN, argmax_BN, value_BN = fetch(
                tree.token_BN, best_BN1[..., 0], logits_BNV.gather(2, best_BN1)[..., 0]
            )
        else:
            (token_BN,) = fetch(tree.token_BN)
        walks: list[Any] = [None] * len(self.rows)
        alike: dict[Settings, list[int]] = {}
        greedy: list[int] = []
        taken: set[int] = set()
        for b, row in enumerate(self.rows):
            settings = row.settings
            free = not settings.needs_history
            if settings.greedy and free:
                walks[b] = walk_greedy(token_BN[b], tree.parents[b], argmax_BN[b])
                greedy.append(b)
            elif settings.accept == "exact" and free:
                alike.setdefault(settings, []).append(b)
            else:
                size = tree.size_B[b] if tree.size_B is not None else len(token_BN[b])
                tokens, parents = token_BN[b][:size], tree.parents[b][:size]
                given = (tokens, parents, logits_BNV[b], settings, row.request.key, row.history)
                if settings.accept == "typical" and not settings.greedy:
                    walks[b] = walk_typical(*given, row.eos)
                else:
                    walks[b] = walk_exact(*given, row.take)
                    taken.add(b)
        for b in greedy:
            for node in walks[b][0]:
                check_chosen(value_BN[b][node], self.rows[b].settings, len(self.rows[b].history))
        for settings, group in alike.items():
            rows = [self.rows[b] for b in group]
            found = walk_exact_rows(
                [token_BN[b] for b in group],
                [tree.parents[b] for b in group],
                logits_BNV[group] if len(group) < len(self.rows) else logits_BNV,
                settings,
                [row.request.key for row in rows],
                [len(row.history) for row in rows],
            )
            for b, walked in zip(group, found, strict=True):
                walks[b] = walked
        emitted = [tokens if b in taken else self.rows[b].emit(tokens) for b, (_, tokens) in enumerate(walks)]
        return [path for path, _ in walks], emitted

    def _later(self, committed: Committed, rows: list[_Row]) -> None:
        """Keep what was committed until the drafter drafts, or is too far behind."""
        for b, row in enumerate(rows):  # one that has ended too: it is among the state's rows until it is dropped
            row.behind.append(committed.row(b))
            row.behind_tokens += committed.count_B[b]
        if sum(row.behind_tokens for row in self.rows) >= MOST_BEHIND:
            self._catch_up()

    def _catch_up(self) -> None:
        """Give the drafter what was committed while it did not draft, and the rows that are new to it."""
        known, new = self.rows[: self.read], self.rows[self.read :]
        if any(row.behind for row in known):
            self.state = self._started(known, self.state)
        if new:
            assert self.drafter is not None
            state = self._started(new, None)
            self.state = self.drafter.join_rows(self.state, state) if known else state
            self.read = len(self.rows)

    def _started(self, rows: list[_Row], state: State) -> State:
        """Return the drafter's state after what these rows had waiting."""
        assert self.drafter is not None
        committed = Committed.of_rows([row.behind for row in rows])
        for row in rows:
            row.behind, row.behind_tokens = [], 0
        return self.drafter.start(committed, state, len(rows))

    def _committed(
        self,
        tree: Tree,
        paths: list[list[int]],
        emitted: list[list[int]],
        tap_BNF: Tensor | None,
        start_B1: Tensor,
    ) -> Committed:
        """Return the committed nodes, each with its features and the token after it."""
        device = start_B1.device
        count = [min(len(p), len(e)) for p, e in zip(paths, emitted, strict=True)]
        width = max(count)
        pad = [p[:c] + [0] * (width - c) for p, c in zip(paths, count, strict=True)]
        path_BT = torch.tensor(pad, device=device)
        next_BT = torch.tensor([e[:c] + [0] * (width - c) for e, c in zip(emitted, count, strict=True)], device=device)
        tap_BTF = None
        if tap_BNF is not None:
            tap_BTF = tap_BNF.gather(1, path_BT[:, :, None].expand(-1, -1, tap_BNF.shape[2]))
        position_BT = start_B1 + torch.arange(width, device=device)
        return Committed(tree.token_BN.gather(1, path_BT), next_BT, position_BT, count, tap_BTF)

    def _drop(self, done: list[int]) -> None:
        known = [b for b in range(self.read) if b not in done]
        new = [b for b in range(self.read, len(self.rows)) if b not in done]
        kept = _closed_up(known, 0) + _closed_up(new, len(known))
        self.rows = [self.rows[b] for b in kept]
        if not kept:
            self.cache, self.state, self.read = None, None, 0
            return
        self.cache.slots.keep_rows(kept)  # type: ignore[union-attr]
        if self.drafter is not None and len(known) < self.read:
            self.state = self.drafter.select_rows(self.state, kept[: len(known)]) if known else None
        self.read = len(known)


def _closed_up(places: list[int], begin: int) -> list[int]:
    """Return the places, ascending, in the order in which they fill `begin`, `begin` + 1, ...: those that lie there stay, and
    the last fill the holes. Far fewer keys and values are moved than when all close up."""
    end = begin + len(places)
    last = iter([place for place in places if place >= end])
    there = set(places)
    return [place if place in there else next(last) for place in range(begin, end)]
