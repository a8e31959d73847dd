"""Folders that are broken, hostile or somebody else's: each is refused in words, and nothing is lost or run."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headway import foreign
from headway.foreign_commands import import_head
from headway.heads.common import aside
from headway.heads.common.checkpoint import save_head
from headway.heads.common.errors import HeadwayError
from headway.heads.common.protocol import Head, find_family
from headway.heads.formats import layout as layout_module
from headway.heads.formats.layout import LAYOUTS, find_layout, layouts_of, read_folder
from headway.inference.parity import write
from tests import tiny
from tests.heads.test_contract import small
from tests.kills import Moment, killed, needs_fork

IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def target():
    return tiny.target(tiny.build(4, "sdpa"), mode="tree")


@pytest.fixture(scope="module")
def texts(target):
    return write(target, [list(b"hello there")], 8)


@pytest.fixture(scope="module")
def made(target, tmp_path_factory) -> Path:
    """A folder of heads (`head-X`) and of their exports (`X`)."""
    root = tmp_path_factory.mktemp("made")
    heads: dict[str, tuple[str, str, dict[str, Any]]] = {
        "eagle3": ("eagle3", "vllm", {"draft_vocab_size": 64}),
        "speculators": ("eagle3", "speculators", {"draft_vocab_size": 64}),
        "eagle": ("eagle", "sglang", {"draft_vocab_size": 0}),
        "medusa": ("medusa", "vllm", {"lm_head": "own", "num_heads": 3}),
    }
    for name, (family, layout, fields) in heads.items():
        source = save_head(small(family, target, **fields), root / f"head-{name}", target=target.info)
        foreign.export(str(source), layout, root / name, target=target)
    return root


def changed(source: Path, out: Path, tensors: Callable[[dict[str, Any]], Any] | None = None, **config: Any) -> Path:
    shutil.copytree(source, out)
    if tensors is not None:
        held = load_file(out / "model.safetensors")
        tensors(held)
        save_file({name: t.contiguous() for name, t in held.items()}, out / "model.safetensors")
    written = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({k: v for k, v in written.items() if k != "headway"} | config))
    return out


CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("eagle3", {key: value})
    for key, values in {
        "num_attention_heads": ("four", 0, -4, True, [4]),
        "head_dim": (0, "x"),
        "hidden_size": ("64", -1, 1.5),
        "rms_norm_eps": ("x", -1, float("nan")),
        "max_position_embeddings": ("x", -5),
        "eagle_config": ([1], "x", {IDS: "123"}),
        IDS: ("123", [1, "a", 3], [[1]], 5, [2.5, 3, 4]),
        "rope_parameters": ("x", [1], *({"rope_type": t} for t in ("bogus", "llama3", "linear", "yarn", 5))),
        "rope_scaling": ({"type": "linear", "factor": 0}, {"type": "llama3", "factor": "8"}),
        "rope_theta": ("x", 0),
        "num_aux_hidden_states": ("x",),
        "norm_before_residual": ("no", 1),
        "fc_norm": ("false",),
        "hidden_act": (["silu"],),
        "headway": ([1], {"taps": 5}, {"taps": [[1]]}),
    }.items()
    for value in values
]
CONFIGS += [("speculators", {"transformer_layer_config": v}) for v in ("x", {"hidden_size": "x"})]
CONFIGS += [("speculators", {"speculators_config": "x"}), ("eagle", {"bias": "x"})]
CONFIGS += [("medusa", {"num_heads": v}) for v in ("3", [3], 0, 10**9)]
CONFIGS += [("medusa", {"medusa": {"num_medusa_heads": "x"}}), ("medusa", {"original_lm_head": "no"})]
CONFIGS += [("medusa", {"headway": {"filled": v}}) for v in (5, {}, {"like_row": -1, "draft_vocab_size": 3})]


def test_a_field_of_a_wrong_type_or_size_is_named(made, tmp_path):
    for i, (name, config) in enumerate(CONFIGS):
        with pytest.raises(HeadwayError) as e:
            read_folder(changed(made / name, tmp_path / str(i), None, **config))
        (key,) = config
        assert key in str(e.value) or any(k in str(e.value) for k in config[key]), config


Q = "midlayer.self_attn.q_proj.weight"


def put(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, Any]], Any]:
    return lambda held: held.__setitem__(name, change(held[name]))


TENSORS: dict[str, tuple[str, Callable[[dict[str, Any]], Any], str]] = {
    "int8": ("eagle3", put("fc.weight", lambda t: t.to(torch.int8)), "fc.weight' is int8.*quantised"),
    "float8": ("eagle3", put("fc.weight", lambda t: t.to(torch.float8_e4m3fn)), "fc.weight' is float8"),
    "all int": ("eagle3", lambda h: [h.update({n: t.int()}) for n, t in h.items()], "is int32"),
    "NaN": ("eagle3", put("norm.weight", lambda t: t * torch.nan), "norm.weight' has values that are not finite"),
    "infinite": ("medusa", put("blocks.1.layers.0.bias", lambda t: t / 0), "1.0.linear.* not finite"),
    "NaN, eagle": ("eagle", put("fc.weight", lambda t: t * torch.nan), "not finite"),
    "a row": ("eagle3", put("fc.weight", lambda t: t[0]), "no matrix"),
    "a number": ("eagle3", put(Q, lambda t: t[0, 0]), "no matrix"),
    "a vector of q": ("eagle3", put(Q, lambda t: t[:, 0]), "no matrix"),
    "o": ("eagle3", put("midlayer.self_attn.o_proj.weight", lambda t: t[:, :32]), "o_proj.weight' is .64, 32"),
    "norm": ("eagle3", put("norm.weight", lambda t: t[:32]), r"norm.weight' is \[32\], config.json makes it \[64\]"),
    "empty": ("eagle3", put("norm.weight", lambda t: t[:0]), r"norm.weight' is \[0\]"),
    "LM head": ("eagle3", put("lm_head.weight", lambda t: t[0]), "lm_head.weight|draft_vocab_size"),
    "d2t floats": ("eagle3", put("d2t", lambda t: t.float()), "offsets"),
    "d2t column": ("eagle3", put("d2t", lambda t: t[:, None]), "offsets"),
    "d2t empty": ("eagle3", put("d2t", lambda t: t[:0]), "offsets"),
    "d2t short": ("eagle3", put("d2t", lambda t: t[:10]), "different words"),
    "fc gone": ("eagle3", lambda h: [h.pop("fc.weight"), h.pop("d2t"), h.pop("lm_head.weight")], "fc.weight"),
    "mask_hidden": ("eagle3", lambda h: h.update(mask_hidden=torch.ones(1, 1, 192)), "mask_hidden"),
    "bias": ("medusa", put("blocks.0.layers.0.bias", lambda t: t[:3]), r"is \[3\], config.json makes it \[64\]"),
}  # fmt: skip


def test_a_tensor_that_cannot_be_is_named_and_never_imported(target, made, tmp_path):
    for what, (name, change, named) in TENSORS.items():
        folder = changed(made / name, tmp_path / what, change)
        with pytest.raises(HeadwayError, match=named):
            foreign.imported(folder, "sglang" if name == "eagle" else "vllm", target)


def test_a_config_of_another_target_is_refused(target, texts, made, tmp_path):
    for key, value in {"vocab_size": 10, "target_hidden_size": 128, "num_aux_hidden_states": 2}.items():
        folder = changed(made / "eagle3", tmp_path / key, None, **{key: value})
        with pytest.raises(HeadwayError, match=key):
            foreign.imported(folder, "vllm", target)
        assert any("config" in fault for fault in foreign.check(folder, target, texts, layout="vllm").faults)


def test_a_null_counts_as_left_out(target, texts, made, tmp_path):
    nulls = dict.fromkeys(("rms_norm_eps", "num_hidden_layers", "hidden_act", "rope_scaling", "target_hidden_size"))
    folder = changed(made / "eagle3", tmp_path / "out", None, **nulls)
    assert foreign.imported(folder, "vllm", target)[0].config.rms_norm_eps == 1e-6
    assert foreign.check(folder, target, texts, layout="vllm").parity is not None


def test_a_folder_for_a_target_of_another_size(made, tmp_path):
    for size, changes in {
        "wide": {"hidden_size": 128},
        "words": {"vocab_size": 300},
        "shallow": {"num_hidden_layers": 2},
    }.items():
        other = tiny.target(tiny.build(4, "sdpa", **changes), mode="tree")
        texts = write(other, [list(b"hello there")], 8)
        for name in ("eagle3", "eagle", "medusa"):
            if size == "shallow" and name != "eagle3":
                continue
            with pytest.raises(HeadwayError):
                foreign.imported(made / name, None, other)
            assert foreign.check(made / name, other, texts).faults, (size, name)


def test_a_target_of_the_same_sizes_is_not_taken_for_the_one(target, texts, made):
    """Another model type, and other weights under another name; the same weights under another name are the same."""
    for changes, named in (
        ({"model_type": "qwen2"}, "is a qwen2 model"),
        ({"initializer_range": 0.3}, "other weights"),
    ):
        other = tiny.target(tiny.build(4, "sdpa", **changes), "other", mode="tree")
        for name in ("eagle3", "medusa"):
            with pytest.raises(HeadwayError, match=named):
                foreign.imported(made / name, None, other)
            assert any(named in fault for fault in foreign.check(made / name, other, texts).faults)
    copy = tiny.target(target.model, "copy", mode="tree")
    assert foreign.imported(made / "eagle3", None, copy)[0].config.taps
    twin = tiny.target(tiny.build(4, "sdpa", initializer_range=0.3), "tiny", mode="tree")
    written = foreign.export(str(made / "head-speculators"), "speculators", made / "twin", target=twin)
    assert "not those that the head was trained on" in " ".join(written.said)


def test_a_folder_is_told_for_what_it_is(target, texts, made):
    for call in (lambda f: foreign.imported(f, None, target), lambda f: foreign.check(f, target, texts)):
        with pytest.raises(HeadwayError, match="a head of headway itself"):
            call(made / "head-eagle3")
    with pytest.raises(HeadwayError, match="give --as vllm"):
        foreign.check(made / "eagle3", target, texts, layout="tgi")
    with pytest.raises(HeadwayError, match="give --from vllm"):
        foreign.imported(made / "eagle3", "tgi", target)


# Files


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def saved(value: Any) -> bytes:
    import io

    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def test_broken_files_are_refused_in_one_line(made, tmp_path):
    config, whole = ((made / "eagle3" / name).read_bytes() for name in ("config.json", "model.safetensors"))
    state, boom = saved(load_file(made / "eagle3" / "model.safetensors")), tmp_path / "boom"
    bombs = [pickle.dumps({"fc.weight": Bomb(boom)}, protocol=p) for p in (0, 2, 4)] + [saved({"a": Bomb(boom)})]
    weights = {
        "model.safetensors": [b"", whole[:-100], whole[:50], whole + b"xx", b"<html>", b"version https://git-lfs"],
        "pytorch_model.bin": [
            b"",
            b"hello world",
            state[: len(state) // 2],
            state[:10],
            *bombs,
            saved([torch.ones(2)]),
        ],
        "medusa_lm_head.pt": [bombs[-1], saved(torch.ones(2)), saved({"model": {"a": torch.ones(1)}})],
        "training_args.bin": [b"x"],
    }
    weights["pytorch_model.bin"] += [saved({"a": t}) for t in (torch.eye(3).to_sparse(), torch.ones(3, device="meta"))]
    weights["pytorch_model.bin"] += [saved({"a": torch.ones(3, dtype=torch.complex64)})]
    files = [(config, name, data) for name, some in weights.items() for data in some]
    files += [(text, "model.safetensors", whole) for text in (b"", b"\xff\xfe{", b'{"a":', b"[1]", b"[" * 100000)]
    for i, (text, name, data) in enumerate(files):
        folder = tmp_path / str(i)
        folder.mkdir()
        (folder / "config.json").write_bytes(text)
        (folder / name).write_bytes(data)
        with pytest.raises(HeadwayError) as e:
            read_folder(folder)
        assert "\n" not in str(e.value)
    assert not boom.exists()
    for name in ("config.json", "model.safetensors"):
        folder = tmp_path / f"folder-{name}"
        shutil.copytree(made / "eagle3", folder)
        (folder / name).unlink()
        (folder / name).mkdir()
        with pytest.raises(HeadwayError, match="cannot be read|cannot read"):
            read_folder(folder)


def test_what_others_leave_beside_weights_is_passed_over(made, tmp_path):
    shutil.copytree(made / "eagle3", tmp_path / "out")
    (tmp_path / "out" / "._model.safetensors").write_bytes(b"resource fork")
    assert "fc.weight" in read_folder(tmp_path / "out").tensors
    state = load_file(tmp_path / "out" / "model.safetensors")
    (tmp_path / "out" / "model.safetensors").unlink()
    (tmp_path / "out" / "training_args.bin").write_bytes(b"x")
    (tmp_path / "out" / "optimizer.pt").write_bytes(b"x")
    torch.save(state, tmp_path / "out" / "head.pt")
    (tmp_path / "out" / "._model.safetensors").unlink()
    assert "fc.weight" in read_folder(tmp_path / "out").tensors


# What is exported


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (put("norm.weight", lambda t: t[:32]), "norm.weight"),
        (put("norm.weight", lambda t: t * torch.nan), "not finite"),
        (put("d2t", lambda t: t[:10]), "d2t"),
        (put("lm_head.weight", lambda t: t[:10]), "lm_head.weight"),
        (put("fc.weight", lambda t: t.to(torch.float8_e4m3fn)), "float8"),
        (put("fc.weight", lambda t: t.to(torch.int64)), "fc.weight"),
        (lambda held: held.pop("fc.weight"), "fc.weight"),
        (lambda held: held.update(stray=torch.ones(2)), "stray"),
        (put("d2t", lambda t: t + 1000), "d2t"),
        (put("t2d", lambda t: ~t), "t2d"),
    ],
)
def test_a_damaged_head_is_not_exported(made, tmp_path, change, named):
    shutil.copytree(made / "head-eagle3", tmp_path / "head")
    held = load_file(tmp_path / "head" / "model.safetensors")
    change(held)
    save_file(held, tmp_path / "head" / "model.safetensors")
    with pytest.raises(HeadwayError, match=named):
        foreign.export(str(tmp_path / "head"), "vllm", tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["head"]


@pytest.mark.parametrize("family", ["hydra"])
def test_a_family_that_no_layout_holds_is_refused_by_name(target, tmp_path, family):
    source = str(save_head(small(family, target), tmp_path / "head", target=target.info))
    for engine in LAYOUTS:
        for call in (
            lambda x=engine: foreign.check_layout(source, x),
            lambda x=engine: foreign.export(source, x, tmp_path / "out", target=target),
        ):
            with pytest.raises(HeadwayError, match=f"layout {engine} holds no {family} heads.*no layout holds th"):
                call()
    assert not (tmp_path / "out").exists()


def with_words(family: str, target, **fields: Any) -> Head:
    """Return a random head over random words of the tokenizer."""
    torch.manual_seed(0)
    config_class, head_class = find_family(family)
    head = head_class(config_class.for_target(target.info, **({"draft_vocab_size": 64} | fields)), target.frozen).eval()
    assert head.draft_vocab is not None
    head.set_draft_vocab(torch.randperm(264)[: len(head.draft_vocab)].sort().values)
    return head


@pytest.mark.parametrize(
    "fields", [{"taps": [3]}, {"taps": [0, 2, 4, 5, 6]}, {"draft_vocab_size": 1}, {"draft_vocab_size": 263}]
)
def test_odd_taps_and_vocabularies_come_back_and_draft_the_same(target, texts, tmp_path, fields):
    head = with_words("eagle3", target, **fields)
    source = save_head(head, tmp_path / "head", target=target.info)
    for engine in ("vllm", "sglang", "speculators"):
        foreign.export(str(source), engine, tmp_path / engine, target=target)
        assert foreign.check(tmp_path / engine, target, texts, head=head).faults == []
        again = foreign.imported(tmp_path / engine, None, target)[0]
        assert again.config == head.config
        assert all(torch.equal(again.state_dict()[n], t) for n, t in head.state_dict().items())


def test_a_medusa_vocabulary_of_one_word_is_refused_and_of_two_drafts_the_same(target, texts, tmp_path):
    for size in (1, 2, 263):
        head = with_words("medusa", target, draft_vocab_size=size)
        source = str(save_head(head, tmp_path / f"head{size}", target=target.info))
        for layout in layouts_of("medusa"):
            out = tmp_path / f"{layout}{size}"
            if size == 1:
                with pytest.raises(HeadwayError, match="head.draft_vocab_size 1"):
                    foreign.export(source, layout, out)
                continue
            foreign.export(source, layout, out)
            assert foreign.check(out, target, texts, head=head).faults == []
            again = foreign.imported(out, None, target)[0]
            assert all(torch.equal(again.state_dict()[n], t) for n, t in head.state_dict().items())


def test_commands_survive_odd_paths(target, made, tmp_path):
    folder = tmp_path / 'it\'s ünï, $(touch boom) "q"'
    foreign.export(str(made / "head-medusa"), "medusa", folder)
    command = foreign.serving_command("medusa", read_folder(folder), folder).replace("python", sys.executable, 1)
    subprocess.run(["bash", "-c", command.split(" && ")[0]], check=True, cwd=tmp_path)
    assert "0.0.linear.weight" in torch.load(folder / "medusa_lm_head.pt", weights_only=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == [folder.name]
    assert foreign.imported(folder, None, target)[0].config.num_heads == 3
    serve = find_layout("eagle").serve
    assert serve("eagle", "x", "t", 3).endswith("--no-eagle3")  # the repository's default is EAGLE-3
    assert "--no-eagle3" not in serve("eagle3", "x", "t", 3)


# Where it is written


def test_nothing_of_the_users_is_lost(target, made, tmp_path):
    source = str(made / "head-eagle3")
    (tmp_path / "file").write_text("mine")
    model = tmp_path / "model"
    target.model.save_pretrained(model)
    shutil.copytree(made / "eagle3", tmp_path / "edited")
    (tmp_path / "edited" / "notes.txt").write_text("mine")
    trained = tmp_path / "trained"
    shutil.copytree(source, trained)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    for out in ("file", "model", "edited", "trained"):
        with pytest.raises(HeadwayError):
            foreign.export(source, "vllm", tmp_path / out)
    head = foreign.imported(made / "eagle3", None, target)[0]
    for out in ("file", "model", "edited"):
        with pytest.raises(HeadwayError):
            save_head(head, tmp_path / out, target=target.info)
    (tmp_path / "link").symlink_to(made / "eagle3")
    for folder, out in ((made / "eagle3", trained), (made / "eagle3", model), (made / "eagle3", tmp_path / "link")):
        with pytest.raises(HeadwayError):
            import_head(folder, str(model), out, None, None, "cpu")
    assert before == {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file() and "link" not in str(p)}


def test_a_link_is_written_through(made, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    for _ in range(2):
        foreign.export(str(made / "head-eagle3"), "vllm", tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "disk" / "config.json").is_file()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["disk", "link"]


MOMENTS = [
    Moment("as the weights are written", layout_module, "save_file", how="half"),
    Moment("as config.json is written", Path, "write_text", of="config.json"),
    Moment("as it goes to the disk", aside, "_to_disk"),
    Moment("as it gets its name", Path, "replace"),
]
BETWEEN = Moment("when the earlier one has lost its name", Path, "replace", call=2)


@needs_fork
@pytest.mark.parametrize("moment", MOMENTS, ids=str)
@pytest.mark.parametrize("earlier", [False, True])
def test_a_kill_leaves_no_part(made, tmp_path, moment, earlier):
    """Killed at each step of the writing: the folder is not there, or is the one that was; the next export clears up."""
    source, out = str(made / "head-eagle3"), tmp_path / "out"
    if earlier:
        foreign.export(source, "sglang", out)
    killed(lambda: foreign.export(source, "vllm", out), moment)
    assert out.exists() is earlier
    if earlier:
        assert read_folder(out).config["headway"]["layout"] == "sglang"
    assert len(list(tmp_path.iterdir())) == 1 + earlier
    foreign.export(source, "vllm", out)
    assert read_folder(out).config["headway"]["layout"] == "vllm"
    assert list(tmp_path.iterdir()) == [out]


@needs_fork
def test_what_was_to_be_replaced_is_not_lost(made, tmp_path):
    """Killed between the two renames, and then an export that is refused: the earlier one has its name back."""
    source, out = str(made / "head-eagle3"), tmp_path / "out"
    foreign.export(source, "sglang", out)
    killed(lambda: foreign.export(source, "vllm", out), BETWEEN)
    assert not out.exists()
    with pytest.raises(ZeroDivisionError), aside.folder_aside(out):
        1 / 0  # noqa: B018
    assert read_folder(out).config["headway"]["layout"] == "sglang"
    assert list(tmp_path.iterdir()) == [out]


def test_only_what_the_dead_of_this_machine_left_is_removed(tmp_path, capsys):
    host, out = socket.gethostname(), tmp_path / "out"
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    parent = tmp_path / f".out.{os.getppid()}@{host}.tmp"
    other = tmp_path / f".out.{gone.pid}@elsewhere.tmp"
    strange = [tmp_path / name for name in (".out.tmp", f".out2.{gone.pid}@{host}.tmp", ".out.1@.tmp")]
    dead = tmp_path / f".out.{gone.pid}@{host}.tmp"
    reused = tmp_path / f".out.{os.getppid()}@{host}.old"  # its number went to a process that began after it was left
    for path in (parent, other, dead, *strange):
        path.write_text("part")
    reused.mkdir()
    os.utime(reused, (0, 0))
    for _ in range(2):
        with aside.folder_aside(out) as folder:
            (folder / "x").write_text("x")
    assert {*tmp_path.iterdir()} == {out, parent, other, *strange}
    err = capsys.readouterr().err
    assert err.count(str(other)) == 1
    assert "elsewhere" in err
    with aside.file_aside(tmp_path / "report.json") as part:
        dead = part.with_name(part.name.replace(str(os.getpid()), str(gone.pid)))
        dead.write_text("")
        part.write_text("{}")
    with aside.file_aside(tmp_path / "report.json") as part:
        assert not dead.exists()
        part.write_text("[]")
    assert (tmp_path / "report.json").read_text() == "[]"


LOW: list[tuple[str, str, dict[str, Any]]] = [
    ("eagle3", "speculators", {"norm_before_residual": True}),
    ("medusa", "vllm", {"lm_head": "shared"}),
    ("medusa", "tgi", {"lm_head": "own", "rank": 8}),
    ("medusa", "vllm", {"lm_head": "draft", "rank": 8}),
]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_rounding_does_is_no_fault(target, texts, tmp_path, dtype):
    for i, (family, layout, fields) in enumerate(LOW):
        head = small(family, target, **fields)
        source = save_head(head, tmp_path / f"head{i}", target=target.info)
        foreign.export(str(source), layout, tmp_path / f"out{i}", dtype, target)
        assert foreign.check(tmp_path / f"out{i}", target, texts, head=head).faults == [], (family, layout, fields)


def test_an_answer_too_short_to_compare_is_said(target, made):
    with pytest.raises(HeadwayError, match="max-new-tokens"):
        foreign.check(made / "eagle3", target, write(target, [list(b"hello there")], 2))
