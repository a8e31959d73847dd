"""`headway report`: one page that loads nothing, of runs in any state; nothing in it can be more than text."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from headway.cli import main
from headway.heads.common.errors import HeadwayError
from headway.inference.target import Target
from headway.train.config import TrainConfig
from headway.train.curves import HEIGHT, MOST_POINTS, WIDTH, Axis, Curve, chart, smooth, spell
from headway.train.loop import train
from headway.train.report import report
from headway.train.run_log import read_run_log, state

EVIL = "<script>alert(1)</script>\"'&"


class Page(HTMLParser):
    """Tags, attributes and text of a page; every tag that is opened is closed."""

    VOID = ("meta", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip() and self._open[-1] != "style":
            self.words.append(data.strip())


def write_run(folder: Path, rows: int = 30, **changes: Any) -> Path:
    """Write the folder of a run that is going on, with an evaluation at every tenth step."""
    folder.mkdir(parents=True)
    recipe = {"family": "eagle3", "target": "org/model", "lr": 0.001, "head": {"steps": 2}} | changes.pop("recipe", {})
    run = {
        "recipe": recipe,
        "total_steps": 100,
        "dialogs_sha256": "0" * 64,
        "argv": ["r.yaml"],
        "dialogs": {},
    } | changes
    (folder / "run.json").write_text(json.dumps(run))
    with (folder / "log.jsonl").open("w") as file:
        for step in range(1, rows + 1):
            row = {"step": step, "lr": 1e-3, "grad_norm": 1 / step, "loss": 5 / step, "agreement_S": [0.5, 0.25]}
            row |= {"total_tokens": 100 * step, "seconds": 2.0 * step, "memory_gib": 1.5, "left_seconds": 140.0}
            file.write(json.dumps(row) + "\n")
            if step % 10 == 0:
                held_out = {
                    "held_out_loss": 6 / step,
                    "held_out_agreement_S": [0.4, 0.2],
                    "accepted_length": 1 + step / 50,
                }
                file.write(
                    json.dumps({"step": step, **held_out, "total_tokens": 100 * step, "seconds": 2.0 * step}) + "\n"
                )
    return folder


def read(path: Path) -> Page:
    """Return a page that loads nothing and runs nothing."""
    page = Page(path.read_text())
    assert not {"script", "link", "img", "iframe", "object", "base", "form"} & set(page.tags)
    assert not [a for a in page.attributes if a[0].startswith("on") or a[0] in ("src", "href", "style", "xlink:href")]
    assert "url(" not in path.read_text()
    return page


def test_a_finished_run(recipe: Callable[..., TrainConfig], tiny: Target) -> None:
    config = recipe(eval_every=3)
    metrics = train(config, target=tiny, argv=["recipe.yaml", "lr=0.01"])
    path = report([config.out])
    assert path == Path(config.out) / "report.html"
    page = read(path)
    assert page.tags.count("svg") == page.tags.count("figure") == 7
    for words in (
        "loss",
        "agreement with the target, by draft step",
        "accepted length",
        "memory, GiB",
        "finished: 6 steps",
    ):
        assert any(words in text for text in page.words), words
    cells = page.words
    assert cells[cells.index("held-out loss") + 1] == spell(metrics["held_out_loss"])
    assert cells[cells.index("head.num_heads") + 1] == "2"
    assert cells[cells.index("argv") + 1] == "recipe.yaml lr=0.01"
    assert {"host.cpu", "code.version", "versions.torch", "dialogs_sha256", "rows.train"} <= set(cells)
    assert report([config.out]) == path, "a report takes the place of an earlier one"
    assert train(config, target=tiny)["steps"] == 6, "and the run is as it was"


def test_a_run_that_goes_on_or_was_interrupted(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    os.utime(run / "log.jsonl", (1000, 1000))
    said = state(read_run_log(run), now=lambda: 1030.0)
    assert said == "not finished: step 30 of 100 (30%), last figures 30 s ago; then 2 min of training steps were left"
    whole = read(report([run], tmp_path / "whole.html"))
    with (run / "log.jsonl").open("a") as file:
        file.write('{"step": 31, "lr": 0.001, "lo')
    torn = read(report([run], tmp_path / "torn.html"))
    assert [w for w in torn.words if "torn" in w]
    assert torn.tags.count("polyline") == whole.tags.count("polyline")
    with (run / "log.jsonl").open("ab") as file:
        file.write(b'ss": 1}\n\xff\xfe\n[1]\n{"step": "x"}\n')
        file.write(b'{"step": 32, "lr": 0.001, "loss": NaN, "agreement_S": "no", "total_tokens": null}\n')
    log = read_run_log(run)
    assert log.wary == [
        "3 broken lines of log.jsonl are left out",
        "1 figures of log.jsonl are not finite, and are left out of the curves",
    ]
    assert (log.steps[-1]["step"], log.last("loss"), log.last("agreement_S/1")) == (32, 1, 0.25)
    read(report([run]))


def test_a_run_before_its_first_step(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rows=0, total_steps=None)
    assert any("begun; no step is logged yet" in w for w in read(report([run])).words)
    (run / "log.jsonl").unlink()
    assert any("there is no log.jsonl" in w for w in read(report([run])).words)


def test_several_runs_are_overlaid(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "a", 20), write_run(tmp_path / "b", 40, recipe={"lr": 0.002, "head": {"steps": 3}})]
    page = read(report(runs, tmp_path / "both.html", by="tokens"))
    assert page.tags.count("svg") == 8, "an agreement chart for each draft step"
    assert page.words.count("supervised tokens trained on") == 8
    colours = {value.split()[-1] for name, value in page.attributes if name == "class" and value.startswith("curve")}
    assert colours == {"c0", "c1"}
    text = (tmp_path / "both.html").read_text()
    differ = [
        row.split("</td>")[0].split("<td>")[1] for row in text.split("<tr")[1:] if row.startswith(' class="differs"')
    ]
    assert differ[:2] == ["lr", "head.steps"]
    assert "family" not in differ


def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run")
    (run / "head").mkdir()
    (tmp_path / "list").mkdir()
    (tmp_path / "list" / "run.json").write_text("[1]")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "run.json").write_text('{"recipe": "x", "total_steps": 3}')
    (tmp_path / "mine.html").write_text("<html>mine</html>")
    for given, out, words in [
        ([tmp_path / "none"], None, "is no run"),
        ([tmp_path], None, "is no run"),
        ([run / "log.jsonl"], None, "is no run"),
        ([run / "head"], None, f"give {run}"),
        ([tmp_path / "list"], None, "is no JSON object"),
        ([tmp_path / "other"], None, "describes no run"),
        ([run, run], tmp_path / "x.html", "twice"),
        ([run, tmp_path / "other"], None, "--out report.html"),
        ([run], tmp_path / "mine.html", "is no report"),
        ([run], tmp_path, "is a folder"),
        ([run], run / "log.jsonl" / "x.html", "cannot write"),
    ]:
        with pytest.raises(HeadwayError, match="(?s).*") as caught:
            report(given, out)
        assert words in str(caught.value)
    assert (tmp_path / "mine.html").read_text() == "<html>mine</html>"
    assert not list(tmp_path.rglob("report.html"))
    assert main(["report", str(run), "--by", "weeks"]) == 2
    assert "give one of steps, tokens, minutes" in capsys.readouterr().err
    assert main(["report", str(run), "--by", "minutes", "--out", str(tmp_path / "new" / "r.html")]) == 0
    assert "r.html" in capsys.readouterr().err
    read(tmp_path / "new" / "r.html")


def test_nothing_in_a_page_is_more_than_text(tmp_path: Path) -> None:
    name = "<script>alert(1)<&\"'"
    changes: dict[str, Any] = {
        "recipe": {"target": EVIL, EVIL: EVIL, "head": {EVIL: EVIL}},
        "argv": [EVIL],
        "dialogs": {"target": EVIL, "counts": {f"dropped: {EVIL}": 3}, "prompts": {"skipped": {EVIL: 1}}, EVIL: [EVIL]},
        "mode": EVIL,
        "mode_reason": EVIL,
        "host": {"cpu": EVIL},
        "code": {"commit": EVIL},
    }
    runs = [write_run(tmp_path / n, **json.loads(json.dumps(changes))) for n in (name, name + "2")]
    (runs[0] / "head").mkdir()
    (runs[0] / "head" / f"{name}.json").write_text("{}")
    (runs[0] / "head" / "tree.json").write_text(json.dumps({EVIL: {"policy": EVIL, "reason": EVIL}}))
    bench = {
        "rows": [{"name": EVIL}],
        "environment": {"device": EVIL, "dtype": EVIL},
        "prompts": {"count": EVIL},
        "command": EVIL,
    }
    (runs[0] / "bench.json").write_text(json.dumps(bench))
    for given in (runs[:1], runs):
        page = read(report(given, tmp_path / "page.html"))
        assert sum(EVIL in word for word in page.words) > 10
        assert any(name in word for word in page.words)


def test_reports_beside_the_head_are_shown(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "head").mkdir()
    tuned = {
        "policy": "chain:2",
        "expected_accepted_length": 1.8,
        "expected_ratio_vs_plain": 1.3,
        "rows": {"4": {"policy": "off"}},
    }
    tuned["candidates"] = [{"policy": "chain:2", "accepted_length": 1.8, "round_ms": 50.0, "tokens_per_ms": 0.036}]
    place = {"device": "cpu: x", "dtype": "float32", "date": "2026-01-01"}
    row = {
        "name": "eagle3",
        "tokens_per_s": 20.25,
        "ratio_vs_plain": 1.25,
        "accepted_length": 1.75,
        "identical": 0.5,
        "lossy": True,
    }
    bench = {
        "rows": [row],
        "environment": place,
        "prompts": {"count": 3},
        "settings": {"batch_size": 2},
        "command": "headway bench",
    }
    length = {"category": "all", "accepted_length": 1.7, "tokens": 10, "rounds": 6, "prompts": 2}
    audit = {"exact": False, "checks": [{"name": "greedy", "what": "answers", "tokens": 9, "verdict": "fail"}]}
    files: dict[str, Any] = {
        "head/tree.json": {"cpu float32": tuned},
        "bench.json": bench,
        "many.json": {"batches": [bench, bench]},
        "head/eval.json": {"head": "h", "target": "t", "rows": [length]},
        "audit.json": audit,
        "notes.json": {"a": 1},
        "list.json": [1],
        "broken.json": "",
        "odd.json": {"rows": [3], "environment": {}},
    }
    for name, content in files.items():
        (run / name).write_text(json.dumps(content) if content else "{")
    words = read(report([run])).words
    titles = [w for w in words if ".json: " in w]
    assert len(titles) == 6
    assert "head/tree.json: tune on cpu float32: chain:2, 1.30 x plain expected" in titles
    assert {"4 at once: off", "eagle3 (lossy)", "20.25", "1.75", "50%", "1.70", "greedy: answers", "fail"} <= set(words)
    assert "audit.json: audit, NOT exact" in titles
    assert "not shown, no report that is known: broken.json, list.json, notes.json, odd.json" in words


def test_what_a_reader_should_know(tmp_path: Path) -> None:
    counts = {"dialogs": 9, "length": 4, "dropped: empty": 2, "truncated": 1, "note: ids": 0}
    account = {"skipped": {"no role": 5}, "repaired": {}, "parts": [{"skipped": {"no role": 5}}]}
    changes: dict[str, Any] = {
        "rows": {"train": 3, "held_out": 1, "cut": 7, "without_goal": 8},
        "dialogs": {"target": "other", "counts": counts, "prompts": {"intake": account}},
        "mode": "replay",
        "mode_reason": "recurrent",
        "code": {"version": "1", "changed": True},
        "continued": [{"step": 5, "code": {"version": "1", "changed": True}, "host": {"cpu": "y"}}, "odd"],
    }
    run = write_run(tmp_path / "run", 5)
    (run / "run.json").write_text(json.dumps(json.loads((run / "run.json").read_text()) | changes))
    with (run / "log.jsonl").open("a") as file:
        file.write('{"step": 5, "held_out_loss": 3.0}\n')
    assert read_run_log(run).wary == [
        "7 rows were cut to the longest length (max_length)",
        "8 rows were left out: no supervised token",
        "the target runs in replay mode: recurrent",
        "dialogs: 4 answers were ended by the length limit",
        "dialogs: dropped: empty: 2",
        "dialogs: truncated: 1",
        "prompts: 5 rows skipped: no role",
        "the dialogs were written by other, the head is trained for org/model",
        "the code was a checkout with changes that no commit holds",
        "continued after step 5 with other host",
        "no accepted length was measured: eval_prompts is 0, or no held-out prompt fits",
    ]


def test_keys_in_an_older_run_are_not_shown(tmp_path: Path) -> None:
    server = "https://me:pass-word@host/v1?api_key=abc"
    run = write_run(
        tmp_path / "run", argv=["r.yaml", "--token", "abc123", "hf_" + "a" * 20], dialogs={"servers": [server]}
    )
    report([run])
    text = (run / "report.html").read_text()
    assert "***" in text
    assert not [secret for secret in ("abc123", "a" * 20, "pass-word", "key=abc") if secret in text]


def test_a_curve_goes_where_its_points_are() -> None:
    svg = chart("t", [Curve("a", [0, 50, 100], [1.0, 3.0, 2.0])], "step", 100)
    points = svg.split('points="')[1].split('"')[0].split()
    (x0, y0), (x1, y1), (x2, y2) = (map(float, p.split(",")) for p in points)
    assert x1 == pytest.approx((x0 + x2) / 2)
    assert x2 == WIDTH - 12
    assert y0 > y2 > y1, "up is more"
    assert y2 == pytest.approx((y0 + y1) / 2)
    assert all(0 <= y <= HEIGHT for y in (y0, y1, y2))
    assert chart("t", [Curve("a", [1], [math.nan])], "step", 1) == ""
    assert chart("t", [Curve("a", [1, 2], [0.0, -1.0])], "step", 2, log=True) == ""
    assert "<circle" in chart("t", [Curve("a", [1], [5.0])], "step", 1), "a single point is a dot"


def test_many_points_are_averaged() -> None:
    n = 10 * MOST_POINTS
    svg = chart("t", [Curve("a", range(n), [i % 2 for i in range(n)])], "step", n)
    points = svg.split('points="')[1].split('"')[0].split()
    assert len(points) == MOST_POINTS
    assert len({p.split(",")[1] for p in points}) == 1, "each group has the same mean"


def test_axes_have_round_ticks() -> None:
    assert Axis.over(0.13, 0.87).ticks == pytest.approx((0, 0.2, 0.4, 0.6, 0.8, 1.0))
    assert Axis.over(3, 3).share(3) == pytest.approx(0.5)
    assert Axis.over(0.02, 300, log=True).ticks == pytest.approx((0.01, 0.1, 1, 10, 100, 1000))
    assert Axis.to(2581).ticks == (0, 500, 1000, 1500, 2000, 2500)
    assert [spell(v) for v in (0.00123, 5, 12345, 3e6, 2.5e9)] == ["0.00123", "5", "12.35k", "3M", "2.5G"]


def test_smoothing_is_a_running_mean() -> None:
    values = [float(i * i % 17) for i in range(100)]
    plain = [sum(values[max(0, i - 3) : i + 1]) / len(values[max(0, i - 3) : i + 1]) for i in range(100)]
    assert smooth(values) == pytest.approx(plain)
