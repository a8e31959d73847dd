"""The audit: it passes what is right, and each way of being wrong that it claims to find is made and found."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

import headway.inference.audit as audit_module
import headway.inference.generate as decoding
import tests.tiny as tiny
from headway.cli import main
from headway.heads.common.checkpoint import save_head
from headway.heads.common.errors import HeadwayError
from headway.inference.audit import LEVEL, audit, print_report, steps
from headway.inference.chi_square import Cell, p_value, wrong_cells
from headway.inference.drafter import HeadDrafter
from headway.inference.generate import branches, plain
from headway.inference.sampling import Settings
from headway.inference.target import Target
from headway.inference.tree import Policy, chain
from tests.inference.helpers import POLICIES, PROMPTS, encode, random_head

ASKED: list[tuple[str, str, list[int]]] = [(f"p{n}", "x", encode(text)) for n, text in enumerate(PROMPTS[:3])]


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny.target(tiny.build(4, num_hidden_layers=4))


def run(target: Target, policy: Policy | None = None, **options: Any) -> dict[str, Any]:
    """Return a short audit's report with a random EAGLE-3 head."""
    policy = POLICIES["dynamic"] if policy is None else policy
    options = {"max_new_tokens": 12, "draws": 256, "batch_size": 2, **options}
    return audit(target, random_head("eagle3", target), policy, ASKED, **options)


def verdicts(report: dict[str, Any]) -> dict[str, str]:
    return {check["name"]: check["verdict"] for check in report["checks"]}


@pytest.mark.parametrize("family", ["medusa", "eagle3"])
def test_a_right_head_passes(target: Target, family: str) -> None:
    items = []
    report = audit(
        target,
        random_head(family, target),
        POLICIES["binary"],
        ASKED,
        max_new_tokens=12,
        draws=256,
        on_progress=lambda done, tokens: items.append(done),
    )
    assert verdicts(report) == {"identity": "pass", "seeded": "pass", "distribution": "pass"}
    assert report["exact"] is True
    identity, seeded, distribution = report["checks"]
    assert (identity["answers"], identity["identical"], seeded["answers"]) == (3, 3, 6)
    assert identity["tokens"] == sum(
        len(plain(target, ids, Settings(max_new_tokens=12), n)) for n, (_, _, ids) in enumerate(ASKED)
    )
    assert distribution["p"] >= LEVEL > distribution["control"]["p"]
    assert distribution["control"]["what"] == "drawn at 1.5 times the temperature"
    assert 0 < report["arithmetic"]["noise"] < 1e-3
    assert sum(items) == steps(3, 256)
    json.dumps(report)


