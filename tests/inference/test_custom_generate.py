"""`model.generate(custom_generate=...)`: transformers' settings mean what they mean there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    TextIteratorStreamer,
    TextStreamer,
)

from headway import headway_generate
from headway.heads.common.errors import HeadwayError
from headway.inference.target import Target
from tests.inference.helpers import POLICIES, PROMPTS, encode, random_head
from tests.tiny import build, byte_tokenizer, llama4, llama12, target

PAD = 0
NO_END = {"eos_token_id": 10**6, "pad_token_id": PAD}


class Multiple(StoppingCriteria):
    """Ends a row at the first token that five divides."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return input_ids[:, -1] % 5 == 0


@pytest.fixture(scope="module")
def twelve() -> Target:
    return target(llama12())


def batch(*prompts: str) -> dict[str, Tensor]:
    rows = [encode(p) for p in prompts]
    width = max(map(len, rows))
    ids = [[PAD] * (width - len(r)) + r for r in rows]
    mask = [[0] * (width - len(r)) + [1] * len(r) for r in rows]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


SETTINGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "penalty": {"repetition_penalty": 1.5},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "min_new_tokens": {"min_new_tokens": 9},
    "min_length": {"min_length": 40},
    "bad_words": {"bad_words_ids": [[134], [93, 48]]},
    "suppress": {"suppress_tokens": list(range(0, 250, 3))},
    "begin_suppress": {"begin_suppress_tokens": list(range(0, 250, 2))},
    "forced_eos": {"forced_eos_token_id": 9},
    "criteria": {"stopping_criteria": StoppingCriteriaList([Multiple()])},
    "prefix": {"prefix_allowed_tokens_fn": lambda b, ids: [b + 10 + int(ids[-1] * 7 + k) % 200 for k in (1, 2, 3)]},
    "max_length": {"max_length": 45, "max_new_tokens": None},
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["one", "padded"])
def test_greedy_equals_transformers(twelve: Target, name: str, prompts: tuple[str, ...]) -> None:
    free = twelve.model.generate(**batch(*prompts), do_sample=False, max_new_tokens=20, **NO_END)
    ends = [int(free[0, -8]), 10**6]  # in the middle of the first answer; the settings move it
    kwargs: dict[str, Any] = {"max_new_tokens": 20, "pad_token_id": PAD, "eos_token_id": ends, "do_sample": False}
    if name == "nothing":
        kwargs["eos_token_id"] = 10**6
    kwargs = {k: v for k, v in {**kwargs, **SETTINGS[name]}.items() if v is not None}
    inputs = batch(*prompts)
    want = twelve.model.generate(**inputs, **kwargs)
    for policy in ("chain", "dynamic"):
        loop = headway_generate(twelve, random_head("eagle3", twelve), POLICIES[policy])
        got = twelve.model.generate(**inputs, custom_generate=loop, **kwargs)
        assert got.tolist() == want.tolist(), policy
    assert twelve.model.generate(**inputs, custom_generate=headway_generate(twelve), **kwargs).tolist() == want.tolist()


def test_stop_strings(twelve: Target) -> None:
    tokenizer = byte_tokenizer()
    inputs = batch(PROMPTS[0])
    free = twelve.model.generate(**inputs, do_sample=False, max_new_tokens=20, **NO_END)[0].tolist()
    pieces = [tokenizer.decode([token]) for token in free[len(PROMPTS[0]) + 2 :]]
    stop = next(piece for piece in pieces if piece.isascii() and piece.isprintable())
    kwargs: dict[str, Any] = {"do_sample": False, "max_new_tokens": 20}
    kwargs["stopping_criteria"] = StoppingCriteriaList([StopStringCriteria(tokenizer, [stop])])
    want = twelve.model.generate(**inputs, **kwargs, **NO_END)
    loop = headway_generate(twelve, random_head("medusa", twelve))
    got = twelve.model.generate(**inputs, custom_generate=loop, **kwargs, **NO_END)
    assert got.tolist() == want.tolist()
    assert got.shape[1] < len(free)


