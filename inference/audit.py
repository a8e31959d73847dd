"""Checks a head on a target: the tokens are the target's own, and sampled tokens follow the target's distribution.

identity       greedy answers of the head, of the plain twin and of transformers.generate are the same tokens
seeded         sampled answers of the head and of the plain twin, under one seed, are the same tokens
distribution   tokens drawn through the head's trees, over many keys, against the target's distribution: chi-square

Where two answers part, the target's scores are recomputed there, by one stock pass over what they share. What arithmetic
alone moves is measured on the target without Headway: how far the gaps between its best logits differ when one text is read
in one pass, in passes of one token and in passes as wide as the tree. A token that scores below the best by no more than
twice the greatest such difference, or than the dtype's step at the greatest logit, is a near-tie: either choice is a greedy
path of this model, and it is listed. One that scores less, or an answer that ends early, is a failure.

In half precision the law, from one stock pass, is known no better than its logits. At the default draws that is far below
what the chi-square can see; at tens of thousands it may not be.

Letters: T tokens of an answer, V vocabulary, K best tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headway.heads.common.errors import HeadwayError
from headway.heads.common.protocol import Head
from headway.inference.bench import Prompt, begin_report, transformers_run
from headway.inference.chi_square import FEWEST, Cell, p_value, wrong_cells
from headway.inference.drafter import HeadDrafter, default_policy
from headway.inference.generate import Request, Result, branches, generate, plain
from headway.inference.sampling import Settings, gumbel, process_rows
from headway.inference.target import Target
from headway.inference.tree import Policy, check_policy

PASS, TIES, FAIL, UNDECIDED = "pass", "near-ties", "fail", "undecided"
SEEDS = 2
"""Seeds under which each prompt is answered with a temperature."""
MEASURED = 4
"""Prompts, the first ones, whose answers are read in several ways to measure the arithmetic."""
BEST = 8
"""The gaps of that many best tokens to the best one are measured."""
ALLOWED = 2.0
"""A near-tie is within so many times the greatest difference measured: what was measured is a sample."""
SEARCHED = 8
"""Prompts, the first ones, in whose answers those places are looked for."""
CONTEXTS = 3
"""Prompts in whose answers the distribution is tested, at the place where it has most to test."""
ROWS = 32
"""Keys drawn together."""
FOLLOWED = 2
"""First tokens, the commonest ones, after which the second is tested as well."""
LEVEL = 1e-4
"""A right sampler is called wrong in one audit of 1 / LEVEL."""
CONTROLS = (1.05, 1.1, 1.2, 1.5)
"""The negative controls sample at so many times the temperature; the least wrong one that is rejected is named."""

ENOUGH = 8
"""Bins of a context: with more of them a test tells more tokens apart, and sees each difference less well."""
SHOWN = 12
"""Divergences on the page; the report has them all."""

OnProgress = Callable[[int, int], None]


def steps(prompts: int, draws: int) -> int:
    """Return how many items an audit reports as done."""
    return prompts * (1 + SEEDS) + min(CONTEXTS, prompts) * -(-draws // ROWS)


def check_asked(policy: Policy | None, temperature: float) -> None:
    """Raise HeadwayError where there would be nothing to check: a tree that is off, or a temperature of 0."""
    if policy is not None and policy.depth == 0:
        raise HeadwayError("the tree is off, so nothing is drafted; name one, such as --tree chain:3")
    if not temperature > 0:
        raise HeadwayError(f"temperature is {temperature}; it must be above 0: greedy answers are checked all the same")


def audit(
    target: Target,
    head: Head,
    policy: Policy | None,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int = 48,
    temperature: float = 1.0,
    batch_size: int = 1,
    draws: int = 512,
    seed: int = 0,
    command: str = "",
    on_progress: OnProgress | None = None,
) -> dict[str, Any]:
    """Return the report: `exact`, and for each of `checks` what was done, on how many tokens, and the verdict.

    A verdict is `pass`, `near-ties` (some answers part at one, and nowhere else), `fail`, or `undecided` where a sampler
    that is wrong on purpose went through the same test. `exact` is false when any check failed. `draws` tokens are drawn in
    each context of the last check. `on_progress(items done, tokens made)` is called as it goes, `steps(...)` items in all.
    Raises HeadwayError for no prompts, a tree that the head cannot draft, or one that drafts nothing.
    """
    policy = policy if policy is not None else default_policy(head)
    check_policy(policy, head.max_depth)
    if not prompts:
        raise HeadwayError("no prompts to audit; give at least one")
    check_asked(policy, temperature)
    policy = HeadDrafter(head, policy).fit(target).policy
    greedy = Settings(max_new_tokens=max_new_tokens, seed=seed)
    run = _Run(target, head, policy, prompts, batch_size, on_progress or (lambda items, tokens: None))
    answers, found = run.identity(greedy)
    parted = {d["prompt"] for d in found["divergences"]}
    read = sorted({*range(len(prompts))[:MEASURED], *parted})
    measured = [measure_noise(target, prompts[n][2], answers[n], run.width) for n in read]
    noise, rounding = (max(values) for values in zip(*measured, strict=True))
    allowed = max(ALLOWED * noise, rounding)
    sampled = replace(greedy, temperature=temperature)
    checks = [
        _judge(found, allowed),
        _judge(run.seeded(sampled), allowed / temperature),
        run.distribution(replace(sampled, max_new_tokens=2, eos_ids=()), answers, draws),
    ]
    return {
        **begin_report(target, command),
        "tree": policy.describe(),
        "settings": {
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "batch_size": batch_size,
            "draws": draws,
            "seed": seed,
        },
        "prompts": {"count": len(prompts)},
        "arithmetic": {
            "what": f"gaps of the {BEST} best logits, one stock pass against stock passes of 1 and {run.width} tokens",
            "tokens": sum(len(answers[n]) for n in read),
            "noise": noise,
            "rounding": rounding,
            "allowed": allowed,
        },
        "exact": all(check["verdict"] != FAIL for check in checks),
        "checks": checks,
    }


class _Run:
    """What all checks work on."""

    def __init__(
        self,
        target: Target,
        head: Head,
        policy: Policy,
        prompts: Sequence[Prompt],
        batch_size: int,
        on_progress: OnProgress,
    ) -> None:
        self.target, self.head, self.policy, self.prompts = target, head, policy, prompts
        self.batch_size, self.on_progress = batch_size, on_progress
        self.width = policy.nodes

    def identity(self, settings: Settings) -> tuple[list[list[int]], dict[str, Any]]:
        """Return the plain answers, and the check that they, the head's and transformers' are the same."""
        stock_run = transformers_run(self.target)
        drafted, with_head = self._with_head(settings)
        answers, divergences = [], []
        for number, prompt in enumerate(self.prompts):
            answer = plain(self.target, prompt[2], settings, number)
            (stock,) = stock_run([(number, prompt)], settings)
            self.on_progress(1, len(answer) + len(stock.token_ids))
            answers.append(answer)
            pairs = {("head", "plain"): with_head[number], ("transformers", "plain"): stock.token_ids}
            for names, tokens in pairs.items():
                divergences += self._parting(number, names, tokens, answer, settings)
        what = "greedy: the head, the plain twin and transformers.generate give the same tokens"
        return answers, self._compared("identity", what, answers, drafted, divergences)

    def seeded(self, settings: Settings) -> dict[str, Any]:
        """Return the check that sampled answers are the same with the head and without, under each seed."""
        answers, divergences, accepted = [], [], 0
        for seed in range(settings.seed, settings.seed + SEEDS):
            drawn = replace(settings, seed=seed)
            drafted, with_head = self._with_head(drawn)
            accepted += drafted
            for number, (_, _, ids) in enumerate(self.prompts):
                answer = plain(self.target, ids, drawn, number)
                self.on_progress(1, len(answer))
                answers.append(answer)
                divergences += self._parting(number, ("head", "plain"), with_head[number], answer, drawn)
        what = f"temperature {settings.temperature:g}, {SEEDS} seeds: the head and the plain twin give the same tokens"
        return self._compared("seeded", what, answers, accepted, divergences)

    def _with_head(self, settings: Settings) -> tuple[int, dict[int, list[int]]]:
        """Return how many drafted tokens were accepted, and the head's answer to each prompt by its number."""
        requests = [Request(ids, settings, id=n, key=n) for n, (_, _, ids) in enumerate(self.prompts)]
        results = list(
            generate(
                self.target,
                requests,
                head=self.head,
                policy=self.policy,
                batch_size=self.batch_size,
                on_tokens=lambda request, tokens: self.on_progress(0, len(tokens)),
            )
        )
        return _accepted(results), {r.id: r.token_ids for r in results}

    def _compared(
        self, name: str, what: str, answers: list[list[int]], accepted: int, divergences: list[dict[str, Any]]
    ) -> dict[str, Any]:
        parted = {(d["prompt"], d["seed"]) for d in divergences}
        return {
            "name": name,
            "what": what,
            "answers": len(answers),
            "identical": len(answers) - len(parted),
            "tokens": sum(map(len, answers)),
            "accepted": accepted,
            "divergences": divergences,
        }

    @torch.inference_mode()
    def _parting(
        self, number: int, names: tuple[str, str], ours: list[int], theirs: list[int], settings: Settings
    ) -> list[dict[str, Any]]:
        """Return where two answers part, and the target's scores there; nothing where they are the same.

        Under sampling a score is a log-probability, but for a constant, with its noise.
        """
        if ours == theirs:
            return []
        shared = min(len(ours), len(theirs))
        at = next((i for i in range(shared) if ours[i] != theirs[i]), None)
        entry: dict[str, Any] = {
            "prompt": number,
            "id": self.prompts[number][0],
            "seed": settings.seed,
            "answers": names,
        }
        if at is None:
            # One ended and the other did not.
            return [{**entry, "position": shared, "tokens": None, "best": [], "below": None}]
        prefix = self.prompts[number][2] + theirs[:at]
        score_V = self._scores(prefix, settings)
        if not settings.greedy:
            every = torch.arange(len(score_V), device=score_V.device)
            score_V = score_V + gumbel(settings.seed, number, len(prefix), every)
        two = score_V.topk(2)
        tokens = [ours[at], theirs[at]]
        best = [{"token": t, "score": v} for t, v in zip(two.indices.tolist(), two.values.tolist(), strict=True)]
        return [
            {
                **entry,
                "position": at,
                "tokens": tokens,
                "best": best,
                "margin": best[0]["score"] - best[1]["score"],
                "below": best[0]["score"] - float(score_V[tokens].min()),
            }
        ]

    def distribution(self, settings: Settings, answers: list[list[int]], draws: int) -> dict[str, Any]:
        """Return the check, with its verdict, that what is drawn through the head's trees follows the target's law."""
        places = []
        for number, (_, _, ids) in enumerate(self.prompts[:SEARCHED]):
            value, size = _most_to_test(self.target, ids, answers[number], settings, draws)
            places.append((value, number, (ids + answers[number])[:size]))
        places = sorted((place for place in places if place[2]), reverse=True)
        cells: list[Cell] = []
        accepted = 0
        for _, number, ids in places[:CONTEXTS]:
            drafted, found = self._draw(number, ids, settings, draws)
            accepted += drafted
            cells += [cell for cell in found if cell.statistic[1]]  # a single bin holds everything, whatever was drawn
        for factor in CONTROLS:
            control = wrong_cells(cells, factor, settings.seed)
            if p_value(control) < LEVEL:
                break
        p, control_p = p_value(cells), p_value(control)
        verdict = FAIL if p < LEVEL else UNDECIDED if control_p >= LEVEL else PASS
        return {
            "name": "distribution",
            "what": f"temperature {settings.temperature:g}: tokens drawn through the trees follow the target's distribution",
            "tokens": sum(cell.draws for cell in cells),
            "accepted": accepted,
            "p": p,
            "level": LEVEL,
            "control": {
                "what": f"drawn at {factor:g} times the temperature",
                "p": control_p,
                "rejected": control_p < LEVEL,
            },
            "cells": [_described(cell, wrong) for cell, wrong in zip(cells, control, strict=True)],
            "verdict": verdict,
        }

    def _draw(self, number: int, ids: list[int], settings: Settings, draws: int) -> tuple[int, list[Cell]]:
        """Return how many drafted tokens were accepted, and the cells of one context.

        They are the first token drawn, and the second after each of the commonest first ones.
        """
        results: list[Result] = []
        for begin in range(0, draws, ROWS):
            keys = list(range(begin, min(begin + ROWS, draws)))
            # Both that name the noise are varied, key and seed.
            seeded = replace(settings, seed=settings.seed + begin)
            part = branches(self.target, ids, seeded, keys, HeadDrafter(self.head, self.policy))
            results += part
            self.on_progress(1, sum(r.new_tokens for r in part))
        drawn = [r.token_ids for r in results]
        name = str(self.prompts[number][0])
        first = Counter(tokens[0] for tokens in drawn)
        cells = [Cell(name, (), self._law(ids, settings), first)]
        for token, _ in first.most_common(FOLLOWED):
            second = Counter(tokens[1] for tokens in drawn if tokens[0] == token and len(tokens) > 1)
            if second.total() >= FEWEST:
                cells.append(Cell(name, (token,), self._law([*ids, token], settings), second))
        return _accepted(results), cells

    @torch.inference_mode()
    def _law(self, ids: list[int], settings: Settings) -> Tensor:
        """Return the target's distribution after `ids`, [V] on the CPU, by one stock pass."""
        return self._scores(ids, settings).softmax(-1).cpu()

    def _scores(self, ids: list[int], settings: Settings) -> Tensor:
        """Return the target's processed scores [V] after `ids`, by one stock pass."""
        logits_1NV, _ = self.target.own_pass(ids)
        return process_rows(logits_1NV[0], settings)[0].double()


