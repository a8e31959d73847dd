"""What the commands are given, checked before any weights are read: prompts, heads, trees, files to write."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.data.manifest import check_writable
from headway.heads.common.errors import HeadwayError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from headway.data.served import Servers
    from headway.heads.common.protocol import Head, TargetInfo
    from headway.inference.bench import Prompt
    from headway.inference.drafter import Drafter
    from headway.inference.economy import Economy
    from headway.inference.target import Target
    from headway.inference.tree import Policy
    from headway.inference.tune import Tuned
    from headway.inference.unfinished import Unfinished


def quiet() -> None:
    """Keep other libraries' warnings and loading bars off the screen."""
    import warnings

    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    hub_logging.set_verbosity_error()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", module=r"(transformers|torch|huggingface_hub)\b")


def check_dtype(dtype: str) -> str:
    """Return `dtype`. Raises HeadwayError for one there is not."""
    from headway.inference.target import DTYPES

    if dtype != "auto" and dtype not in DTYPES:
        raise HeadwayError(f"unknown dtype {dtype!r}; allowed: auto, {', '.join(DTYPES)}")
    return dtype


def check_device(device: str) -> str:
    """Return `device`, `auto` being a GPU where there is one. Raises HeadwayError for one that is not there."""
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as e:
        raise HeadwayError(f"no device {device!r} here ({str(e).splitlines()[0]}); use auto, cpu or cuda") from None
    return device


def parse_sizes(text: str) -> list[int]:
    """Return the batch sizes of `8` or `1,2,4`. Raises HeadwayError for anything else."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise HeadwayError(f"--batch is {text!r}; give a number of prompts above 0, or several: 1,2,4,8")
    return sorted({int(part) for part in parts})


def check_minutes(minutes: float | None) -> float | None:
    """Return the seconds of --minutes, None where it was not given. Raises HeadwayError unless it is some time."""
    if minutes is None:
        return None
    if not 0 < minutes < math.inf:
        raise HeadwayError(f"--minutes is {minutes}; give a finite number above 0")
    return 60 * minutes


def check_file(path: Path) -> Path:
    """Return `path`. Raises HeadwayError unless a file can be written there."""
    if path.is_dir():
        raise HeadwayError(f"{path} is a folder; give the name of a file to write")
    check_writable(path)
    return path


def check_folder(path: Path) -> Path:
    """Return `path`. Raises HeadwayError unless a folder can be made or written there."""
    if path.exists() and not path.is_dir():
        raise HeadwayError(f"{path} is a file; give the name of a folder to write")
    check_writable(path / "x")
    return path


def prompt_text(prompt: str | None, file: str | None) -> str:
    """Return the prompt given directly or as a file (`-` is standard input). Raises HeadwayError unless it is one."""
    if (prompt is None) == (file is None):
        raise HeadwayError("give one prompt: either --prompt TEXT or --prompt-file FILE (- reads standard input)")
    text = prompt
    if file is not None:
        try:
            raw = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
            text = raw.decode("utf-8").removesuffix("\n")
        except OSError as e:
            raise HeadwayError(f"cannot read the prompt file {file!r}: {e.strerror}; give an existing file") from None
        except UnicodeDecodeError:
            raise HeadwayError(f"the prompt file {file!r} is not UTF-8 text; convert it") from None
    if not text or not text.strip():
        raise HeadwayError("the prompt is empty; give some text with --prompt or --prompt-file")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise HeadwayError("the prompt is not UTF-8 text; convert it, or give it as --prompt-file") from None
    return text


def tokenize_prompt(tokenizer: PreTrainedTokenizerBase, text: str, raw: bool) -> list[int]:
    """Return the ids of a user's words in the chat template, or of the bare text when `raw`."""
    from headway.data.chat import prompt_ids, use_template
    from headway.data.sources import RowError

    if raw:
        return [int(i) for i in tokenizer(text)["input_ids"]]
    if not tokenizer.chat_template:
        name = getattr(tokenizer, "name_or_path", "") or "this target"
        raise HeadwayError(
            f"the tokenizer of {name} has no chat template (a base model?); pass --raw to continue the bare text, or "
            "give a Jinja file with --chat-template FILE"
        )
    use_template(tokenizer)
    try:
        return prompt_ids(tokenizer, [{"role": "user", "content": text}])
    except RowError as e:
        raise HeadwayError(f"{e}; pass --raw to continue the bare text") from e


