"""A LoRA kept beside a head, in PEFT's layout, added to the head's weights when it is loaded: W + alpha / r B A.

    model.safetensors           the head that the LoRA was trained on
    adapter_config.json         r, lora_alpha, target_modules, ... as PEFT writes them
    adapter_model.safetensors   base_model.model.<module>.lora_A.weight [r, in] and .lora_B.weight [out, r]

Reading it takes no PEFT.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from headway.heads.common.errors import HeadwayError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
OTHER = ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "fan_in_fan_out", "modules_to_save", "lora_bias")
"""Fields that change the sum above; a head's LoRA has none of them."""


def with_lora(tensors: dict[str, Tensor], lora: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """Return a head's tensors with the LoRA in `folder`, whose own tensors are `lora`, added in float32.

    Raises HeadwayError unless every one of them belongs to a weight of the head.
    """
    scale = _scale(folder / CONFIG)
    merged = dict(tensors)
    left = set(lora)
    for name in sorted(lora):
        if not name.endswith(".lora_A.weight"):
            continue
        module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
        other = name.replace(".lora_A.", ".lora_B.")
        weight, down, up = tensors.get(f"{module}.weight"), lora[name], lora.get(other)
        if (
            weight is None
            or up is None
            or tuple(weight.shape) != (up.shape[0], down.shape[1])
            or len(down) != up.shape[1]
        ):
            raise HeadwayError(
                f"{folder / WEIGHTS}: {name!r} does not fit the head beside it; the files do not belong together"
            )
        merged[f"{module}.weight"] = (weight.float() + scale * (up.float() @ down.float())).to(weight.dtype)
        left -= {name, other}
    if left or not lora:
        what = f"tensor {min(left)!r}, which is none of a LoRA" if left else "no tensors"
        raise HeadwayError(f"{folder / WEIGHTS} has {what}; save or download the head again")
    return merged


def write_lora(folder: Path, lora: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Write a LoRA's tensors and PEFT's config of it."""
    from safetensors.torch import save_file

    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in lora.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _scale(path: Path) -> float:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except FileNotFoundError:
        raise HeadwayError(f"{path} does not exist; save or download the head again") from None
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise HeadwayError(f"{path} is no config of a LoRA ({e}); save or download the head again") from None
    strange = [name for name in OTHER if config.get(name)]
    if config.get("peft_type") != "LORA" or rank < 1 or strange:
        said = (
            f"{strange[0]} {config[strange[0]]!r}" if strange else f"peft_type {config.get('peft_type')!r} and r {rank}"
        )
        raise HeadwayError(f"{path} has {said}; a head's adapter is a plain LoRA")
    return alpha / rank
