"""Measures the accepted length of heads by the tokens that they were trained on, and by what they minimised.

    headway capture --target T runs/demo/dialogs --taps 1,14,26,last --dtype bfloat16 --out runs/features
    python docs/curves.py recipes/smollm2-eagle3.yaml target=T dialogs=runs/demo/dialogs features=runs/features \
        dtype=bfloat16 --prompts humaneval.jsonl --prompts gsm8k.jsonl --out runs/curves

Each head is trained by the recipe with a schedule that ends where its tokens do, and answers the prompts in the real decoder, as
`headway eval` does. Leaves curves.jsonl, a row for each head, and what is made of it: curves.md and curves.png (which needs
matplotlib). Interrupted, the same command continues; more --tokens, --losses or --seeds add to what is there. The features may
also be computed by the way: give cache=memory, and the heads share them.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from headway import inputs
from headway.data.dialogs import read_dialogs
from headway.data.manifest import digest, read_json, require_same, write_json
from headway.heads.common.checkpoint import load_head
from headway.heads.common.errors import HeadwayError
from headway.inference.bench import require_matplotlib
from headway.inference.drafter import HeadDrafter
from headway.inference.target import Target, load_info, load_tokenizer
from headway.inference.tree import parse_policy
from headway.train.batches import Order, make_batches, make_rows
from headway.train.config import TrainConfig, load_recipe
from headway.train.evaluate import evaluate_accepted_length
from headway.train.features import Memory
from headway.train.loop import train

Sets = dict[str, list[list[int]]]
"""Token ids of the prompts of each file, by its name."""
SERIES_LOSS = "kl"
LOSSES = ["kl", "ce", "reverse_kl", "jsd", "tv", "lk", "topk"]
FROM_THE_RUN = ("loss", "seed", "max_steps", "max_seconds", "epochs", "out", "eval_every", "eval_prompts", "tree")
NO_PART = ("features", "cache", "save_every", "log_every", "tracker")
"""Keys of a recipe that the script sets, and those that change no head; the others must be the same for all."""


class Head(NamedTuple):
    """A head to train."""

    loss: str
    tokens: int
    """Supervised tokens."""
    seed: int


def wanted_heads(given: argparse.Namespace) -> list[Head]:
    """Return the heads in the order they are trained: the series by tokens, then the losses, seed by seed."""
    series = [Head(SERIES_LOSS, tokens, given.seeds[0]) for tokens in given.tokens]
    losses = [Head(loss, given.loss_tokens, seed) for seed in given.seeds for loss in given.losses]
    return list(dict.fromkeys([*series, *losses]))


def steps_for(config: TrainConfig, tokens: int, most_positions: int) -> tuple[int, float]:
    """Return the steps after which a run has seen `tokens` supervised tokens, and the epochs that they are."""
    rows = make_rows(
        read_dialogs(config.dialogs),
        min(config.max_length, most_positions),
        config.eval_fraction,
        config.eval_rows,
        config.supervise,
    )
    batches = make_batches(rows.train, config.tokens_per_batch)
    order, seen = Order(len(batches), config.seed), 0
    for n in count():
        if seen >= tokens and n % config.grad_accum == 0:
            return n // config.grad_accum, n / len(batches)
        seen += sum(row.num_goals for row in batches[order[n]])
    raise AssertionError


def train_head(given: argparse.Namespace, head: Head, target: Target, shared: Memory) -> dict[str, Any]:
    """Train a head, or continue, and return the figures of the run; a run that is finished is not done again."""
    fixed = [
        "max_seconds=null",
        "epochs=null",
        "eval_every=0",
        "eval_prompts=0",
        f"loss={head.loss}",
        f"seed={head.seed}",
    ]
    # The tree is named so that one too deep for the head is refused before it is trained.
    recipe = [*given.overrides, *fixed, f"tree={given.tree}", f"out={run_folder(given, head)}"]
    whole = load_recipe(given.recipe, [*recipe, "max_steps=1"])
    steps, epochs = steps_for(whole, head.tokens, target.max_positions)
    figures = train(load_recipe(given.recipe, [*recipe, f"max_steps={steps}"]), target=target, shared=shared)
    kept = ("steps", "trained_tokens", "train_seconds", "held_out_agreement_S")
    return {"epochs": round(epochs, 2), **{key: figures[key] for key in kept}}


def answer(given: argparse.Namespace, head: Head, target: Target, sets: Sets) -> dict[str, Any]:
    """Return the accepted length of a trained head, over all prompts and by set."""
    trained = load_head(run_folder(given, head) / "head", target)
    policy = HeadDrafter(trained, parse_policy(given.tree)).fit(target).policy
    found = {
        name: evaluate_accepted_length(
            target, trained, policy, prompts, max_new_tokens=given.max_new_tokens, batch_size=given.batch_size
        )
        for name, prompts in sets.items()
    }
    emitted, rounds = (sum(row[key] for row in found.values()) for key in ("tokens", "rounds"))
    return {"accepted_length": emitted / rounds, "sets": {name: row["accepted_length"] for name, row in found.items()}}


def run_folder(given: argparse.Namespace, head: Head) -> Path:
    """Return the folder of a head's run."""
    return given.out / f"{head.loss.replace(':', '-')}-{head.tokens}-{head.seed}"


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows that were measured before."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.is_file() else []


