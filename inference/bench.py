"""Measures, side by side in one run: transformers.generate, Headway without a head, and Headway with each head.

Every prompt is answered by every method before the next prompt, and who begins rotates, so that a machine that slows
down slows all of them. Seconds include the prefill.

report     target, mode, settings, environment, command, prompts, rows, rounds, answers
rows       one per method: tokens_per_s, ratios of it, accepted_length (also per category), identical, ttft_ms, itl_ms
rounds     one per method with rounds: milliseconds and share of draft, verify and the rest
answers    one per method and prompt: tokens, rounds, seconds

`row_passes` counts the target passes that each row took part in; rows of one batch share a pass.
"""

from __future__ import annotations

import json
import os
import platform
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from itertools import pairwise
from math import ceil
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import transformers

from headway import __version__
from headway.heads.common.aside import file_aside
from headway.heads.common.errors import HeadwayError
from headway.heads.common.protocol import Head
from headway.inference.drafter import Drafter, as_drafter
from headway.inference.economy import Economy
from headway.inference.generate import Request, Times, generate
from headway.inference.host import clock, stopped
from headway.inference.sampling import Settings
from headway.inference.target import Target
from headway.inference.tree import Policy
from headway.inference.unfinished import Unfinished, kept
from headway.inference.whole_table import print_table

Prompt = tuple[str, str, list[int]]
"""(id, category, token ids)."""

TRANSFORMERS, PLAIN = "transformers", "plain"
LOOKUP, ASSISTED = "transformers lookup", "transformers assisted"
FAILURES = (HeadwayError, RuntimeError, ValueError, IndexError, TypeError)
"""What a method may raise on a prompt without ending the bench."""
LOOKUP_TOKENS = 10
"""What transformers takes where nothing is said."""
FORMAT = 1
WARM_UP_TOKENS = 16


@dataclass
class Answer:
    """What one method made of one prompt."""

    token_ids: list[int]
    rounds: int
    """Target passes after the prefill."""
    in_rounds: int
    """Tokens emitted by those."""
    arrivals: list[tuple[float, int]]
    """(seconds since the prompt was handed over, tokens that came then)."""


Run = Callable[[Sequence[tuple[int, Prompt]], Settings], list[Answer]]


