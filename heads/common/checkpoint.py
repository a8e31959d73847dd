"""A head on disk: a folder of config.json, model.safetensors and README.md, written aside and renamed.

config.json   format, family, dtype, head (the family's Config), target (TargetInfo), weights_of (fingerprint of the
              target's weights), metrics, data; where a LoRA was trained on another head, lora: from, rank, alpha, dropout, modules,
              keep (it lies beside that head's weights, see lora.py); where the adapter on the target was trained together
              with the head, target_changed and joint: how, and how far the target is from what it was (train/joint.py)
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from headway.heads.common.aside import folder_aside
from headway.heads.common.card import model_card
from headway.heads.common.errors import HeadwayError
from headway.heads.common.hub import CARD, CONFIG, WEIGHTS, download, parse_id
from headway.heads.common.lora import CONFIG as LORA_CONFIG
from headway.heads.common.lora import WEIGHTS as LORA_WEIGHTS
from headway.heads.common.lora import with_lora, write_lora
from headway.heads.common.protocol import AdapterInfo, Frozen, Head, TargetInfo, find_family, module_dtype

if TYPE_CHECKING:
    from headway.inference.target import Target

__all__ = ["CARD", "CONFIG", "WEIGHTS"]
FORMAT = 1


def save_head(
    head: Head,
    folder: Path | str,
    *,
    target: TargetInfo,
    metrics: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    state_dict: dict[str, Tensor] | None = None,
    lora: dict[str, Any] | None = None,
    kept: tuple[dict[str, Tensor], dict[str, Any]] | None = None,
    joint: dict[str, Any] | None = None,
    weights_of: str | None = None,
) -> Path:
    """Write a head as a folder and return its path; a head that was there is replaced only once the new one is whole.

    `metrics` are figures for the card and `data` says what it was trained on; both are JSON. `state_dict` is the
    gathered state under sharded training. `lora` says what LoRA was trained on the head, and `kept` holds its tensors and
    PEFT's config of it, where it is to lie beside the head's weights and not in them. `joint` says how the adapter on the
    target was trained together with the head, and how far the target is from what it was. `weights_of` is the fingerprint of
    a target that is split over processes. Raises HeadwayError for a missing or empty tensor, or a folder that holds something
    else.
    """
    folder = Path(folder)
    check_head_folder(folder)
    tensors = _whole(head.state_dict() if state_dict is None else state_dict, set(head.state_dict()))
    config = {
        "format": FORMAT,
        "family": type(head).__module__.rsplit(".", 1)[-1],
        "dtype": str(module_dtype(head)).removeprefix("torch."),
        "head": head.config.to_json(),
        "target": dataclasses.asdict(target),
        "weights_of": weights_of or fingerprint(head.frozen),
        "metrics": metrics or {},
        "data": data or {},
        **({} if lora is None else {"lora": lora}),
        **({} if joint is None else {"target_changed": True, "joint": joint}),
    }
    with folder_aside(folder) as aside:
        save_file(tensors, aside / WEIGHTS, metadata={"format": "pt"})
        if kept is not None:
            write_lora(aside, *kept)
        (aside / CONFIG).write_text(json.dumps(config, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        (aside / CARD).write_text(model_card(config), encoding="utf-8")
    return folder


class NewerFormatError(HeadwayError):
    """A head of headway, in a format that this headway does not read."""


def check_head_folder(folder: Path) -> None:
    """Raise HeadwayError where writing a head to `folder` would cost a file or what is no head of headway."""
    if folder.exists() and not folder.is_dir():
        raise HeadwayError(f"{folder} is a file; give the name of a folder to write")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    try:
        read_config(folder)
    except NewerFormatError:
        raise
    except HeadwayError:
        raise HeadwayError(f"{folder} is not empty and holds no head of headway; give a new folder") from None


def load_head(
    source: Path | str,
    target: Target | Frozen,
    *,
    dtype: str | torch.dtype | None = None,
    revision: str | None = None,
    other_target: bool = False,
) -> Head:
    """Return the head in a folder or hub repository, in eval mode on the target's device.

    `dtype` None means the target's. A head is refused, naming both sides, for a target of another hidden size,
    vocabulary, depth or model type, and for one of another name, unless its weights are those the head was trained on
    (a local copy), or with another adapter on it; `other_target` lets another name or adapter pass. Raises HeadwayError
    for all of that, and for files that are missing, truncated or not exactly what the head needs.
    """
    frozen = target if isinstance(target, Frozen) else target.frozen
    folder = head_folder(source, revision)
    saved = read_config(folder)
    info = saved_info(saved)
    _check_target(folder, info, frozen, saved.get("weights_of"), other_target)
    config_class, head_class = find_family(saved["family"])
    head = head_class(config_class.from_json(saved["head"]), frozen)
    _fill(head, read_weights(folder, saved), folder / WEIGHTS)
    weight = frozen.lm_head_weight()
    return head.to(device=weight.device, dtype=_dtype(dtype) or weight.dtype).eval()


def read_config(source: Path | str, revision: str | None = None) -> dict[str, Any]:
    """Return a head's config.json: format, family, dtype, head, target, metrics, data. Raises HeadwayError."""
    path = head_folder(source, revision) / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise HeadwayError(f"{path} does not exist; give a folder that `headway train` wrote, or a hub id") from None
    except ValueError as e:
        raise HeadwayError(f"{path} is no JSON ({e}); save or download the head again") from None
    if not isinstance(config, dict) or not {"format", "family", "head", "target"} <= set(config):
        raise HeadwayError(
            f"{path} describes no head of headway; give a folder that `headway train` wrote, or a hub id"
        )
    # Heads saved before there were adapters say nothing of one.
    known = {f.name for f in dataclasses.fields(TargetInfo)} - {"adapter"}
    fields = {"head": {"taps", "hidden_size", "vocab_size"}, "target": known}
    for name, needed in fields.items():
        if not isinstance(config[name], dict) or not needed <= set(config[name]):
            raise HeadwayError(f"{path}: its {name} is not whole; save or download the head again")
    if config["format"] != FORMAT:
        raise NewerFormatError(f"{path} has format {config['format']}, this headway reads {FORMAT}; upgrade headway")
    return config