def context_size(info: TargetInfo) -> int:
    """Return the longest context of a target."""
    from headway.inference.target import usable_positions

    return usable_positions(info.text_config)


def check_length(info: TargetInfo, size: int) -> None:
    """Raise HeadwayError for a prompt of `size` tokens that leaves no room for an answer."""
    limit = context_size(info)
    if size >= limit:
        raise HeadwayError(f"the prompt has {size} tokens, {info.name} takes {limit - 1} at most; shorten it")


def unfinished(
    what: str, target: Target, heads: Sequence[str], prompts: Sequence[Prompt], settings: dict[str, Any]
) -> Unfinished:
    """Return the parts that the same measurement made, on this machine, before it was interrupted."""
    from headway.heads.common.checkpoint import LORA_WEIGHTS, WEIGHTS
    from headway.inference.bench import environment
    from headway.inference.unfinished import Unfinished, file_identity

    weights = [Path(head) / WEIGHTS for head in heads]
    weights += [path for head in heads if (path := Path(head) / LORA_WEIGHTS).is_file()]
    identity = {
        "target": [target.info.name, target.info.revision, target.fingerprint, target.mode],
        "place": {key: value for key, value in environment(target).items() if key != "date"},
        "heads": [file_identity(path) if path.is_file() else str(path) for path in weights],
        "prompts": [list(prompt) for prompt in prompts],
        **settings,
    }
    return Unfinished(what, identity)


def bench_prompts(
    sources: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    info: TargetInfo,
    limit: int | None,
    held_out: float = 0.0,
) -> list[Prompt]:
    """Return (id, category, ids) of the first user turn of each row, at most `limit` rows of each source; with `held_out`,
    only of rows in that share.

    The category is the row's own, else the name of its file. Rows that cannot be used are counted on stderr.
    """
    from headway.data.chat import prompt_ids, use_template
    from headway.data.prompts import read_rows
    from headway.data.sources import RowError

    use_template(tokenizer)
    prompts: list[Prompt] = []
    left_out: dict[str, int] = {}
    for source in sources:
        rows, report = read_rows(source, limit=limit, held_out=held_out, part="held_out" if held_out else "all")
        if report.skipped or report.repaired:
            print(report, file=sys.stderr)
        categories = _categories(source)
        for row in rows:
            first = next(i for i, message in enumerate(row.messages) if message["role"] == "user")
            try:
                ids = prompt_ids(tokenizer, row.messages[: first + 1])
                reason = "too long for the context" if len(ids) >= context_size(info) else ""
            except RowError as e:
                ids, reason = [], str(e)
            if reason:
                left_out[reason] = left_out.get(reason, 0) + 1
            else:
                prompts.append((row.id, categories.get(row.id, Path(source).stem), ids))
    for reason, count in left_out.items():
        print(f"headway: {count} prompts left out: {reason}", file=sys.stderr)
    if not prompts:
        raise HeadwayError(f"no prompt of {', '.join(sources)} can be used ({', '.join(left_out)}); give shorter ones")
    return prompts


def _categories(source: str) -> dict[str, str]:
    """Return the `category` of each row of a local file by its id."""
    from headway.data.prompts import given_id
    from headway.data.sources import raw_rows

    if not Path(source).is_file():
        return {}
    found: dict[str, str] = {}
    for line, raw in raw_rows(source):
        if isinstance(raw, dict) and isinstance(raw.get("category"), str):
            given = given_id(raw)
            # A repeated id gets its line number when rows are read.
            found.setdefault(f"line{line}" if given is None else given, raw["category"])
            found[f"{given}~line{line}"] = raw["category"]
    return found