def _accepted(results: Sequence[Result]) -> int:
    """Return how many drafted tokens the answers hold."""
    return sum(sum(r.accepted_per_round) - r.rounds for r in results)


def _described(cell: Cell, wrong: Cell) -> dict[str, Any]:
    statistic, freedom = cell.statistic
    return {
        "id": cell.id,
        "after": list(cell.after),
        "draws": cell.draws,
        "bins": freedom + 1,
        "statistic": statistic,
        "p": cell.p,
        "control_p": wrong.p,
    }


def _judge(check: dict[str, Any], allowed: float) -> dict[str, Any]:
    """Return the check with its verdict; each divergence says whether it is a near-tie."""
    for divergence in check["divergences"]:
        divergence["near_tie"] = divergence["below"] is not None and divergence["below"] <= allowed
    ties = [divergence["near_tie"] for divergence in check["divergences"]]
    verdict = PASS if not ties else TIES if all(ties) else FAIL
    return {**check, "allowed": allowed, "near_ties": sum(ties), "verdict": verdict}


def _pass_logits(target: Target, ids: list[int], size: int, width: int) -> Tensor | None:
    """Return the stock logits [T, V] that predict ids[size:], read `width` tokens a pass after the first `size`; 0 is in
    one pass. None for a model that hands out no cache."""
    if width == 0:
        return target.own_pass(ids[:-1], keep=len(ids) - size)[0][0].float()
    logits_1NV, cache = target.own_pass(ids[:size])
    parts = [logits_1NV[0]]
    for begin in range(size, len(ids) - 1, width):
        if cache is None:
            return None
        new = ids[begin : min(begin + width, len(ids) - 1)]
        logits_1NV, cache = target.own_pass(new, begin, cache, len(new))
        parts.append(logits_1NV[0])
    return torch.cat(parts).float()


