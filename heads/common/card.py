"""The README.md of a saved head: what it is, what it was trained on, how to run it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CARD = """---
library_name: headway
tags:
- speculative-decoding
- {family}{base}
---

# {family} head for {target}{with_adapter}

A draft head of family `{family}`, trained with Headway. It makes {target} decode faster; with exact acceptance
the output is the target's own: token for token in float32, up to ties of rounding in bfloat16.

| | |
|---|---|
| target | {target} |
| target revision | {revision} |{adapter}
| target type | {model_type}, {num_layers} layers, hidden size {hidden_size}, vocabulary {vocab_size} |
| taps | {taps} |
| dtype of the weights | {dtype} |

## Head

{head}

{lora}## Data

{data}

## Figures

{metrics}

## How to run

```sh
headway generate --target {target}{adapter_option} --head FOLDER_OR_HUB_ID --prompt "Why is the sky blue?"
```

```python
from headway import Request, Settings, Target, generate, load_head

target = Target.load("{target}", dtype="float32"{adapter_argument})
head = load_head("FOLDER_OR_HUB_ID", target)
messages = [{{"role": "user", "content": "Why is the sky blue?"}}]
text = target.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
ids = target.tokenizer(text, add_special_tokens=False).input_ids
for result in generate(target, [Request(ids, Settings(max_new_tokens=128))], head=head):
    print(target.tokenizer.decode(result.token_ids), result.accepted_length)
```
"""


def model_card(config: dict[str, Any]) -> str:
    """Return the card of a head from its config.json."""
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
    # The hub takes ids only: a local target is named in the text but is no base_model.
    on_hub = target["revision"] is not None or (target["name"].count("/") == 1 and not Path(target["name"]).exists())
    return CARD.format(
        family=config["family"],
        base=f"\nbase_model: {target['name']}" if on_hub else "",
        target=target["name"],
        revision=target["revision"] or "local files",
        taps=", ".join(str(t) for t in head["taps"]),
        dtype=config["dtype"],
        head=_table({k: v for k, v in head.items() if k not in ("taps", "hidden_size", "vocab_size")}),
        data=_table(config["data"]),
        metrics=_table(config["metrics"]),
        lora=_lora(config.get("lora")),
        **carries,
        **{k: target[k] for k in ("model_type", "num_layers", "hidden_size", "vocab_size")},
    )


def _lora(lora: dict[str, Any] | None) -> str:
    if lora is None:
        return ""
    where = "beside the base head's weights, in PEFT's layout" if lora["keep"] else "in the weights"
    fields = {k: v for k, v in lora.items() if k not in ("from", "keep")}
    return f"## LoRA\n\nTrained on the head {lora['from']}, which was frozen; it is {where}.\n\n{_table(fields)}\n\n"


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
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
