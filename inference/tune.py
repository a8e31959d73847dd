"""Chooses the tree for this machine and this head, from measured costs and recorded acceptance.

Letters: N nodes verified (root included), D draft depth.

Three measurements: T(N), the target's pass over N tokens; C(D), the head's draft of depth D; and, on calibration prompts
with one wide tree, where in the head's own ranking the accepted nodes stood. Because a tree of the N best nodes down to
depth D is a part of the wide one, the recording tells the accepted length of every smaller tree at once. The tree of the
highest (1 + accepted) / (T(N) + C(D)) is taken; chains, static trees made from the recorded hits of each rank, and no draft
at all are among the candidates.

The costs are measured for several numbers of rows, and each has a tree of its own: where T(rows x N) grows with N as it does on a
busy machine, small trees win, and then none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from headway.heads.common.aside import file_aside
from headway.heads.common.errors import HeadwayError
from headway.heads.common.protocol import Head
from headway.inference.drafter import Ask, Committed, HeadDrafter, default_policy
from headway.inference.economy import Price
from headway.inference.generate import Request, Times, generate
from headway.inference.host import clock
from headway.inference.sampling import Settings
from headway.inference.target import Target
from headway.inference.tree import (
    OFF,
    ByRows,
    DynamicTree,
    Policy,
    StaticTree,
    Tree,
    chain,
    each_shape,
    parse_policy,
    static_from_hits,
)
from headway.inference.unfinished import Unfinished, kept

WIDTHS = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32)
ROWS = (1, 2, 4, 8, 16)
MOST_TOKENS = 64
"""Of all rows of a pass that is measured with more rows than one."""
PLAIN_TOKENS = 16
FILE = "tree.json"


@dataclass
class Recording:
    """Of each round: the head's ranking of the tree, the depth of each node, and the accepted path without its root, as
    nodes and as ranks among siblings."""

    order: list[list[int]] = field(default_factory=list)
    """Nodes, the best first."""
    depths: list[list[int]] = field(default_factory=list)
    paths: list[list[int]] = field(default_factory=list)
    choices: list[tuple[int, ...]] = field(default_factory=list)
    """Per accepted node which choice of the head it was, 0 the first."""
    _ranks: dict[int, list[list[int]]] = field(default_factory=dict)

    def observe(self, tree: Tree, paths: list[list[int]]) -> None:
        """Take one round; the callback of `generate`."""
        if tree.score_BN is None:  # a chain, on a target that takes no trees: its order is its ranking
            self.order += [list(range(len(parents))) for parents in tree.parents]
        else:
            self.order += tree.score_BN.argsort(dim=1, descending=True, stable=True).tolist()
        self.depths += tree.depth_BN.tolist()
        self._ranks.clear()
        for b, path in enumerate(paths):
            self.paths.append(path[1:])
            parents = tree.parents[b]
            self.choices.append(tuple(parents[:node].count(parents[node]) for node in path[1:]))

    def extend(self, more: Recording) -> None:
        """Take the rounds of another recording."""
        self.order += more.order
        self.depths += more.depths
        self.paths += more.paths
        self.choices += more.choices
        self._ranks.clear()

    def plain(self) -> dict[str, Any]:
        """Return the rounds as JSON can hold them."""
        return {"order": self.order, "depths": self.depths, "paths": self.paths, "choices": self.choices}

    @staticmethod
    def read(rounds: dict[str, Any]) -> Recording:
        """Return the recording that `plain` gave."""
        return Recording(**{**rounds, "choices": [tuple(choices) for choices in rounds["choices"]]})

    def accepted(self, nodes: int, depth: int) -> float:
        """Return the mean accepted nodes of the tree of the `nodes` best nodes (root included) down to `depth`."""
        if depth not in self._ranks:
            self._ranks[depth] = [self._ranks_down_to(depth, i) for i in range(len(self.paths))]
        return sum(sum(r < nodes for r in ranks) for ranks in self._ranks[depth]) / max(1, len(self.paths))

    def _ranks_down_to(self, depth: int, i: int) -> list[int]:
        """Return the ranks of round i's accepted nodes among the nodes that a tree of this depth has."""
        depths = self.depths[i]
        among = [node for node in self.order[i] if depths[node] <= depth]
        rank = {node: r for r, node in enumerate(among)}
        return [rank[node] for node in self.paths[i] if depths[node] <= depth]

    def accepted_chain(self, depth: int) -> float:
        """Return the mean accepted nodes of a chain of `depth` first choices."""
        return self.accepted_static(chain(depth))

    def accepted_static(self, tree: StaticTree) -> float:
        """Return the mean accepted nodes of a static tree; at least that, as the recording's tree had not all its nodes."""
        paths = set(tree.paths)
        total = sum(choices[:d] in paths for choices in self.choices for d in range(1, len(choices) + 1))
        return total / max(1, len(self.choices))

    def hits(self, depth: int, top_k: int) -> Tensor:
        """Return, per depth and choice, the share of the rounds right so far in which that choice was right: [D, R]."""
        hits_DR = torch.zeros(depth, top_k, dtype=torch.float64)
        reached_D = torch.zeros(depth, dtype=torch.float64)
        for choices in self.choices:
            for d in range(min(len(choices) + 1, depth)):
                reached_D[d] += 1
                if d < len(choices) and choices[d] < top_k:
                    hits_DR[d, choices[d]] += 1
        return hits_DR / reached_D[:, None].clamp_min(1)


