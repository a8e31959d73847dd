"""A LoRA adapter of PEFT on the target: found, told from another, put on, merged.

An adapter is named `FOLDER`, or `owner/name` or `owner/name@revision` of the hub. Two are the same when their numbers and what
scales them are, wherever they lie: that digest goes into heads, dialogs and features made with the adapter.

The modules that PEFT puts in place of linear layers compute W x + s B (A x). Whatever runs the model's own modules runs
them; what reads weights instead of running a module (the LM head's rows, warm starts) is given W + s B A.
"""

from __future__ import annotations

import copy
import hashlib
import json
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from headway.heads.common.errors import HeadwayError
from headway.heads.common.hub import download, parse_id
from headway.heads.common.lora import CONFIG, PREFIX, WEIGHTS
from headway.heads.common.protocol import AdapterInfo

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OLD_WEIGHTS = "adapter_model.bin"
SCALES = ("alpha_pattern", "bias", "fan_in_fan_out", "lora_alpha", "r", "rank_pattern", "use_dora", "use_rslora")
"""Fields of an adapter's config that change what the same weights do."""
PLAIN = {"peft_type": "LORA", "alora_invocation_tokens": None, "layer_replication": None}
"""Fields of an adapter's config that must have these values."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Relative difference of the logits with the adapter merged that is taken for rounding."""


def require_peft() -> None:
    """Raise HeadwayError where PEFT is not installed."""
    if find_spec("peft") is None:
        raise HeadwayError("adapters are put on by PEFT, which is not installed; run `pip install 'headway[peft]'`")


def read_adapter(given: str | Path) -> AdapterInfo:
    """Return what an adapter is, from its files alone.

    Raises HeadwayError where PEFT or the adapter is missing, for damaged files, and for an adapter that is no LoRA.
    """
    return _read(*_find(given))


def attach(model: PreTrainedModel, given: str | Path, *, merge: bool = False) -> tuple[PreTrainedModel, AdapterInfo]:
    """Return the model with the adapter on it, in the model's dtype, and what the adapter is; `merge` adds it to the weights.

    The model given is changed. Raises HeadwayError, beside what `read_adapter` raises, for an adapter of another model, and
    where merging it would change the logits by more than rounding.
    """
    folder, revision = _find(given)
    info = _read(folder, revision, given)
    import peft

    try:
        wrapped = peft.PeftModel.from_pretrained(model, str(folder), autocast_adapter_dtype=False)
    except (ValueError, RuntimeError, KeyError, TypeError, OSError) as e:
        first = (str(e).strip().splitlines() or [type(e).__name__])[-1].strip()
        raise HeadwayError(
            f"adapter {info.name} does not fit {model.name_or_path or type(model).__name__}: {first} It was made for "
            f"{info.base or 'a model that it does not name'}; give that --target, or another --target-adapter"
        ) from e
    _check_names(peft.get_peft_model_state_dict(wrapped), _tensors(folder), info)
    if not getattr(model, "is_quantized", False):
        for name, weight in wrapped.named_parameters():
            if "lora_" in name:
                weight.data = weight.data.to(model.dtype)
    settle_ends(model)
    if merge:
        _merge(wrapped, info)
    return model, info


def attached(model: Any, known: AdapterInfo | None, name: str) -> tuple[Any, AdapterInfo | None]:
    """Return a model of transformers, taken out of a PeftModel, and the adapter on it, `known` if it was put on here.

    Raises HeadwayError for several adapters at once, and for what is no LoRA.
    """
    if "peft" not in sys.modules:
        return model, known
    import peft

    if isinstance(model, peft.PeftModel):
        if model.active_peft_config.is_prompt_learning:
            raise HeadwayError(f"{name} carries a {model.active_peft_config.peft_type.value} adapter; allowed: LORA")
        wrapped, model = model, model.get_base_model()
    else:
        wrapped = model
    if known is not None or not adapted(model):
        return model, known
    active = {n for m in model.modules() if hasattr(m, "lora_A") for n in m.active_adapters}
    if len(active) != 1:
        raise HeadwayError(
            f"{name} has the adapters {sorted(active)} on; one LoRA is allowed: set_adapter to one, or merge_and_unload first"
        )
    (adapter,) = active
    config = model.peft_config[adapter]
    _check_plain(config.to_dict(), name)
    tensors = peft.get_peft_model_state_dict(wrapped, adapter_name=adapter)
    settle_ends(model)
    base = config.base_model_name_or_path
    return model, AdapterInfo(name=adapter, sha256=digest(tensors, config.to_dict()), base=base)


def adapted(module: nn.Module) -> bool:
    """Return whether a module has layers of PEFT in it."""
    if "peft" not in sys.modules:
        return False
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    return any(isinstance(m, BaseTunerLayer | AuxiliaryTrainingWrapper) for m in module.modules())


def beside_weights(module: nn.Module) -> bool:
    """Return whether a module has layers of PEFT that compute what is not in the weights of the layer below them."""
    if not adapted(module):
        return False
    from peft.tuners.tuners_utils import BaseTunerLayer

    return any(isinstance(m, BaseTunerLayer) and not m.merged for m in module.modules())


@torch.no_grad()
def settle_ends(model: Any) -> None:
    """Make the embedding and the LM head plain modules that have the adapter in their weights: heads read those.

    Raises HeadwayError where that cannot be done.
    """
    embedding, out = model.get_input_embeddings(), model.get_output_embeddings()
    for module, put in ((embedding, model.set_input_embeddings), (out, model.set_output_embeddings)):
        if not adapted(module):
            continue
        if hasattr(module, "modules_to_save"):
            put(module.modules_to_save[module.active_adapters[0]])
        elif hasattr(module, "lora_A") and not hasattr(module, "parameter_name"):
            base = module.get_base_layer()
            base.weight = nn.Parameter(
                base.weight.detach().clone(), requires_grad=False
            )  # it may be tied to the other end
            module.merge()
            put(base)
        else:
            raise HeadwayError(
                f"the adapter changes the {type(module).__name__} of the embedding or LM head, which cannot be used as it is; "
                "save the model with the adapter merged (PEFT's merge_and_unload) and give that as the target"
            )