def head_source(given: str) -> str:
    """Return what names a head: its folder, that of a training run, or `owner/name@commit` for one on the hub.

    One on the hub is downloaded, and its commit fixed for the rest of the command. Raises HeadwayError where it has none.
    """
    from headway.heads.common.checkpoint import head_folder
    from headway.heads.common.hub import parse_id, run_head

    source = run_head(given)
    on_hub = parse_id(source)
    if on_hub is None or Path(source).expanduser().is_dir():
        return source
    return f"{on_hub[0]}@{head_folder(source).name}"


def head_name(source: str) -> str:
    """Return a short name for a head: its folder's, its run's, or that of its repository."""
    from headway.heads.common.hub import is_commit

    name, _, commit = source.rpartition("@")
    path = Path(name if is_commit(commit) else source.rstrip("/"))
    return path.absolute().parent.name if path.name == "head" else path.name


def head_names(sources: Sequence[str]) -> dict[str, str]:
    """Return a short name -> source for each head: that of `head_name`, or else the path as given."""
    plain = {source: head_name(source) for source in sources}
    names = list(plain.values())
    return {name if names.count(name) == 1 else source: source for source, name in plain.items()}


def check_head(source: str, info: TargetInfo, other_target: bool = False) -> dict[str, Any]:
    """Return a head's config after checking, without reading weights, that it is whole and of the target's sizes and, unless
    `other_target`, adapter."""
    from headway.heads.common.checkpoint import read_config

    saved = read_config(source)
    reason = misfit(source, saved, info, other_target)
    if reason:
        raise HeadwayError(reason)
    head_tensors(source)
    return saved


def misfit(source: str, saved: dict[str, Any], info: TargetInfo, other_target: bool = False) -> str:
    """Return why the head of config `saved` cannot work on a target, or ''."""
    from headway.heads.common.checkpoint import other_adapter, saved_adapter

    trained = saved["target"]
    for field in ("model_type", "hidden_size", "num_layers", "vocab_size"):
        want, have = trained[field], getattr(info, field)
        if want != have:
            return (
                f"head {source} was trained for {trained['name']} with {field} {want}, target {info.name} has {field} "
                f"{have}; use it with {trained['name']}, or train a head for {info.name}"
            )
    reason = "" if other_target else other_adapter(f"head {source}", saved_adapter(saved), info)
    return f"{reason}, train a head for this target, or pass --other-target to try it" if reason else ""


def head_tensors(source: str) -> dict[str, list[int]]:
    """Return the shape of each tensor of a head, from the file's header.

    Raises HeadwayError where the file is missing, damaged or truncated.
    """
    from safetensors import SafetensorError, safe_open

    from headway.heads.common.checkpoint import head_folder

    path = head_folder(source) / "model.safetensors"
    if not path.is_file():
        raise HeadwayError(f"{path} does not exist; save or download the head again")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - not a dict
    except SafetensorError as e:
        reason = str(e).splitlines()[0]
        raise HeadwayError(f"{path} is damaged or truncated ({reason}); save or download the head again") from None


def parse_tree(text: str | None) -> Policy | None:
    """Return the tree asked for on the command line; None for the head's own (`auto`, or nothing asked)."""
    from headway.inference.tree import parse_policy

    return None if text in (None, "auto") else parse_policy(text or "")


def economy(source: str | None, target: Target, tree: str | None) -> Economy | None:
    """Return what turns a head, or a drafter without one, off where drafting does not pay; None where a tree was asked for by
    name, which then drafts in every round."""
    from headway.heads.common.checkpoint import head_folder
    from headway.inference.economy import Economy

    if tree not in (None, "auto"):
        return None
    tuned = _tuned(head_folder(source), target) if source is not None else None
    return Economy(tuned.prices if tuned is not None else None)


