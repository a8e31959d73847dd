"""Compares Headway with flashspec and economize: same target, prompts, process, side by side and interleaved.

    pip install flashspec==0.3.1 economize==0.3.2
    python docs/peers.py TARGET --head H [--head H2] --prompts FILE --limit 6 -n 80 --dtype bfloat16 --batch 1 --out peers.json

Each peer has a model object of its own, as it rewires what it is given, and drafts by prompt lookup, which needs no head of
a format that it would have to read. Every prompt is answered by every method before the next; who begins rotates.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from headway import inputs
from headway.data.chat import use_template
from headway.heads.common.checkpoint import load_head
from headway.inference.bench import Prompt, environment, save_report, transformers_run
from headway.inference.drafter import HeadDrafter, as_drafter
from headway.inference.drafters.hybrid import HybridDrafter
from headway.inference.drafters.ngram import NgramDrafter
from headway.inference.economy import Economy
from headway.inference.generate import Request, generate
from headway.inference.sampling import Settings
from headway.inference.target import Target, load_info, load_tokenizer

Group = list[tuple[int, Prompt]]
Method = Callable[[Group, int], list[list[int]]]


def stock(name: str, dtype: torch.dtype) -> Any:
    """Return a fresh model of transformers."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(name, dtype=dtype).eval()


def flashspec_method(name: str, target: Target) -> Method:
    """Return flashspec's prompt lookup; one prompt at a time."""
    from flashspec import BanditConfig, FlashSpecConfig, SamplingConfig, SpeculativeEngine
    from flashspec.engine import NgramDrafter as Lookup
    from flashspec.engine import TargetModel

    config = FlashSpecConfig(
        device="cpu",
        dtype=str(target.dtype).removeprefix("torch."),
        drafter_strategy="bandit",
        bandit=BanditConfig(n_arms=1),
        sampling=SamplingConfig(temperature=0.0),
        eos_token_ids=tuple(target.eos_ids),
    )
    model = TargetModel(name, torch.device("cpu"), target.dtype, model=stock(name, target.dtype))
    engine = SpeculativeEngine(config, [Lookup()], model)

    def run(group: Group, count: int) -> list[list[int]]:
        answers = []
        for _, (_, _, ids) in group:
            out = engine.generate(torch.tensor([ids]), max_new_tokens=count).output_ids
            answers.append(until_end(after(ids, out.flatten().tolist()), target))
        return answers

    return run


def economize_method(name: str, target: Target, length: int) -> Method:
    """Return economize's prompt lookup in cycles of `length`, its own batches."""
    import economize
    from economize.techniques.lookup import LookupConfig

    model = economize.apply(
        stock(name, target.dtype), LookupConfig(), decoding=economize.DecodeConfig(cycle_length=length)
    )

    def stop(tokens: Any) -> bool:
        return int(tokens[-1]) in target.eos_ids

    def run(group: Group, count: int) -> list[list[int]]:
        prompts = [torch.tensor(ids) for _, (_, _, ids) in group]
        results = model.decode_batch(prompts, count, stop=stop)
        pairs = zip(prompts, results, strict=True)
        return [until_end(after(ids.tolist(), r.tokens.flatten().tolist()), target) for ids, r in pairs]

    return run


def headway_method(target: Target, drafter: Any, economy: Economy | None = None) -> Method:
    """Return Headway with a drafter, or plain."""

    def run(group: Group, count: int) -> list[list[int]]:
        requests = [Request(ids, Settings(max_new_tokens=count), id=n) for n, (_, _, ids) in group]
        answers = generate(target, requests, head=drafter, batch_size=len(group), economy=economy)
        found = {r.id: r.token_ids for r in answers}
        return [found[n] for n, _ in group]

    return run


def transformers_method(target: Target, **extra: Any) -> Method:
    """Return transformers.generate."""
    answer = transformers_run(target, **extra)
    return lambda group, count: [a.token_ids for a in answer(group, Settings(max_new_tokens=count))]


def after(prompt: list[int], ids: list[int]) -> list[int]:
    """Return the new tokens of an answer that may repeat its prompt."""
    return ids[len(prompt) :] if ids[: len(prompt)] == prompt else ids


def until_end(ids: list[int], target: Target) -> list[int]:
    """Return the ids up to the first end id."""
    end = next((i for i, token in enumerate(ids) if token in target.eos_ids), len(ids) - 1)
    return ids[: end + 1]


def main() -> None:
    """Measure, print a table, write the report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("--head", action="append", default=[])
    parser.add_argument("--prompts", action="append", required=True)
    parser.add_argument("--limit", type=int, default=6)
    parser.add_argument("-n", type=int, default=80)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    inputs.quiet()
    tokenizer, info = load_tokenizer(given.target), load_info(given.target)
    use_template(tokenizer)
    prompts = list(enumerate(inputs.bench_prompts(given.prompts, tokenizer, info, given.limit)))
    target = Target.load(given.target, dtype=given.dtype)
    methods: dict[str, Method] = {"transformers": transformers_method(target)}
    if given.batch == 1:
        methods["transformers lookup"] = transformers_method(target, prompt_lookup_num_tokens=10)
        methods["flashspec lookup"] = flashspec_method(given.target, target)
    methods["economize lookup"] = economize_method(given.target, target, 4)
    methods["headway plain"] = headway_method(target, None)
    methods["headway n-gram"] = headway_method(target, NgramDrafter(), Economy())
    for name, source in inputs.head_names([inputs.head_source(h) for h in given.head]).items():
        drafter = as_drafter(load_head(source, target, dtype=target.dtype), inputs.saved_tree(source, target))
        methods[f"headway {name}"] = headway_method(target, drafter, inputs.economy(source, target, None))
        if isinstance(drafter, HeadDrafter):
            hybrid = HybridDrafter(drafter)
            methods[f"headway n-gram or {name}"] = headway_method(target, hybrid, inputs.economy(source, target, None))
    groups = [prompts[at : at + given.batch] for at in range(0, len(prompts), given.batch)]
    seconds, tokens, same = (dict.fromkeys(methods, 0.0) for _ in range(3))
    names = list(methods)
    for method in methods.values():
        method(groups[0], 16)
    for i, group in enumerate(groups):
        answers = {}
        for name in names[i % len(names) :] + names[: i % len(names)]:
            begin = perf_counter()
            answers[name] = methods[name](group, given.n)
            seconds[name] += perf_counter() - begin
            tokens[name] += sum(map(len, answers[name]))
        for name in names:
            same[name] += sum(a == b for a, b in zip(answers[name], answers["transformers"], strict=True))
        print(f"{(i + 1) * given.batch} of {len(prompts)} prompts", flush=True)
    speed = {name: tokens[name] / seconds[name] for name in names}
    print(f"{'method':28s} tokens/s  speed-up  same")
    for name in names:
        ratio = speed[name] / speed["transformers"]
        print(f"{name:28s} {speed[name]:8.1f}  {ratio:8.2f}  {same[name] / len(prompts):4.0%}")
    if given.out:
        rows = [{"name": n, "tokens_per_s": speed[n], "identical": same[n] / len(prompts)} for n in names]
        save_report(
            {
                "environment": environment(target),
                "settings": json.loads(json.dumps(vars(given), default=str)),
                "rows": rows,
            },
            given.out,
        )


if __name__ == "__main__":
    main()
