"""What a head or a target is, from configs and file headers alone."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headway.heads.common.checkpoint import head_folder, read_config, saved_adapter
from headway.heads.common.errors import HeadwayError
from headway.heads.common.hub import parse_id
from headway.inference.target import load_info, load_tokenizer
from headway.inputs import context_size, head_tensors, misfit


def is_head(source: str) -> bool:
    """Whether a folder or hub id holds a head; a model's config.json is none."""
    folder = Path(source).expanduser()
    if not folder.is_dir() and (folder.suffix == ".gguf" or parse_id(source) is None):
        return False
    try:
        read_config(source)
    except HeadwayError:
        return False
    return True


def describe_head(source: str) -> dict[str, Any]:
    """Return the facts of a head."""
    folder = head_folder(source)
    saved, shapes = read_config(folder), head_tensors(str(folder))
    head, target = saved["head"], saved["target"]
    path = folder / "model.safetensors"
    facts: dict[str, Any] = {
        "source": source,
        "family": saved["family"],
        "target": target["name"] + (f"@{target['revision']}" if target.get("revision") else ""),
        "adapter": str(saved_adapter(saved) or "none"),
        "taps": ", ".join(map(str, head["taps"])),
        "parameters": sum(map(prod, shapes.values())),
        "dtype": saved.get("dtype"),
        "size_mb": round(path.stat().st_size / 1e6, 1),
        "hidden_size": head["hidden_size"],
        "vocab_size": head["vocab_size"],
        "draft_vocab": head.get("draft_vocab_size") or "the target's",
        "config": {k: v for k, v in head.items() if k not in ("taps", "hidden_size", "vocab_size", "draft_vocab_size")},
        "tree": (folder / "tree.json").is_file(),
        "metrics": saved.get("metrics") or {},
        "data": saved.get("data") or {},
    }
    return facts


def describe_target(
    name: str, head: str | None, revision: str | None, adapter: str | None = None
) -> tuple[dict[str, Any], str]:
    """Return the facts of a target, and of a head if one is given, and why that does not fit or ''."""
    info = load_info(name, revision=revision, adapter=adapter)
    tokenizer = load_tokenizer(name, revision=revision)
    target = {
        "source": name,
        "revision": info.revision,
        "adapter": str(info.adapter or "none"),
        "model_type": info.model_type,
        "parameters": _parameters(name, revision),
        "layers": info.num_layers,
        "hidden_size": info.hidden_size,
        "vocab_size": info.vocab_size,
        "tokens": info.num_tokens,
        "context": context_size(info),
        "chat_template": bool(tokenizer.chat_template),
        "taps": f"0..{info.num_layers - 1} or last",
    }
    if head is None:
        return {"target": target}, ""
    saved = read_config(head)
    reason = misfit(head, saved, info)
    fit = "no" if reason else "yes"
    trained = saved["target"]["name"]
    if not reason and Path(trained).name.lower() != Path(name).name.lower():
        fit = f"sizes fit, names differ (trained for {trained}); loading compares the weights"
    return {"target": target, "head": describe_head(head), "fit": fit}, reason


def _parameters(name: str, revision: str | None) -> int | None:
    """Return the number of weights, from the config alone; None for a file whose config cannot be read that way."""
    if name.endswith(".gguf"):
        return None
    config = AutoConfig.from_pretrained(
        Path(name).expanduser() if Path(name).expanduser().is_dir() else name, revision=revision
    )
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (ValueError, KeyError, TypeError, ImportError) as e:
        raise HeadwayError(f"{name} is no causal language model: {str(e).strip().splitlines()[0][:200]}") from e
    return sum(p.numel() for p in model.parameters())