def test_sampling_follows_torchs_seed(twelve: Target) -> None:
    kwargs = {**batch(*PROMPTS), "do_sample": True, "temperature": 0.9, "top_p": 0.8, "max_new_tokens": 20, **NO_END}
    out = []
    medusa, eagle3 = random_head("medusa", twelve), random_head("eagle3", twelve)
    for seed, head in ((1, None), (1, medusa), (1, eagle3), (2, eagle3)):
        torch.manual_seed(seed)
        loop = headway_generate(twelve, head, POLICIES["dynamic"] if head else None)
        out.append(twelve.model.generate(custom_generate=loop, **kwargs).tolist())
    assert out[0] == out[1] == out[2] != out[3]


def test_streamer(twelve: Target, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = byte_tokenizer()
    loop = headway_generate(twelve, random_head("medusa", twelve), streamer=TextStreamer(tokenizer, skip_prompt=True))
    out = twelve.model.generate(**batch(PROMPTS[0]), custom_generate=loop, do_sample=False, max_new_tokens=20, **NO_END)
    assert capsys.readouterr().out.strip() == tokenizer.decode(out[0, len(PROMPTS[0]) :]).strip()


def test_a_streamer_ends_after_an_error_too(twelve: Target) -> None:
    """Another thread reads it, and would wait for ever."""
    streamer = TextIteratorStreamer(byte_tokenizer(), timeout=0.1)  # type: ignore[arg-type]
    loop = headway_generate(twelve, streamer=streamer)
    nothing = LogitsProcessorList([lambda ids, scores: torch.full_like(scores, float("nan"))])
    with pytest.raises(HeadwayError, match="NaN"):
        twelve.model.generate(**batch(PROMPTS[0]), custom_generate=loop, logits_processor=nothing, **NO_END)
    list(streamer)


@pytest.mark.parametrize(
    ("prompts", "kwargs", "said"),
    [
        (PROMPTS[:1], {"num_beams": 2}, "num_beams"),
        (PROMPTS[:1], {"return_dict_in_generate": True}, "return_dict_in_generate"),
    ],
)
def test_refused(twelve: Target, prompts: tuple[str, ...], kwargs: dict[str, Any], said: str) -> None:
    with pytest.raises(HeadwayError, match=said):
        twelve.model.generate(**batch(*prompts), custom_generate=headway_generate(twelve), max_new_tokens=4, **kwargs)


def test_right_padding_and_other_models_are_refused(twelve: Target) -> None:
    inputs = batch(*PROMPTS[:2])
    inputs = {name: value.flip(1) for name, value in inputs.items()}
    with pytest.raises(HeadwayError, match="not padded on its left"):
        twelve.model.generate(**inputs, custom_generate=headway_generate(twelve), max_new_tokens=4, **NO_END)
    with pytest.raises(HeadwayError, match="another model"):
        llama4().generate(**batch("a"), custom_generate=headway_generate(twelve), max_new_tokens=4, **NO_END)


def test_what_the_loop_would_not_read_is_refused() -> None:
    """transformers hands a model's own arguments through; an answer made without them would be another."""
    model = build(3, model_type="gpt2", num_hidden_layers=2, num_key_value_heads=4)
    t = target(model)
    inputs, kwargs = batch(*PROMPTS[:2]), {"max_new_tokens": 6, "do_sample": False, **NO_END}
    place = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    want = model.generate(**inputs, **kwargs)
    for loop in (None, headway_generate(t)):
        assert model.generate(**inputs, position_ids=place, custom_generate=loop, **kwargs).tolist() == want.tolist()
    for name, value in (("position_ids", place + 3), ("token_type_ids", torch.full_like(place, 7))):
        assert model.generate(**inputs, **{name: value}, **kwargs).tolist() != want.tolist()
        with pytest.raises(HeadwayError, match=f"^{name} "):
            model.generate(**inputs, **{name: value}, custom_generate=headway_generate(t), **kwargs)
