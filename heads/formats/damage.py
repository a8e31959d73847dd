"""What no folder of a head may hold, whatever its layout: fields of a wrong type, numbers out of range, rotary angles that
nobody builds, tensors that are not plain numbers.

Checked when a folder is read, so that what reads it further on may take the fields for what they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headway.heads.common.errors import HeadwayError
from headway.heads.common.vocab import from_d2t, to_t2d

TAP_IDS = "eagle_aux_hidden_state_layer_ids"
MASK_TOKEN = ("mask_token_id", "pard_token", "ptd_token_id")
"""Names that the token of P-EAGLE for what is not yet known has, in the order in which vLLM looks for them."""
NOTE = "headway"
"""Key of config.json under which an export says what it is; engines pass over it."""
PLAIN = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Floating dtypes of weights; the narrower ones are quantised, and mean nothing without their scales."""
WHOLE = (torch.bool, torch.int64, torch.int32)
MOST_HEADS = 1024
"""Medusa heads, and layers of each, that anyone could mean."""

_MEDUSA = ("medusa_num_heads", "medusa_num_layers", "num_medusa_heads", "num_medusa_layers", "num_heads")
_COUNTS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "draft_vocab_size", "truncated_vocab_size", "max_position_embeddings", "num_hidden_layers", "target_hidden_size",
    "num_aux_hidden_states",
)  # fmt: skip
_FLAGS = (
    "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "attention_bias", "mlp_bias", "bias",
    "tie_word_embeddings", "use_aux_hidden_state",
)  # fmt: skip
_OBJECTS = ("eagle_config", "transformer_layer_config", "speculators_config", "medusa", NOTE)
_ROPES = ("rope_parameters", "rope_scaling")
_ROPE_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor"),
}
"""Rotary types, and what each cannot be built without."""


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in value)


def _is(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind)


_RULES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(_MEDUSA, (f"a count of 1 to {MOST_HEADS}", lambda v: _is_count(v) and v <= MOST_HEADS)),
    **dict.fromkeys(_OBJECTS, ("an object", _is(dict))),
    **dict.fromkeys(("medusa_fc_bias", "original_lm_head"), ("true or false", _is(bool))),
    TAP_IDS: ("a list of layer numbers", _is_ids),
}
"""Key -> what it has to be, of any folder."""
_DRAFT_RULES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(_COUNTS, ("a count of 1 or more", _is_count)),
    **dict.fromkeys(("rms_norm_eps", "rope_theta"), ("a number above 0", _is_number)),
    **dict.fromkeys(_FLAGS, ("true or false", _is(bool))),
    **dict.fromkeys(_ROPES, ("an object", _is(dict))),
    **dict.fromkeys(
        MASK_TOKEN, ("a token, 0 or more", lambda v: _is_count(v) or (v == 0 and isinstance(v, int) and v is not False))
    ),
    **dict.fromkeys(("hidden_act", "speculators_model_type"), ("a name", _is(str))),
}
"""The same, of a head that has the config to itself."""


def check_config(config: dict[str, Any], path: Path, alone: bool) -> None:
    """Raise HeadwayError where a field that is read has a wrong type or is out of range. A null counts as left out.

    `alone` means that config.json is the head's own; a full model's fields are the model's, whose types nobody here knows.
    """
    rules = _RULES | (_DRAFT_RULES if alone else {})
    inner = [value for key in ("eagle_config", "transformer_layer_config", "medusa") for value in [config.get(key)]]
    for fields in (config, *(value for value in inner if isinstance(value, dict))):
        for key, (needed, fits) in rules.items():
            if fields.get(key) is not None and not fits(fields[key]):
                raise HeadwayError(f"{path} has {key} {fields[key]!r:.80}, which has to be {needed}; correct it")
        for key in _ROPES if alone else ():
            _check_rope(fields.get(key) or {}, key, path)
    _check_note(config.get(NOTE) or {}, path)


