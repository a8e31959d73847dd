"""A tiny random target that speaks the byte tokenizer, and a script-driven stand-in for the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from byte_tokenizer import IM_END, byte_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from headway.inference.generate import Request, Result
from headway.inference.target import Target


def tiny_target(name: str = "tiny", positions: int = 256) -> Target:
    """Return a two-layer Llama of random weights, the same at every call."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=264,
        max_position_embeddings=positions,
        initializer_range=0.3,
        eos_token_id=IM_END,
        bos_token_id=None,
        pad_token_id=None,
    )
    return Target(LlamaForCausalLM(config), byte_tokenizer(), name, mode="tree")


class Script:
    """Stands in for `generate`: answers by a function of the request, out of order, and can be interrupted."""

    def __init__(self, answer: Callable[[Request], tuple[str, str]], interrupt_after: int | None = None) -> None:
        self.answer, self.interrupt_after = answer, interrupt_after
        self.requests: list[Request] = []

    def __call__(
        self,
        target: Target,
        requests: Iterable[Request],
        *,
        batch_size: int = 1,
        on_tokens: Callable[[Request, list[int]], None] | None = None,
        **_: Any,
    ) -> Iterator[Result]:
        waiting = iter(requests)
        rows: list[Request] = []
        yielded = 0
        while True:
            while len(rows) < batch_size and (request := next(waiting, None)) is not None:
                self.requests.append(request)
                rows.append(request)
            if not rows:
                return
            if yielded == self.interrupt_after:
                raise KeyboardInterrupt
            request = rows.pop(-(yielded % 2))
            text, reason = self.answer(request)
            assert target.tokenizer is not None
            ids = target.tokenizer(text, add_special_tokens=False)["input_ids"] + [IM_END] * (reason == "stop")
            if on_tokens:
                on_tokens(request, ids)
            yielded += 1
            yield Result(request.id, ids, reason, max(0, len(ids) - 1), [1] * max(0, len(ids) - 1))
