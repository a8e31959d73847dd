"""What the layouts share: what goes in and comes out, and folders on disk.

A layout is a module of this package named in LAYOUTS. It has

    WRITE     {family: function(Saved, TargetWeights | None) -> Foreign}
    READ      {family: function(Foreign, TargetInfo, TargetWeights) -> Saved}
    needs_target(Saved) -> whether WRITE copies weights of the target
    serve     function(family, folder, target name, number of drafted tokens) -> the command that serves it

A family that a layout cannot hold is not in its tables; what it cannot hold of a family is refused by name.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from headway.heads.common.aside import folder_aside
from headway.heads.common.checkpoint import CONFIG, WEIGHTS
from headway.heads.common.errors import HeadwayError
from headway.heads.common.protocol import HeadConfig, TargetInfo
from headway.heads.formats.damage import MASK_TOKEN, NOTE, TAP_IDS, check_config, check_tensors

LAYOUTS = ("vllm", "sglang", "speculators", "eagle", "medusa", "tgi")
OURS = (CONFIG, WEIGHTS, "medusa_lm_head.safetensors", "medusa_lm_head.pt")
"""Files of an export: what is written, and what a printed command makes of it."""


@dataclass
class TargetWeights:
    """Weights of the target as its own files hold them."""

    embedding: Tensor
    """[V, D], before any scaling of the embedding."""
    lm_head: Tensor
    """[V, D]"""


@dataclass
class Saved:
    """A head in Headway's own names."""

    family: str
    config: HeadConfig
    tensors: dict[str, Tensor]
    info: TargetInfo


@dataclass
class Foreign:
    """A head in the names of a layout."""

    tensors: dict[str, Tensor]
    config: dict[str, Any]
    weights: str = WEIGHTS
    """Name of the file of the tensors."""
    said: list[str] = field(default_factory=list)
    """What the user should know of the translation, a line each."""


def find_layout(name: str) -> ModuleType:
    """Return the module of a layout. Raises HeadwayError naming those there are."""
    if name not in LAYOUTS:
        raise HeadwayError(f"unknown layout {name!r}; there are {', '.join(LAYOUTS)}")
    return import_module(f"headway.heads.formats.{name}")


def layouts_of(family: str) -> list[str]:
    """Return the layouts that can hold heads of a family."""
    return [name for name in LAYOUTS if family in find_layout(name).WRITE]


def writes(name: str, family: str) -> ModuleType:
    """Return the module of a layout that can hold heads of a family. Raises HeadwayError naming those that can."""
    layout = find_layout(name)
    if family not in layout.WRITE:
        held = " or ".join(layouts_of(family))
        raise HeadwayError(
            f"layout {name} holds no {family} heads, only {', '.join(layout.WRITE)}; "
            + (f"export it --to {held}" if held else "no layout holds that family")
        )
    return layout


def to_layout(name: str, saved: Saved, dtype: torch.dtype, weights: TargetWeights | None = None) -> Foreign:
    """Return a head in a layout, floating tensors in `dtype`.

    Raises HeadwayError, naming it, for what the layout cannot hold and for a tensor that is empty or not finite.
    """
    layout = writes(name, saved.family)
    if weights is None and layout.needs_target(saved):
        raise HeadwayError(f"layout {name} holds copies of the target's weights; give --target")
    foreign: Foreign = layout.WRITE[saved.family](saved, weights)
    foreign.tensors = {n: _stored(n, t, dtype) for n, t in foreign.tensors.items()}
    foreign.config["dtype"] = foreign.config["torch_dtype"] = str(dtype).removeprefix("torch.")
    foreign.config[NOTE] = {
        "layout": name,
        "family": saved.family,
        "taps": list(saved.config.taps),
        "taps_are": "outputs of decoder layers, counted from 0; last is after the final norm",
        "target": saved.info.name,
        "tensors": digest(foreign.tensors),
        "config": config_digest(foreign.config),
        **foreign.config.get(NOTE, {}),
    }
    return foreign


def from_layout(name: str, family: str, foreign: Foreign, info: TargetInfo, weights: TargetWeights) -> Saved:
    """Return the head that a layout holds. Raises HeadwayError, naming it, for what a head of the family cannot be."""
    layout = find_layout(name)
    if family not in layout.READ:
        raise HeadwayError(f"layout {name} holds no {family} heads; give --from {' or '.join(layouts_of(family))}")
    saved: Saved = layout.READ[family](foreign, info, weights)
    return saved


