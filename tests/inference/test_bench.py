"""The bench: what it counts, against answers known beforehand; and text streaming."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import tests.tiny as tiny
from headway.heads.common.errors import HeadwayError
from headway.heads.common.protocol import Head, find_family
from headway.inference.bench import Prompt, bench, save_plot, save_report
from headway.inference.drafters.ngram import NgramDrafter
from headway.inference.economy import Economy
from headway.inference.generate import Request, generate
from headway.inference.sampling import Settings
from headway.inference.stream import TextStream
from headway.inference.target import Target
from headway.inference.tree import chain
from headway.inference.unfinished import Unfinished

PROMPTS: list[Prompt] = [
    ("a", "short", list(b"Hello")),
    ("b", "short", list(b"One two")),
    ("c", "long", list(b"The quick brown fox")),
]


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny.target(tiny.llama12())


@pytest.fixture(scope="module")
def head(target: Target) -> Head:
    config_class, head_class = find_family("eagle3")
    torch.manual_seed(3)
    head = head_class(config_class.for_target(target.info, draft_vocab_size=0), target.frozen)
    head.warm_start()
    return head.eval()


@pytest.mark.parametrize("batch_size", [1, 2])
def test_counts(target: Target, head: Head, batch_size: int) -> None:
    settings = Settings(max_new_tokens=10)
    seen: list[tuple[int, int]] = []
    report = bench(
        target,
        {"mine": (head, chain(3))},
        PROMPTS,
        settings,
        batch_size=batch_size,
        on_progress=lambda *counts: seen.append(counts),
    )
    rows = {row["name"]: row for row in report["rows"]}
    assert list(rows) == ["transformers", "plain", "mine"]
    results = list(
        generate(target, [Request(ids, settings, id=i) for i, _, ids in PROMPTS], head=head, policy=chain(3))
    )
    emitted, rounds = sum(sum(r.accepted_per_round) for r in results), sum(r.rounds for r in results)
    assert rows["mine"]["accepted_length"] == pytest.approx(emitted / rounds)
    assert rows["mine"]["row_passes"] == rounds + 3
    assert rows["mine"]["tokens"] == rows["plain"]["tokens"] == rows["transformers"]["tokens"]
    assert rows["plain"]["identical"] == rows["mine"]["identical"] == rows["mine"]["identical_to_plain"] == 1.0
    assert rows["mine"]["different"] == []
    assert rows["transformers"]["ratio_vs_transformers"] == rows["plain"]["ratio_vs_plain"] == 1.0
    for row in rows.values():
        assert row["tokens_per_s"] == pytest.approx(row["tokens"] / row["seconds"])
        assert 0 < row["ttft_ms"] < 1000 * row["seconds"]
        assert row["itl_ms"] > 0
        assert set(row["accepted_length_by_category"]) == {"short", "long"}
    assert sum(items for items, _ in seen) == 3
    assert sum(tokens for _, tokens in seen) == sum(row["tokens"] for row in rows.values())


def test_time_ends_a_bench_after_whole_prompts(target: Target, head: Head) -> None:
    report = bench(target, {"mine": (head, None)}, PROMPTS, Settings(max_new_tokens=4), seconds=0)
    assert report["prompts"]["count"] == 1
    assert report["prompts"]["left_out"] == len(PROMPTS) - 1
    assert [entry["id"] for entry in report["answers"]] == [PROMPTS[0][0]] * 3
    assert report["prompts"]["categories"] == [PROMPTS[0][1]]


def test_an_interrupted_bench_reports_the_prompts_that_were_done(target: Target, head: Head) -> None:
    heads, settings = {"mine": (head, chain(3))}, Settings(max_new_tokens=10)
    whole = bench(target, heads, PROMPTS[:2], settings)
    answered = 0

    def interrupt(items: int, tokens: int) -> None:
        nonlocal answered
        answered += tokens > 0
        if answered == 8:  # three methods: two of them have answered the third prompt
            raise KeyboardInterrupt

    report = bench(target, heads, PROMPTS, settings, on_progress=interrupt)
    assert report["prompts"]["interrupted"]
    assert not whole["prompts"]["interrupted"]
    assert (report["prompts"]["count"], report["prompts"]["left_out"]) == (2, 1)
    counted = ("name", "accepted_length", "tokens", "row_passes", "identical")
    for got, want in zip(report["rows"], whole["rows"], strict=True):
        assert {key: got[key] for key in counted} == {key: want[key] for key in counted}
    assert [r["rounds"] for r in report["rounds"]] == [r["rounds"] for r in whole["rounds"]]


def test_a_bench_interrupted_before_its_first_prompt_is_done_ends(target: Target) -> None:
    def interrupt(items: int, tokens: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench(target, {}, PROMPTS, Settings(max_new_tokens=4), on_progress=interrupt)


def test_the_parts_of_a_round_are_the_whole(target: Target, head: Head) -> None:
    report = bench(target, {"mine": (head, None)}, PROMPTS[:1], Settings(max_new_tokens=6))
    assert [row["name"] for row in report["rounds"]] == ["plain", "mine"]
    for row in report["rounds"]:
        assert row["draft_ms"] + row["verify_ms"] + row["other_ms"] == pytest.approx(row["round_ms"])
        assert row["draft_share"] + row["verify_share"] + row["other_share"] == pytest.approx(1)
    plain, mine = report["rounds"]
    assert plain["rounds_vs_plain"] == pytest.approx(1)
    assert plain["ceiling_vs_plain"] == pytest.approx(plain["verify_ms"] / (plain["draft_ms"] + plain["verify_ms"]))
    accepted = report["rows"][2]["accepted_length"]
    assert mine["rounds_vs_plain"] == pytest.approx(accepted * plain["round_ms"] / mine["round_ms"])
    cost = mine["draft_ms"] + mine["verify_ms"]
    assert mine["ceiling_vs_plain"] == pytest.approx(accepted * plain["verify_ms"] / cost)
    rounds = {entry["name"]: entry["rounds"] for entry in report["answers"]}
    assert {row["name"]: row["rounds"] for row in report["rounds"]} == {n: rounds[n] for n in ("plain", "mine")}


def test_sampling_is_compared_with_plain_only(target: Target, head: Head) -> None:
    report = bench(target, {"mine": (head, None)}, PROMPTS, Settings(max_new_tokens=6, temperature=0.9, seed=3))
    assert [row["identical"] for row in report["rows"]] == [None, None, None]
    assert [row["identical_to_plain"] for row in report["rows"]] == [None, None, 1.0]


def test_a_wrong_answer_shows(target: Target, head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    real = target.model.generate

    def other(*args: object, **kwargs: object) -> torch.Tensor:
        out = real(*args, **kwargs)  # type: ignore[operator]
        if out[0, 0] == PROMPTS[0][2][0]:
            out[0, -1] += 1
        return out

    monkeypatch.setattr(target.model, "generate", other)
    report = bench(target, {}, PROMPTS, Settings(max_new_tokens=6, eos_ids=()))
    assert report["rows"][1]["identical"] == pytest.approx(2 / 3)
    assert report["rows"][1]["different"] == ["a"]


def test_a_method_that_fails_on_a_prompt_is_named(target: Target, head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    real = target.model.generate

    def failing(*args: object, **kwargs: object) -> object:
        if kwargs["input_ids"].shape[1] == len(PROMPTS[1][2]):  # type: ignore[attr-defined]
            raise ValueError("no such prompt")
        return real(*args, **kwargs)  # type: ignore[operator]

    monkeypatch.setattr(target.model, "generate", failing)
    report = bench(target, {"mine": (head, None)}, PROMPTS, Settings(max_new_tokens=4))
    assert report["errors"] == [{"name": "transformers", "id": "b", "error": "ValueError: no such prompt"}]
    assert (report["prompts"]["count"], report["prompts"]["left_out"]) == (2, 1)
    assert [e["id"] for e in report["answers"]] == ["a", "c"] * 3
    with pytest.raises(HeadwayError, match="no such prompt"):
        bench(target, {}, PROMPTS[1:2], Settings(max_new_tokens=4))


def test_what_failed_is_tried_again(target: Target, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real, broken = target.model.generate, [True]

    def failing(*args: object, **kwargs: object) -> object:
        if broken[0] and kwargs["input_ids"].shape[1] == len(PROMPTS[1][2]):  # type: ignore[attr-defined]
            raise RuntimeError("out of memory")
        return real(*args, **kwargs)  # type: ignore[operator]

    monkeypatch.setattr(target.model, "generate", failing)
    settings, kept = Settings(max_new_tokens=4), Unfinished("bench", {}, tmp_path)
    assert bench(target, {}, PROMPTS, settings, unfinished=kept)["prompts"]["count"] == 2
    broken[0] = False
    report = bench(target, {}, PROMPTS, settings, unfinished=Unfinished("bench", {}, tmp_path))
    assert [report["prompts"][key] for key in ("count", "continued")] == [3, 2]
    assert not report["errors"]


def test_transformers_refusing_to_draft_stops_nobody(target: Target) -> None:
    """Its assisted generation takes no draft model of another size of vocabulary, where Headway's does."""
    small = tiny.target(tiny.build(1, num_hidden_layers=2, vocab_size=300), name="small")
    report = bench(target, {"n-gram": (NgramDrafter(), None)}, PROMPTS, Settings(max_new_tokens=4), assistant=small)
    assert [row["name"] for row in report["rows"]] == ["transformers", "plain", "n-gram"]
    assert [row["name"] for row in report["refused"]] == ["transformers assisted"]
    assert not report["errors"]


