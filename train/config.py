"""A recipe: one flat YAML file plus `key=value` on the command line, checked before anything is loaded."""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, Literal

import yaml

from headway.data.shards import Store
from headway.heads.common.errors import HeadwayError
from headway.heads.common.objective import Objective, parse_objective
from headway.heads.common.protocol import find_family
from headway.train.batches import Supervise


@dataclass(frozen=True, kw_only=True)
class AnyLoraFields:
    """Keys that every LoRA of a recipe has, under the section `SECTION`."""

    SECTION: ClassVar[str]

    rank: int
    alpha: float
    """The LoRA is added times alpha / rank."""
    dropout: float = 0.0
    """Share of a LoRA's inputs that are zeroed in training."""
    modules: tuple[str, ...] = ()
    """Linear layers by the ends of their names, such as q_proj; not given, all that the section allows."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise HeadwayError(f"{self.SECTION}.rank is {self.rank}; give 1 or more")
        if not 0 <= self.dropout < 1:
            raise HeadwayError(f"{self.SECTION}.dropout is {self.dropout}; give a number from 0 to below 1")
        self._above_zero("alpha")

    def _above_zero(self, name: str) -> None:
        if not 0 < getattr(self, name) < math.inf:
            raise HeadwayError(f"{self.SECTION}.{name} is {getattr(self, name)}; give a finite number above 0")


@dataclass(frozen=True, kw_only=True)
class LoraFields(AnyLoraFields):
    """Keys of `lora` in a recipe: on the head, by default on all linear layers but LM heads, which the loss reads whole."""

    SECTION = "lora"

    rank: int = 16
    alpha: float = 32.0
    keep: bool = False
    """Save it beside the weights of the head that it was trained on, in PEFT's layout; else it is added to them."""


