"""The README.md of a saved head: what it is, what it was trained on, how to run it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headway.heads.common.report_tables import report_tables

CARD = """---
library_name: headway
tags:
- speculative-decoding
- {family}{base}
---

# {family} head for {target}{with_adapter}

A draft head of family `{family}`, trained with Headway. It makes {target}{with_adapter} decode faster; with exact acceptance
the output is the target's own: token for token in float32, up to ties of rounding in bfloat16.
{changed}
| | |
|---|---|
| target | {target} |
| target revision | {revision} |{adapter}
| licence of the target | {licence} |
| target type | {model_type}, {num_layers} layers, hidden size {hidden_size}, vocabulary {vocab_size} |
| taps | {taps} |
| dtype of the weights | {dtype} |

## Head

{head}

{lora}{joint}## Data

{data}

## Figures

{metrics}
{measured}
## How to run

```sh
headway generate --target {target}{adapter_option} --head {place} --prompt "Why is the sky blue?"
```

```python
from headway import Request, Settings, Target, generate, load_head

target = Target.load("{target}", dtype="float32"{adapter_argument})
head = load_head("{place}", target)
messages = [{{"role": "user", "content": "Why is the sky blue?"}}]
text = target.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
ids = target.tokenizer(text, add_special_tokens=False).input_ids
for result in generate(target, [Request(ids, Settings(max_new_tokens=128))], head=head):
    print(target.tokenizer.decode(result.token_ids), result.accepted_length)
```
"""


CHANGED = """
**The target changed.** Its adapter was trained together with this head, so what is decoded is what {target} *with the adapter*
would write, which is not what {target} writes. Without that adapter the head is refused. How far apart they are is said below.
"""
PLACE = "FOLDER_OR_HUB_ID"
_SEAL = re.compile(r"\n<!-- headway card ([0-9a-f]{16}) -->\n*$")


def model_card(
    config: dict[str, Any],
    *,
    place: str = PLACE,
    licence: str = "not looked up",
    measured: Sequence[str] = (),
) -> str:
    """Return the card of a head from its config.json.

    `place` is where readers find the head, `licence` what is known of the target's, `measured` tables to show below the
    figures. The card ends in a seal by which `is_sealed` knows it.
    """
    target, head = config["target"], config["head"]
    adapter = target.get("adapter")
    carries = {"adapter": "", "with_adapter": "", "adapter_option": "", "adapter_argument": ""}
    if adapter is not None:
        made_for = f", made for {adapter['base']}" if adapter["base"] else ""
        carries = {
            "adapter": f"\n| LoRA adapter on the target | {adapter['name']}, sha256 {adapter['sha256']}{made_for} |",
            "with_adapter": f" with the adapter {adapter['name']}",
            "adapter_option": f" --target-adapter {adapter['name']}",
            "adapter_argument": f', adapter="{adapter["name"]}"',
        }
    # The hub takes ids only: a local target is named in the text (elsewhere without its path) but is no base_model.
    on_hub = is_on_hub(target)
    name = target["name"] if on_hub or place == PLACE else Path(target["name"]).name
    data = {key: name if value == target["name"] else value for key, value in config["data"].items()}
    card = CARD.format(
        family=config["family"],
        base=f"\nbase_model: {target['name']}" if on_hub else "",
        target=name,
        revision=target["revision"] or "local files",
        licence=licence,
        taps=", ".join(str(t) for t in head["taps"]),
        dtype=config["dtype"],
        head=_table({k: v for k, v in head.items() if k not in ("taps", "hidden_size", "vocab_size")}),
        data=_table(data),
        metrics=_table(config["metrics"]),
        lora=_lora(config.get("lora")),
        changed=CHANGED.format(target=name) if config.get("target_changed") else "",
        joint=_joint(config.get("joint")),
        measured="".join(f"\n{table}\n" for table in measured),
        place=place,
        **carries,
        **{k: target[k] for k in ("model_type", "num_layers", "hidden_size", "vocab_size")},
    )
    return f"{card}\n<!-- headway card {_seal(card)} -->\n"


def is_on_hub(target: dict[str, Any]) -> bool:
    """Whether a target is named by its hub id."""
    return target["revision"] is not None or (target["name"].count("/") == 1 and not Path(target["name"]).exists())


def is_sealed(card: str) -> bool:
    """Whether a card is as `model_card` wrote it: nobody has edited it since."""
    found = _SEAL.search(card)
    return found is not None and found[1] == _seal(card[: found.start()])


def _seal(card: str) -> str:
    return hashlib.sha256(card.encode()).hexdigest()[:16]


def tuned_table(trees: dict[str, Any]) -> list[str]:
    """Return the table of a tree.json, what `headway tune` chose; nothing where that holds nothing."""
    rows = [
        (place, tuned["policy"], tuned.get("expected_accepted_length"), tuned.get("expected_ratio_vs_plain"))
        for place, tuned in trees.items()
        if isinstance(tuned, dict) and "policy" in tuned
    ]
    heading = ("tuned for", "tree", "accepted length (expected)", "x plain (expected)")
    return [_columns("Trees that `headway tune` chose; one prompt at a time:", heading, rows)] if rows else []


def report_table(report: dict[str, Any]) -> str:
    """Return the table of a report of `headway bench`, of one batch size, or `headway eval`, without the note: a command names
    files of this machine.

    Raises KeyError, TypeError, AttributeError or ValueError where it is neither.
    """
    (table,) = report_tables(report)
    return _columns(f"{table.title}:", table.heading, table.rows)


def _columns(title: str, heading: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [heading, ["---"] * len(heading), *([("" if x is None else _cell(x)) for x in row] for row in rows)]
    return "\n".join([title, "", *(f"| {' | '.join(line)} |" for line in lines)])


def _lora(lora: dict[str, Any] | None) -> str:
    if lora is None:
        return ""
    where = "beside the base head's weights, in PEFT's layout" if lora["keep"] else "in the weights"
    fields = {k: v for k, v in lora.items() if k not in ("from", "keep")}
    return f"## LoRA\n\nTrained on the head {lora['from']}, which was frozen; it is {where}.\n\n{_table(fields)}\n\n"


def _joint(joint: dict[str, Any] | None) -> str:
    if joint is None:
        return ""
    measured = {
        "KL divergence from the unchanged target, nats a token": joint.get("target_kl"),
        "likeliest word the same": joint.get("target_top1"),
        "held-out tokens": joint.get("tokens"),
    }
    fields = {k: v for k, v in joint.items() if k not in ("target_kl", "target_top1", "tokens")}
    apart = {k: "not measured" if v is None else v for k, v in measured.items()}
    return (
        f"## The target changed\n\nHow far it is from the unchanged one, on held-out rows:\n\n{_table(apart)}\n\n"
        f"How the adapter was trained, together with the head:\n\n{_table(fields)}\n\n"
    )


def _table(values: dict[str, Any]) -> str:
    if not values:
        return "Not recorded."
    rows = [f"| {key} | {_cell(value)} |" for key, value in values.items()]
    return "\n".join(["| | |", "|---|---|", *rows])


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple) and all(isinstance(v, int | float) for v in value):
        return ", ".join(_cell(v) for v in value)
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text.replace("|", "\\|").replace("\n", " ")