def bench(
    target: Target,
    heads: Mapping[str, tuple[Head | Drafter, Policy | None]],
    prompts: Sequence[Prompt],
    settings: Settings,
    *,
    batch_size: int = 1,
    lookup: bool = False,
    assistant: Target | None = None,
    economies: Mapping[str, Economy] | None = None,
    seconds: float | None = None,
    command: str = "",
    on_progress: Callable[[int, int], None] | None = None,
    unfinished: Unfinished | None = None,
) -> dict[str, Any]:
    """Return the report of all methods on `prompts`; `heads` maps a name to a head and its tree (None: the default), or to
    another drafter and None.

    `lookup` adds transformers' own prompt lookup, `assistant` its assisted generation with that draft model; of these it
    takes one prompt at a time, so larger batches go without, and so does a target that it refuses; `refused` has its words.
    `economies` turns methods, by name, off where drafting does not pay; without one a method drafts in every round. A group
    of prompts on which a method fails is counted for none; `errors` holds its words.

    After `seconds` no further prompts are begun (the first are); the report counts those that were measured. Ctrl-C
    ends it as if time were up, without the prompts that were under way, once any are measured; `interrupted` says so.
    What `unfinished` holds is not measured again, and what is measured goes into it; `continued` counts the prompts that
    came from it. `on_progress(prompts done, tokens made)` is called as it goes. Raises HeadwayError for no prompts, a
    tree deeper than its head, or a head named as one of the methods is.
    """
    numbered = _numbered(prompts)
    if batch_size > 1:
        lookup, assistant = False, None
    runs, clocks, tallies = _methods(target, heads, lookup, assistant, economies or {})
    groups = [numbered[at : at + batch_size] for at in range(0, len(numbered), batch_size)]
    known, keep = kept(unfinished)
    progress = on_progress or (lambda items, tokens: None)
    refused = _warm_up(runs, groups[0], settings)
    for row in refused:
        del runs[row["name"]], tallies[row["name"]]
    names = list(runs)
    start, measured, continued, interrupted = perf_counter(), 0, 0, False
    errors: list[dict[str, str]] = []
    for i, group in enumerate(groups):
        if set(known.get(str(i), ())) == set(names):
            parts = {name: _Part.read(part) for name, part in known[str(i)].items()}
            continued += len(group)
        elif measured and seconds is not None and perf_counter() - start > seconds:
            break
        else:
            order = names[i % len(names) :] + names[: i % len(names)]
            try:
                parts = _measure(runs, clocks, order, group, settings, progress)
            except KeyboardInterrupt:
                if not measured:
                    raise
                interrupted = True
                break
            if not any(part.error for part in parts.values()):  # what failed is tried again
                keep(str(i), {name: asdict(part) for name, part in parts.items()})
            progress(len(group), 0)
        ids = ", ".join(prompt_id for _, (prompt_id, _, _) in group)
        failed = [{"name": name, "id": ids, "error": part.error} for name, part in parts.items() if part.error]
        errors += failed
        if failed:
            continue
        for name, tally in tallies.items():
            tally.add(group, parts[name])
        measured += len(group)
    if not measured:
        raise HeadwayError(f"no prompt was answered by every method; {errors[0]['name']}: {errors[0]['error']}")
    return {
        **begin_report(target, command),
        "settings": {**_plain_settings(settings), "batch_size": batch_size},
        "prompts": {
            "count": measured,
            "left_out": len(prompts) - measured,
            "interrupted": interrupted,
            "continued": continued,
            "categories": sorted({entry["category"] for entry in tallies[PLAIN].entries}),
        },
        "errors": errors,
        "refused": refused,
        "rows": [tally.row(tallies, settings) for tally in tallies.values()],
        "rounds": [tally.round(tallies[PLAIN]) for tally in tallies.values() if tally.times.rounds],
        "answers": [entry for tally in tallies.values() for entry in tally.entries],
    }


def _numbered(prompts: Sequence[Prompt]) -> list[tuple[int, Prompt]]:
    if not prompts:
        raise HeadwayError("no prompts to measure; give at least one")
    return list(enumerate(prompts))


@dataclass
class _Part:
    """What one method made of one group of prompts."""

    answers: list[Answer]
    seconds: float
    times: Times
    error: str = ""

    @staticmethod
    def read(kept: dict[str, Any]) -> _Part:
        answers = [Answer(**answer) for answer in kept["answers"]]
        return _Part(answers, kept["seconds"], Times(**kept["times"]), kept["error"])


def _measure(
    runs: Mapping[str, Run],
    clocks: Mapping[str, Times],
    order: Sequence[str],
    group: Sequence[tuple[int, Prompt]],
    settings: Settings,
    progress: Callable[[int, int], None],
) -> dict[str, _Part]:
    """Have every method answer a group, in this order; return what each made."""
    parts = {}
    for name in order:
        clocks[name].clear()
        begin, error, answers = clock(), "", []
        try:
            answers = runs[name](group, settings)
        except FAILURES as e:
            error = f"{type(e).__name__}: {e}"
        parts[name] = _Part(answers, clock() - begin, copy(clocks[name]), error)
        progress(0, sum(len(answer.token_ids) for answer in answers))
    return parts


def _methods(
    target: Target,
    heads: Mapping[str, tuple[Head | Drafter, Policy | None]],
    lookup: bool,
    assistant: Target | None,
    economies: Mapping[str, Economy],
) -> tuple[dict[str, Run], dict[str, Times], dict[str, _Tally]]:
    """Return what answers by each method, its clock and its tally."""
    clocks: dict[str, Times] = defaultdict(Times)
    runs: dict[str, Run] = {TRANSFORMERS: transformers_run(target)}
    if lookup:
        runs[LOOKUP] = transformers_run(target, prompt_lookup_num_tokens=LOOKUP_TOKENS)
    if assistant is not None:
        runs[ASSISTED] = transformers_run(target, assistant_model=assistant.model)
    runs[PLAIN] = _headway_run(target, clocks[PLAIN])
    tallies = {name: _Tally(name) for name in runs}
    for name, drafter in _drafters(heads, target).items():
        tallies[name] = _Tally(name, tree=drafter.describe() if drafter is not None else "off")
        runs[name] = _headway_run(target, clocks[name], drafter, economies.get(name))
    return runs, clocks, tallies


