"""Self-written prompts: filtered and counted, and the same after an interruption."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any, TypeVar

import pytest
from byte_tokenizer import IM_END
from tiny_target import Script, tiny_target

import headway.data.magpie
from headway.data.magpie import write_prompts
from headway.data.manifest import read_json
from headway.data.prompts import read_rows
from headway.heads.common.errors import HeadwayError, Interrupted
from headway.inference.generate import Request, Result
from headway.inference.sampling import Settings
from headway.inference.target import Target

Engine = TypeVar("Engine", bound=Callable[..., Iterator[Result]])
DRAWN = [
    ("One?", "stop"),
    ("  ", "stop"),
    ("one", "stop"),
    ("on and on", "length"),
    ("Two?", "stop"),
    ("Three?", "stop"),
]


def by_draw(request: Request) -> tuple[str, str]:
    return DRAWN[request.key] if request.key < len(DRAWN) else (f"Number {request.key}?", "stop")


def use(monkeypatch: pytest.MonkeyPatch, script: Engine) -> Engine:
    monkeypatch.setattr(headway.data.magpie, "generate", script)
    return script


def test_draws_are_filtered_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = use(monkeypatch, Script(by_draw))
    counts = write_prompts(tiny_target(), tmp_path / "p.jsonl", 3, batch_size=4, show=False)
    assert counts == {"kept": 3, "empty": 1, "duplicate": 1, "runaway": 1}
    rows, _ = read_rows(str(tmp_path / "p.jsonl"))
    assert [(row.id, row.messages[0]["content"]) for row in rows] == [("0", "One?"), ("4", "Two?"), ("5", "Three?")]
    assert read_json(tmp_path / "p.manifest.json")["counts"] == dict(counts)
    request = script.requests[0]
    assert tiny_target().tokenizer.decode(request.prompt_ids) == "<|im_start|>user\n"  # type: ignore[union-attr]
    assert request.settings.eos_ids == (IM_END,)
    assert request.settings.stop == ()


def test_progress_counts_no_more_prompts_than_are_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def first_one_last(target: Target, requests: Iterator[Request], **kwargs: Any) -> Iterator[Result]:
        first, *others = islice(requests, 6)
        return script(target, [*others, first], **(kwargs | {"batch_size": 1}))

    script = Script(lambda request: (f"Number {request.key}?", "stop"))
    use(monkeypatch, first_one_last)
    monkeypatch.setattr("headway.data.progress.time.monotonic", count(step=60).__next__)
    write_prompts(tiny_target(), tmp_path / "p.jsonl", 3, batch_size=6)
    said = capsys.readouterr().err
    assert "prompts 3/3" in said
    assert "prompts 4/3" not in said


@pytest.mark.parametrize("after", range(7))
def test_interrupted_writing_continues_to_the_same_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    use(monkeypatch, Script(by_draw))
    write_prompts(tiny_target(), tmp_path / "whole.jsonl", 6, batch_size=3, show=False)
    script = use(monkeypatch, Script(by_draw, interrupt_after=after))
    with pytest.raises(Interrupted, match="prompts are safe"):
        write_prompts(tiny_target(), tmp_path / "p.jsonl", 6, batch_size=3, show=False)
    script.interrupt_after = None
    write_prompts(tiny_target(), tmp_path / "p.jsonl", 3, batch_size=3, show=False)
    counts = write_prompts(tiny_target(), tmp_path / "p.jsonl", 6, batch_size=3, show=False)
    assert counts["kept"] == 6
    for suffix in (".jsonl", ".rejected.jsonl"):
        assert (tmp_path / f"p{suffix}").read_bytes() == (tmp_path / f"whole{suffix}").read_bytes()


def test_openers_begin_the_prompts_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = use(monkeypatch, Script(lambda request: (f" many {request.key}?", "stop")))
    openers = ("", "How")
    write_prompts(tiny_target(), tmp_path / "p.jsonl", 4, openers=openers, batch_size=2, show=False)
    rows, _ = read_rows(str(tmp_path / "p.jsonl"))
    assert [row.messages[0]["content"] for row in rows] == ["many 0?", "How many 1?", "many 2?", "How many 3?"]
    decode = tiny_target().tokenizer.decode  # type: ignore[union-attr]
    asked = [decode(request.prompt_ids) for request in script.requests[:2]]
    assert asked == ["<|im_start|>user\n", "<|im_start|>user\nHow"]
    with pytest.raises(HeadwayError, match="openers"):
        write_prompts(tiny_target(), tmp_path / "p.jsonl", 5, openers=("",), show=False)


def test_a_real_engine_writes_the_same_at_any_batch_size(tmp_path: Path) -> None:
    settings = Settings(max_new_tokens=10, temperature=1.0, top_p=0.9)
    target = tiny_target()
    target.model.generation_config.eos_token_id = [*range(0, 256, 4), IM_END]  # ends soon
    for size in (1, 3):
        counts = write_prompts(target, tmp_path / f"{size}.jsonl", 4, settings=settings, batch_size=size, show=False)
        assert counts["kept"] == 4
    assert (tmp_path / "1.jsonl").read_bytes() == (tmp_path / "3.jsonl").read_bytes()


def test_plain_text_that_ends_the_turn_is_a_stop_string(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = use(monkeypatch, Script(lambda request: (f"Hello {request.key} BOT: more", "stop_string")))
    target = tiny_target()
    target.tokenizer.chat_template = (  # type: ignore[union-attr]
        "{% for m in messages %}{{ m.role ~ ' USER: ' ~ m.content ~ ' BOT:' }}{% endfor %}"
    )
    write_prompts(target, tmp_path / "p.jsonl", 2, show=False)
    assert script.requests[0].settings.stop == ("BOT:",)
    assert [r.messages[0]["content"] for r in read_rows(str(tmp_path / "p.jsonl"))[0]] == ["Hello 0", "Hello 1"]


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Script(by_draw))
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "mine"}\n')
    with pytest.raises(HeadwayError, match="was not written by the target"):
        write_prompts(tiny_target(), path, 3, show=False)
    assert path.read_text() == '{"prompt": "mine"}\n'
    write_prompts(tiny_target(), tmp_path / "q.jsonl", 1, show=False)
    with pytest.raises(HeadwayError, match="target was 'tiny', now 'other'"):
        write_prompts(tiny_target("other"), tmp_path / "q.jsonl", 3, show=False)
    use(monkeypatch, Script(lambda request: ("on and on", "length")))
    with pytest.raises(HeadwayError, match=r"hardly writes prompts of its own \(0 kept, 20\d runaway\)"):
        write_prompts(tiny_target(), tmp_path / "r.jsonl", 3, show=False)


def test_time_budget_starts_nothing_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Script(by_draw))
    assert write_prompts(tiny_target(), tmp_path / "p.jsonl", 3, seconds=0, show=False) == {"kept": 0}