def _check_rope(rope: dict[str, Any], key: str, path: Path) -> None:
    rope = rope.get("full_attention", rope)
    kind = (rope.get("rope_type") or rope.get("type") or "default") if isinstance(rope, dict) else rope
    if not isinstance(kind, str) or kind not in _ROPE_NEEDS:
        raise HeadwayError(f"{path} has {key} of type {kind!r:.80}; known are {', '.join(_ROPE_NEEDS)}")
    for name in _ROPE_NEEDS[kind]:
        if rope.get(name) is None:
            raise HeadwayError(f"{path} has {key} of type {kind} without {name}; download or convert the head again")
    for name, value in rope.items():
        numbers = value if isinstance(value, list) else [value]
        if name.endswith(("factor", "theta", "embeddings")) and not all(v is None or _is_number(v) for v in numbers):
            raise HeadwayError(f"{path} has {key}.{name} {value!r:.80}, which has to be above 0; correct it")


def _check_note(note: dict[str, Any], path: Path) -> None:
    filled = note.get("filled")
    fits = {
        "taps": note.get("taps") is None
        or isinstance(note["taps"], list)
        and all(isinstance(tap, (int, str)) for tap in note["taps"]),
        "depths": note.get("depths") is None or _is_count(note["depths"]),
        "filled": filled is None
        or isinstance(filled, dict)
        and _is_count(filled.get("draft_vocab_size"))
        and isinstance(filled.get("like_row"), int)
        and filled["like_row"] >= 0,
    }
    for key, good in fits.items():
        if not good:
            raise HeadwayError(f"{path}: {NOTE}.{key} is not what an export writes; export the head again")


def check_tensors(tensors: Iterable[tuple[str, Tensor]], where: Path) -> None:
    """Raise HeadwayError for a tensor that is not dense numbers in memory: quantised, sparse, complex or without values."""
    for name, tensor in tensors:
        what = str(tensor.dtype).removeprefix("torch.")
        if tensor.layout != torch.strided or tensor.is_meta:
            what = "without values" if tensor.is_meta else "sparse"
        elif tensor.dtype in PLAIN or (tensor.dtype in WHOLE and name.rsplit(".", 1)[-1] in ("d2t", "t2d")):
            continue
        raise HeadwayError(
            f"{where}: tensor {name!r} is {what}; heads are read in {', '.join(str(d).removeprefix('torch.') for d in PLAIN)}: "
            "get the head before it was quantised, or convert it"
        )


def check_fit(tensors: dict[str, Tensor], expected: dict[str, Tensor], where: str) -> None:
    """Raise HeadwayError unless the tensors are those a head needs, of its shapes, floating where it is, and finite."""
    for name in sorted(set(tensors) | set(expected)):
        if name not in tensors or name not in expected:
            raise HeadwayError(f"{where} {'lacks' if name in expected else 'has no place for'} tensor {name!r}")
        have, need = tensors[name], expected[name]
        if have.shape != need.shape:
            raise HeadwayError(
                f"{where}: tensor {name!r} is {list(have.shape)}, config.json makes it {list(need.shape)}; the files do not "
                "belong together"
            )
        if have.is_floating_point() != need.is_floating_point():
            raise HeadwayError(
                f"{where}: tensor {name!r} is {have.dtype}, the head has it in {need.dtype}; the files are damaged"
            )
        if have.is_floating_point() and not torch.isfinite(have).all():
            raise HeadwayError(f"{where}: tensor {name!r} has values that are not finite; download or train it again")


def check_words(tensors: dict[str, Tensor], vocab_size: int, where: str) -> None:
    """Raise HeadwayError where a head's draft vocabulary is not ascending ids of the target, or its maps contradict."""
    ids = from_d2t(tensors["d2t"]) if "d2t" in tensors else tensors.get("vocab_ids")
    if ids is None:
        return
    if ids.min() < 0 or ids.max() >= vocab_size or (ids.diff() <= 0).any():
        name = "d2t" if "d2t" in tensors else "vocab_ids"
        raise HeadwayError(f"{where}: {name} does not lead to ascending ids below {vocab_size}; the files are damaged")
    if "t2d" in tensors and not torch.equal(tensors["t2d"], to_t2d(ids, vocab_size)):
        raise HeadwayError(f"{where}: t2d and d2t name different words; the files do not belong together")