def bench_economies(
    target: Target, methods: Iterable[str], heads: Sequence[str], drafts: Sequence[tuple[str, str]], tree: str | None
) -> dict[str, Economy]:
    """Return the economies of the methods that `bench_methods` gave: heads in their order, then drafts. A hybrid's begins with
    the prices of the first head."""
    of_drafts = [heads[0] if kind == "hybrid" else None for kind, _ in drafts]
    asked = {name: economy(source, target, tree) for name, source in zip(methods, [*heads, *of_drafts], strict=True)}
    return {name: economy for name, economy in asked.items() if economy is not None}


def parse_drafts(texts: Sequence[str]) -> list[tuple[str, str]]:
    """Return (kind, rest) of each --draft: `ngram`, `hybrid`, `model:NAME`. Raises HeadwayError for anything else."""
    parsed = []
    for text in texts:
        kind, _, rest = text.partition(":")
        if (kind == "model") != bool(rest) or kind not in ("ngram", "hybrid", "model"):
            raise HeadwayError(
                f"unknown --draft {text!r}; use ngram (what followed the last tokens before), model:NAME (a smaller model of "
                "the same tokenizer; model:NAME@TREE for another tree than chain:4) or hybrid (ngram, and the head where "
                "nothing is found)"
            )
        if kind == "model":
            parse_tree(rest.partition("@")[2] or None)
        parsed.append((kind, rest))
    return parsed


def make_drafter(
    kind: str, rest: str, target: Target, head: Head | None, policy: Policy | None, device: str
) -> Drafter:
    """Return the drafter of a parsed --draft. Raises HeadwayError for a hybrid without a head, or a model that is none."""
    from headway.inference.drafter import HeadDrafter, default_policy
    from headway.inference.drafters.draft_model import ModelDrafter
    from headway.inference.drafters.hybrid import HybridDrafter
    from headway.inference.drafters.ngram import NgramDrafter
    from headway.inference.target import Target as Loaded

    if kind == "ngram":
        return NgramDrafter()
    if kind == "model":
        name, _, tree = rest.partition("@")
        model = Loaded.load(name, dtype=target.dtype, device=device, compile=target.compiled is not None)
        return ModelDrafter(model, parse_tree(tree or None)).fit(target)
    if head is None:
        raise HeadwayError("--draft hybrid asks a head where nothing is found; give --head")
    return HybridDrafter(HeadDrafter(head, policy if policy is not None else default_policy(head)))


def bench_methods(
    target: Target, heads: dict[str, tuple[Head, Policy | None]], drafts: Sequence[tuple[str, str]], device: str
) -> tuple[dict[str, tuple[Head | Drafter, Policy | None]], Target | None]:
    """Return heads and drafters by name, and the draft model that transformers is to assist with. A hybrid takes the first
    head."""
    methods: dict[str, tuple[Head | Drafter, Policy | None]] = dict(heads)
    first, (head, policy) = next(iter(heads.items()), ("", (None, None)))
    assistant = None
    for kind, rest in drafts:
        drafter = make_drafter(kind, rest, target, head, policy, device)
        model = Path(rest.partition("@")[0]).name
        name = {"ngram": "n-gram", "hybrid": f"n-gram or {first}", "model": f"model {model}"}[kind]
        methods[name if name not in methods else f"{kind} {rest}"] = (drafter, None)
        assistant = getattr(drafter, "model", assistant)
    return methods, assistant