def read_weights(folder: Path, config: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of the head in a folder, a LoRA that lies beside them added. Raises HeadwayError."""
    tensors = read_tensors(folder / WEIGHTS)
    if (config.get("lora") or {}).get("keep"):
        return with_lora(tensors, read_tensors(folder / LORA_WEIGHTS), folder)
    if (folder / LORA_CONFIG).is_file():
        raise HeadwayError(
            f"{folder} holds {LORA_CONFIG}, of which {CONFIG} knows nothing; the files do not belong together"
        )
    return tensors


def saved_info(config: dict[str, Any]) -> TargetInfo:
    """Return what a head's config.json says of its target; fields that are not known here are passed over."""
    target = {f.name: config["target"].get(f.name) for f in dataclasses.fields(TargetInfo)}
    return TargetInfo(**target | {"adapter": saved_adapter(config)})


def saved_adapter(config: dict[str, Any]) -> AdapterInfo | None:
    """Return what a head's config.json says of the adapter that its target carried; None for a bare target."""
    fields = config["target"].get("adapter")
    return (
        None if fields is None else AdapterInfo(**{f.name: fields.get(f.name) for f in dataclasses.fields(AdapterInfo)})
    )


def other_adapter(what: str, made_with: AdapterInfo | None, given: TargetInfo) -> str:
    """Return why something made with one adapter on the target, or none, does not go with the target given, or ''."""
    have = given.adapter
    if (made_with and made_with.sha256) == (have and have.sha256):
        return ""
    now = f"{given.name} has {f'adapter {have}' if have else 'no adapter'} on"
    if made_with is None:
        return f"{what} was made with the bare target, {now}; leave out --target-adapter"
    return f"{what} was made with adapter {made_with} on the target, {now}; give --target-adapter {made_with.name}"


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file. Raises HeadwayError where it is missing or damaged."""
    try:
        return load_file(path)
    except FileNotFoundError:
        raise HeadwayError(f"{path} does not exist; save or download the head again") from None
    except SafetensorError as e:
        raise HeadwayError(
            f"{path} is damaged or truncated ({_first_line(e)}); save or download the head again"
        ) from None


def fingerprint(frozen: Frozen) -> str:
    """Return a short hash of samples of the target's weights, the same at any loading dtype of bf16 weights."""
    samples = {"lm_head": frozen.lm_head_weight()[:: max(1, frozen.info.vocab_size // 64)]}
    norm = frozen.final_norm()
    if norm is not None:
        samples["norm"] = norm
    layer = frozen.layer_weights(frozen.info.num_layers - 1)
    samples |= {name: weight[:2] for name, weight in layer.items() if weight.is_floating_point()}
    digest = hashlib.sha256()
    for name in sorted(samples):
        sample = samples[name].detach().to("cpu", torch.bfloat16).contiguous()
        digest.update(name.encode() + sample.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


def _whole(tensors: dict[str, Tensor], names: set[str]) -> dict[str, Tensor]:
    """Return the tensors ready to be written. Raises HeadwayError unless all `names` are there and none is empty."""
    for name in sorted(names | set(tensors)):
        if name not in tensors or name not in names:
            what = "is missing" if name not in tensors else "does not belong to the head"
            raise HeadwayError(f"tensor {name!r} {what}, so the head was not saved; pass its whole state_dict")
        if tensors[name].numel() == 0:
            raise HeadwayError(
                f"tensor {name!r} is empty, so the head was not saved; under sharded training pass "
                "state_dict=accelerator.get_state_dict(head)"
            )
    # Clones: safetensors refuses tensors that share memory.
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}


def _fill(head: Head, tensors: dict[str, Tensor], path: Path) -> None:
    expected = head.state_dict()
    for name in sorted(set(expected) | set(tensors)):
        if name not in tensors:
            raise HeadwayError(f"{path} lacks tensor {name!r} of the head; save or download the head again")
        if name not in expected:
            raise HeadwayError(
                f"{path} has tensor {name!r}, which the head in {CONFIG} has not; the files do not belong together"
            )
        if tensors[name].shape != expected[name].shape:
            raise HeadwayError(
                f"{path}: tensor {name!r} has shape {list(tensors[name].shape)}, the head in {CONFIG} needs "
                f"{list(expected[name].shape)}; the files do not belong together"
            )
    head.load_state_dict(tensors, strict=True)


def _check_target(folder: Path, saved: TargetInfo, frozen: Frozen, weights_of: str | None, other_target: bool) -> None:
    given = frozen.info
    for name in ("model_type", "hidden_size", "vocab_size", "num_layers"):
        want, have = getattr(saved, name), getattr(given, name)
        if want != have:
            raise HeadwayError(
                f"head {folder} was trained for {saved.name} with {name} {want}, target {given.name} has {name} "
                f"{have}; use it with {saved.name}, or train a head for {given.name}"
            )
    reason = "" if other_target else other_adapter(f"head {folder}", saved.adapter, given)
    if reason:
        raise HeadwayError(
            f"{reason}, train a head for this target, or pass other_target=True (--other-target) to try it"
        )
    same_name = plain_name(saved.name) == plain_name(given.name)
    if not (same_name or other_target or weights_of == fingerprint(frozen)):
        raise HeadwayError(
            f"head {folder} was trained for {saved.name}, target {given.name} has another name and other weights; "
            f"use it with {saved.name}, train a head for {given.name}, or pass other_target=True (--other-target) to try it"
        )


def plain_name(name: str) -> str:
    """Return the last part of a hub id or path, as a model is called in both."""
    return Path(name.rstrip("/")).name.lower().removesuffix(".gguf")


def head_folder(source: Path | str, revision: str | None = None) -> Path:
    """Return the folder of a head, downloading it when `source` is a hub id, `owner/name[@revision]`.

    Of a repository that holds no head nothing but its config.json is fetched. Raises HeadwayError where there is no head.
    """
    text = str(source)
    path = Path(text).expanduser()
    if path.is_dir():
        return path
    on_hub = None if isinstance(source, Path) else parse_id(text)
    if on_hub is None:
        raise HeadwayError(
            f"no folder {text!r}; give a folder that `headway train` wrote, or a hub id (owner/name, owner/name@revision)"
        )
    repo, said = on_hub
    if said and revision and said != revision:
        raise HeadwayError(f"{text!r} names a revision, and revision={revision!r} another; give one of them")
    try:
        commit = download(repo, said or revision, (CONFIG,))
    except HeadwayError as e:
        raise HeadwayError(f"no folder {text!r}, and no head on the hub. {e}") from e.__cause__
    if not (commit / CONFIG).is_file():
        raise HeadwayError(f"{repo} on the hub holds no {CONFIG}, so no head of headway; give the id of a head")
    read_config(commit)
    return download(repo, commit.name)


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    short = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    value = getattr(torch, short.get(dtype, dtype), None)
    if not isinstance(value, torch.dtype) or not value.is_floating_point:
        raise HeadwayError(f"unknown dtype {dtype!r}; allowed: float32, bfloat16, float16")
    return value


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