@torch.inference_mode()
def measure_noise(target: Target, prompt_ids: list[int], answer: list[int], width: int) -> tuple[float, float]:
    """Return by how much a gap between the best logits differs, at most, between passes of unlike width over one answer,
    and the step of the dtype (epsilon) at the greatest logit."""
    ids, size = prompt_ids + answer, len(prompt_ids)
    whole_TV = _pass_logits(target, ids, size, 0)
    assert whole_TV is not None
    best_TK = whole_TV.topk(min(BEST, whole_TV.shape[1])).indices

    def gaps(logits_TV: Tensor) -> Tensor:
        value_TK = logits_TV.gather(1, best_TK)
        return value_TK[:, :1] - value_TK

    gap_TK = [
        gaps(t) for w in (0, 1, width) if (t := whole_TV if w == 0 else _pass_logits(target, ids, size, w)) is not None
    ]
    step = torch.finfo(target.dtype).eps * float(whole_TV.abs().max())
    return max(float((a - b).abs().max()) for a in gap_TK for b in gap_TK), step


@torch.inference_mode()
def _most_to_test(
    target: Target, prompt_ids: list[int], answer: list[int], settings: Settings, draws: int
) -> tuple[tuple[int, float], int]:
    """Return how much there is to test, and the tokens of the context, at the best place of an answer.

    The law of the next token should have some bins there, and of places that have, the negative control should stand out.
    """
    logits_TV = _pass_logits(target, prompt_ids + answer, len(prompt_ids), 0)
    assert logits_TV is not None
    law_TV = process_rows(logits_TV, settings).softmax(-1)
    wrong_TV = (process_rows(logits_TV, settings) / CONTROLS[-1]).softmax(-1)
    own_TV = law_TV * draws >= FEWEST
    bins_T = own_TV.sum(-1) + 1
    rest_T, wrong_rest_T = ((t * ~own_TV).sum(-1) for t in (law_TV, wrong_TV))
    off_T = ((law_TV - wrong_TV) ** 2 / law_TV * own_TV).nan_to_num().sum(-1)
    off_T = draws * (off_T + (rest_T - wrong_rest_T) ** 2 / rest_T.clamp(min=FEWEST / draws))
    strength_T = off_T / (2 * bins_T) ** 0.5
    found = [
        ((min(bins, ENOUGH), strength), size)
        for size, (bins, strength) in enumerate(zip(bins_T.tolist(), strength_T.tolist(), strict=True), len(prompt_ids))
        if size > 1  # the root, and something before it
    ]
    return max(found, default=((0, 0.0), 0))