def saved_tree(source: str, target: Target) -> Policy | None:
    """Return the trees tuned for a head on this device and dtype, and an adapter carried as it is, which lie beside it as
    tree.json: those that draft, for an economy to turn off where they do not pay. None without any."""
    from headway.heads.common.checkpoint import head_folder
    from headway.inference.tune import place_of, read_policies

    folder = head_folder(source)
    tuned = _tuned(folder, target)
    policy = tuned.drafting if tuned is not None else None
    known = sorted(read_policies(folder))
    if policy is None and known:
        here = place_of(target)
        print(f"headway: the tree of {source} was tuned for {'; '.join(known)}; not for {here}", file=sys.stderr)
    return policy


def carried(adapter: str | None, merge: bool) -> dict[str, Any]:
    """Return what `load_target` is told of the adapter on the target. Raises HeadwayError for one that is not there."""
    from headway.inference.adapter import read_adapter
    from headway.inference.target import check_merge

    check_merge(adapter, merge)
    if adapter is not None:
        read_adapter(adapter)
    return {"adapter": adapter, "merge_adapter": merge}


def _tuned(folder: Path, target: Target) -> Tuned | None:
    from headway.inference.tune import load_tuned

    return load_tuned(folder, target.dtype, str(target.device), target.carries, target.compiled is not None)


def load_target(
    name: str,
    dtype: str,
    device: str,
    revision: str | None,
    tokenizer: Any = None,
    rows: int = 1,
    adapter: str | None = None,
    merge_adapter: bool = False,
    compile: bool = False,
) -> Target:
    """Return the target, with an adapter on it if given; `tokenizer` replaces its own (one that was given a chat template).

    `rows` are the answers that run together: with the dtype `auto`, what it is chosen for.
    """
    from headway.inference.target import FEW_TOKENS, Target

    target = Target.load(
        name, dtype=dtype, device=device, revision=revision, tokens=max(FEW_TOKENS, rows),
        adapter=adapter, merge_adapter=merge_adapter, compile=compile,
    )  # fmt: skip
    if tokenizer is not None:
        target.tokenizer = tokenizer
    return target


LOCAL = {
    "record": "keeps what the local engine computes; leave it out, training computes it",
    "batch_size": "is of the local engine; leave it out, --concurrency says how many answers are under way at once",
    "dtype": "is of the local engine; leave it out, the server has its own",
    "device": "is of the local engine; leave it out, the server has its own",
    "merge_adapter": "is of the local engine; leave it out, the server has the adapter on in its own way",
}
"""Options of distilling that mean nothing beside --server, by what they are."""
SERVED = ("served_model", "api", "concurrency", "timeout", "request", "api_key_env")
"""Those that mean nothing without it."""


def check_distill(given: Collection[str], served: bool) -> None:
    """Raise HeadwayError for an option that was given and would go unused, beside --server or without it."""
    for name in given:
        option = f"--{name.replace('_', '-')}"
        if served and name in LOCAL:
            raise HeadwayError(f"{option} {LOCAL[name]}")
        if not served and name in SERVED:
            raise HeadwayError(f"{option} says how servers are asked; give --server too, or leave it out")
    if {"temperature", "temperature_mix"} <= set(given):
        raise HeadwayError("--temperature and --temperature-mix contradict each other; give one of them")


def servers(
    urls: Sequence[str],
    model: str | None,
    api: str,
    concurrency: int,
    timeout: float,
    fields: str | None,
    key_variable: str | None,
) -> Servers | None:
    """Return the servers asked for on the command line; None without --server.

    Raises HeadwayError for what no server could be asked.
    """
    from headway.data.served import Servers, api_key

    if not urls:
        return None
    try:
        more = json.loads(fields) if fields is not None else {}
    except ValueError:
        more = None
    if not isinstance(more, dict):
        raise HeadwayError(f'--request {fields!r} is no JSON object, such as \'{{"reasoning_effort": "low"}}\'')
    return Servers(
        urls=tuple(urls),
        model=model,
        api=api,  # type: ignore[arg-type]  # checked there
        concurrency=concurrency,
        timeout=timeout,
        key=api_key(key_variable),
        fields=more,
    )
