"""What a target's logits become before a token is chosen, and the noise that chooses it.

Letters: V vocabulary, M rows of logits, L rows not done yet, K candidates.

A token is chosen by Gumbel-max: argmax of processed log-probabilities plus noise. The noise is a function of (seed, row
key, position, token id) alone, so it does not matter how the logits came about: a run with a head, with another head or
with none draws the same numbers, and its tokens are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from numbers import Integral, Real
from typing import Any, Literal

import torch
from torch import Tensor

from headway.heads.common.errors import HeadwayError

Processor = Callable[[Tensor, Tensor], Tensor]
WHOLE = ("max_new_tokens", "top_k", "min_new_tokens", "seed")
"""Settings that count, or name, something."""
REAL = ("temperature", "top_p", "min_p", "repetition_penalty", "epsilon", "delta")
"""Settings that measure something."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How one request is to be answered."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """0 is off."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Applied to every token of the history, prompt included, as transformers does; each tree node has its own history."""
    min_new_tokens: int = 0
    """No end id is emitted before that many tokens. Stop strings end the answer all the same."""
    processors: tuple[Processor, ...] = ()
    """Called in turn before the temperature, as transformers' LogitsProcessors are: (ids [1, T], scores [1, V]) -> scores.
    Along the accepted path each is called once per emitted token, with a history one token longer, so that one that keeps
    a state (a grammar) works; it belongs to one request then. Under typical acceptance other paths are asked for too."""
    seed: int = 0
    accept: Literal["exact", "typical"] = "exact"
    """`exact` gives what the target alone would have written; `typical` is faster and lossy."""
    epsilon: float = 0.09
    delta: float = 0.3
    eos_ids: tuple[int, ...] | None = None
    """Ids that end the answer; None takes the target's, () ignores them."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer, wherever they fall inside tokens."""

    def __post_init__(self) -> None:
        for name in ("processors", "eos_ids", "stop"):  # a list is as good; rows that share settings are found by hash
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        self._check(
            [
                *((name, isinstance(getattr(self, name), Integral), "a whole number") for name in WHOLE),
                *((name, _is_finite(getattr(self, name)), "a finite number") for name in REAL),
                ("processors", _holds(self.processors, Callable), "a tuple of callables"),
                ("stop", _holds(self.stop, str), "a tuple of strings"),
                ("eos_ids", self.eos_ids is None or _holds(self.eos_ids, Integral), "a tuple of token ids, or None"),
            ]
        )
        self._check(
            [
                ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
                ("temperature", self.temperature >= 0, "0 (greedy) or more"),
                ("top_k", self.top_k >= 0, "0 (off) or more"),
                ("top_p", 0 < self.top_p <= 1, "above 0, at most 1 (off)"),
                ("min_p", 0 <= self.min_p <= 1, "from 0 (off) to 1"),
                ("min_new_tokens", 0 <= self.min_new_tokens <= self.max_new_tokens, "from 0 to max_new_tokens"),
                ("repetition_penalty", self.repetition_penalty > 0, "above 0; 1 is off"),
                ("accept", self.accept in ("exact", "typical"), "exact or typical"),
                ("epsilon", self.epsilon >= 0, "0 or more"),
                ("delta", self.delta >= 0, "0 or more"),
                ("stop", all(self.stop), "strings that are not empty"),
            ]
        )

    def _check(self, known: list[tuple[str, bool, str]]) -> None:
        """Raise HeadwayError for the first (field, whether it is as allowed, what is allowed) that is not."""
        for name, fits, allowed in known:
            if not fits:
                raise HeadwayError(f"{name} is {getattr(self, name)!r}; it must be {allowed}")

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken."""
        return self.temperature == 0

    @property
    def needs_history(self) -> bool:
        """Whether the scores of a token depend on the tokens before it beyond what the target makes of them."""
        return self.repetition_penalty != 1.0 or bool(self.processors)


def _is_finite(value: object) -> bool:
    return isinstance(value, Real) and isfinite(value)


def _holds(value: object, kind: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(each, kind) for each in value)


def process(logits_V: Tensor, settings: Settings, history: list[int]) -> Tensor:
    """Return fp32 scores [V] after penalty, processors, temperature, top-k, top-p and min-p, in transformers' order.

    Excluded tokens are -inf. `history` is every token before the one to be chosen, prompt included. Raises HeadwayError
    when a processor gives back another shape.
    """
    score = logits_V.float()
    if settings.repetition_penalty != 1.0 and history:
        seen = torch.tensor(sorted(set(history)), device=score.device)
        value = score[seen]
        score = score.clone()
        score[seen] = torch.where(value < 0, value * settings.repetition_penalty, value / settings.repetition_penalty)
    for processor in settings.processors:
        before = score.shape
        score = processor(torch.tensor([history], device=score.device), score[None].clone())[0]
        if score.shape != before:
            raise HeadwayError(
                f"processor {_name(processor)} gave scores of shape {[1, *score.shape]} for {[1, *before]}; it must return "
                "one score for each word"
            )
    return process_rows(score[None], settings)[0]


def _name(processor: Processor) -> str:
    return getattr(processor, "__name__", type(processor).__name__)


def check_chosen(best: float, settings: Settings, position: int) -> None:
    """Raise HeadwayError when the best score of a position is no number, or every token is excluded."""
    if best != best:
        raise HeadwayError(
            f"the scores for position {position} are not numbers (NaN); is the target whole, and its dtype wide enough? "
            "float16 overflows in some models, bfloat16 and float32 do not"
        )
    if best == -torch.inf:
        names = ", ".join(map(_name, settings.processors)) or "the settings"
        raise HeadwayError(
            f"every token is excluded at position {position} (by {names}); allow at least one, an end id, say"
        )


def process_rows(logits_MV: Tensor, settings: Settings) -> Tensor:
    """Return fp32 scores [M, V] of rows that share sampling settings and need no history; see `process`."""
    score = logits_MV.float()
    if settings.greedy:
        return score
    if settings.temperature != 1.0:
        score = score / settings.temperature
    if 0 < settings.top_k < score.shape[-1]:
        floor = score.topk(settings.top_k).values[:, -1:]
        score = score.masked_fill(score < floor, -torch.inf)
    if settings.top_p < 1.0:
        score = _top_p(score, settings.top_p)
    if settings.min_p > 0:
        probability = score.softmax(-1)
        floor = settings.min_p * probability.amax(-1, keepdim=True)
        score = score.masked_fill(probability < floor, -torch.inf)
    return score


_REACHES = (8.0, 16.0, torch.inf)
"""How far below the best score a token of the kept set is looked for, in turn."""


def _top_p(score_MV: Tensor, top_p: float) -> Tensor:
    """Keep the smallest set of most probable tokens whose probability reaches top_p; at least one. Ties go by id."""
    best_M1 = score_MV.amax(-1, keepdim=True)
    total_M = (score_MV - best_M1).exp_().sum(-1).double()
    out_MV = torch.full_like(score_MV, -torch.inf)
    left = torch.arange(len(score_MV), device=score_MV.device)
    # The kept set is small as a rule: rows are sorted as far down as they need, seldom whole.
    for reach in _REACHES:
        among = score_MV if len(left) == len(score_MV) else score_MV[left]
        row, index = (among >= best_M1[left] - reach).nonzero(as_tuple=True)
        count_L = torch.bincount(row, minlength=len(left))
        place = torch.arange(len(row), device=row.device) - (count_L.cumsum(0) - count_L)[row]
        value_LK = score_MV.new_full((len(left), int(count_L.max())), -torch.inf)
        index_LK = torch.zeros_like(value_LK, dtype=torch.long)
        value_LK[row, place] = among[row, index]
        index_LK[row, place] = index
        value_LK, order_LK = value_LK.sort(dim=-1, descending=True, stable=True)
        probability_LK = (value_LK - best_M1[left]).double().exp() / total_M[left, None]
        cumulative_LK = probability_LK.cumsum(-1)
        keep_LK = (cumulative_LK - probability_LK < top_p) & (value_LK > -torch.inf)
        keep_LK[:, 0] = True
        done_L = (cumulative_LK[:, -1] >= top_p) | (reach == torch.inf)
        keep_LK &= done_L[:, None]
        row, place = keep_LK.nonzero(as_tuple=True)
        out_MV[left[row], index_LK.gather(1, order_LK)[row, place]] = value_LK[row, place]
        left = left[~done_L]
        if not len(left):
            break
    return out_MV


_MASK64 = (1 << 64) - 1


def _mix64(x: int) -> int:
    """Return a well-mixed 64-bit word (the splitmix64 finaliser)."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def noise_words(seed: int, key: int, position: int) -> tuple[int, int]:
    """Return the two 32-bit words that name the noise of one position of one row."""
    word = _mix64(_mix64(_mix64(seed & _MASK64) ^ (key & _MASK64)) ^ position)
    return word & 0xFFFFFFFF, word >> 32


