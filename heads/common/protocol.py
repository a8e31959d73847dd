"""The contract between a head, its training loop and the decoder.

Letters: B batch, T positions, N frontier nodes, M all nodes drafted so far, D target hidden size, F tap width,
V vocabulary of the head (the draft vocabulary, or the target's), S draft steps.

Alignment, the same at train and run time:

    position p:            0    1    2    3
    token:                 x0   x1   x2   x3        feature f[p] is computed by the target from x0..xp
    anchor at p reads:     f[p] and the token after it, x[p+1]
    draft step s predicts: x[p + 2 + s]             (x[p+1] is the target's own prediction, already committed)
    teacher of step s:     the target's distribution at position p + 1 + s
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from headway.heads.common.errors import HeadwayError
from headway.heads.common.objective import Objective
from headway.heads.common.static import Run

Tap = int | Literal["last"]


@dataclass(frozen=True, kw_only=True)
class AdapterInfo:
    """A LoRA adapter on the target."""

    name: str
    """Folder or hub id."""
    revision: str | None = None
    """Commit hash of the hub snapshot, or None for a local adapter."""
    sha256: str
    """Of its weights and what scales them (inference/adapter.py): it tells one adapter from another."""
    base: str | None = None
    """The model that the adapter says it was made for."""

    def __str__(self) -> str:
        return f"{self.name} ({self.sha256[:12]})"


@dataclass(frozen=True, kw_only=True)
class TargetInfo:
    """What a head must know of its target: plain data, saved with the head and compared at load."""

    name: str
    """Hub id, folder or file the target was loaded from."""
    revision: str | None = None
    """Commit hash of the hub snapshot, or None for a local target."""
    model_type: str
    hidden_size: int
    vocab_size: int
    """Rows of the LM head: config.vocab_size, which may exceed the tokenizer."""
    num_tokens: int
    """Ids the tokenizer knows; ids from here to vocab_size are padding rows."""
    num_layers: int
    text_config: dict[str, Any] = field(default_factory=dict)
    """The target's text config as a dict: rope, norms, head counts. Families read their defaults from it."""
    adapter: AdapterInfo | None = None
    """The LoRA adapter that the target carries, attached or merged."""


@dataclass(frozen=True)
class Frozen:
    """References into the target that a head may use and never owns."""

    info: TargetInfo
    embed: Callable[[Tensor], Tensor]
    """ids [...] -> what the first decoder layer reads [..., D] (any embedding scale applied)."""
    logits: Callable[..., Tensor]
    """logits(last [..., D], rows=None) -> target logits [..., V]; with `rows` (ids [R]) only those columns [..., R]. Scale and
    softcap applied. `last` is the feature after the final norm."""
    lm_head_weight: Callable[[], Tensor]
    """The LM head's weight [V, D], for warm starts; never modified."""
    layer_weights: Callable[[int], dict[str, Tensor]] = field(default=lambda i: {})
    """State dict of decoder layer i, for warm starts; may be empty for an unknown layout."""
    final_norm: Callable[[], Tensor | None] = field(default=lambda: None)
    """Weight of the norm before the LM head [D], for warm starts; None for an unknown layout."""


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """Fields of every family. A family's Config adds its own; all are saved in the head's config.json."""

    taps: tuple[Tap, ...] = ("last",)
    """Target layers the head reads, in order. Tap i is the output of decoder layer i (0-based); `last` is after the final
    norm."""
    hidden_size: int = 0
    """The target's hidden size D; 0 takes it from the target."""
    vocab_size: int = 0
    """The target's vocabulary V; 0 takes it from the target."""

    @classmethod
    def for_target(cls: type[C], info: TargetInfo, **fields: Any) -> C:
        """Return this config with what the user left open taken from the target.

        Raises HeadwayError for an unknown field (naming the nearest) or one that does not fit the target.
        """
        from difflib import get_close_matches

        known = {f.name for f in dataclasses.fields(cls)}
        for name in fields:
            if name not in known:
                near = get_close_matches(name, known, n=1)
                hint = f"; did you mean head.{near[0]}?" if near else f"; allowed: {', '.join(sorted(known))}"
                raise HeadwayError(f"unknown key head.{name}{hint}")
        if isinstance(fields.get("taps"), list):
            fields["taps"] = tuple(fields["taps"])
        filled = {**cls.defaults(info), **{k: v for k, v in fields.items() if v is not None}}
        filled["hidden_size"] = info.hidden_size
        filled["vocab_size"] = info.vocab_size
        config = cls(**filled)
        config.check_taps(info)
        decay = getattr(config, "decay", 1.0)
        if not 0 <= decay < math.inf:
            raise HeadwayError(f"head.decay is {decay}; give a finite number of 0 or more")
        words = getattr(config, "draft_vocab_size", 0)
        if words > info.num_tokens:
            raise HeadwayError(
                f"head.draft_vocab_size is {words}, the tokenizer has {info.num_tokens} tokens; use at most that"
            )
        return config

    @property
    def num_steps(self) -> int | None:
        """Draft steps that training counts, each with its weight in the loss; None where the family does not say."""
        return None

    @classmethod
    def defaults(cls, info: TargetInfo) -> dict[str, Any]:
        """Return the field values this family takes from the target where the user gives none."""
        return {}

    def check_taps(self, info: TargetInfo) -> None:
        """Raise HeadwayError unless every tap names a layer of the target, each once."""
        for tap in self.taps:
            if tap != "last" and not (isinstance(tap, int) and 0 <= tap < info.num_layers):
                raise HeadwayError(
                    f"head.taps has {tap!r}, but {info.name} has layers 0..{info.num_layers - 1}; "
                    "use those numbers or 'last'"
                )
        if len(set(self.taps)) != len(self.taps):
            raise HeadwayError(f"head.taps names a layer twice: {list(self.taps)}; use distinct layers")

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict; `from_json` is its inverse."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}

    @classmethod
    def from_json(cls: type[C], fields: dict[str, Any]) -> C:
        """Return the config saved by `to_json`. Raises HeadwayError for unknown fields."""
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = set(fields) - known
        if unknown:
            raise HeadwayError(
                f"head config has unknown fields {sorted(unknown)}; was it written by a newer headway? upgrade to load it"
            )
        restored: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
        return cls(**restored)