def test_a_method_with_an_economy_drafts_when_that_says_so(target: Target, head: Head) -> None:
    class Half(Economy):
        def drafts(self, rows: int) -> bool:
            return (self.drafted + self.plain) % 2 == 0

    report = bench(target, {"mine": (head, chain(3))}, PROMPTS, Settings(max_new_tokens=12), economies={"mine": Half()})
    plain, mine = report["rounds"]
    assert plain["drafted_share"] == 0
    assert 0.3 < mine["drafted_share"] < 0.7
    assert report["rows"][2]["identical"] == 1.0


def test_refusals(target: Target, head: Head) -> None:
    with pytest.raises(HeadwayError, match="no prompts"):
        bench(target, {}, [], Settings())
    with pytest.raises(HeadwayError, match="'plain'"):
        bench(target, {"plain": (head, None)}, PROMPTS, Settings())


def test_report_and_plot_are_written_whole(target: Target, head: Head, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = bench(target, {"mine": (head, None)}, PROMPTS[:1], Settings(max_new_tokens=4))
    save_report(report, tmp_path / "r.json")
    save_plot(report, tmp_path / "r.png")
    assert json.loads((tmp_path / "r.json").read_text()) == report
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["r.json", "r.png"]


def encode(text: str) -> list[int]:
    return list(tiny.byte_tokenizer()(text)["input_ids"])


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_stream_never_shows_half_a_character(size: int) -> None:
    text = "naïve €5 🌍🌍 — done"
    ids = encode(text)
    stream = TextStream(tiny.byte_tokenizer(), eos_ids=[260])
    pieces = [stream.feed([*ids, 260][at : at + size]) for at in range(0, len(ids) + 1, size)]
    assert "".join([*pieces, stream.finish()]) == stream.text == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_stream_drops_half_a_character_at_the_end() -> None:
    stream = TextStream(tiny.byte_tokenizer())
    assert stream.feed(encode("ab🌍")[:-1]) == "ab"
    assert stream.finish() == ""


def test_stream_shows_bytes_that_are_no_characters() -> None:
    stream = TextStream(tiny.byte_tokenizer())
    assert stream.feed([*encode("é")[:1] * 2, *encode("a")]) == "\ufffd\ufffda"


@pytest.mark.parametrize("size", [1, 3, 100])
def test_stream_is_cut_before_a_stop_string(size: int) -> None:
    stream = TextStream(tiny.byte_tokenizer(), stop=("END", "\n\n"))
    ids = encode("an ENtry, the END of it\n\n")
    shown = [stream.feed(ids[at : at + size]) for at in range(0, len(ids), size)]
    assert "".join([*shown, stream.finish()]) == "an ENtry, the "


def test_stream_gives_what_was_only_the_beginning_of_a_stop_string() -> None:
    stream = TextStream(tiny.byte_tokenizer(), stop=("END",))
    assert stream.feed(encode("so EN")) == "so "
    assert stream.finish() == "EN"


def test_stream_leaves_special_tokens_out() -> None:
    stream = TextStream(tiny.byte_tokenizer(), eos_ids=[260])
    assert stream.feed([259, *encode("a"), 263, *encode("b"), 260, *encode("c")]) == "ab"