def noise_of(low: int | Tensor, high: int | Tensor, ids: Tensor) -> Tensor:
    """Return the Gumbel noise, float64, of token ids at the position that the words `low` and `high` name."""
    # A 32-bit integer hash (two multiply-xorshift rounds, keyed twice), held in int64 so that it wraps the same everywhere.
    x = (ids.long() * 0x9E3779B1 + low) & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = (((x ^ (x >> 15)) + high) * 0x846CA68B) & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = x ^ (x >> 15)
    uniform = (x.double() + 0.5) / 4294967296.0
    return -torch.log(-torch.log(uniform))


def gumbel(seed: int, key: int, position: int, ids: Tensor) -> Tensor:
    """Return Gumbel noise, float64, for token ids `ids`: a function of its arguments alone, on any device."""
    return noise_of(*noise_words(seed, key, position), ids)


def choose(score_V: Tensor, settings: Settings, key: int, position: int) -> int:
    """Return the token chosen from processed scores for the sequence position `position`."""
    best = int(score_V.argmax())  # NaN counts as the greatest
    check_chosen(float(score_V[best]), settings, position)
    if settings.greedy:
        return best
    ids = (score_V > -torch.inf).nonzero()[:, 0]
    return int(ids[(score_V[ids].double() + gumbel(settings.seed, key, position, ids)).argmax()])