@dataclass(frozen=True, kw_only=True)
class JointFields(AnyLoraFields):
    """Keys of `joint` in a recipe: on the target, by default on all linear layers of its decoder layers."""

    SECTION = "joint"

    rank: int = 32
    alpha: float = 64.0
    weight: float = 5.0
    """Of the KL divergence from the unchanged target, beside the head's loss. Medusa-2 weighs heads 0.2 of it."""
    warmup: float = 0.1
    """Steps in which the head trains alone: below 1 a share of all, otherwise a number. 0 for a head that is trained already."""
    lr_scale: float = 0.25
    """The LoRA's learning rate as a share of the head's. Medusa-2's heads learn four times as fast as what is below them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._above_zero("lr_scale")
        for name in ("weight", "warmup"):
            if not 0 <= getattr(self, name) < math.inf:
                raise HeadwayError(f"joint.{name} is {getattr(self, name)}; give a finite number of 0 or more")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """What a training run is made of. Keys of the YAML file are these names, and `head.x` for the family's Config."""

    family: str
    """A module of headway.heads: medusa, eagle3, ..."""
    target: str
    """Hub id, folder or .gguf file of the frozen model."""
    revision: str | None = None
    """Branch, tag or commit of a hub target."""
    target_adapter: str | None = None
    """LoRA adapter of PEFT on the target: a folder, or a hub id (owner/name@revision). The head is for the target with it."""
    merge_adapter: bool = False
    """Add the adapter to the target's weights, which runs faster; not for a quantised target."""
    dialogs: str
    """Folder written by `headway distill`."""
    out: str
    """Run folder: head/ (the result), state/ (to continue from), run.json, log.jsonl."""
    init_from: str | None = None
    """A head to begin with (folder, run folder or hub id) in place of a new one; it gives the fields of `head` too."""
    lora: dict[str, Any] | None = None
    """Train a LoRA on that head and leave its own weights: rank, alpha, dropout, modules, keep (train/lora.py); {} takes the
    defaults."""
    joint: dict[str, Any] | None = None
    """Train a LoRA on the target together with the head, which changes the target (Medusa-2): rank, alpha, dropout, modules,
    weight, warmup, lr_scale (train/joint.py); {} takes the defaults."""
    head: dict[str, Any] = field(default_factory=dict)
    """Fields of the family's Config; what is left open comes from the family or the target."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "float32"
    """Of the target; `auto` is the one that the device is faster in. The head's own weights are trained in float32."""
    autocast: bool | None = None
    """Run the head's matrix products in bfloat16; not given, where the target is in bfloat16."""
    seed: int = 0
    """Order of the batches and the head's initial weights."""

    epochs: float | None = None
    """Passes over the dialogs. The run ends at whichever of epochs, max_steps and max_seconds comes first."""
    max_steps: int | None = None
    """Optimizer steps."""
    max_seconds: float | None = None
    """Budget for training steps. The number of steps it buys is measured once, before the first, and then kept, so that
    the schedule does not depend on the clock; evaluations and start-up are not counted."""

    tokens_per_batch: int = 2048
    """Padded tokens of a batch; a longer dialog is a batch of its own."""
    max_length: int = 1024
    """Dialogs are cut to this many tokens; cuts are counted."""
    grad_accum: int = 1
    """Batches of an optimizer step on each process that the run begins with. A step keeps its batches when the run goes on
    with another number of processes; its mean is over their supervised tokens, however they are spread."""
    supervise: Supervise = "answers"
    """Which tokens are goals: those of the answers, or `all`, prompts and template too. With self-written prompts `all`
    trains on half as many tokens again for little more time. Held-out figures are over answers either way."""
    loss: str = "kl"
    """What is minimised: kl (forward KL), ce (cross-entropy to the target's likeliest word), reverse_kl, jsd, tv (total
    variation), lk or lk:eta=3 (KL giving way to total variation), topk or topk:k=64 (KL over the target's likeliest words)."""
    step_weights: tuple[float, ...] = ()
    """Weight of each draft step (each head of Medusa) in the loss; not given, head.decay^step."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: Muon for the hidden matrices, AdamW for LM heads and vectors; torch 2.9 or later."""
    lr: float = 1e-3
    """Peak learning rate; Muon's updates are scaled to AdamW's size, so that one rate serves both."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """After the warm-up. cosine: falls over all steps; wsd (warm-up, stable, decay): stays, and falls in a line at the end."""
    warmup: float = 0.05
    """Below 1 a share of the steps, otherwise a number of steps."""
    cooldown: float = 0.2
    """The fall of schedule wsd: below 1 a share of the steps, otherwise a number of steps."""
    min_lr_ratio: float = 0.05
    """Share of the peak that the schedule ends at."""
    weight_decay: float = 0.0
    """On matrices only."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Of AdamW."""
    clip: float = 1.0
    """Largest gradient norm; 0 does not clip."""
    ema: float = 0.0
    """Decay of a running average of the weights, for example 0.999; the average is evaluated and saved as the head. 0 keeps
    none."""

    eval_fraction: float = 0.05
    """Share of the dialogs held out, chosen by a hash of their id; 0 holds out none."""
    eval_rows: int = 64
    """At most this many are held out."""
    eval_every: int = 0
    """Steps between evaluations; 0 evaluates at the end only."""
    eval_prompts: int = 8
    """Held-out prompts answered with the head for the accepted length; 0 leaves it out."""
    eval_tokens: int = 64
    """New tokens of each."""
    tree: str = "auto"
    """Draft policy of those answers: `auto`, `chain:4`, `dynamic:depth=4,top_k=4,nodes=12`."""

    save_every: int = 200
    """Steps between states to continue from; 0 saves at the end and on Ctrl-C only."""
    log_every: int = 10
    """Steps between log rows."""
    cache: Literal["auto", "memory", "disk", "off"] = "auto"
    """Where features are kept between epochs; `auto` is memory when they fit and are needed again, else off. The result
    is the same with any."""
    store: Store = "bfloat16"
    """How features are rounded, kept or not: bfloat16, or int8, which takes half the room (data/shards.py)."""
    features: str | None = None
    """Folder written by `headway capture`, whose features must then be this target's, of these taps; not given, those
    beside the dialogs are read where they are."""
    target_device: str | None = None
    """Device of the target, such as cuda:1, where the head has one of its own: the features of the next batch are computed
    while the head trains on this one. Not given, both share a device."""
    shard_target: bool = False
    """Split the target's decoder layers over the processes (FSDP2), each of which gathers one layer at a time. For a target
    that fits no device whole; each process reads it into host memory first."""
    compile: bool = False
    """Have torch.compile make the head's pass, all but its LM head and the loss. It takes a C++ compiler, and the first steps
    long; the weights are the same to rounding."""
    tracker: Literal["none", "wandb", "tensorboard", "trackio"] = "none"
    """Where figures go besides log.jsonl."""

    def __post_init__(self) -> None:
        if self.epochs is None and self.max_steps is None and self.max_seconds is None:
            raise HeadwayError("the recipe says no end; give epochs, max_steps or max_seconds")
        for name in ("epochs", "max_steps", "max_seconds"):
            if getattr(self, name) is not None:
                self._at_least(name, 1e-9)
        for name in ("tokens_per_batch", "max_length", "grad_accum", "log_every", "eval_rows", "eval_tokens"):
            self._at_least(name, 1)
        for name in ("lr", "warmup", "weight_decay", "clip", "eval_every", "eval_prompts", "save_every", "seed"):
            self._at_least(name, 0)
        for name in ("min_lr_ratio", "eval_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise HeadwayError(f"{name} is {getattr(self, name)}; give a number from 0 to 1")
        for name, most in (("seed", 2**63 - 1), ("max_seconds", 1e9), ("epochs", 1e6)):
            if (getattr(self, name) or 0) > most:
                raise HeadwayError(f"{name} is {getattr(self, name)}; give at most {most:g}")
        self._check_optimisation()
        find_family(self.family)
        self._check_what_it_begins_with()
        self._check_joint()
        self._check_shard_target()
        self.objective()

    def _check_shard_target(self) -> None:
        if self.shard_target and self.max_seconds is not None:
            raise HeadwayError(
                "max_seconds is timed by one process, and with shard_target none can run the target alone; give max_steps and "
                "max_seconds=null"
            )
        if self.shard_target and self.target_device is not None:
            raise HeadwayError("shard_target splits the target over all devices; leave out target_device")

    def _check_optimisation(self) -> None:
        self._at_least("cooldown", 0)
        if not all(0 <= beta < 1 for beta in self.betas):
            raise HeadwayError(f"betas is {list(self.betas)}; give two numbers from 0 to below 1")
        if not 0 <= self.ema < 1:
            raise HeadwayError(f"ema is {self.ema}; give a number from 0 to below 1")
        if self.schedule == "wsd" and self.warmup < 1 and self.cooldown < 1 and self.warmup + self.cooldown > 1:
            raise HeadwayError(
                f"warmup {self.warmup} and cooldown {self.cooldown} are more than all the steps; give shares of 1 together"
            )

    def _check_what_it_begins_with(self) -> None:
        if self.lora is not None and self.init_from is None:
            raise HeadwayError("lora trains on a head that there is; give init_from=HEAD, or leave out lora")
        if self.merge_adapter and self.target_adapter is None:
            raise HeadwayError("merge_adapter has no adapter to merge; give target_adapter, or leave it out")

    def _check_joint(self) -> None:
        if self.joint is None:
            return
        changing = "joint changes the target's features with every step"
        for name, allowed, why in (
            ("features", None, f"{changing}, captured ones are of the target as it was; leave features out"),
            ("cache", ("auto", "off"), f"{changing}, none can be kept; use cache=off"),
            ("store", "bfloat16", f"{changing}, none are stored; leave store out"),
            (
                "target_device",
                None,
                "joint sends gradients through head and target on one device; leave target_device out",
            ),
            (
                "shard_target",
                False,
                "joint sends gradients through the target, which one process then holds whole; leave shard_target out",
            ),
            (
                "lora",
                None,
                "joint trains all of the head with a LoRA on the target, lora a LoRA on the head; leave one out",
            ),
            (
                "target_adapter",
                None,
                "joint puts a LoRA of its own on the target; merge the other into its weights (PEFT's merge_and_unload) "
                "and give the result as target",
            ),
            ("dtype", ("auto", "float32", "bfloat16"), "gradients overflow in float16; use dtype=bfloat16 or float32"),
        ):
            value = getattr(self, name)
            if value != allowed and not (isinstance(allowed, tuple) and value in allowed):
                raise HeadwayError(f"{name} is {value!r}: {why}")

    def objective(self) -> Objective:
        """Return what `loss` and `step_weights` say."""
        return parse_objective(self.loss, self.step_weights)

    def _at_least(self, name: str, least: float) -> None:
        # Written so that a NaN does not pass.
        if not least <= getattr(self, name) < math.inf:
            allowed = f"a finite number of {least} or more" if least in (0, 1) else "a finite number above 0"
            raise HeadwayError(f"{name} is {getattr(self, name)}; give {allowed}")

    def to_json(self) -> dict[str, Any]:
        """Return the recipe as resolved, JSON-ready."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}


def load_recipe(path: Path | str, overrides: Sequence[str] = ()) -> TrainConfig:
    """Return the recipe in a YAML file with `key=value` overrides applied.

    Raises HeadwayError for a missing or broken file, an unknown key (naming the nearest) or a value of the wrong type.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError):
        raise HeadwayError(f"no recipe {str(path)!r}; give a YAML file, such as those in recipes/") from None
    except OSError as e:
        raise HeadwayError(f"cannot read the recipe {str(path)!r}: {e.strerror}") from None
    except UnicodeDecodeError:
        raise HeadwayError(f"the recipe {str(path)!r} is not UTF-8 text; convert it, or give another file") from None
    try:
        fields = yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError) as e:  # its constructors raise ValueError
        raise HeadwayError(f"{path} is no YAML: {' '.join(str(e).split())}") from None
    if not isinstance(fields, dict):
        raise HeadwayError(f"{path} holds no `key: value` lines; see recipes/ for examples")
    return make_config(fields, overrides)