def digest(tensors: dict[str, Tensor]) -> str:
    """Return a short hash of names, shapes and values."""
    hashed = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        hashed.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        hashed.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()[:16]


def config_digest(config: dict[str, Any]) -> str:
    """Return a short hash of a config without its note."""
    plain = {key: value for key, value in config.items() if key != NOTE}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]


def renamed(saved: Saved, names: dict[str, str], layout: str) -> dict[str, Tensor]:
    """Return the head's tensors under the names of a layout; `names` is ours -> theirs.

    Raises HeadwayError for a tensor of the head that has no name there, and for one that the head lacks.
    """
    for name in sorted(set(names) ^ set(saved.tensors)):
        what = "has no place in" if name in saved.tensors else "is missing, and needed in"
        raise HeadwayError(f"tensor {name!r} of the {saved.family} head {what} layout {layout}; nothing was written")
    return {theirs: saved.tensors[ours] for ours, theirs in names.items()}


def _stored(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor as it is written. Raises HeadwayError for one that is empty or not finite."""
    if tensor.numel() == 0:
        raise HeadwayError(f"tensor {name!r} is empty, so nothing was written; save the whole head first")
    if not tensor.is_floating_point():
        return tensor.detach().cpu().contiguous().clone()
    tensor = tensor.detach().cpu().to(dtype).contiguous().clone()
    if not torch.isfinite(tensor).all():
        raise HeadwayError(
            f"tensor {name!r} has values that are not finite in {str(dtype).removeprefix('torch.')}, so nothing was written; "
            "train the head again, or give --dtype float32"
        )
    return tensor


def write_folder(folder: Path, foreign: Foreign) -> None:
    """Write config.json and the tensors, aside and then renamed; an earlier export there is replaced.

    Raises HeadwayError for a file, and for a folder that holds something else.
    """
    if folder.exists() and not folder.is_dir():
        raise HeadwayError(f"{folder} is a file; give the name of a folder to write")
    if folder.is_dir() and any(folder.iterdir()) and NOTE not in _read_config(folder, needed=False):
        raise HeadwayError(f"{folder} is not empty and holds no export of headway; give a new folder")
    if (folder / CONFIG).is_file() and "format" in _read_config(folder):
        raise HeadwayError(f"{folder} is a head of headway itself; export it to another folder")
    others = sorted(path.name for path in folder.iterdir() if path.name not in OURS) if folder.is_dir() else []
    if others:
        raise HeadwayError(f"{folder} holds {others[0]!r} beside an export, which would be lost; give a new folder")
    with folder_aside(folder) as aside:
        save_file(foreign.tensors, aside / foreign.weights, metadata={"format": "pt"})
        text = json.dumps(foreign.config, indent=2, ensure_ascii=False) + "\n"
        (aside / CONFIG).write_text(text, encoding="utf-8")


def read_folder(folder: Path) -> Foreign:
    """Return config and tensors of a foreign folder: safetensors, or .bin and .pt files of tensors alone, in one file or
    several. Of a full model with Medusa heads in it, the heads alone are read.

    Raises HeadwayError where there is nothing to read, or a file is damaged or would run code.
    """
    if not folder.is_dir():
        raise HeadwayError(f"no folder {str(folder)!r}; give a folder of config.json and weights")
    config = _read_config(folder)
    paths = _weight_files(folder)
    inside = any(MEDUSA_IN_A_MODEL.search(name) for path in paths for name in path_names(path))
    check_config(config, folder / CONFIG, alone=not inside)
    tensors: dict[str, Tensor] = {}
    for path in paths:
        held = _read_file(path, lambda name: not inside or bool(MEDUSA_IN_A_MODEL.search(name)))
        check_tensors(held.items(), path)
        for name, tensor in held.items():
            if name in tensors:
                raise HeadwayError(f"{folder}: tensor {name!r} is in two files; leave one of them")
            tensors[name] = tensor
    if not tensors:
        raise HeadwayError(f"{folder} holds no tensors; download or convert it again")
    return Foreign(tensors, config, paths[0].name)


def _read_config(folder: Path, needed: bool = True) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if not needed:
            return {}
        raise HeadwayError(f"{path} does not exist; a foreign head is a folder of config.json and weights") from None
    except (ValueError, RecursionError) as e:
        raise HeadwayError(f"{path} is no JSON ({e}); download or convert it again") from None
    except OSError as e:
        raise HeadwayError(
            f"cannot read {path}: {e.strerror}; a foreign head is a folder of config.json and weights"
        ) from None
    if not isinstance(config, dict):
        raise HeadwayError(f"{path} is no JSON object; download or convert it again")
    return config


def _weight_files(folder: Path) -> list[Path]:
    """Return the files of the tensors: safetensors where there are any, else .bin, else .pt."""
    for pattern in ("*.safetensors", "*.bin", "*.pt"):
        # Not what other programs leave beside weights: hidden files, arguments and states of a trainer.
        paths = [path for path in sorted(folder.glob(pattern)) if path.name[0] != "." and path.name not in NO_WEIGHTS]
        heads = [path for path in paths if path.name.startswith("medusa_lm_head")]
        if paths:
            return heads or paths
    raise HeadwayError(f"{folder} has no .safetensors, .bin or .pt file; download or convert it again")


NO_WEIGHTS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.bin", "scheduler.pt", "scaler.pt")
MEDUSA_IN_A_MODEL = re.compile(r"(^|\.)medusa_heads?\.")


def path_names(path: Path) -> list[str]:
    """Return the names of the tensors in a file. Raises HeadwayError where it is damaged."""
    if path.suffix == ".safetensors":
        with _opened(path) as file:
            return list(file.keys())
    return list(_unpickle(path))


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Give an open safetensors file. Raises HeadwayError where it is damaged, of an unknown dtype or cannot be read."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except HeadwayError:
        raise
    except (SafetensorError, OSError, RuntimeError, AttributeError, UnicodeError) as e:
        raise HeadwayError(f"{path} is damaged, truncated or cannot be read ({_first(e)}); download it again") from None


def _first(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _read_file(path: Path, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        with _opened(path) as file:
            return {name: file.get_tensor(name) for name in file.keys() if wanted(name)}  # noqa: SIM118 - not a dict
    return {name: tensor for name, tensor in _unpickle(path).items() if wanted(name)}


def _unpickle(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a .bin or .pt file, read without running what it may hold."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as e:  # noqa: BLE001 - torch raises pickle, zip, key and runtime errors for damaged files
        raise HeadwayError(
            f"{path} holds more than tensors, or is damaged ({_first(e)}); it is not read, since it could run code: "
            "ask its author for safetensors"
        ) from None
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    if not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
        raise HeadwayError(f"{path} is no dictionary of tensors; give the weights file alone")
    return {str(name): tensor.detach() for name, tensor in state.items()}


def recognise(foreign: Foreign) -> tuple[str | None, str]:
    """Return (layout, family) of a foreign folder; the layout is None where config and tensors leave it open.

    Raises HeadwayError where no family is recognised.
    """
    if {"format", "family", "head"} <= set(foreign.config):
        raise HeadwayError("the folder holds a head of headway itself; use it as it is, or export it first")
    config, names = foreign.config, [re.sub(r"^model\.", "", name) for name in foreign.tensors]
    note = config.get(NOTE)
    if isinstance(note, dict) and note.get("layout") in LAYOUTS and isinstance(note.get("family"), str):
        return note["layout"], note["family"]
    if "speculators_model_type" in config:
        return "speculators", str(config["speculators_model_type"])
    if any(re.search(r"(^|\.)hydra_(mlp|lm_head)\.", name) for name in names):
        raise HeadwayError(
            "a head of the Hydra repository: its LM heads and skips have biases and its prefix layer a norm after it, which "
            "headway's hydra has not; it cannot be imported, train family hydra instead"
        )
    if any(re.match(r"blocks\.\d+\.layers\.", name) for name in names):
        return "vllm", "medusa"
    if any(re.search(r"(^|\.)\d+\.\d+\.linear\.weight$", name) for name in names):
        return "medusa", "medusa"
    fused = any(re.match(r"(midlayer|layers\.0)\.hidden_norm\.", name) for name in names)
    if "mask_hidden" in names or fused and any(config.get(key) is not None for key in MASK_TOKEN):
        return "vllm", "peagle"
    if fused:
        asked = (config.get("eagle_config") or {}).get(TAP_IDS) or config.get(TAP_IDS)
        return (None if asked else "eagle"), "eagle3"
    if "fc.weight" in names and any(name.startswith("layers.0.") for name in names):
        return "eagle", "eagle"
    raise HeadwayError(
        f"no head that headway knows: tensors {', '.join(sorted(foreign.tensors)[:4])}, ...; known are EAGLE, EAGLE-3, P-EAGLE and "
        f"Medusa in the layouts {', '.join(LAYOUTS)}"
    )
