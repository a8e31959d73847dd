"""Training that begins with a head there is: all of its weights, or a LoRA on them.

PEFT puts the LoRA on the head's linear layers while it trains; what is saved is a head as any other, with the LoRA in its
weights or, kept, beside them.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor, nn

from headway.heads.common.checkpoint import load_head, other_adapter, plain_name, read_config, saved_adapter
from headway.heads.common.errors import HeadwayError
from headway.heads.common.hub import run_head
from headway.heads.common.lora import PREFIX
from headway.heads.common.protocol import Frozen, Head, find_family
from headway.train.config import TrainConfig
from headway.train.progress import say

WHOLE = ("lm_head", "lm_heads")
"""Modules whose weight the loss reads whole, past whatever stands in for them."""


def source(config: TrainConfig) -> str:
    """Return the folder or hub id of the head that a recipe begins with: of a run, its head."""
    assert config.init_from is not None
    return run_head(config.init_from)


def head_fields(config: TrainConfig) -> dict[str, Any]:
    """Return the fields of the head's config: the recipe's, or those of the head that it begins with.

    Raises HeadwayError where that is of another family, or the recipe asks for other fields than it has.
    """
    if config.init_from is None:
        return config.head
    saved = read_config(source(config))
    if saved["family"] != config.family:
        raise HeadwayError(
            f"init_from {config.init_from} is a head of family {saved['family']}, the recipe says {config.family}; give one of "
            f"{config.family}, or family={saved['family']}"
        )
    for name, value in config.head.items():
        if (list(value) if isinstance(value, tuple) else value) != saved["head"].get(name):
            raise HeadwayError(
                f"head.{name} is {value!r}, init_from {config.init_from} has {saved['head'].get(name)!r}; leave it out of the "
                f"recipe, or give head.{name}={_spelled(saved['head'].get(name))}"
            )
    fields = find_family(config.family)[0].from_json(saved["head"])
    return {name: getattr(fields, name) for name in saved["head"] if name not in ("hidden_size", "vocab_size")}


def _spelled(value: Any) -> str:
    """Return a field's value as it is given on the command line."""
    return json.dumps(value).replace(" ", "")


def begin_with(config: TrainConfig, frozen: Frozen) -> Head:
    """Return the head that the recipe begins with, in float32, with a LoRA on it if asked for.

    One of another target of the same sizes, or of another adapter on it, will do, and that is said.
    """
    head_fields(config)
    folder = source(config)
    saved = read_config(folder)
    head = load_head(folder, frozen, dtype=torch.float32, other_target=True).train()
    made_for = saved["target"]["name"]
    if plain_name(made_for) != plain_name(frozen.info.name):
        say(f"{folder} was trained for {made_for}; it begins a head for {frozen.info.name}")
    elif other_adapter("", saved_adapter(saved), frozen.info):
        say(
            f"{folder} was trained with {saved_adapter(saved) or 'no adapter'} on the target, now it is {frozen.info.adapter}"
        )
    return head if config.lora is None else add_lora(head, config.lora)


def add_lora(head: Head, fields: dict[str, Any]) -> Head:
    """Return the head with a LoRA on its linear layers, which alone trains; it begins as nothing.

    Raises HeadwayError where PEFT is missing, and for modules that the head has not, or whose weight the loss reads whole.
    """
    from headway.inference.adapter import require_peft

    require_peft()
    import peft

    linear = [name for name, module in head.named_modules() if type(module) is nn.Linear]
    allowed = [name for name in linear if not set(name.split(".")) & set(WHOLE)]
    wanted = fields["modules"] or allowed
    for end in wanted:
        if not any(_ends(name, end) for name in allowed):
            raise HeadwayError(
                f"lora.modules has {end!r}, the head can have one on {', '.join(allowed)}; use those names"
            )
    chosen = [name for name in allowed if any(_ends(name, end) for end in wanted)]
    config = peft.LoraConfig(
        r=fields["rank"], lora_alpha=fields["alpha"], lora_dropout=fields["dropout"], target_modules=chosen
    )
    peft.inject_adapter_in_model(config, head)
    return head


def plain_state(head: Head) -> dict[str, Tensor]:
    """Return the state of a head by its own names, a LoRA on it added to its weights."""
    return _base_state(head) | {
        f"{name}.weight": (module.weight + module.get_delta_weight("default")).detach()
        for name, module in _lora_layers(head).items()
    }


def split(head: Head, config: TrainConfig) -> tuple[Head, dict[str, Any]]:
    """Return the head as `save_head` takes it, and what that is told of the LoRA."""
    layers = _lora_layers(head)
    if config.lora is None or not layers:
        return head, {}
    plain = type(head)(head.config, head.frozen)
    plain.load_state_dict(_base_state(head) if config.lora["keep"] else plain_state(head))
    said = {"from": source(config), **config.lora, "modules": list(layers)}
    if not config.lora["keep"]:
        return plain, {"lora": said}
    tensors = {
        f"{PREFIX}{name}.{part}.weight": getattr(module, part)["default"].weight
        for name, module in layers.items()
        for part in ("lora_A", "lora_B")
    }
    written: dict[str, Any] = head.peft_config["default"].to_dict()  # type: ignore[index, union-attr]
    written |= {"base_model_name_or_path": source(config), "inference_mode": True}
    written = {k: sorted(v) if isinstance(v, set) else getattr(v, "value", v) for k, v in written.items()}
    return plain, {"lora": said, "kept": (tensors, written)}


def _lora_layers(head: Head) -> dict[str, Any]:
    return {name: module for name, module in head.named_modules() if hasattr(module, "lora_A")}


def _base_state(head: Head) -> dict[str, Tensor]:
    return {
        name.replace(".base_layer.", "."): tensor for name, tensor in head.state_dict().items() if ".lora_" not in name
    }


def _ends(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")