def print_report(report: dict[str, Any], console: Any = None) -> None:
    """Print a report's page: what was checked and found, then each place where answers part."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    console = console or Console()
    place, size = report["environment"], report["prompts"]["count"]
    title = f"{report['target']}, {place['dtype']}, tree {report['tree']}, {size} prompts"
    table = Table(box=SIMPLE, padding=(0, 0, 0, 1), title=title)
    for heading in ("check", "what was compared", "tokens", "found", "verdict"):
        table.add_column(
            heading, justify="right" if heading == "tokens" else "left", no_wrap=heading in ("check", "verdict")
        )
    for check in report["checks"]:
        table.add_row(check["name"], check["what"], str(check["tokens"]), _found(check), check["verdict"])
    console.print(table)
    divergences = [(check, d) for check in report["checks"] for d in check.get("divergences", [])]
    if divergences:
        console.print(_divergence_table(divergences))
    noise = report["arithmetic"]
    console.print(
        f"arithmetic: {noise['what']}: up to {noise['noise']:.2g} over {noise['tokens']} tokens; a token up to "
        f"{noise['allowed']:.2g} below the best is a near-tie",
        highlight=False,
    )
    if any(check["verdict"] == UNDECIDED for check in report["checks"]):
        console.print(
            "undecided: too few samples to tell a wrong sampler from a right one; raise --draws", highlight=False
        )
    console.print("exact: " + ("yes" if report["exact"] else "NO"), highlight=False)


def _found(check: dict[str, Any]) -> str:
    """Return what a check found, in a few words."""
    if check["name"] == "distribution":
        said = "rejected" if check["control"]["rejected"] else "not rejected"
        contexts = f"p {check['p']:.2g} in {len(check['cells'])} contexts"
        control = f"control ({check['control']['what']}) {said}, p {check['control']['p']:.1g}"
        return f"{contexts}; {control}; {check['accepted']} drafted tokens accepted"
    near = f", {check['near_ties']} near-ties" if check["near_ties"] else ""
    return f"{check['identical']} of {check['answers']} identical{near}; {check['accepted']} drafted tokens accepted"


def _divergence_table(divergences: list[tuple[dict[str, Any], dict[str, Any]]]) -> Any:
    """Return a table of the first of them."""
    from rich.box import SIMPLE
    from rich.table import Table

    left_out = len(divergences) - SHOWN
    title = "where answers part" + (f" ({SHOWN} of {len(divergences)})" if left_out > 0 else "")
    table = Table(box=SIMPLE, padding=(0, 0, 0, 1), title=title)
    for heading in ("check", "prompt", "at", "tokens", "best two", "margin", "below", "near-tie"):
        table.add_column(heading, no_wrap=heading in ("at", "near-tie"))
    for check, d in divergences[:SHOWN]:
        who = f"{check['name']}, {d['answers'][0]}"
        if d["tokens"] is None:
            table.add_row(who, str(d["id"]), str(d["position"]), "one answer ends", "", "", "", "no")
            continue
        best = " ".join(f"{b['token']}:{b['score']:.4f}" for b in d["best"])
        tokens = " ".join(map(str, d["tokens"]))
        row = [str(d["id"]), str(d["position"]), tokens, best, f"{d['margin']:.2g}", f"{d['below']:.2g}"]
        table.add_row(who, *row, "yes" if d["near_tie"] else "NO")
    return table