def tune(
    target: Target,
    head: Head,
    prompts: list[list[int]],
    *,
    depth: int = 6,
    top_k: int = 6,
    max_new_tokens: int = 64,
    context: int = 200,
    repeats: int = 7,
    rows: Sequence[int] = ROWS,
    seconds: float | None = None,
    on_progress: Callable[[int, int], None] = lambda items, tokens: None,
    unfinished: Unfinished | None = None,
) -> dict[str, Any]:
    """Return {policy, expected ..., costs ..., candidates ..., rows}: the fastest tree of one row and the measurements behind
    it, and under `rows` the same for each other number of rows, as text. In plain and replay mode, where nothing is measured,
    {policy, reason}.

    Times are medians in milliseconds with `context` cached tokens in each row. After `seconds` no further prompt is
    answered (one is). `on_progress(answers, tokens)` is called as calibration answers are made. Answers that `unfinished`
    holds are not made again; costs always are measured. Raises HeadwayError without prompts.
    """
    if not prompts:
        raise HeadwayError("tuning needs at least one calibration prompt")
    if target.mode == "replay":
        reason = "in replay mode the cost of a round depends on what was accepted, and is not tuned"
        return {"policy": default_policy(head).describe(), "reason": reason}
    if target.mode == "plain":
        return {"policy": OFF.describe(), "expected_accepted_length": 1.0, "reason": target.mode_reason}
    depth = min(depth, head.max_depth or depth)
    wide = DynamicTree(depth=depth, top_k=top_k, nodes=max(WIDTHS))
    recording, times = _record(target, head, wide, prompts, max_new_tokens, seconds, on_progress, unfinished)
    without = Times()  # rounds without a head have their accepting and committing too
    list(generate(target, [Request(prompts[0], Settings(max_new_tokens=PLAIN_TOKENS))], times=without))
    rest, plain_rest = (1e3 * t.other / max(1, t.rounds) for t in (times, without))
    one = _costs(target, head, wide, context, repeats, 1)
    # Timed alone, a draft finds its weights in the processor's cache; between target passes it does not. The recording
    # run tells by how much that matters.
    measured = (one.tree if target.mode == "tree" else one.chain)[depth]
    cold = max(1.0, 1e3 * times.draft / max(1, times.rounds) / measured)
    reports = {}
    for count in sorted({1, *rows}):
        costs = one if count == 1 else _costs(target, head, wide, context, max(1, repeats // 2), count)
        reports[count] = _choose(costs.colder(cold), recording, wide, target.mode == "tree", rest, plain_rest)
    return {
        **reports[1],
        "rounds_recorded": len(recording.paths),
        "rows": {str(count): report for count, report in reports.items() if count > 1},
    }


@dataclass
class _Costs:
    """Milliseconds: of the target by tokens of each row, of a draft by depth, of trees and of chains."""

    verify: dict[int, float]
    tree: dict[int, float]
    chain: dict[int, float]

    def colder(self, times: float) -> _Costs:
        """Return the costs with dearer drafts."""
        tree, chain = ({d: times * ms for d, ms in draft.items()} for draft in (self.tree, self.chain))
        return _Costs(self.verify, tree, chain)


def _costs(target: Target, head: Head, wide: DynamicTree, context: int, repeats: int, rows: int) -> _Costs:
    """Measure what passes and drafts of that many rows cost; with several rows, drafts as deep as the trees may be."""
    widths = [n for n in WIDTHS if rows == 1 or n <= max(2, MOST_TOKENS // rows)]
    depths = range(1, min(wide.depth, max(widths) - 1) + 1)
    return _Costs(
        measure_verify(target, context, repeats, head, rows, widths),
        {
            d: measure_draft(target, head, DynamicTree(d, wide.top_k, wide.nodes), context, repeats, rows)
            for d in depths
        },
        {d: measure_draft(target, head, chain(d), context, repeats, rows) for d in depths},
    )


def _choose(
    costs: _Costs, recording: Recording, wide: DynamicTree, trees: bool, rest: float, plain_rest: float
) -> dict[str, Any]:
    """Return the fastest tree at these costs, what it is expected to give, and the best of the others."""
    verify, widest = costs.verify, max(costs.verify)
    plain_ms = verify[1] + plain_rest
    rows = [_candidate(OFF, 0.0, plain_ms)]
    for d in costs.chain:
        if d < widest:
            cost = _at(verify, d + 1) + costs.chain[d] + rest
            rows.append(_candidate(chain(d), recording.accepted_chain(d), cost))
        for n in verify:
            if trees and n > d + 1:
                cost = verify[n] + costs.tree[d] + rest
                rows.append(_candidate(DynamicTree(d, wide.top_k, n), recording.accepted(n, d), cost))
    hits_DR = recording.hits(wide.depth, wide.top_k)
    for n in verify:
        static = static_from_hits(hits_DR, n)
        if trees and not static.is_chain and static.depth in costs.tree:
            cost = _at(verify, static.nodes) + costs.tree[static.depth] + rest
            rows.append(_candidate(static, recording.accepted_static(static), cost))
    rows.sort(key=lambda row: -row["tokens_per_ms"])
    best = rows[0]
    return {
        "policy": best["policy"],
        "expected_accepted_length": best["accepted_length"],
        "expected_ratio_vs_plain": round(best["tokens_per_ms"] * plain_ms, 3),
        "verify_ms": verify,
        "draft_tree_ms": costs.tree,
        "draft_chain_ms": costs.chain,
        "plain_ms": plain_ms,
        "candidates": rows[:12],
    }


def _record(
    target: Target,
    head: Head,
    wide: Policy,
    prompts: list[list[int]],
    max_new_tokens: int,
    seconds: float | None,
    on_progress: Callable[[int, int], None],
    unfinished: Unfinished | None,
) -> tuple[Recording, Times]:
    """Answer the calibration prompts with the wide tree; return its rounds and where their time went."""
    recording, times, (done, keep) = Recording(), Times(), kept(unfinished)
    settings, begin = Settings(max_new_tokens=max_new_tokens), perf_counter()
    for i, ids in enumerate(prompts):
        if str(i) in done:
            recording.extend(Recording.read(done[str(i)]["rounds"]))
            times.add(Times(**done[str(i)]["times"]))
            continue
        if recording.paths and seconds is not None and perf_counter() - begin > seconds:
            break
        answer, clock = Recording(), Times()
        emitted = lambda request, tokens: on_progress(0, len(tokens))  # noqa: E731
        request = Request(ids, settings, id=i)
        list(
            generate(target, [request], head=head, policy=wide, on_tokens=emitted, observe=answer.observe, times=clock)
        )
        recording.extend(answer)
        times.add(clock)
        keep(str(i), {"rounds": answer.plain(), "times": asdict(clock)})
        on_progress(1, 0)
    return recording, times


def _candidate(policy: Policy, accepted: float, cost_ms: float) -> dict[str, Any]:
    return {
        "policy": policy.describe(),
        "accepted_length": round(1 + accepted, 3),
        "round_ms": round(cost_ms, 2),
        "tokens_per_ms": (1 + accepted) / cost_ms,
    }


def _at(cost: dict[int, float], n: int) -> float:
    """Return the cost of n nodes, interpolated between the measured widths."""
    below = max(w for w in cost if w <= n)
    above = min((w for w in cost if w >= n), default=below)
    if above == below:
        return cost[below]
    return cost[below] + (cost[above] - cost[below]) * (n - below) / (above - below)


@torch.inference_mode()
def measure_verify(
    target: Target,
    context: int,
    repeats: int,
    head: Head | None = None,
    rows: int = 1,
    widths: Sequence[int] = WIDTHS,
) -> dict[int, float]:
    """Return the median milliseconds of a target pass over N new tokens of each row, for each of `widths`, after `context`
    tokens.

    A pass is timed after another of its width, as rounds follow one another.
    """
    cache = target.new_cache(rows, context + max(widths) + 1)
    taps = head.config.taps if head is not None else ()
    _run(target, cache, context, taps)
    cache.slots.commit([list(range(context))] * rows)
    seconds: dict[int, list[float]] = {n: [] for n in widths}
    for repeat in range(repeats + 1):
        for n in widths:  # widths in turn, so that a slow spell of the machine falls on all of them
            _run(target, cache, n, taps)
            begin = clock()
            _run(target, cache, n, taps)
            if repeat:
                seconds[n].append(clock() - begin)
    return {n: 1e3 * median(s) for n, s in seconds.items()}


def _run(target: Target, cache: Any, n: int, taps: Any) -> None:
    rows, at_N = cache.slots.rows, torch.arange(n, device=target.device)
    token_BN = (at_N % target.info.num_tokens).expand(rows, -1)
    position_BN = (cache.slots.length[0] + at_N).expand(rows, -1)
    causal = torch.ones(n, n, dtype=torch.bool, device=target.device).tril().expand(rows, -1, -1)
    target.forward(token_BN, position_BN, causal, cache, taps=taps).logits_BNV[0, 0, 0].item()


@torch.inference_mode()
def measure_draft(target: Target, head: Head, policy: Policy, context: int, repeats: int, rows: int = 1) -> float:
    """Return the median milliseconds of absorbing two committed tokens of each row and drafting a tree."""
    device, dtype = target.device, target.dtype
    drafter, width = HeadDrafter(head, policy), target.tap_width(head.config.taps)

    def take(state: Any, count: int, at: int) -> Any:
        tap = torch.randn(rows, count, width, device=device).to(dtype)
        position = torch.arange(at, at + count, device=device).expand(rows, -1)
        token = torch.ones(rows, count, dtype=torch.long, device=device)
        return drafter.start(Committed(token, token, position, [count] * rows, tap), state, rows)

    state = take(None, context, 0)
    ask = Ask(torch.ones(rows, dtype=torch.long, device=device), [[1]] * rows)
    seconds = []
    for repeat in range(repeats + 1):
        begin = clock()
        state = take(state, 2, context + 2 * repeat)
        tree, state = drafter.propose(state, ask)
        tree.token_BN[0, 0].item()
        seconds.append(clock() - begin)
    return 1e3 * median(seconds[1:])


def save_policy(folder: Path | str, target: Target, report: dict[str, Any]) -> None:
    """Keep a tuning report beside a head, under this `place`; other entries stay."""
    known = read_policies(folder)
    known[place_of(target)] = report
    path = Path(folder) / FILE
    with file_aside(path) as aside:
        aside.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


def read_policies(folder: Path | str) -> dict[str, Any]:
    """Return the tuning reports kept beside a head, by `place`. Raises HeadwayError for a broken file."""
    path = Path(folder) / FILE
    if not path.is_file():
        return {}
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise HeadwayError(f"{path} is broken ({type(e).__name__}); delete it and tune again, or give --tree") from e
    if not isinstance(known, dict):
        raise HeadwayError(f"{path} is broken (no JSON object); delete it and tune again, or give --tree")
    return known


@dataclass(frozen=True)
class Tuned:
    """What `headway tune` found for a head in one `place`."""

    best: Policy
    """The fastest tree of each number of rows, `off` where drafting does not pay."""
    drafting: Policy
    """The fastest tree that drafts: what an Economy turns off and on."""
    prices: dict[int, Price]
    """Of `drafting`, by number of rows."""


def load_tuned(
    folder: Path | str, dtype: torch.dtype | str, device: str = "cpu", carries: str = "", compiled: bool = False
) -> Tuned | None:
    """Return what was tuned for this `place`, or None when nothing was. Raises HeadwayError for a broken file."""
    report = read_policies(folder).get(place(dtype, device, carries, compiled))
    if not report:
        return None
    try:
        reports = {1: report} | {int(rows): more for rows, more in report.get("rows", {}).items()}
        best = {rows: parse_policy(each["policy"]) for rows, each in reports.items()}
        drafts = {rows: _drafting(each) for rows, each in reports.items()}
        prices = {
            rows: Price(row["round_ms"] / reports[rows]["plain_ms"], row["accepted_length"])
            for rows, row in drafts.items()
            if row is not None
        }
        trees = {rows: parse_policy(row["policy"]) for rows, row in drafts.items() if row is not None}
        return Tuned(_by_rows(best), _by_rows(trees or best), prices)
    except (HeadwayError, KeyError, AttributeError, TypeError, ValueError) as e:
        raise HeadwayError(
            f"{Path(folder) / FILE} is broken ({type(e).__name__}: {e}); delete it and tune again, or give --tree"
        ) from e


def load_policy(
    folder: Path | str, dtype: torch.dtype | str, device: str = "cpu", carries: str = "", compiled: bool = False
) -> Policy | None:
    """Return the trees tuned for this `place`, or None when there are none. Raises HeadwayError for a broken file."""
    tuned = load_tuned(folder, dtype, device, carries, compiled)
    return tuned.best if tuned is not None else None


def _drafting(report: dict[str, Any]) -> dict[str, Any] | None:
    """Return the fastest candidate that drafts; None where none was measured."""
    rows = [row for row in report.get("candidates", ()) if row["policy"] != OFF.describe()]
    return max(rows, key=lambda row: row["tokens_per_ms"], default=None)


def _by_rows(shapes: dict[int, Policy]) -> Policy:
    return each_shape(ByRows(tuple(sorted(shapes.items()))), lambda shape: shape)  # type: ignore[arg-type]


def place_of(target: Target) -> str:
    """Return the `place` of a loaded target."""
    return place(target.dtype, str(target.device), target.carries, target.compiled is not None)


def place(dtype: torch.dtype | str, device: str, carries: str = "", compiled: bool = False) -> str:
    """Return what a tree is tuned for beside the head: kind of device, dtype, whether passes are compiled, and how the target
    `carries` an adapter."""
    passes = f"{device.split(':')[0]} {str(dtype).removeprefix('torch.')}{' compiled' if compiled else ''}"
    return f"{passes}, {carries}" if carries else passes