def test_the_second_token_is_tested_after_the_commonest_first_ones(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    distribution = run(target, temperature=0.4)["checks"][2]
    assert distribution["control"]["what"] == "drawn at 1.2 times the temperature"
    after = [cell for cell in distribution["cells"] if cell["after"]]
    assert distribution["verdict"] == "pass"
    assert len(after) >= 2
    assert all(cell["bins"] > 1 and cell["p"] > LEVEL for cell in after)
    assert distribution["accepted"] > 0
    right = decoding.walk_exact_rows

    def takes_drafts(token_BN: Any, parents: Any, logits_BNV: Tensor, settings: Any, keys: Any, lengths: Any) -> Any:
        walks = right(token_BN, parents, logits_BNV, settings, keys, lengths)
        for b, (path, emitted) in enumerate(walks):
            child = next((n for n, p in enumerate(parents[b]) if p == path[-1] and len(path) > 1), None)
            if child is not None:
                walks[b] = [*path, child], [*emitted[:-1], token_BN[b][child], emitted[-1]]
        return walks

    monkeypatch.setattr(decoding, "walk_exact_rows", takes_drafts)
    distribution = run(target, temperature=0.4)["checks"][2]
    assert distribution["verdict"] == "fail"
    assert all(cell["p"] > LEVEL for cell in distribution["cells"] if not cell["after"]), "the first token is right"


def emit_another(place: int) -> Callable[..., Any]:
    """Return a walk that is right but for the token it emits at one place of its run."""
    right = decoding.walk_greedy

    def walk(token_N: list[int], parents: list[int], argmax_N: list[int]) -> tuple[list[int], list[int]]:
        path, emitted = right(token_N, parents, argmax_N)
        return path, [*emitted[:-1], (emitted[-1] + place) % 250]

    return walk


def test_a_walk_that_accepts_a_wrong_token_fails(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    def accepts_the_first_draft(token_N: list[int], parents: list[int], argmax_N: list[int]) -> Any:
        return [0, 1], [token_N[1], argmax_N[1]]

    monkeypatch.setattr(decoding, "walk_greedy", accepts_the_first_draft)
    report = run(target)
    assert verdicts(report) == {"identity": "fail", "seeded": "pass", "distribution": "pass"}
    assert report["exact"] is False
    divergence = report["checks"][0]["divergences"][0]
    n, at = divergence["prompt"], divergence["position"]
    assert divergence["answers"] == ("head", "plain")
    ids = ASKED[n][2] + plain(target, ASKED[n][2], Settings(max_new_tokens=12), n)[:at]
    logits_V = target.model(torch.tensor([ids])).logits[0, -1].double()
    best = logits_V.topk(2)
    assert [b["token"] for b in divergence["best"]] == best.indices.tolist()
    assert divergence["tokens"][1] == best.indices[0]
    assert divergence["margin"] == pytest.approx(float(best.values[0] - best.values[1]), abs=1e-4)
    assert divergence["below"] == pytest.approx(float(best.values[0] - logits_V[divergence["tokens"][0]]), abs=1e-4)
    assert divergence["near_tie"] is False


def test_a_biased_sampler_fails(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The law of 1.4 times the temperature: each token is plausible, and only seeds and counts can tell."""
    right = decoding.walk_exact_rows

    def warmer(token_BN: Any, parents: Any, logits_BNV: Tensor, *rest: Any) -> Any:
        return right(token_BN, parents, logits_BNV / 1.4, *rest)

    monkeypatch.setattr(decoding, "walk_exact_rows", warmer)
    report = run(target)
    assert verdicts(report) == {"identity": "pass", "seeded": "fail", "distribution": "fail"}
    assert report["exact"] is False


def test_noise_that_repeats_itself_fails_in_distribution(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right scores and noise that ignores the key: what is drawn is the twin's own, and not a sample."""
    import headway.inference.sampling as sampling

    right = sampling.noise_words
    for module in (sampling, "headway.inference.draft"):
        path = "headway.inference.sampling" if module is sampling else module
        monkeypatch.setattr(f"{path}.noise_words", lambda seed, key, position: right(seed % 2, key % 20, position))
    assert verdicts(run(target)) == {"identity": "pass", "seeded": "pass", "distribution": "fail"}


def test_an_answer_that_ends_early_is_no_near_tie(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    right = audit_module.generate

    def shorter(*args: Any, **kwargs: Any) -> Any:
        for result in right(*args, **kwargs):
            result.token_ids = result.token_ids[:-1]
            yield result

    monkeypatch.setattr(audit_module, "generate", shorter)
    report = run(target)
    assert verdicts(report) == {"identity": "fail", "seeded": "fail", "distribution": "pass"}
    assert report["checks"][0]["divergences"][0]["tokens"] is None


def tied() -> Target:
    """A target whose ids 10 to 250 come in pairs of equal rows of the LM head, the second a hair longer."""
    model = tiny.build(4, num_hidden_layers=4)
    with torch.no_grad():
        weight = model.get_output_embeddings().weight
        weight[11:250:2] = weight[10:249:2] * (1 + 3e-7)
    return tiny.target(model)


def test_near_ties_are_listed_and_are_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tied()
    right = decoding.walk_greedy

    def other_of_the_pair(token_N: list[int], parents: list[int], argmax_N: list[int]) -> Any:
        return right(token_N, parents, [t ^ 1 if 10 <= t < 250 else t for t in argmax_N])

    monkeypatch.setattr(decoding, "walk_greedy", other_of_the_pair)
    report = run(target)
    assert verdicts(report)["identity"] == "near-ties"
    assert report["exact"] is True
    assert 0 < report["checks"][0]["near_ties"] == len(report["checks"][0]["divergences"])
    assert all(d["below"] < 1e-4 for d in report["checks"][0]["divergences"])


def test_half_precision_is_judged_by_its_own_arithmetic() -> None:
    model = tiny.build(4, num_hidden_layers=4).to(torch.bfloat16)
    report = run(tiny.target(model), max_new_tokens=16, draws=32)
    assert report["arithmetic"]["allowed"] > 1e-3
    assert report["checks"][0]["verdict"] in ("pass", "near-ties")


def test_too_few_draws_are_undecided(target: Target) -> None:
    report = run(target, draws=8)
    assert verdicts(report)["distribution"] == "undecided"
    assert report["exact"] is True
    console = Console(width=150, record=True, quiet=False)
    print_report(report, console)
    assert "raise --draws" in console.export_text()


def test_branches_are_what_plain_decoding_draws(target: Target) -> None:
    settings = Settings(max_new_tokens=5, temperature=1.0, eos_ids=(), seed=7)
    ids = encode("Hello wo")
    for family in ("medusa", "eagle3"):
        got = branches(
            target, ids, settings, [3, 1, 8, 20, 21], HeadDrafter(random_head(family, target), POLICIES["dynamic"])
        )
        assert [r.token_ids for r in got] == [plain(target, ids, settings, key) for key in (3, 1, 8, 20, 21)]
        assert len({tuple(r.token_ids) for r in got}) > 1
        assert all(sum(r.accepted_per_round) == 5 for r in got)


def draw(law_V: Tensor, draws: int, seed: int) -> Cell:
    drawn = torch.multinomial(law_V, draws, replacement=True, generator=torch.Generator().manual_seed(seed))
    return Cell("x", (), law_V, Counter(drawn.tolist()))


def test_p_values_of_the_law_itself_are_spread_evenly() -> None:
    law_V = torch.softmax(torch.linspace(0, -6, 60), 0)
    p = torch.tensor([draw(law_V, 400, seed).p for seed in range(400)])
    assert abs(float((p < 0.5).float().mean()) - 0.5) < 0.1
    assert abs(float((p < 0.1).float().mean()) - 0.1) < 0.05
    assert all(p_value([draw(law_V, 400, seed)] * 2) >= LEVEL for seed in range(100))


def test_the_statistic_by_hand() -> None:
    cell = Cell(
        "x", (), torch.tensor([0.5, 0.3, 0.14, 0.04, 0.02], dtype=torch.float64), Counter({0: 60, 1: 20, 2: 15, 3: 5})
    )
    assert cell.bins == [
        (60, pytest.approx(50)),
        (20, pytest.approx(30)),
        (15, pytest.approx(14)),
        (5, pytest.approx(6)),
    ]
    statistic, freedom = cell.statistic
    assert (statistic, freedom) == (pytest.approx(100 / 50 + 100 / 30 + 1 / 14 + 1 / 6), 3)
    # The tail for three degrees of freedom, in closed form.
    x = statistic / 2
    assert cell.p == pytest.approx(math.erfc(x**0.5) + 2 * (x / math.pi) ** 0.5 * math.exp(-x))


def test_tokens_that_the_law_excludes_are_counted() -> None:
    cell = Cell("x", (), torch.tensor([0.7, 0.3, 0.0]), Counter({0: 60, 1: 20, 2: 20}))
    assert sum(seen for seen, _ in cell.bins) == 100
    assert cell.p < LEVEL


def test_the_wrong_sampler_is_rejected() -> None:
    law_V = torch.softmax(torch.linspace(0, -6, 60), 0)
    cells = [draw(law_V, 500, seed) for seed in range(3)]
    assert p_value(cells) >= LEVEL > p_value(wrong_cells(cells, 1.5, 0))
    assert p_value(wrong_cells(cells, 1.0, 0)) >= LEVEL


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"policy": chain(0)}, "tree is off"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
    ],
    ids=str,
)
def test_nothing_to_check_is_refused(target: Target, asked: dict[str, Any], said: str) -> None:
    with pytest.raises(HeadwayError, match=said):
        run(target, **asked)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `target`, `other`, a head `eagle3` of the first, and `prompts.jsonl`."""
    root = tmp_path_factory.mktemp("audit")
    for name, layers in (("target", 4), ("other", 6)):
        tiny.build(4, num_hidden_layers=layers).save_pretrained(root / name)
        tiny.byte_tokenizer().save_pretrained(root / name)
    target = Target.load(root / "target")
    save_head(random_head("eagle3", target), root / "eagle3", target=target.info, metrics={})
    (root / "prompts.jsonl").write_text('{"id": "a", "prompt": "One?"}\n{"id": "b", "prompt": "Two?"}\n')
    return root


AUDIT = ("audit", "-t", "target", "--head", "eagle3", "-p", "prompts.jsonl", "-n", "8", "--draws", "256")


def test_the_command(folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "120")
    assert main([*AUDIT, "--tree", "chain:2", "--out", "r.json"]) == 0
    out, err = capfd.readouterr()
    assert "exact: yes" in out
    assert "wrote r.json" in err
    report = json.loads((folder / "r.json").read_text())
    assert (report["tree"], report["head"], report["prompts"]["count"]) == ("chain:2", "eagle3", 2)
    assert main([*AUDIT, "--json"]) == 0
    assert json.loads(capfd.readouterr()[0])["exact"] is True


def test_the_command_exits_with_1(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setattr(decoding, "walk_greedy", emit_another(1))
    assert main([*AUDIT, "--out", "wrong.json"]) == 1
    out = capfd.readouterr()[0]
    assert "exact: NO" in out
    assert "where answers part" in out
    assert json.loads((folder / "wrong.json").read_text())["exact"] is False


BAD = {
    "temperature": (["--temperature", "0"], "temperature is 0.0"),
    "tree off": (["--tree", "off"], "tree is off"),
    "tree text": (["--tree", "bush"], "unknown tree 'bush'"),
    "dtype": (["--dtype", "float7"], "unknown dtype"),
    "prompts": (["-p", "nowhere.jsonl"], "'nowhere.jsonl' does not exist"),
    "head": (["--head", "./nowhere"], "no folder './nowhere'"),
    "other target": (["-t", "other"], "other has num_layers 6"),
    "out": (["--out", "."], "is a folder"),
    "no new tokens": (["-n", "0"], "max_new_tokens is 0"),
}


@pytest.mark.parametrize("case", BAD, ids=list(BAD))
def test_bad_input_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], case: str
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(Target, "load", None)  # refused before any weights are read
    more, said = BAD[case]
    assert main([*AUDIT, *more]) == 2
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("error: ")
    assert said in err


def test_the_head_is_required(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "-t", "target", "-p", "prompts.jsonl"]) == 2
    assert "--head" in capfd.readouterr()[1]