def _warm_up(runs: Mapping[str, Run], group: Sequence[tuple[int, Prompt]], settings: Settings) -> list[dict[str, str]]:
    """Have every method answer shortly; return name and words of transformers' own drafting where it refuses.

    Any other that fails says so when it is measured.
    """
    few = min(settings.max_new_tokens, WARM_UP_TOKENS)
    short = replace(settings, max_new_tokens=few, min_new_tokens=min(settings.min_new_tokens, few))
    refused = []
    for name, run in runs.items():
        try:
            run(group, short)
        except FAILURES as e:
            if name in (LOOKUP, ASSISTED):
                refused.append({"name": name, "error": f"{type(e).__name__}: {e}"})
    return refused


def _drafters(heads: Mapping[str, tuple[Head | Drafter, Policy | None]], target: Target) -> dict[str, Drafter | None]:
    """Return what drafts for each method, after checking that it can."""
    drafters = {}
    for name, (head, policy) in heads.items():
        if name in (TRANSFORMERS, LOOKUP, ASSISTED, PLAIN):
            raise HeadwayError(f"a head cannot be called {name!r} in a bench; rename its folder")
        drafter = as_drafter(head, policy)
        drafters[name] = None if drafter is None else drafter.fit(target)
    return drafters


def throughput(
    target: Target,
    prompts: Sequence[Prompt],
    settings: Settings,
    *,
    batch_size: int,
    command: str = "",
    on_progress: Callable[[int, int], None] | None = None,
    unfinished: Unfinished | None = None,
) -> dict[str, Any]:
    """Return tokens per second over a whole set of prompts: a transformers.generate loop over batches, and Headway.

    This is what distilling costs. The loop answers `batch_size` prompts at a time, left-padded, sorted by length, until
    the last of them is done; Headway lets waiting prompts in as rows end. Half of the loop runs before Headway and half
    after it, so that a machine that slows down slows both. What `unfinished` holds is not measured again: batches of the
    loop, and Headway's run, which is one part. `on_progress(answers, tokens)` counts the answers of both. Raises
    HeadwayError for no prompts.
    """
    numbered = sorted(_numbered(prompts), key=lambda pair: len(pair[1][2]))
    groups = [numbered[at : at + batch_size] for at in range(0, len(numbered), batch_size)]
    run = transformers_run(target)
    requests = [Request(ids, settings, id=number, key=number) for number, (_, _, ids) in enumerate(prompts)]
    short = replace(settings, max_new_tokens=min(settings.max_new_tokens, WARM_UP_TOKENS))
    run(groups[0], short)
    list(generate(target, [replace(r, settings=short) for r in requests[:batch_size]], batch_size=batch_size))
    known, keep = kept(unfinished)
    seconds = dict.fromkeys((TRANSFORMERS, PLAIN), 0.0)

    def part(name: str, method: str, answering: Iterable[tuple[int, list[int]]]) -> dict[int, list[int]]:
        """Return the answers of one part by prompt number, and count its seconds."""
        if name not in known:
            begin, made = clock(), []
            for number, ids in answering:
                made.append((number, ids))
                if on_progress:
                    on_progress(1, len(ids))
            known[name] = made, clock() - begin
            keep(name, known[name])
        made, took = known[name]
        seconds[method] += took
        return dict(made)

    def loop(group: Sequence[tuple[int, Prompt]]) -> Iterator[tuple[int, list[int]]]:
        for (number, _), answer in zip(group, run(group, settings), strict=True):
            yield number, answer.token_ids

    answers: dict[int, list[int]] = {}
    for i in range(0, len(groups), 2):
        answers |= part(f"loop {i}", TRANSFORMERS, loop(groups[i]))
    ours = part(PLAIN, PLAIN, ((r.id, r.token_ids) for r in generate(target, requests, batch_size=batch_size)))
    for i in range(1, len(groups), 2):
        answers |= part(f"loop {i}", TRANSFORMERS, loop(groups[i]))
    made = {TRANSFORMERS: sum(map(len, answers.values())), PLAIN: sum(map(len, ours.values()))}
    speed = {name: made[name] / seconds[name] for name in made}
    same = sum(ours[n] == ids for n, ids in answers.items()) / len(answers) if settings.greedy else None
    return {
        **begin_report(target, command),
        "settings": {**_plain_settings(settings), "batch_size": batch_size},
        "prompts": {"count": len(prompts)},
        "rows": [
            {
                "name": name,
                "tokens_per_s": speed[name],
                "ratio_vs_transformers": speed[name] / speed[TRANSFORMERS],
                "tokens": made[name],
                "seconds": seconds[name],
                "identical": same if name == PLAIN else None,
            }
            for name in made
        ],
    }