def choose_rows(score_MV: Tensor, settings: Settings, keys: list[int], positions: list[int]) -> list[int]:
    """Return the token chosen from each row of processed scores, all under one sampling setting; see `choose`."""
    value_M, best_M = score_MV.max(-1)
    for value, position in zip(value_M.tolist(), positions, strict=True):
        check_chosen(value, settings, position)
    if settings.greedy:
        return [int(token) for token in best_M]
    words = [noise_words(settings.seed, key, position) for key, position in zip(keys, positions, strict=True)]
    low_M, high_M = torch.tensor(words, device=score_MV.device).T
    row, ids = (score_MV > -torch.inf).nonzero(as_tuple=True)
    value = score_MV[row, ids].double() + noise_of(low_M[row], high_M[row], ids)
    counts = torch.bincount(row, minlength=len(score_MV)).tolist()
    best = [int(part.argmax()) for part in value.split(counts)]
    return [int(part[b]) for part, b in zip(ids.split(counts), best, strict=True)]


def typical_threshold(probability_V: Tensor, epsilon: float, delta: float) -> float:
    """Return min(epsilon, delta * exp(-H)): a token of greater probability is accepted (Medusa, section 3.3)."""
    entropy = float(-torch.special.xlogy(probability_V, probability_V).sum())
    return min(epsilon, delta * torch.exp(torch.tensor(-entropy)).item())