def dense_weights(layer: nn.Module) -> dict[str, Tensor]:
    """Return the weights of a layer by their names in the bare model, the adapter added."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layer = copy.deepcopy(layer)
    tuners = [m for m in layer.modules() if isinstance(m, BaseTunerLayer)]
    with torch.no_grad():
        for module in tuners:
            module.merge()
    return {
        name.replace(".base_layer.", "."): weight for name, weight in layer.named_parameters() if "lora_" not in name
    }


def digest(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> str:
    """Return the sha256 of an adapter: its tensors rounded to bfloat16, so that the dtype it is kept in does not matter, and
    the fields of its config that scale them."""
    found = hashlib.sha256()
    for name in sorted(tensors, key=lambda name: name.removeprefix(PREFIX)):
        rounded = tensors[name].detach().to("cpu", torch.bfloat16).contiguous()
        found.update(f"{name.removeprefix(PREFIX)} {tuple(rounded.shape)} ".encode())
        found.update(rounded.view(torch.int16).numpy().tobytes())
    fields = {name: config.get(name) or None for name in SCALES}
    found.update(json.dumps(fields, sort_keys=True).encode())
    return found.hexdigest()


def _find(given: str | Path) -> tuple[Path, str | None]:
    """Return the folder of an adapter and its commit on the hub; what is needed of it is downloaded."""
    require_peft()
    text = str(given)
    path = Path(text).expanduser()
    if path.is_dir():
        if not (path / CONFIG).is_file():
            raise HeadwayError(f"folder {text!r} has no {CONFIG}; give the folder of a PEFT adapter")
        return path, None
    on_hub = parse_id(text)
    if on_hub is None:
        raise HeadwayError(
            f"no folder {text!r}; give the folder of a PEFT adapter, or a hub id (owner/name, owner/name@revision)"
        )
    try:
        folder = download(*on_hub, ("adapter_*", "*.jinja"))
    except HeadwayError as e:
        raise HeadwayError(f"no folder {text!r}, and no adapter on the hub. {e}") from e.__cause__
    if not (folder / CONFIG).is_file():
        raise HeadwayError(f"{text} has no {CONFIG}; give a PEFT adapter")
    return folder, folder.name


def _read(folder: Path, revision: str | None, given: str | Path | None = None) -> AdapterInfo:
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise HeadwayError(f"{folder / CONFIG} is no JSON ({e}); save or download the adapter again") from None
    if not isinstance(config, dict):
        raise HeadwayError(f"{folder / CONFIG} is no JSON object; save or download the adapter again")
    name = str(folder if given is None else given).partition("@")[0] if revision else str(given or folder)
    _check_plain(config, f"adapter {name}")
    return AdapterInfo(
        name=name,
        revision=revision,
        sha256=digest(_tensors(folder), config),
        base=config.get("base_model_name_or_path"),
    )


def _check_plain(config: Mapping[str, Any], name: str) -> None:
    for field, allowed in PLAIN.items():
        value = config.get(field)
        if (value or None) != allowed:
            raise HeadwayError(
                f"{name} has {field} {getattr(value, 'value', value)!r}; allowed: {allowed!r}. Heads work with LoRA adapters "
                "that change the weights of the target's own layers"
            )


def _tensors(folder: Path) -> dict[str, Tensor]:
    """Return an adapter's tensors. Raises HeadwayError where there are none, or damaged ones."""
    new, old = folder / WEIGHTS, folder / OLD_WEIGHTS
    try:
        if new.is_file():
            return load_file(new)
        if old.is_file():
            return dict(torch.load(old, map_location="cpu", weights_only=True))
    except (SafetensorError, OSError, RuntimeError, EOFError, ValueError, TypeError) as e:
        first = (str(e).strip().splitlines() or [type(e).__name__])[0]
        raise HeadwayError(f"the weights of adapter {folder} are damaged ({first}); save or download it again") from e
    raise HeadwayError(f"{folder} has neither {WEIGHTS} nor {OLD_WEIGHTS}; save or download the adapter again")


def _check_names(loaded: Mapping[str, Tensor], saved: Mapping[str, Tensor], info: AdapterInfo) -> None:
    """Raise HeadwayError unless the adapter found a place for each of its tensors, and a tensor for each place."""
    for name in sorted(set(loaded) ^ set(saved)):
        what = "has no place in the target" if name in saved else "is missing in its file"
        raise HeadwayError(
            f"adapter {info.name}: {name} {what}; it was made for {info.base or 'another model'}, give that --target"
        )


@torch.no_grad()
def _merge(wrapped: Any, info: AdapterInfo) -> None:
    """Add the adapter to the model's weights. Raises HeadwayError where that changes what it computes."""
    model = wrapped.get_base_model()
    ids = torch.arange(2, 10, device=model.device)[None] % model.get_input_embeddings().weight.shape[0]
    before = model(input_ids=ids, use_cache=False).logits.float()
    wrapped.merge_and_unload()
    after = model(input_ids=ids, use_cache=False).logits.float()
    differ = float((after - before).norm() / before.norm())
    if not differ <= TOLERANCE.get(model.dtype, 1e-2):
        raise HeadwayError(
            f"adapter {info.name} merged into the weights changes the logits by {differ:.1%}; use it attached: leave out "
            "--merge-adapter"
        )
