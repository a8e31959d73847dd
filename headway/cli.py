"""The console script `headway`. What takes long to import is imported by the command that needs it.

A command checks everything it is given before it reads weights. An error of the user's is one line and exit code 2;
Ctrl-C is exit code 130.
"""

from __future__ import annotations

import functools
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway import __version__
from headway.heads.common.errors import HeadwayError, Interrupted, spell_os_error

if TYPE_CHECKING:
    from headway.inference.sampling import Settings

app = typer.Typer(
    name="headway",
    help="Train Medusa, Hydra and EAGLE heads on a frozen language model, and decode with them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

TargetOption = Annotated[str, typer.Option("--target", "-t", help="Hub id, model folder or .gguf file.")]
AdapterOption = Annotated[
    str | None,
    typer.Option(help="LoRA adapter of PEFT on the target: a folder, or a hub id (owner/name@revision)."),
]
MergeOption = Annotated[
    bool, typer.Option("--merge-adapter", help="Add the adapter to the weights, which runs as fast as none.")
]
RevisionOption = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub target.")]
DtypeOption = Annotated[str, typer.Option(help="float32, bfloat16, float16, or auto: bfloat16 where it is fast.")]
DeviceOption = Annotated[str, typer.Option(help="auto (a GPU where there is one), cpu, cuda, ...")]
CompileOption = Annotated[
    bool,
    typer.Option(
        "--compile",
        help="Compile the target's passes and the head's drafts with torch.compile, on a GPU as CUDA graphs. The first of each "
        "size takes long, on a CPU minutes.",
    ),
]
TreeOption = Annotated[
    str | None,
    typer.Option(
        "--tree",
        help="off, chain:4, dynamic:depth=4,top_k=4,nodes=12, static:0/1/0.0, or auto: what `headway tune` "
        "found for the head on this device and dtype, else chain:3.",
    ),
]
PromptsOption = Annotated[
    list[str],
    typer.Option("--prompts", "-p", help="A file (jsonl, json, csv, parquet), a folder or a hub id; may be repeated."),
]
MixOption = Annotated[
    list[str],
    typer.Option(
        "--prompts",
        "-p",
        help="A file (jsonl, json, csv, parquet), a folder or a hub id; may be repeated, and end in =WEIGHT for a mix.",
    ),
]
DedupeOption = Annotated[bool, typer.Option("--dedupe", help="Skip rows that repeat an earlier one; they are counted.")]
HoldOutOption = Annotated[
    float, typer.Option("--hold-out", help="Leave out this share of the rows, always the same ones, by the hash of id.")
]
HeldOutOption = Annotated[
    float,
    typer.Option(
        "--held-out",
        help="Use only this share of the rows, the lowest hashes of id: what --hold-out leaves out and training holds out; 0: all.",
    ),
]
LimitOption = Annotated[int | None, typer.Option(min=1, help="Use the first N rows of each prompts file.")]
TemperatureOption = Annotated[float, typer.Option(help="0 is greedy.")]
TopPOption = Annotated[float, typer.Option("--top-p", help="1 is off.")]
TopKOption = Annotated[int, typer.Option("--top-k", help="0 is off.")]
MinPOption = Annotated[float, typer.Option("--min-p", help="0 is off.")]
SeedOption = Annotated[int, typer.Option(help="Names the noise of sampling.")]
NewTokensOption = Annotated[int, typer.Option("--max-new-tokens", "-n", help="Most tokens of an answer.")]
BatchOption = Annotated[int, typer.Option("--batch-size", "--batch", min=1, help="Prompts answered together.")]
DRAFT_HELP = (
    "What drafts without training: ngram (what followed the last tokens before), model:NAME (a smaller model of the same "
    "tokenizer), hybrid (ngram, and the head where nothing is found)."
)
OtherOption = Annotated[
    bool, typer.Option("--other-target", help="Use the head though it was trained for a target of another name.")
]
TemplateOption = Annotated[str | None, typer.Option("--chat-template", help="Jinja file, in place of the tokenizer's.")]
data_app = typer.Typer(name="data", help="Look at data.", no_args_is_help=True)
app.add_typer(data_app)
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def command(name: str, **extra: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a command whose errors are one line."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> None:
            try:
                function(*args, **kwargs)
            except HeadwayError as e:
                print(f"error: {' '.join(str(e).split())}", file=sys.stderr)
                raise typer.Exit(2) from None
            except BrokenPipeError:
                raise
            except OSError as e:  # a full disk, a place that only seemed writable
                print(f"error: {spell_os_error(e)}", file=sys.stderr)
                raise typer.Exit(2) from None
            except KeyboardInterrupt as e:
                start = "\r\x1b[K" if sys.stderr.isatty() else ""  # over the progress line
                print(f"{start}headway: {e if isinstance(e, Interrupted) else 'interrupted'}", file=sys.stderr)
                raise typer.Exit(130) from None

        return (extra.pop("of", None) or app).command(name, **extra)(guarded)

    return register


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        app(list(sys.argv[1:] if argv is None else argv), prog_name="headway")
    except SystemExit as e:
        return e.code if isinstance(e.code, int) else int(e.code is not None)
    return 0


def _version(asked: bool) -> None:
    if asked:
        print(f"headway {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Train Medusa, Hydra and EAGLE heads on a frozen language model, and decode with them."""


@command("generate")
def generate_command(
    target: TargetOption,
    head: Annotated[
        str | None, typer.Option(help="Head folder, run folder or hub id (user/name@revision); none: plainly.")
    ] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="A user's words.")] = None,
    prompt_file: Annotated[str | None, typer.Option(help="Text file; - is standard input.")] = None,
    max_new_tokens: NewTokensOption = 128,
    min_new_tokens: Annotated[int, typer.Option(min=0, help="No end of the answer before that many.")] = 0,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    top_k: TopKOption = 0,
    min_p: MinPOption = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    seed: SeedOption = 0,
    accept: Annotated[
        str,
        typer.Option(
            help="exact: as the target alone; greedy: exact at temperature 0; typical: lossy, above temperature 0."
        ),
    ] = "exact",
    epsilon: Annotated[float, typer.Option(help="Of typical acceptance.")] = 0.09,
    delta: Annotated[float, typer.Option(help="Of typical acceptance.")] = 0.3,
    draft: Annotated[str | None, typer.Option(help=DRAFT_HELP)] = None,
    tree: TreeOption = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; may be repeated.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the bare text, without the chat template.")] = False,
    chat_template: TemplateOption = None,
    other_target: OtherOption = False,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "auto",
    compile: CompileOption = False,
    revision: RevisionOption = None,
    target_adapter: AdapterOption = None,
    merge_adapter: MergeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Answer a prompt, streaming the text; with --json one object: text, token_ids, finish_reason, figures."""
    from headway import inputs
    from headway.data.chat import use_template
    from headway.heads.common.checkpoint import load_head
    from headway.inference.sampling import Settings
    from headway.inference.target import load_info, load_tokenizer

    inputs.quiet()
    carried = inputs.carried(target_adapter, merge_adapter)
    dtype, device, policy = inputs.check_dtype(dtype), inputs.check_device(device), inputs.parse_tree(tree)
    settings = Settings(
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        temperature=_temperature(accept, temperature),
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        accept="typical" if accept == "typical" else "exact",
        epsilon=epsilon,
        delta=delta,
        stop=tuple(stop or ()),
    )
    text = inputs.prompt_text(prompt, prompt_file)
    tokenizer, info = (
        load_tokenizer(target, revision=revision),
        load_info(target, revision=revision, adapter=target_adapter),
    )
    if chat_template is not None:
        use_template(tokenizer, chat_template)
    ids = inputs.tokenize_prompt(tokenizer, text, raw)
    inputs.check_length(info, len(ids))
    source = None if head is None else inputs.head_source(head)
    ((kind, rest),) = inputs.parse_drafts([draft]) if draft else [("", "")]
    if source is None and policy is not None:
        raise HeadwayError(f"--tree {tree} has no head to grow it; give --head")
    if kind == "hybrid" and source is None:
        raise HeadwayError("--draft hybrid asks a head where nothing is found; give --head")
    if kind in ("ngram", "model") and source is not None:
        raise HeadwayError(f"--draft {draft} drafts without a head; leave out --head, or use --draft hybrid")
    if source is not None:
        inputs.check_head(source, info, other_target)
    loaded = inputs.load_target(target, dtype, device, revision, tokenizer, compile=compile, **carried)
    loaded_head: Any = None
    if source is not None:
        loaded_head = load_head(source, loaded, other_target=other_target)
        policy = policy if policy is not None else inputs.saved_tree(source, loaded)
    economy = inputs.economy(source, loaded, tree) if source is not None or kind else None
    if kind:
        loaded_head = inputs.make_drafter(kind, rest, loaded, loaded_head, policy, device)
    _answer(loaded, ids, settings, loaded_head, policy, economy, as_json)


def _temperature(accept: str, temperature: float) -> float:
    """Return the temperature that --accept leaves. Raises HeadwayError where they contradict."""
    if accept not in ("exact", "greedy", "typical"):
        raise HeadwayError(f"unknown --accept {accept!r}; allowed: exact, greedy, typical")
    if accept == "greedy" and temperature > 0:
        print(
            f"headway: --accept greedy decodes at temperature 0; --temperature {temperature} is unused", file=sys.stderr
        )
        return 0.0
    if accept == "typical" and temperature == 0:
        raise HeadwayError("--accept typical compares probabilities; give --temperature above 0 (at 0 use greedy)")
    return temperature


def _answer(
    target: Any, ids: list[int], settings: Settings, head: Any, policy: Any, economy: Any, as_json: bool
) -> None:
    """Answer one prompt on the screen."""
    from headway.inference.bench import compiling
    from headway.inference.generate import Request, generate
    from headway.inference.host import clock
    from headway.inference.stream import TextStream

    stream = TextStream(target.tokenizer, target.eos_ids, settings.stop)
    show = (lambda piece: None) if as_json else (lambda piece: print(piece, end="", flush=True))
    begin = clock()
    (result,) = generate(
        target,
        [Request(ids, settings)],
        head=head,
        policy=policy,
        economy=economy,
        on_tokens=lambda request, tokens: show(stream.feed(tokens)),
    )
    seconds = clock() - begin
    show(stream.finish() if as_json else stream.finish() + "\n")
    figures = {
        "text": stream.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "new_tokens": result.new_tokens,
        "rounds": result.rounds,
        "accepted_length": result.accepted_length,
        "tokens_per_s": result.new_tokens / seconds,
        "mode": target.mode,
        "lossy": head is not None and settings.accept == "typical",
        **compiling(target),
    }
    if as_json:
        print(json.dumps(figures, ensure_ascii=False))
        return
    print(
        f"[{result.new_tokens} tokens in {seconds:.1f} s, {figures['tokens_per_s']:.1f} tokens/s; "
        f"{result.rounds} rounds, accepted length {result.accepted_length:.2f}; ended by {result.finish_reason}"
        f"{'; lossy' if figures['lossy'] else ''}{_compiled(figures)}]",
        file=sys.stderr,
    )


def _compiled(figures: dict[str, Any]) -> str:
    """Return what is said of compiling."""
    if "compiled" not in figures:
        return ""
    if figures["compiled"] is not True:
        return "; not compiled"
    return f"; compiled in {figures['compile_seconds']:.1f} s, which is not counted"


@command("bench")
def bench_command(
    target: TargetOption,
    prompts: PromptsOption,
    head: Annotated[
        list[str] | None, typer.Option(help="Head folders or hub ids (user/name@revision); H1,H2 or repeated.")
    ] = None,
    limit: LimitOption = None,
    held_out: HeldOutOption = 0.0,
    max_new_tokens: NewTokensOption = 128,
    draft: Annotated[
        list[str] | None, typer.Option(help=DRAFT_HELP + " May be repeated; adds transformers' own.")
    ] = None,
    batch: Annotated[
        str, typer.Option("--batch-size", "--batch", help="Prompts answered together: 1, or 1,2,4.")
    ] = "1",
    throughput: Annotated[
        bool,
        typer.Option(
            "--throughput", help="Compare tokens per second over the whole set, as distilling does; no heads."
        ),
    ] = False,
    tree: TreeOption = None,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    top_k: TopKOption = 0,
    min_p: MinPOption = 0.0,
    seed: SeedOption = 0,
    out: Annotated[Path | None, typer.Option(help="JSON report to write.")] = None,
    plot: Annotated[bool, typer.Option("--plot", help="Draw a PNG beside the report.")] = False,
    chat_template: TemplateOption = None,
    other_target: OtherOption = False,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "auto",
    compile: CompileOption = False,
    revision: RevisionOption = None,
    target_adapter: AdapterOption = None,
    merge_adapter: MergeOption = False,
) -> None:
    """Measure transformers.generate, Headway without a head and each head, side by side; print tables, write JSON."""
    from headway import inputs
    from headway.data.chat import use_template
    from headway.data.progress import Progress
    from headway.heads.common.checkpoint import load_head
    from headway.inference import bench as measure
    from headway.inference.sampling import Settings
    from headway.inference.target import load_info, load_tokenizer

    inputs.quiet()
    carried = inputs.carried(target_adapter, merge_adapter)
    dtype, device, policy = inputs.check_dtype(dtype), inputs.check_device(device), inputs.parse_tree(tree)
    settings = Settings(
        max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed
    )
    sizes, drafts = inputs.parse_sizes(batch), inputs.parse_drafts(draft or [])
    _check_bench(tree, head, drafts, sizes, throughput, plot, out)
    if out is not None:
        inputs.check_file(out)
    if plot:
        measure.require_matplotlib()
    tokenizer, info = (
        load_tokenizer(target, revision=revision),
        load_info(target, revision=revision, adapter=target_adapter),
    )
    use_template(tokenizer, chat_template)
    chosen = inputs.bench_prompts(prompts, tokenizer, info, limit, held_out)
    sources = [inputs.head_source(h) for given in head or [] for h in given.split(",") if h]
    for source in sources:
        inputs.check_head(source, info, other_target)
    loaded = inputs.load_target(target, dtype, device, revision, tokenizer, rows=sizes[0], compile=compile, **carried)
    heads = {
        name: (
            load_head(source, loaded, other_target=other_target),
            policy if policy is not None else inputs.saved_tree(source, loaded),
        )
        for name, source in inputs.head_names(sources).items()
    }
    methods, assistant = inputs.bench_methods(loaded, heads, drafts, device)
    economies = inputs.bench_economies(loaded, methods, list(dict.fromkeys(sources)), drafts, tree)
    if drafts and sizes[-1] > 1:
        print(
            "headway: transformers drafts for one prompt at a time; larger batches have no row of it", file=sys.stderr
        )
    said = shlex.join(["headway", *sys.argv[1:]])
    trees = [tree.describe() if tree is not None else None for _, tree in heads.values()]
    what = {"throughput": throughput, "settings": settings, "drafts": drafts, "trees": trees}
    what |= {"methods": list(methods), "economies": list(economies)}
    left = {size: inputs.unfinished("bench", loaded, sources, chosen, what | {"batch": size}) for size in sizes}
    if throughput:
        _throughput(loaded, chosen, settings, sizes[0], said, prompts, out, left[sizes[0]])
        return
    reports: list[dict[str, Any]] = []
    for size, unfinished in left.items():
        title = "bench: prompts" if len(sizes) == 1 else f"bench: {size} at once: prompts"
        progress = Progress(title, max(0, len(chosen) - size * len(unfinished.done)))
        try:
            report = measure.bench(
                loaded,
                methods,
                chosen,
                settings,
                batch_size=size,
                lookup=bool(drafts),
                assistant=assistant,
                economies=economies,
                command=said,
                on_progress=progress.add,
                unfinished=unfinished,
            )
        except HeadwayError:
            if reports:  # of smaller batches
                _keep_reports(reports, out, plot)
            raise
        count, ended = report["prompts"]["count"], "interrupted after " if report["prompts"]["interrupted"] else ""
        progress.close(f"bench: {ended}{count} prompts, {progress.tokens} tokens in {progress.elapsed:.0f} s")
        report["prompts"]["files"] = prompts
        measure.print_report(report)
        reports.append(report)
        if report["prompts"]["interrupted"]:
            break
    _keep_reports(reports, out, plot)
    if reports[-1]["prompts"]["interrupted"]:
        raise Interrupted("interrupted: what is measured is kept; the same command measures the others")
    for unfinished in left.values():
        unfinished.finish()


def _check_bench(
    tree: str | None,
    head: list[str] | None,
    drafts: list[tuple[str, str]],
    sizes: list[int],
    throughput: bool,
    plot: bool,
    out: Path | None,
) -> None:
    """Raise HeadwayError for options of `headway bench` that contradict one another."""
    if tree not in (None, "auto") and not head:
        raise HeadwayError(f"--tree {tree} has no head to grow it; give --head")
    if plot and out is None:
        raise HeadwayError("--plot draws beside the report; give --out report.json")
    if throughput and (head or plot or drafts or len(sizes) > 1):
        raise HeadwayError(
            "--throughput measures the target alone, at one --batch, and draws nothing; leave out --head, --draft and --plot"
        )
    if any(kind == "hybrid" for kind, _ in drafts) and not head:
        raise HeadwayError("--draft hybrid asks a head where nothing is found; give --head")


def _keep_reports(reports: list[dict[str, Any]], out: Path | None, plot: bool) -> None:
    """Write one report, or those of several batch sizes; draw them."""
    from headway.inference import bench as measure

    if len(reports) > 1:
        measure.print_crossover(reports)
    if out is None:
        return
    measure.save_report(reports[0] if len(reports) == 1 else {"format": measure.FORMAT, "batches": reports}, out)
    print(f"headway: wrote {out}", file=sys.stderr)
    if plot:
        picture = out.with_suffix(".png")
        if len(reports) == 1:
            measure.save_plot(reports[0], picture)
        else:
            measure.save_crossover(reports, picture)
        print(f"headway: wrote {picture}", file=sys.stderr)


def _throughput(
    target: Any,
    chosen: list[Any],
    settings: Settings,
    batch: int,
    said: str,
    files: list[str],
    out: Path | None,
    unfinished: Any,
) -> None:
    """Measure the target alone over the whole set."""
    from headway.data.progress import Progress
    from headway.inference import bench as measure

    progress = Progress("bench: answers", 2 * len(chosen))
    with unfinished.interruptible():
        report = measure.throughput(
            target,
            chosen,
            settings,
            batch_size=batch,
            command=said,
            on_progress=progress.add,
            unfinished=unfinished,
        )
    progress.close(f"bench: {progress.tokens} tokens in {progress.elapsed:.0f} s")
    report["prompts"]["files"] = files
    measure.print_throughput(report)
    if out is not None:
        measure.save_report(report, out)
        print(f"headway: wrote {out}", file=sys.stderr)
    unfinished.finish()


@command("eval")
def eval_command(
    target: TargetOption,
    head: Annotated[str, typer.Option(help="Head folder, run folder or hub id (user/name@revision).")],
    prompts: PromptsOption,
    limit: LimitOption = None,
    held_out: HeldOutOption = 0.0,
    max_new_tokens: NewTokensOption = 128,
    batch: BatchOption = 1,
    tree: TreeOption = None,
    out: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
    chat_template: TemplateOption = None,
    other_target: OtherOption = False,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "auto",
    compile: CompileOption = False,
    revision: RevisionOption = None,
    target_adapter: AdapterOption = None,
    merge_adapter: MergeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure a head's accepted length, by category, on greedy answers of the decoder itself."""
    from headway import inputs
    from headway.data.chat import use_template
    from headway.heads.common.checkpoint import load_head
    from headway.inference.bench import compiling
    from headway.inference.drafter import HeadDrafter, default_policy
    from headway.inference.sampling import Settings
    from headway.inference.target import load_info, load_tokenizer
    from headway.inference.tree import ByRows

    inputs.quiet()
    carried = inputs.carried(target_adapter, merge_adapter)
    dtype, device, policy = inputs.check_dtype(dtype), inputs.check_device(device), inputs.parse_tree(tree)
    Settings(max_new_tokens=max_new_tokens)
    if out is not None:
        inputs.check_file(out)
    tokenizer, info = (
        load_tokenizer(target, revision=revision),
        load_info(target, revision=revision, adapter=target_adapter),
    )
    use_template(tokenizer, chat_template)
    chosen = inputs.bench_prompts(prompts, tokenizer, info, limit, held_out)
    source = inputs.head_source(head)
    inputs.check_head(source, info, other_target)
    loaded = inputs.load_target(target, dtype, device, revision, tokenizer, rows=batch, compile=compile, **carried)
    loaded_head = load_head(source, loaded, other_target=other_target)
    policy = policy or inputs.saved_tree(source, loaded) or default_policy(loaded_head)
    if isinstance(policy, ByRows):
        policy = policy.of(1)  # accepted lengths do not depend on how many prompts are answered at once
    policy = HeadDrafter(loaded_head, policy).fit(loaded).policy
    what = {"max_new_tokens": max_new_tokens, "batch": batch, "tree": policy.describe()}
    unfinished = inputs.unfinished("eval", loaded, [source], chosen, what)
    with unfinished.interruptible():
        rows = _accepted_lengths(loaded, loaded_head, policy, chosen, max_new_tokens, batch, unfinished)
    report = {
        "target": target,
        "head": source,
        "dtype": loaded.dtype_name,
        "tree": policy.describe(),
        "rows": rows,
        **compiling(loaded),
    }
    if out is not None:
        from headway.inference.bench import save_report

        save_report(report, out)
    if as_json:
        print(json.dumps(report, ensure_ascii=False))
    else:
        _show_rows(f"{source} on {target}, {policy.describe()}", rows)
    unfinished.finish()


def _accepted_lengths(
    target: Any, head: Any, policy: Any, prompts: list[Any], max_new_tokens: int, batch: int, unfinished: Any
) -> list[dict]:
    """Return a row per category and one of all."""
    from headway.data.progress import Progress
    from headway.train.evaluate import evaluate_accepted_length

    progress = Progress("eval: prompts", len(prompts) - len(unfinished.done))
    rows = []
    for category in sorted({category for _, category, _ in prompts}):
        ids = [prompt for _, its, prompt in prompts if its == category]

        def answered() -> bool:
            progress.add(items=1)
            return False

        row = evaluate_accepted_length(
            target,
            head,
            policy,
            ids,
            max_new_tokens=max_new_tokens,
            batch_size=batch,
            stop=answered,
            unfinished=unfinished,
            part=f"{category} ",
        )
        rows.append({"category": category, **row})
    progress.close(f"eval: {len(prompts)} prompts in {progress.elapsed:.0f} s")
    total = {key: sum(row[key] for row in rows) for key in ("tokens", "rounds", "prompts")}
    length = total["tokens"] / total["rounds"] if total["rounds"] else 1.0
    return [*rows, {"category": "all", "accepted_length": length, **total}]


def _show_rows(title: str, rows: list[dict]) -> None:
    from rich.table import Table

    from headway.inference.whole_table import print_table

    table = Table(title=title)
    table.add_column("category")
    for heading in ("prompts", "accepted length", "tokens", "rounds"):
        table.add_column(heading, justify="right")
    for row in rows:
        length = f"{row['accepted_length']:.2f}"
        table.add_row(row["category"], str(row["prompts"]), length, str(row["tokens"]), str(row["rounds"]))
    print_table(table)


@command("distill")
def distill_command(
    context: typer.Context,
    target: TargetOption,
    prompts: MixOption,
    out: Annotated[Path, typer.Option(help="Folder for the dialogs; one begun alike is continued.")],
    split: Annotated[str, typer.Option(help="Of a hub dataset.")] = "train",
    limit: LimitOption = None,
    dedupe: DedupeOption = False,
    hold_out: HoldOutOption = 0.0,
    max_new_tokens: NewTokensOption = 512,
    temperature: TemperatureOption = 0.0,
    temperature_mix: Annotated[
        str | None, typer.Option(help="Temperatures with weights, as 0.6:0.3,1.0:0.7; a row's id chooses its own.")
    ] = None,
    top_p: TopPOption = 1.0,
    top_k: TopKOption = 0,
    min_p: MinPOption = 0.0,
    seed: SeedOption = 0,
    history: Annotated[
        str, typer.Option(help="What stands before a later turn: the target's own answers, or those given in the row.")
    ] = "own",
    batch_size: Annotated[int, typer.Option(min=1, help="Answers under way at once in the local engine.")] = 8,
    max_tokens_total: Annotated[int | None, typer.Option(min=1, help="Begin no answer beyond so many tokens.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Begin no answer after so long.")] = None,
    record: Annotated[
        bool, typer.Option("--record", help="Keep the features too, so that training need not compute them.")
    ] = False,
    server: Annotated[
        list[str] | None,
        typer.Option(
            help="OpenAI-compatible server of the target (vLLM, SGLang), in place of the local engine; repeat it."
        ),
    ] = None,
    served_model: Annotated[str | None, typer.Option(help="The target's name on the servers.")] = None,
    api: Annotated[
        str, typer.Option(help="chat: servers render the template; completions: they are sent token ids.")
    ] = "chat",
    concurrency: Annotated[int, typer.Option(min=1, help="Requests under way at once, on each server.")] = 32,
    timeout: Annotated[float, typer.Option(help="Seconds that a server may take for an answer.")] = 600.0,
    request: Annotated[
        str | None, typer.Option(help="JSON object of more fields of each request, such as chat_template_kwargs.")
    ] = None,
    api_key_env: Annotated[
        str | None, typer.Option(help="Environment variable that holds the servers' key; else HEADWAY_API_KEY.")
    ] = None,
    chat_template: TemplateOption = None,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "auto",
    revision: RevisionOption = None,
    target_adapter: AdapterOption = None,
    merge_adapter: MergeOption = False,
) -> None:
    """Have the target answer prompts, here or on servers; its token ids are what a head learns."""
    from headway import inputs
    from headway.data.chat import use_template
    from headway.data.distill import distill
    from headway.data.prompts import read_rows
    from headway.data.recorded import usual_taps
    from headway.data.served import distill_served
    from headway.data.turns import TemperatureMix, check_history
    from headway.inference.sampling import Settings
    from headway.inference.target import load_end_ids, load_info, load_tokenizer

    inputs.quiet()
    inputs.check_distill(_given(context), bool(server))
    carried = inputs.carried(target_adapter, merge_adapter)
    dtype, device, seconds = inputs.check_dtype(dtype), inputs.check_device(device), inputs.check_minutes(minutes)
    settings = Settings(
        max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed
    )
    servers = inputs.servers(server or [], served_model, api, concurrency, timeout, request, api_key_env)
    common: dict[str, Any] = {
        "settings": settings,
        "history": check_history(history),
        "mix": None if temperature_mix is None else TemperatureMix.parse(temperature_mix),
        "source": ", ".join(prompts),
        "max_tokens_total": max_tokens_total,
        "seconds": seconds,
    }
    inputs.check_folder(out)
    rows, report = read_rows(
        prompts,
        split=split,
        limit=limit,
        tools=True,
        dedupe=dedupe,
        keeps_answers=history == "given",
        held_out=hold_out,
    )
    print(report, file=sys.stderr)
    tokenizer = load_tokenizer(target, revision=revision)
    use_template(tokenizer, chat_template)
    if servers is not None:
        info, ends = (
            load_info(target, revision=revision, adapter=target_adapter),
            load_end_ids(target, tokenizer, revision=revision),
        )
        done = distill_served(tokenizer, info, rows, out, servers=servers, end_ids=ends, **common)
        raise typer.Exit(1 if done.left_open else 0)
    loaded = inputs.load_target(target, dtype, device, revision, tokenizer, rows=batch_size, **carried)
    distill(loaded, rows, out, batch_size=batch_size, record=usual_taps(loaded.info) if record else (), **common)


def _given(context: typer.Context) -> list[str]:
    """Return the names of the parameters that stand on the command line, whatever their values."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]


@command("prompts")
def prompts_command(
    target: TargetOption,
    count: Annotated[int, typer.Option(min=1, help="Prompts wanted.")],
    out: Annotated[Path, typer.Option(help="File for the prompts; one begun alike is continued.")],
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", help="Most tokens of a prompt.")] = 160,
    temperature: TemperatureOption = 1.0,
    top_p: TopPOption = 0.95,
    top_k: TopKOption = 0,
    min_p: MinPOption = 0.0,
    seed: SeedOption = 0,
    opener: Annotated[
        list[str] | None,
        typer.Option(
            help="Words that prompts begin with, taken in turn; may be given again. An empty one leaves it free."
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts under way at once.")] = 8,
    minutes: Annotated[float | None, typer.Option(help="Begin no prompt after so long.")] = None,
    chat_template: TemplateOption = None,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "auto",
    revision: RevisionOption = None,
    target_adapter: AdapterOption = None,
    merge_adapter: MergeOption = False,
) -> None:
    """Have the target write prompts of its own, from its chat template up to where a user's words begin."""
    from headway import inputs
    from headway.data.chat import use_template
    from headway.data.magpie import write_prompts
    from headway.inference.sampling import Settings
    from headway.inference.target import load_tokenizer

    inputs.quiet()
    carried = inputs.carried(target_adapter, merge_adapter)
    dtype, device, seconds = inputs.check_dtype(dtype), inputs.check_device(device), inputs.check_minutes(minutes)
    settings = Settings(
        max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed
    )
    if settings.greedy:
        raise HeadwayError("--temperature 0 would write the same prompt again and again; give more than 0")
    inputs.check_file(out)
    tokenizer = load_tokenizer(target, revision=revision)
    use_template(tokenizer, chat_template)
    loaded = inputs.load_target(target, dtype, device, revision, tokenizer, rows=batch_size, **carried)
    openers = tuple(opener or ("",))
    write_prompts(loaded, out, count, settings=settings, openers=openers, batch_size=batch_size, seconds=seconds)


@command("convert")
def convert_command(
    target: TargetOption,
    prompts: MixOption,
    out: Annotated[Path, typer.Option(help="Folder for the dialogs; one begun alike is continued.")],
    split: Annotated[str, typer.Option(help="Of a hub dataset, or of a folder.")] = "train",
    limit: LimitOption = None,
    dedupe: DedupeOption = False,
    hold_out: HoldOutOption = 0.0,
    max_length: Annotated[
        int | None, typer.Option(min=2, help="Cut dialogs to so many tokens; cuts are counted.")
    ] = None,
    chat_template: TemplateOption = None,
    revision: RevisionOption = None,
) -> None:
    """Make dialogs of conversations that hold their answers already; nothing is generated, no weights are read."""
    from headway import inputs
    from headway.data.chat import use_template
    from headway.data.convert import convert
    from headway.data.progress import Progress
    from headway.data.prompts import Intake
    from headway.inference.target import load_info, load_tokenizer

    inputs.quiet()
    inputs.check_folder(out)
    rows = Intake(prompts, split=split, limit=limit, answers=True, dedupe=dedupe, held_out=hold_out)
    tokenizer, info = load_tokenizer(target, revision=revision), load_info(target, revision=revision)
    if chat_template is not None:
        use_template(tokenizer, chat_template)
    progress = Progress("convert: rows", None)
    counts = convert(
        tokenizer,
        rows,
        out,
        target=info,
        max_length=max_length,
        on_row=lambda tokens: progress.add(items=1, tokens=tokens),
    )
    progress.close(str(rows.report))
    print(f"{out}: {', '.join(f'{count} {what}' for what, count in counts.items() if count)}", file=sys.stderr)


@command("inspect", of=data_app)
def inspect_command(
    source: Annotated[list[str], typer.Argument(help="A dialogs folder, or rows that `headway convert` takes.")],
    target: Annotated[
        str | None, typer.Option("--target", "-t", help="Whose tokenizer; of a dialogs folder, what its manifest says.")
    ] = None,
    show: Annotated[int, typer.Option("--show", "-n", min=0, help="Dialogs to print; all are counted.")] = 3,
    row: Annotated[str | None, typer.Option(help="Print only the dialog of this id.")] = None,
    split: Annotated[str, typer.Option(help="Of a hub dataset, or of a folder.")] = "train",
    limit: LimitOption = None,
    dedupe: DedupeOption = False,
    hold_out: HoldOutOption = 0.0,
    max_length: Annotated[int | None, typer.Option(min=2, help="Cut dialogs to so many tokens.")] = None,
    chat_template: TemplateOption = None,
    revision: RevisionOption = None,
) -> None:
    """Print dialogs with what is supervised in colour (between {+ and +} in a file), and count all of them."""
    from headway import inputs
    from headway.data.inspect import inspect
    from headway.data.prompts import Intake

    inputs.quiet()
    rows = Intake(source, split=split, limit=limit, answers=True, dedupe=dedupe, held_out=hold_out)
    inspect(
        rows,
        target=target,
        show_rows=show,
        only=row,
        max_length=max_length,
        chat_template=chat_template,
        revision=revision,
    )


@command("tune")
def tune_command(
    target: TargetOption,
    head: Annotated[str, typer.Option(help="Head folder or run folder; the tree is kept in it.")],
    prompts: PromptsOption,
    limit: Annotated[int, typer.Option(min=1, help="Use the first N rows of each prompts file.")] = 12,
    held_out: HeldOutOption = 0.0,
    max_new_tokens: NewTokensOption = 64,
    minutes: Annotated[float | None, typer.Option(help="Begin no calibration answer after so long.")] = None,
    chat_template: TemplateOption = None,
    other_target: OtherOption = False,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "auto",
    compile: CompileOption = False,
    revision: RevisionOption = None,
    target_adapter: AdapterOption = None,
    merge_adapter: MergeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure this machine, and choose the tree that makes a head fastest on it; `--tree auto` uses it from then on."""
    from headway import inputs
    from headway.data.chat import use_template
    from headway.data.progress import Progress
    from headway.heads.common.checkpoint import load_head
    from headway.heads.common.hub import run_head
    from headway.inference.bench import compiling
    from headway.inference.sampling import Settings
    from headway.inference.target import load_info, load_tokenizer
    from headway.inference.tune import place_of, read_policies, save_policy, tune

    inputs.quiet()
    carried = inputs.carried(target_adapter, merge_adapter)
    dtype, device, seconds = inputs.check_dtype(dtype), inputs.check_device(device), inputs.check_minutes(minutes)
    Settings(max_new_tokens=max_new_tokens)
    source = run_head(head)
    read_policies(source)
    if not Path(source).is_dir():
        raise HeadwayError(
            f"no folder {head!r}; the tree is kept beside the head, give a local one (`headway pull` makes one)"
        )
    tokenizer, info = (
        load_tokenizer(target, revision=revision),
        load_info(target, revision=revision, adapter=target_adapter),
    )
    use_template(tokenizer, chat_template)
    inputs.check_head(source, info, other_target)
    chosen = inputs.bench_prompts(prompts, tokenizer, info, limit, held_out)
    loaded = inputs.load_target(target, dtype, device, revision, tokenizer, compile=compile, **carried)
    unfinished = inputs.unfinished("tune", loaded, [source], chosen, {"max_new_tokens": max_new_tokens})
    progress = Progress("tune: answers", len(chosen) - len(unfinished.done), seconds=seconds)
    tuned_head = load_head(source, loaded, other_target=other_target)
    with unfinished.interruptible():
        report = tune(
            loaded,
            tuned_head,
            [ids for _, _, ids in chosen],
            max_new_tokens=max_new_tokens,
            seconds=seconds,
            on_progress=progress.add,
            unfinished=unfinished,
        )
    report |= compiling(loaded)
    save_policy(source, loaded, report)
    unfinished.finish()
    progress.close(f"tune: {report['policy']} kept in {Path(source) / 'tree.json'} for {place_of(loaded)}")
    if as_json:
        print(json.dumps(report, ensure_ascii=False))
    else:
        _show_tuning(report)


@command("audit")
def audit_command(
    target: TargetOption,
    head: Annotated[str, typer.Option(help="Head folder, run folder or hub id (user/name@revision).")],
    prompts: PromptsOption,
    limit: Annotated[int, typer.Option(min=1, help="Use the first N rows of each prompts file.")] = 4,
    max_new_tokens: NewTokensOption = 48,
    batch: BatchOption = 1,
    draws: Annotated[int, typer.Option(min=1, help="Tokens drawn in each context whose distribution is tested.")] = 512,
    tree: TreeOption = None,
    temperature: Annotated[
        float, typer.Option(help="Of the sampled answers; greedy ones are checked all the same.")
    ] = 1,
    seed: SeedOption = 0,
    out: Annotated[Path | None, typer.Option(help="JSON report to write.")] = None,
    chat_template: TemplateOption = None,
    other_target: OtherOption = False,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "auto",
    revision: RevisionOption = None,
    target_adapter: AdapterOption = None,
    merge_adapter: MergeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Check that a head leaves the target's answers as they are: greedy, seeded, in distribution; exit code 1 if not."""
    from headway import inputs
    from headway.data.chat import use_template
    from headway.data.progress import Progress
    from headway.heads.common.checkpoint import load_head
    from headway.inference.audit import audit, check_asked, print_report, steps
    from headway.inference.bench import save_report
    from headway.inference.sampling import Settings
    from headway.inference.target import load_info, load_tokenizer

    inputs.quiet()
    carried = inputs.carried(target_adapter, merge_adapter)
    dtype, device, policy = inputs.check_dtype(dtype), inputs.check_device(device), inputs.parse_tree(tree)
    Settings(max_new_tokens=max_new_tokens, temperature=temperature)
    check_asked(policy, temperature)
    source = inputs.head_source(head)
    if out is not None:
        inputs.check_file(out)
    tokenizer, info = (
        load_tokenizer(target, revision=revision),
        load_info(target, revision=revision, adapter=target_adapter),
    )
    use_template(tokenizer, chat_template)
    inputs.check_head(source, info, other_target)
    chosen = inputs.bench_prompts(prompts, tokenizer, info, limit)
    loaded = inputs.load_target(target, dtype, device, revision, tokenizer, rows=batch, **carried)
    progress = Progress("audit: steps", steps(len(chosen), draws))
    report = audit(
        loaded,
        load_head(source, loaded, other_target=other_target),
        policy if policy is not None else inputs.saved_tree(source, loaded),
        chosen,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        batch_size=batch,
        draws=draws,
        seed=seed,
        command=shlex.join(["headway", *sys.argv[1:]]),
        on_progress=progress.add,
    )
    report["head"], report["prompts"]["files"] = source, prompts
    progress.close(f"audit: {len(chosen)} prompts, {progress.tokens} tokens in {progress.elapsed:.0f} s")
    if as_json:
        print(json.dumps(report, ensure_ascii=False))
    else:
        print_report(report)
    if out is not None:
        save_report(report, out)
        print(f"headway: wrote {out}", file=sys.stderr)
    if not report["exact"]:
        raise typer.Exit(1)


def _show_tuning(report: dict[str, Any]) -> None:
    from rich.box import SIMPLE
    from rich.table import Table

    from headway.inference.whole_table import print_table

    if "candidates" not in report:
        print(f"{report['policy']}: {report['reason']}")
        return
    costs = Table(box=SIMPLE, padding=(0, 0, 0, 1), title="milliseconds of a target pass, by tokens in it")
    for tokens in report["verify_ms"]:
        costs.add_column(str(tokens), justify="right")
    costs.add_row(*(f"{ms:.0f}" for ms in report["verify_ms"].values()))
    best = Table(box=SIMPLE, padding=(0, 0, 0, 1), title="expected of the best trees")
    for title in ("tree", "accepted", "round ms", "x plain"):
        best.add_column(title, justify="left" if title == "tree" else "right", no_wrap=True)
    for row in report["candidates"][:6]:
        ratio = row["tokens_per_ms"] * report["plain_ms"]
        best.add_row(row["policy"], f"{row['accepted_length']:.2f}", f"{row['round_ms']:.1f}", f"{ratio:.2f}")
    together = Table(box=SIMPLE, padding=(0, 0, 0, 1), title="the fastest tree by the answers made at once")
    for title in ("at once", "tree", "accepted", "x plain"):
        together.add_column(title, justify="left" if title == "tree" else "right", no_wrap=True)
    for count, found in {"1": report, **report["rows"]}.items():
        expected = (f"{found[f'expected_{key}']:.2f}" for key in ("accepted_length", "ratio_vs_plain"))
        together.add_row(count, found["policy"], *expected)
    for table in (costs, best, together):
        print_table(table)


@command("train", context_settings={"ignore_unknown_options": True})
def train_command(
    recipe: Annotated[str, typer.Argument(help="YAML file, such as those in recipes/.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[key=value]...", help="Keys of the recipe.")] = None,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Say what the run would take, from the target's config alone, and end.")
    ] = False,
    rows: Annotated[int | None, typer.Option(help="For --estimate without dialogs: how many.")] = None,
    mean_tokens: Annotated[int | None, typer.Option(help="And of how many tokens.")] = None,
    on: Annotated[str | None, typer.Option(help="For --estimate: not this machine, but H100, 8xA100, ...")] = None,
    as_json: JsonOption = False,
) -> None:
    """Train the head that a recipe describes, or continue its run; as `accelerate launch train/train_heads.py` does."""
    from headway.train.config import load_recipe
    from headway.train.train_heads import main as train

    load_recipe(recipe, overrides or [])
    from headway import inputs

    inputs.quiet()
    options = {"--rows": rows, "--mean-tokens": mean_tokens, "--on": on, "--json": "" if as_json else None}
    given = [part for name, value in options.items() if value is not None for part in (name, str(value)) if part]
    if given and not estimate:
        raise HeadwayError(f"{given[0]} is for --estimate; add that, or leave it out")
    raise typer.Exit(train([recipe, *(overrides or []), *(["--estimate", *given] if estimate else [])]))


@command("report")
def report_command(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Run folders; several are overlaid.")],
    out: Annotated[Path | None, typer.Option(help="HTML file to write; of one run report.html in its folder.")] = None,
    by: Annotated[str, typer.Option(help="What the curves run along: steps, tokens or minutes.")] = "steps",
) -> None:
    """Make one HTML page of a run, finished or not: curves, figures, recipe, origin; nothing is loaded from elsewhere."""
    from headway.train.report import report

    print(f"headway: wrote {report(runs, out, by)}", file=sys.stderr)


@command("capture")
def capture_command(
    target: TargetOption,
    dialogs: Annotated[Path, typer.Argument(help="Folder written by `headway distill` or `headway convert`.")],
    taps: Annotated[
        str | None, typer.Option(help="Layers, such as 1,14,26,last; not given, those that every family reads.")
    ] = None,
    store: Annotated[str, typer.Option(help="bfloat16, or int8: about half the room.")] = "bfloat16",
    out: Annotated[
        Path | None, typer.Option(help="Folder; not given, beside the dialogs, where training looks.")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read what is there, and make anew what is damaged.")
    ] = False,
    estimate: Annotated[bool, typer.Option("--estimate", help="Say what it would take, and end.")] = False,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "auto",
    revision: RevisionOption = None,
    target_adapter: AdapterOption = None,
    merge_adapter: MergeOption = False,
) -> None:
    """Keep the target's features of dialogs in shards, for runs to read; run again it continues."""
    from headway import inputs
    from headway.data.capture import capture, check_request, spell_estimate
    from headway.inference.target import load_info, load_tokenizer

    inputs.quiet()
    carried = inputs.carried(target_adapter, merge_adapter)
    dtype, device = inputs.check_dtype(dtype), inputs.check_device(device)
    info = load_info(target, revision=revision, adapter=target_adapter)
    chosen, kind = check_request(info, taps, store)
    if out is not None:
        inputs.check_folder(out)
    if estimate:
        print(spell_estimate(info, dialogs, chosen, kind, out))
        return
    tokenizer = load_tokenizer(target, revision=revision)
    capture(
        inputs.load_target(target, dtype, device, revision, tokenizer, **carried),
        dialogs,
        chosen,
        out=out,
        store=kind,
        verify=verify,
    )


@command("push")
def push_command(
    run: Annotated[str, typer.Argument(help="Head folder, or run folder of `headway train`.")],
    repo: Annotated[str, typer.Argument(help="user/name on the hub.")],
    private: Annotated[bool, typer.Option("--private", help="Create it private.")] = False,
) -> None:
    """Upload a head to the hub, with a card that says what it is; run again after a failure it sends what is missing."""
    from headway import inputs
    from headway.hub import push_to_hub

    inputs.quiet()
    pushed = push_to_hub(run, repo, private=private)
    done = "uploaded" if pushed.uploaded else "the hub has all of it already:"
    print(f"headway: {done} {', '.join(pushed.files)}, commit {pushed.commit}", file=sys.stderr)
    print(pushed.address)


@command("pull")
def pull_command(
    head: Annotated[str, typer.Argument(help="user/name on the hub, or user/name@revision.")],
    out: Annotated[Path, typer.Option(help="Folder for the head.")],
) -> None:
    """Download a head from the hub to a folder, whole or not at all."""
    from headway import inputs
    from headway.hub import pull_from_hub

    inputs.quiet()
    print(pull_from_hub(head, out))


LAYOUT_HELP = "vllm, sglang, speculators, eagle, medusa or tgi"


@command("export")
def export_command(
    head: Annotated[str, typer.Argument(help="Head folder, run folder or hub id (user/name@revision).")],
    to: Annotated[str, typer.Option("--to", help=f"Layout: {LAYOUT_HELP}.")],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    target: Annotated[
        str | None, typer.Option("--target", "-t", help="What the target is called in the export; else as in the head.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16 for the weights; else the head's.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Prove it as `headway check` does; exit code 1 if it fails.")
    ] = False,
    revision: RevisionOption = None,
    target_adapter: AdapterOption = None,
    device: DeviceOption = "auto",
) -> None:
    """Write a head as another engine reads it, and print the command that serves it."""
    from headway.foreign_commands import export_head

    export_head(head, to, out, target, dtype, check, revision, device, target_adapter)


@command("import")
def import_command(
    folder: Annotated[Path, typer.Argument(help="Folder of config.json and .safetensors, .bin or .pt.")],
    target: TargetOption,
    out: Annotated[Path, typer.Option(help="Head folder to write.")],
    layout: Annotated[str | None, typer.Option("--from", help=f"Layout, where it is not clear: {LAYOUT_HELP}.")] = None,
    revision: RevisionOption = None,
    target_adapter: AdapterOption = None,
    device: DeviceOption = "auto",
) -> None:
    """Make a head of one that another program trained or serves: EAGLE, EAGLE-3, P-EAGLE and Medusa."""
    from headway.foreign_commands import import_head

    import_head(folder, target, out, layout, revision, device, target_adapter)


@command("check")
def check_command(
    folder: Annotated[Path, typer.Argument(help="Folder that an engine is to read.")],
    target: TargetOption,
    head: Annotated[str | None, typer.Option(help="The head that was exported: folder, run folder or hub id.")] = None,
    layout: Annotated[str | None, typer.Option("--as", help=f"Layout, where it is not clear: {LAYOUT_HELP}.")] = None,
    prompts: Annotated[
        list[str] | None, typer.Option("--prompts", "-p", help="A file of prompts; else four that come with it.")
    ] = None,
    limit: LimitOption = None,
    max_new_tokens: NewTokensOption = 48,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "auto",
    revision: RevisionOption = None,
    target_adapter: AdapterOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read a folder as its engine would and compare logits and accepted length with the head; exit code 1 if they differ."""
    from headway.foreign_commands import check_folder

    check_folder(
        folder,
        target,
        head,
        layout,
        prompts or [],
        limit,
        max_new_tokens,
        dtype,
        device,
        revision,
        as_json,
        target_adapter,
    )


@command("info")
def info_command(
    what: Annotated[str, typer.Argument(help="A head (folder, run folder, hub id) or a target.")],
    head: Annotated[str | None, typer.Option(help="Say whether this head fits the target.")] = None,
    revision: RevisionOption = None,
    target_adapter: AdapterOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what a head or a target is, and whether they fit; exit code 2 when they do not."""
    from headway import inputs
    from headway.describe import describe_head, describe_target, is_head
    from headway.heads.common.hub import run_head

    inputs.quiet()
    source = run_head(what)
    if is_head(source):
        if head is not None:
            raise HeadwayError(
                f"{what} is a head itself; give a target to compare it with: headway info TARGET --head H"
            )
        facts, reason = {"head": describe_head(source)}, ""
    else:
        facts, reason = describe_target(
            what, None if head is None else inputs.head_source(head), revision, target_adapter
        )
    if as_json:
        print(json.dumps(facts, ensure_ascii=False))
    else:
        for kind, values in facts.items():
            print(kind if isinstance(values, dict) else f"{kind}: {values}")
            for name, value in values.items() if isinstance(values, dict) else ():
                print(f"  {name:<16} {value if not isinstance(value, dict) else json.dumps(value)}")
    if reason:
        raise HeadwayError(reason)


@command("demo")
def demo_command(
    minutes: Annotated[float, typer.Option(help="Budget of the whole run; more trains better heads.")] = 25,
    out: Annotated[Path, typer.Option(help="Folder for all it makes; one begun is continued.")] = Path("runs/demo"),
) -> None:
    """Get a small model, write prompts, distil, train two heads, measure them: everything, once."""
    from headway import inputs
    from headway.train.demo import main as demo

    inputs.check_minutes(minutes)
    inputs.check_folder(out)
    inputs.quiet()
    try:
        demo(minutes, out)
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted: what is made is safe in {out}; the same command continues") from None