C = TypeVar("C", bound=HeadConfig)


@dataclass
class Batch:
    """Training rows, right-padded. Everything is indexed by position."""

    token_BT: Tensor
    """int64 ids; padding is any id, told by length_B."""
    length_B: Tensor
    """int64 number of real tokens in each row."""
    supervised_BT: Tensor
    """bool: the token at this position was emitted by the target, so predicting it is a goal. False on padding."""
    tap_BTF: Tensor
    """Features of the taps at each position, concatenated in tap order."""
    last_BTD: Tensor
    """The feature after the final norm, from which `Frozen.logits` makes the teacher's distribution."""
    normaliser_BT: Tensor | None = None
    """log-sum-exp of the target's logits at each position, or None to have the loss compute it (see losses.summarise)."""
    argmax_BT: Tensor | None = None
    """The target's argmax at each position, or None likewise."""
    whole_count_S: Tensor | None = None
    """Where these rows are part of a larger whole: how many labels each step has in all of it (`Head.count_labels`). Means are
    then over those, so that the losses of the parts add up to that of the whole."""


@dataclass
class LossReport:
    """What `Head.loss` returns; every mean is over supervised tokens, and zero of them give loss 0."""

    loss: Tensor
    """Scalar to call backward on: the mean over supervised tokens of the weighted steps."""
    loss_S: Tensor
    """Per step: mean loss, unweighted, detached."""
    agreement_S: Tensor
    """Per step: share of supervised tokens where the head's argmax is the target's argmax. A target token outside the draft
    vocabulary is a miss."""
    count_S: Tensor
    """Per step: supervised tokens counted."""
    figures: dict[str, Tensor] = field(default_factory=dict)
    """Further means over the tokens that the first step counts, by name; detached."""


@dataclass
class Context:
    """Newly committed positions of each row: features and the token after each.

    tap_BTF[b, t] is the feature at position position_BT[b, t]; next_BT[b, t] is the token at the position after it (for
    the newest entry that is the root). Rows are ragged: entries at and beyond count_B[b] are padding.
    """

    tap_BTF: Tensor
    next_BT: Tensor
    position_BT: Tensor
    count_B: list[int]