def save_rows(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write the rows aside and rename the file into place."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    aside.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    aside.replace(path)


def spell_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return rows as a table in Markdown."""
    names = list(rows[0]["sets"])
    steps = len(rows[0]["held_out_agreement_S"])
    heading = ["loss", "seed", "supervised tokens", "epochs", "steps", f"agreement, steps 1 to {steps}", "all", *names]
    lines = [heading, ["---"] * len(heading)]
    for row in rows:
        agreement = " ".join(f"{a:.2f}" for a in row["held_out_agreement_S"])
        lengths = [f"{length:.2f}" for length in (row["accepted_length"], *(row["sets"][name] for name in names))]
        tokens, epochs = f"{row['trained_tokens'] / 1000:.0f} thousand", f"{row['epochs']:.2f}"
        lines.append([row["loss"], str(row["seed"]), tokens, epochs, str(row["steps"]), agreement, *lengths])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def spell_spread(rows: Sequence[dict[str, Any]]) -> str:
    """Return by how much losses differ, beside how much seeds of one loss do; '' unless there are several of both."""
    by_loss: dict[str, list[float]] = {}
    for row in rows:
        by_loss.setdefault(row["loss"], []).append(row["accepted_length"])
    apart = [max(lengths) - min(lengths) for lengths in by_loss.values() if len(lengths) > 1]
    if not apart or len(by_loss) < 2:
        return ""
    means = {loss: mean(lengths) for loss, lengths in by_loss.items()}
    best, worst = max(means, key=means.__getitem__), min(means, key=means.__getitem__)
    return (
        f"Means of the seeds: from {means[worst]:.2f} ({worst}) to {means[best]:.2f} ({best}). Seeds of one loss differ by "
        f"{mean(apart):.2f} in the mean, {max(apart):.2f} at most.\n"
    )


def draw(series: Sequence[dict[str, Any]], losses: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Draw accepted length against tokens, and by loss, into a PNG."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    by_tokens, by_loss = figure.subplots(1, 2, width_ratios=(3, 2))
    tokens = [row["trained_tokens"] for row in series]
    for name in series[0]["sets"] if series else ():
        by_tokens.plot(tokens, [row["sets"][name] for row in series], marker="o", label=name)
    by_tokens.plot(tokens, [row["accepted_length"] for row in series], "--", color="0.3", marker="o", label="all")
    by_tokens.set_xscale("log", base=2)
    by_tokens.set_xticks(tokens, [f"{t / 1000:.0f}k" for t in tokens])
    by_tokens.minorticks_off()
    by_tokens.set_xlabel(f"supervised tokens seen, loss {SERIES_LOSS}")
    by_tokens.set_ylabel("accepted length")
    by_tokens.legend(frameon=False)
    names = list(dict.fromkeys(row["loss"] for row in losses))
    for seed in dict.fromkeys(row["seed"] for row in losses):
        of_seed = [row for row in losses if row["seed"] == seed]
        places = [names.index(row["loss"]) for row in of_seed]
        by_loss.plot([row["accepted_length"] for row in of_seed], places, "o", label=f"seed {seed}")
    by_loss.set_yticks(range(len(names)), names)
    by_loss.invert_yaxis()
    if losses:
        by_loss.set_xlabel(f"accepted length, all sets, {losses[0]['tokens'] / 1000:.0f}k tokens")
        by_loss.legend(frameon=False)
    for axes in (by_tokens, by_loss):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=10)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    FigureCanvasAgg(figure).print_png(str(aside))
    aside.replace(path)


def show(given: argparse.Namespace, rows: Sequence[dict[str, Any]], title: str) -> None:
    """Write the tables and the plot of what is measured so far, in the order of the heads wanted."""
    by_head = {Head(row["loss"], row["tokens"], row["seed"]): row for row in rows}
    done = [head for head in wanted_heads(given) if head in by_head]
    series = [
        by_head[h] for h in done if (h.loss, h.seed) == (SERIES_LOSS, given.seeds[0]) and h.tokens in given.tokens
    ]
    losses = [by_head[head] for head in done if head.tokens == given.loss_tokens and head.loss in given.losses]
    tables = [spell_table(part) for part in (series, losses) if part]
    (given.out / "curves.md").write_text("\n".join([*tables, spell_spread(losses)]), encoding="utf-8")
    draw(series, losses, title, given.out / "curves.png")


def numbers(text: str) -> list[int]:
    """Return the numbers of `25000,50000`."""
    return [int(part) for part in text.split(",")]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return what was given on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", help="key=value of the recipe")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--prompts", action="append", required=True, help="held-out prompts; repeat it for several sets"
    )
    parser.add_argument("--tokens", type=numbers, default=[25_000, 50_000, 100_000, 200_000, 400_000])
    parser.add_argument("--losses", type=lambda text: text.split(","), default=LOSSES)
    parser.add_argument("--loss-tokens", type=int, default=100_000, help="that each loss is trained on")
    parser.add_argument("--seeds", type=numbers, default=[0], help="of the losses; the series by tokens has the first")
    parser.add_argument("--limit", type=int, default=8, help="prompts of each set")
    parser.add_argument("-n", "--max-new-tokens", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--tree", default="dynamic:depth=6,top_k=8,nodes=60")
    return parser.parse_intermixed_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Train and evaluate what is wanted and not there yet."""
    given = parse(argv)
    inputs.quiet()
    require_matplotlib()
    checks = [[f"loss={loss}", "max_steps=1", "out=x"] for loss in given.losses]
    config = [load_recipe(given.recipe, [*given.overrides, *check]) for check in checks][0]
    if config.dtype == "auto":
        raise HeadwayError(
            "dtype is auto, which may be another one when the command continues; give dtype=bfloat16 or float32"
        )
    tokenizer, info = load_tokenizer(config.target, revision=config.revision), load_info(config.target)
    chosen = {Path(p).stem: inputs.bench_prompts([p], tokenizer, info, given.limit) for p in given.prompts}
    sets = {name: [ids for _, _, ids in prompts] for name, prompts in chosen.items()}
    settings = {
        "recipe": {key: value for key, value in config.to_json().items() if key not in FROM_THE_RUN + NO_PART},
        "prompts": digest(sets),
        **{key: getattr(given, key) for key in ("tree", "limit", "max_new_tokens", "batch_size")},
    }
    given.out.mkdir(parents=True, exist_ok=True)
    known = given.out / "settings.json"
    if known.is_file():
        require_same(read_json(known), settings, given.out)
    write_json(known, settings)
    rows = read_rows(given.out / "curves.jsonl")
    done = {(row["loss"], row["tokens"], row["seed"]) for row in rows}
    wanted = wanted_heads(given)
    target = Target.load(config.target, dtype=config.dtype, revision=config.revision)
    title = f"{Path(info.name).name}, {config.family}, {sum(map(len, sets.values()))} prompts, {given.tree}"
    shared: Memory = {}
    for i, head in enumerate(wanted):
        if head not in done:
            figures = train_head(given, head, target, shared)
            rows.append({**head._asdict(), **figures, **answer(given, head, target, sets)})
            save_rows(rows, given.out / "curves.jsonl")
        row = next(row for row in rows if (row["loss"], row["tokens"], row["seed"]) == head)
        print(
            f"{i + 1} of {len(wanted)}: {head.loss}, {row['trained_tokens']} tokens, seed {head.seed}: "
            f"accepted length {row['accepted_length']:.3f}",
            flush=True,
        )
        show(given, rows, title)
    print((given.out / "curves.md").read_text("utf-8"))


if __name__ == "__main__":
    main()