def make_config(fields: Mapping[str, Any], overrides: Sequence[str] = ()) -> TrainConfig:
    """Return the config of a mapping (`head` nested, or `head.x` flat) with `key=value` overrides applied."""
    merged: dict[str, Any] = {}
    for key, value in [*fields.items(), *map(_split, overrides)]:
        key = str(key)
        if key == "head":
            if not isinstance(value, Mapping | None):
                raise HeadwayError(f"head is {value!r}; give a mapping of names to values, or head.name=value")
            merged["head"] = {**merged.get("head", {}), **(value or {})}
        elif key.startswith(("head.", "lora.", "joint.")):
            owner, _, name = key.partition(".")
            merged[owner] = {**(merged.get(owner) or {}), name: value}
        else:
            merged[key] = value
    checked = check_fields(TrainConfig, merged)
    required = [f.name for f in dataclasses.fields(TrainConfig) if _required(f)]
    for name in required:
        if name not in checked:
            raise HeadwayError(f"the recipe lacks {name!r}; add `{name}: ...` to it or {name}=... to the command")
    config_class, _ = find_family(checked["family"])
    checked["head"] = check_fields(config_class, checked.get("head", {}), prefix="head.")
    for section in (LoraFields, JointFields):
        key = section.SECTION
        if checked.get(key) is not None:
            checked[key] = dataclasses.asdict(section(**check_fields(section, checked[key], prefix=f"{key}.")))
    return TrainConfig(**checked)