def print_throughput(report: dict[str, Any], console: Any = None) -> None:
    """Print a throughput report's table."""
    from rich.box import SIMPLE
    from rich.table import Table

    place, size = report["environment"], report["settings"]["batch_size"]
    title = f"{report['target']}, {place['dtype']}, {report['prompts']['count']} prompts, {size} at once"
    table = Table(box=SIMPLE, padding=(0, 0, 0, 1), title=title)
    table.add_column("method", no_wrap=True)
    for heading in ("tokens/s", "speed-up", "tokens", "seconds", "same"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in report["rows"]:
        same = "-" if row["identical"] is None else f"{row['identical']:.0%}"
        cells = [f"{row['tokens_per_s']:.1f}", f"{row['ratio_vs_transformers']:.2f}"]
        table.add_row(row["name"], *cells, str(row["tokens"]), f"{row['seconds']:.0f}", same)
    print_table(table, console)


def _plain_settings(settings: Settings) -> dict[str, Any]:
    return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(settings).items()}


def begin_report(target: Target, command: str) -> dict[str, Any]:
    """Return what every report begins with: the target, its mode, the environment, the command."""
    return {
        "format": FORMAT,
        "target": target.info.name,
        "revision": target.info.revision,
        "mode": target.mode,
        "mode_reason": target.mode_reason,
        "environment": environment(target),
        "command": command,
        **compiling(target),
    }


