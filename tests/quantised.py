"""Folders of quantised models as the libraries publish them, written with torch alone: four bits, groups of GROUP inputs.

    from tests.quantised import KINDS, save_quantised

Weights are rounded to the nearest code, where GPTQ and AWQ choose codes by calibration; the files have the same layout.

Letters: O outputs, I inputs, G groups.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.data.byte_tokenizer import byte_tokenizer

GROUP = 32
"""Inputs that share a scale."""
LOW_FIRST = tuple(range(8))
"""Which of eight codes lies in which four bits of an int32, from the lowest."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
MIDDLE = 8
"""The code of zero."""


def _pack(code: Tensor, dim: int, order: Sequence[int] = LOW_FIRST) -> Tensor:
    """Return int32 with eight codes 0..15 in each, taken along `dim`."""
    eight = code.long().movedim(dim, -1).unflatten(-1, (-1, 8))
    word = sum(eight[..., at] << (4 * i) for i, at in enumerate(order))
    assert isinstance(word, Tensor)
    return (word - ((word >> 31) << 32)).to(torch.int32).movedim(-1, dim).contiguous()


def _round(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes [O, I], MIDDLE for zero, and scales [O, G], numbers that float16 can say."""
    group_OGI = weight_OI.float().unflatten(-1, (-1, GROUP))
    scale_OG = (group_OGI.abs().amax(-1) / 7).clamp(min=2**-14).half().float()
    code = (group_OGI / scale_OG[..., None]).round().clamp(-MIDDLE, MIDDLE - 1) + MIDDLE
    return code.flatten(-2).int(), scale_OG


def _gptq(weight_OI: Tensor) -> dict[str, Tensor]:
    code_OI, scale_OG = _round(weight_OI)
    zero_GO = torch.full_like(scale_OG.T, MIDDLE - 1)  # the first of its file formats keeps them less one
    return {
        "qweight": _pack(code_OI.T, 0),
        "qzeros": _pack(zero_GO, 1),
        "scales": scale_OG.T.half().contiguous(),
        "g_idx": torch.arange(weight_OI.shape[1], dtype=torch.int32) // GROUP,
    }


def _awq(weight_OI: Tensor) -> dict[str, Tensor]:
    code_OI, scale_OG = _round(weight_OI)
    return {
        "qweight": _pack(code_OI.T, 1, AWQ_ORDER),
        "qzeros": _pack(torch.full_like(scale_OG.T, MIDDLE), 1, AWQ_ORDER),
        "scales": scale_OG.T.half().contiguous(),
    }


def _compressed(weight_OI: Tensor) -> dict[str, Tensor]:
    code_OI, scale_OG = _round(weight_OI)
    return {
        "weight_packed": _pack(code_OI, 1),
        "weight_scale": scale_OG,
        "weight_shape": torch.tensor(weight_OI.shape),
    }


_WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
KINDS: dict[str, tuple[Callable[[Tensor], dict[str, Tensor]], dict[str, Any]]] = {
    "gptq": (
        _gptq,
        {"bits": 4, "group_size": GROUP, "desc_act": False, "sym": True, "checkpoint_format": "gptq"},
    ),
    "awq": (_awq, {"bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
    "compressed-tensors": (
        _compressed,
        {
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": _WEIGHTS}},
        },
    ),
}
"""By what transformers calls the method: what a layer's weight becomes, and the method's fields in the config."""


def save_quantised(model: PreTrainedModel, folder: Path, kind: str) -> Path:
    """Write a model with all linear layers but its LM head quantised, and the byte tokenizer; return the folder."""
    quantise, fields = KINDS[kind]
    tensors = {name: weight for name, weight in model.state_dict().items() if name != "lm_head.weight"}
    if not model.config.tie_word_embeddings:
        tensors["lm_head.weight"] = model.get_output_embeddings().weight.detach()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            weight = tensors.pop(f"{name}.weight")
            tensors |= {f"{name}.{key}": value for key, value in quantise(weight).items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: t.contiguous().clone() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    config = model.config.to_dict() | {
        "architectures": [type(model).__name__],
        "quantization_config": {"quant_method": kind, **fields},
    }
    (folder / "config.json").write_text(json.dumps(config))
    byte_tokenizer().save_pretrained(folder)
    return folder


def decoded(weight_OI: Tensor) -> Tensor:
    """Return what the codes of a weight stand for."""
    code_OI, scale_OG = _round(weight_OI)
    return ((code_OI - MIDDLE).unflatten(-1, (-1, GROUP)) * scale_OG[..., None]).flatten(-2)