def check_fields(cls: type, fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the fields converted to the types of a dataclass.

    Raises HeadwayError for an unknown name (naming the nearest) or a value of the wrong type (naming both).
    """
    hints = typing.get_type_hints(cls)
    known = [f.name for f in dataclasses.fields(cls)]
    result = {}
    for name, value in fields.items():
        if name not in known:
            near = get_close_matches(str(name), known, n=1)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"allowed: {', '.join(sorted(known))}"
            raise HeadwayError(f"unknown key {prefix}{name}; {hint}")
        try:
            result[name] = _convert(value, hints[name])
        except TypeError:
            raise HeadwayError(
                f"{prefix}{name} is {value!r} ({type(value).__name__}); it must be {_spell(hints[name])}"
            ) from None
    return result


def _convert(value: Any, hint: Any) -> Any:
    """Return `value` as `hint` wants it. Raises TypeError when it does not fit."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        for option in args:
            try:
                return _convert(value, option)
            except TypeError:
                continue
        raise TypeError
    if origin is Literal:
        if value in args and type(value) in {type(a) for a in args}:
            return value
        raise TypeError
    if origin is tuple:
        return _convert_tuple(value, args)
    if origin is dict or hint is dict:
        if isinstance(value, Mapping):
            return dict(value)
        raise TypeError
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is hint:
        return value
    raise TypeError


def _convert_tuple(value: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise TypeError
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(_convert(v, args[0]) for v in value)
    if len(value) != len(args):
        raise TypeError
    return tuple(_convert(v, a) for v, a in zip(value, args, strict=True))


def _spell(hint: Any) -> str:
    """Return a type as a user would say it."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_spell(a) for a in args)
    if origin is Literal:
        return "one of " + ", ".join(str(a) for a in args)
    if origin is tuple:
        items = [_spell(a) for a in args if a is not Ellipsis]
        return f"a list of {', '.join(items)}"
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}
    return names.get(hint, "a mapping of names to values" if origin is dict or hint is dict else str(hint))


def _split(override: str) -> tuple[str, Any]:
    key, equals, value = override.partition("=")
    if not equals or not key or key.startswith("-"):
        raise HeadwayError(f"cannot read {override!r}; write key=value, for example lr=1e-3 or head.num_heads=4")
    try:
        return key, yaml.load(value, Loader=_Loader)
    except (yaml.YAMLError, ValueError):
        return key, value


def _required(item: dataclasses.Field[Any]) -> bool:
    return item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING


class _Loader(yaml.SafeLoader):
    """SafeLoader with the plain words of YAML 1.2: `off` is text, not false; 2024-01-31 is text, not a date; 1e-3 is a
    number, which YAML 1.1 takes for text."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, words) for tag, words in resolvers if not tag.endswith((":bool", ":timestamp"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)