def environment(target: Target) -> dict[str, Any]:
    """Return what the figures depend on beside the code: dtype, device, threads, versions."""
    device = target.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    return {
        "dtype": target.dtype_name,
        "adapter": target.info.adapter and f"{target.info.adapter}, {target.carries.removeprefix('adapter ')}",
        "device": f"{device.type}: {name}",
        "packed_weights": target.packed.reason or f"{target.packed.num_bytes / 2**30:.1f} GiB",
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "headway": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        **({"compile": True} if compiling(target) else {}),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def compiling(target: Target) -> dict[str, Any]:
    """Return how passes are compiled, and the seconds that took so far, which no figure counts; nothing where they are not
    asked to be."""
    if target.compiled is None and not target.compiled_reason:
        return {}
    drafts = (
        {"not_compiled": target.compiled.reasons} if target.compiled is not None and target.compiled.reasons else {}
    )
    return {"compiled": target.compiled_reason or True, **drafts, "compile_seconds": round(stopped(), 1)}


def cpu_name() -> str:
    """Return what the processor calls itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


@dataclass
class _Tally:
    """What one method did so far."""

    name: str
    tree: str | None = None
    seconds: float = 0.0
    times: Times = field(default_factory=Times)
    answers: dict[int, Answer] = field(default_factory=dict)
    """By prompt number."""
    entries: list[dict[str, Any]] = field(default_factory=list)
    by_category: dict[str, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))
    """Category -> [tokens emitted in rounds, rounds]."""

    def add(self, group: Sequence[tuple[int, Prompt]], part: _Part) -> None:
        self.seconds += part.seconds
        self.times.add(part.times)
        for (number, (prompt_id, category, _)), answer in zip(group, part.answers, strict=True):
            self.answers[number] = answer
            self.by_category[category][0] += answer.in_rounds
            self.by_category[category][1] += answer.rounds
            # Prompts of one batch share its seconds.
            entry = {"name": self.name, "id": prompt_id, "category": category, "tokens": len(answer.token_ids)}
            self.entries.append({**entry, "rounds": answer.rounds, "seconds": round(part.seconds / len(group), 4)})

    @property
    def tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers.values())

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    def same(self, other: _Tally) -> float:
        """Return the share of prompts answered with the same tokens."""
        same = [answer.token_ids == other.answers[n].token_ids for n, answer in self.answers.items()]
        return sum(same) / len(same)

    def row(self, tallies: Mapping[str, _Tally], settings: Settings) -> dict[str, Any]:
        emitted, rounds = map(sum, zip(*self.by_category.values(), strict=True))
        reference, plain = tallies[TRANSFORMERS], tallies[PLAIN]
        compared = settings.greedy and self is not reference
        exact = settings.greedy or settings.accept == "exact"
        gaps = [gap for answer in self.answers.values() for gap in _gaps(answer)]
        first = [answer.arrivals[0][0] for answer in self.answers.values()]
        row: dict[str, Any] = {
            "name": self.name,
            "tokens_per_s": self.tokens_per_s,
            "ratio_vs_transformers": self.tokens_per_s / reference.tokens_per_s,
            "ratio_vs_plain": self.tokens_per_s / plain.tokens_per_s,
            "accepted_length": _per(emitted, rounds),
            "identical": self.same(reference) if compared else None,
            "identical_to_plain": self.same(plain) if exact and self not in (reference, plain) else None,
            "ttft_ms": 1000 * median(first),
            "ttft_p95_ms": 1000 * _percentile(first, 0.95),
            "itl_ms": 1000 * median(gaps) if gaps else None,
            "itl_p95_ms": 1000 * _percentile(gaps, 0.95) if gaps else None,
            "accepted_length_by_category": {c: _per(*counts) for c, counts in sorted(self.by_category.items())},
            "row_passes": rounds + len(self.answers),
            "passes_per_answer": rounds / len(self.answers) + 1,
            "seconds_per_answer": self.seconds / len(self.answers),
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tree": self.tree,
            "lossy": self.tree is not None and settings.accept == "typical",
        }
        if compared:
            row["different"] = [
                e["id"] for e, n in zip(self.entries, self.answers, strict=True) if self._differs(n, reference)
            ]
        return row

    def _differs(self, number: int, other: _Tally) -> bool:
        return self.answers[number].token_ids != other.answers[number].token_ids

    def round(self, plain: _Tally) -> dict[str, Any]:
        """Return where the time of a round went, what it gained over plain rounds, and the most it could have: all but
        target pass and draft being free."""
        times, least = self.times, plain.times
        total, plain_total = (t.draft + t.verify + t.other for t in (times, least))
        out: dict[str, Any] = {"name": self.name, "rounds": times.rounds, "round_ms": 1000 * total / times.rounds}
        for part in ("draft", "verify", "other"):
            out[f"{part}_ms"] = 1000 * getattr(times, part) / times.rounds
            out[f"{part}_share"] = getattr(times, part) / total
        out["drafted_share"] = times.drafted / times.rounds
        if least.rounds:
            gained = _per(*map(sum, zip(*self.by_category.values(), strict=True)))
            out["rounds_vs_plain"] = gained * (plain_total / least.rounds) / (total / times.rounds)
            out["ceiling_vs_plain"] = (
                gained * (least.verify / least.rounds) / ((times.draft + times.verify) / times.rounds)
            )
        return out


def _per(emitted: int, rounds: int) -> float:
    return emitted / rounds if rounds else 1.0


def _percentile(values: Sequence[float], share: float) -> float:
    """Return the least value that `share` of the values do not exceed."""
    return sorted(values)[max(0, ceil(share * len(values)) - 1)]


def _gaps(answer: Answer) -> list[float]:
    """Return the seconds each token after the first took; tokens that came together share the time since the last."""
    gaps = []
    for (before, _), (now, count) in pairwise(answer.arrivals):
        gaps += [(now - before) / count] * count
    return gaps


def _headway_run(target: Target, times: Times, drafter: Drafter | None = None, economy: Economy | None = None) -> Run:
    def run(group: Sequence[tuple[int, Prompt]], settings: Settings) -> list[Answer]:
        settings = replace(settings, max_new_tokens=_budget(target, group, settings))
        arrivals: dict[int, list[tuple[float, int]]] = {number: [] for number, _ in group}
        requests = [Request(ids, settings, id=number, key=number) for number, (_, _, ids) in group]
        begin = clock()

        def arrived(request: Request, tokens: list[int]) -> None:
            arrivals[request.id].append((clock() - begin, len(tokens)))

        results = generate(
            target,
            requests,
            head=drafter,
            batch_size=len(group),
            on_tokens=arrived,
            times=times,
            economy=economy,
        )
        answers = {r.id: Answer(r.token_ids, r.rounds, sum(r.accepted_per_round), arrivals[r.id]) for r in results}
        return [answers[number] for number, _ in group]

    return run


class _Arrivals:
    """A streamer of transformers that notes when tokens come."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, int]] = []
        """(seconds, ids that came then)."""
        self._begin = perf_counter()
        self._prompt_seen = False

    def put(self, value: Any) -> None:
        """Take the prompt first, then each step's tokens."""
        if self._prompt_seen:
            self.steps.append((perf_counter() - self._begin, value.numel()))
        self._prompt_seen = True

    def end(self) -> None:
        """Nothing is left to do."""


def transformers_run(target: Target, **extra: Any) -> Run:
    """Return what answers a group with `target.model.generate`, left-padded to the longest prompt; `extra` goes there too."""

    def run(group: Sequence[tuple[int, Prompt]], settings: Settings) -> list[Answer]:
        prompts = [ids for _, (_, _, ids) in group]
        size = max(map(len, prompts))
        pad = _pad_id(target)
        rows = [[pad] * (size - len(ids)) + ids for ids in prompts]
        mask = [[0] * (size - len(ids)) + [1] * len(ids) for ids in prompts]
        streamer = _Arrivals()
        torch.manual_seed(settings.seed)
        out = target.model.generate(  # type: ignore[operator]
            input_ids=torch.tensor(rows, device=target.device),
            attention_mask=torch.tensor(mask, device=target.device),
            max_new_tokens=_budget(target, group, settings),
            pad_token_id=pad,
            eos_token_id=list(_eos(target, settings)) or None,
            streamer=streamer,
            **_sampling(settings),
            **extra,
        )
        answers = []
        for row in out[:, size:].tolist():
            ids = _until_end(row, _eos(target, settings))
            if extra:  # one prompt, and each step brings what was accepted of its draft; the first reads the prompt too
                answers.append(Answer(ids, len(streamer.steps), len(ids), streamer.steps))
            else:
                arrivals = [(seconds, 1) for seconds, _ in streamer.steps[: len(ids)]]
                answers.append(Answer(ids, len(ids) - 1, len(ids) - 1, arrivals))
        return answers

    return run


def _budget(target: Target, group: Sequence[tuple[int, Prompt]], settings: Settings) -> int:
    """Return the most new tokens of a group: rows that transformers pads all end where the longest fills the context."""
    return min(settings.max_new_tokens, target.max_positions - max(len(ids) for _, (_, _, ids) in group))


def _eos(target: Target, settings: Settings) -> tuple[int, ...]:
    return target.eos_ids if settings.eos_ids is None else settings.eos_ids


def _pad_id(target: Target) -> int:
    pad = getattr(target.tokenizer, "pad_token_id", None)
    return pad if pad is not None else next(iter(target.eos_ids), 0)


def _sampling(settings: Settings) -> dict[str, Any]:
    """Return the settings as transformers calls them, overriding what the model's generation config says."""
    common = {"repetition_penalty": settings.repetition_penalty, "num_beams": 1}
    if settings.greedy:
        return {"do_sample": False, **common}
    drawn = {"temperature": settings.temperature, "top_k": settings.top_k, "top_p": settings.top_p}
    if settings.min_p > 0:
        drawn["min_p"] = settings.min_p
    return {"do_sample": True, **drawn, **common}


def _until_end(ids: list[int], eos: tuple[int, ...]) -> list[int]:
    """Return the tokens up to the first end token, that one included; what follows is padding."""
    end = next((i for i, token in enumerate(ids) if token in eos), len(ids) - 1)
    return ids[: end + 1]


def save_report(report: dict[str, Any], path: Path | str) -> None:
    """Write a report as JSON, aside and then renamed."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with file_aside(path) as aside:
        aside.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _how_compiled(report: dict[str, Any]) -> str:
    compiled = report.get("compiled")
    return "" if compiled is None else "compiled, " if compiled is True else "not compiled, "


def print_report(report: dict[str, Any], console: Any = None) -> None:
    """Print a report's tables; `speed-up` is over transformers.generate, `same` the share of answers identical to its."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    console = console or Console()
    place = report["environment"]
    table = Table(
        box=SIMPLE,
        padding=(0, 0, 0, 1),
        title=f"{report['target']}, {place['dtype']}, {_how_compiled(report)}{report['prompts']['count']} prompts",
    )
    table.add_column("method", no_wrap=True)
    heading = ["tok/s", "speed-up", "x plain", "accepted", "same", "ttft ms", "itl ms", "p95"]
    for title in heading:
        table.add_column(title, justify="right", no_wrap=True)
    for row in report["rows"]:
        same = "-" if row["identical"] is None else f"{row['identical']:.0%}"
        cells = [f"{row[key]:.2f}" for key in ("ratio_vs_transformers", "ratio_vs_plain", "accepted_length")]
        places = {"itl_ms": 1, "itl_p95_ms": 0}
        token_ms = ["-" if row[key] is None else f"{row[key]:.{n}f}" for key, n in places.items()]
        name = f"{row['name']} (lossy)" if row["lossy"] else row["name"]
        table.add_row(name, f"{row['tokens_per_s']:.1f}", *cells, same, f"{row['ttft_ms']:.0f}", *token_ms)
    print_table(table, console)
    for row in report["refused"]:
        console.print(f"no row of {row['name']}, which refused: {row['error']}", markup=False)
    for error in report["errors"]:
        console.print(f"not counted: {error['id']}, on which {error['name']} failed: {error['error']}", markup=False)
    if len(report["prompts"]["categories"]) > 1:
        print_table(_category_table(report), console)
    if report["rounds"]:
        print_table(_round_table(report), console)


def _category_table(report: dict[str, Any]) -> Any:
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(box=SIMPLE, padding=(0, 0, 0, 1), title="accepted length by category")
    table.add_column("method", no_wrap=True)
    for category in report["prompts"]["categories"]:
        table.add_column(category, justify="right", no_wrap=True)
    for row in report["rows"]:
        if row["name"] in (TRANSFORMERS, PLAIN):
            continue
        values = row["accepted_length_by_category"]
        table.add_row(row["name"], *(f"{values[c]:.2f}" for c in report["prompts"]["categories"]))
    return table


def _round_table(report: dict[str, Any]) -> Any:
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(box=SIMPLE, padding=(0, 0, 0, 1), title="where the time of a round goes")
    table.add_column("method", no_wrap=True)
    for title in ("rounds", "drafted", "round ms", "draft", "verify", "other", "", "x plain", "ceiling"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in report["rounds"]:
        parts = [f"{row[p + '_ms']:.1f}" for p in ("draft", "verify", "other")] + [f"{row['other_share']:.0%}"]
        gains = [f"{row[key]:.2f}" if key in row else "-" for key in ("rounds_vs_plain", "ceiling_vs_plain")]
        head = [str(row["rounds"]), f"{row['drafted_share']:.0%}", f"{row['round_ms']:.1f}"]
        table.add_row(row["name"], *head, *parts, *gains)
    return table


def print_crossover(reports: Sequence[dict[str, Any]], console: Any = None) -> None:
    """Print the speed-up of each method over plain decoding at each batch size, of reports that differ in it alone."""
    from rich.box import SIMPLE
    from rich.table import Table

    sizes = [report["settings"]["batch_size"] for report in reports]
    table = Table(box=SIMPLE, padding=(0, 0, 0, 1), title="tokens per second over plain decoding, by prompts at once")
    table.add_column("method", no_wrap=True)
    for size in sizes:
        table.add_column(str(size), justify="right")
    for name, ratios in _ratios(reports).items():
        table.add_row(name, *("-" if ratios.get(size) is None else f"{ratios[size]:.2f}" for size in sizes))
    print_table(table, console)


def _ratios(reports: Sequence[dict[str, Any]]) -> dict[str, dict[int, float]]:
    """Return, by method and batch size, tokens per second over plain decoding."""
    found: dict[str, dict[int, float]] = {}
    for report in reports:
        for row in report["rows"]:
            found.setdefault(row["name"], {})[report["settings"]["batch_size"]] = row["ratio_vs_plain"]
    return found


def save_crossover(reports: Sequence[dict[str, Any]], path: Path | str) -> None:
    """Draw each method's speed-up over plain decoding against the batch size into a PNG."""
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    sizes = [report["settings"]["batch_size"] for report in reports]
    for name, ratios in _ratios(reports).items():
        style = {PLAIN: ("0.3", "--"), TRANSFORMERS: ("0.65", "-")}.get(name, (None, "-"))
        axes.plot(list(ratios), list(ratios.values()), marker="o", label=name, color=style[0], linestyle=style[1])
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xlabel("prompts at once")
    axes.set_ylabel("tokens per second over plain decoding")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    place = reports[0]["environment"]
    title = f"{Path(reports[0]['target']).name}, {place['dtype']}, {place['threads']} threads"
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    _save_figure(figure, Path(path))


def _save_figure(figure: Any, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    with file_aside(path) as aside:
        FigureCanvasAgg(figure).print_png(str(aside))


def require_matplotlib() -> None:
    """Raise HeadwayError unless a plot can be drawn."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise HeadwayError("a plot needs matplotlib, which is not installed; pip install 'headway[plot]'")


def save_plot(report: dict[str, Any], path: Path | str) -> None:
    """Draw tokens per second and accepted length of each method into a PNG. Raises HeadwayError without matplotlib."""
    require_matplotlib()
    from matplotlib.figure import Figure

    rows, place = report["rows"], report["environment"]
    figure = Figure(figsize=(7, 0.7 * len(rows) + 1.6), layout="constrained")
    axes = figure.add_subplot()
    ours = [row["name"] for row in rows if row["tree"] is not None]
    colours = [
        f"C{ours.index(n)}" if n in ours else "0.45" if n == PLAIN else "0.65" for n in (r["name"] for r in rows)
    ]
    bars = axes.barh([row["name"] for row in rows], [row["tokens_per_s"] for row in rows], color=colours)
    notes = [f"{r['ratio_vs_transformers']:.2f}x, accepted length {r['accepted_length']:.2f}" for r in rows]
    axes.bar_label(bars, notes, padding=4)
    axes.invert_yaxis()
    axes.margins(x=0.45)
    axes.set_xlabel("tokens per second")
    axes.set_title(
        f"{Path(report['target']).name}, {place['dtype']}, batch {report['settings']['batch_size']}, "
        f"{report['prompts']['count']} prompts, {place['threads']} threads",
        fontsize=10,
    )
    axes.spines[["top", "right"]].set_visible(False)
    _save_figure(figure, Path(path))
