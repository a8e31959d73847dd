"""Compares heads trained on features kept in bfloat16 and in int8: same dialogs, steps, seeds and batches.

    python docs/store.py recipes/smollm2-eagle3.yaml target=runs/models/SmolLM2-135M-Instruct dialogs=runs/demo/dialogs \
        max_seconds=null max_steps=400 dtype=float32 --out runs/store --seeds 0,1

Prints, for each seed and store, the held-out agreement and the accepted length of the real decoder, and the difference that
int8 makes beside the difference between seeds, which is what it must be compared with. Interrupted, it continues.
Training reads what was recorded with the dialogs; in bfloat16 then, and rounded again to int8 as `headway capture --store int8`
would have kept it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from headway import inputs
from headway.data.shards import STORES
from headway.inference.target import Target
from headway.train.config import load_recipe
from headway.train.loop import train


def main(argv: Sequence[str] | None = None) -> None:
    """Train twice for each seed and print the table; figures go to OUT/store.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--prompts", type=int, default=64, help="held-out prompts answered")
    given = parser.parse_intermixed_args(argv)
    inputs.quiet()
    fixed = ["eval_every=0", "tree=chain:4", f"eval_rows={given.prompts}", f"eval_prompts={given.prompts}"]
    rows: list[dict[str, Any]] = []
    target: Target | None = None
    for seed in map(int, given.seeds.split(",")):
        for store in STORES:
            run = [*fixed, *given.overrides, f"seed={seed}", f"store={store}", f"out={given.out / f'{store}-{seed}'}"]
            config = load_recipe(given.recipe, run)
            if config.max_seconds is not None or config.dtype == "auto":
                parser.error("give max_seconds=null max_steps=N dtype=...: runs of equal steps are compared")
            if target is None:
                target = Target.load(config.target, dtype=config.dtype, revision=config.revision)
            figures = train(config, target=target)
            rows.append({"seed": seed, "store": store, **figures})
            agreement = "/".join(f"{a:.3f}" for a in figures["held_out_agreement_S"])
            print(
                f"seed {seed}  {store:<9} accepted length {figures['accepted_length']:.3f}, agreement {agreement}",
                flush=True,
            )
    (given.out / "store.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    by_store = {s: [row["accepted_length"] for row in rows if row["store"] == s] for s in STORES}
    cost = mean(by_store["int8"]) - mean(by_store["bfloat16"])
    spread = max(by_store["bfloat16"]) - min(by_store["bfloat16"])
    beside = (
        f"between seeds of bfloat16: {spread:.3f}"
        if len(by_store["int8"]) > 1
        else "one seed, so no telling it from chance"
    )
    print(f"int8 minus bfloat16: {cost:+.3f}; {beside}")


if __name__ == "__main__":
    main()