@dataclass
class Frontier:
    """Nodes whose children are wanted, all at one depth.

    depth 0 is the root alone: N = 1 and the token is the newest `next_BT` of each row. At depth d > 0, node n has token
    token_BN[b, n] and continues entry parent_BN[b, n] of the frontier of depth d - 1.
    """

    token_BN: Tensor
    parent_BN: Tensor
    depth: int


State = Any
"""A family's own running state for a set of rows; opaque to the decoder, returned and never stored on the head."""


class Head(nn.Module):
    """Base of every family: holds the config and the frozen references; its state_dict is exactly the head.

    A family is one module `heads/<family>.py` that defines `Config(HeadConfig)` and `Head`; it is found by module name.
    """

    config: HeadConfig
    static: Run | None = None
    """Set where drafts are compiled, by a target that is: then what goes through static.py runs in shapes that are few."""
    compiled: Callable[..., list[Tensor]] | None = None
    """Set where training is compiled: compiled(function, head, *arguments) returns `function(head, *arguments)`."""

    def __init__(self, config: HeadConfig, frozen: Frozen) -> None:
        super().__init__()
        self.config = config
        self.frozen = frozen  # no Module, so nothing of the target is registered
        self.objective = Objective()
        """What `loss` minimises; the recipe's, set before training."""

    @property
    def max_depth(self) -> int | None:
        """Deepest path this head can draft, or None when it can go on for ever."""
        return None

    @property
    def draft_vocab(self) -> Tensor | None:
        """Target ids of the draft vocabulary, int64 [V], or None when the head speaks the target's vocabulary."""
        return None

    def count_labels(self, supervised_BT: Tensor) -> Tensor:
        """Return over how many labels each step's mean in `loss` goes, int64 [S]; steps beyond have none.

        A family that trains on a sample of them draws the sample that `loss` would draw from the same state of torch's
        generator.
        """
        from headway.heads.common.losses import count_labels

        return count_labels(supervised_BT)

    def warm_start(self) -> None:
        """Initialise from the target's weights where that helps. Called once, before training from scratch."""

    def set_draft_vocab(self, target_ids: Tensor) -> None:
        """Take the draft vocabulary (sorted target ids); called once before `warm_start`. No-op without one."""

    def training_pass(self, function: Callable[..., list[Tensor]], *arguments: Any) -> list[Tensor]:
        """Return `function(self, *arguments)`: what the loss reads at each step, compiled in training where that is asked for.

        The function is no closure, and does nothing but compute: what it draws, looks up in the target or decides by the contents
        of tensors is done before.
        """
        if self.compiled is None or not (self.training and torch.is_grad_enabled()):
            return function(self, *arguments)
        return self.compiled(function, self, *arguments)

    def loss(self, batch: Batch) -> LossReport:
        """Return the training loss of a batch and its per-step figures."""
        raise NotImplementedError

    def start(self, context: Context, state: State | None, rows: int) -> State:
        """Return the state after absorbing newly committed tokens; `state` None begins `rows` empty rows."""
        raise NotImplementedError

    def step(self, state: State, frontier: Frontier) -> tuple[Tensor, State]:
        """Return logits_BNV for the children of each frontier node (fp32 not required), and the new state.

        V is the head's own vocabulary; `draft_vocab` maps it to target ids.
        """
        raise NotImplementedError

    def select_rows(self, state: State, kept: list[int]) -> State:
        """Return the state of the given rows, in that order (kept[b] >= b); the others are gone."""
        raise NotImplementedError

    def join_rows(self, state: State, other: State) -> State:
        """Return one state holding the rows of `state`, then those of `other`."""
        raise NotImplementedError


def find_family(name: str) -> tuple[type[HeadConfig], type[Head]]:
    """Return (Config, Head) of a family, found by module name under headway.heads.

    Raises HeadwayError naming the families there are.
    """
    from importlib import import_module

    if name not in families():
        raise HeadwayError(f"unknown family {name!r}; there are {', '.join(families())}")
    module = import_module(f"headway.heads.{name}")
    return module.Config, module.Head


def families() -> list[str]:
    """Return the names of all families: the modules directly under headway.heads."""
    import pkgutil

    import headway.heads

    names = {m.name for m in pkgutil.iter_modules(headway.heads.__path__) if not m.ispkg and not m.name.startswith("_")}
    return sorted(names)


def module_dtype(module: nn.Module) -> torch.dtype:
    """Return the dtype of a module's first parameter."""
    return next(module.parameters()).dtype
