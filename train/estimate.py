"""What a run will take, before it starts: time, memory and disk, from the config of the target and the recipe alone.

No weight is read. The head is laid out without its weights and one training step is followed through it, which counts its
operations and the memory it needs at once; the target's pass is counted from its config. Everything here is computed, not
measured, and said so. Letters: B rows, T positions, F tap width, D hidden.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from headway.data.capture import free_disk
from headway.data.dialogs import read_dialogs
from headway.data.manifest import read_json
from headway.data.recorded import FOLDER
from headway.data.shards import STORES, feature_bytes
from headway.heads.common.errors import HeadwayError
from headway.heads.common.protocol import Batch, Head, find_family
from headway.inference.packed import SHARE as PACKED_SHARE
from headway.inference.sizes import Sizes, empty_frozen, read_sizes
from headway.inference.target import DTYPES, fast_dtype
from headway.train.batches import make_batches, make_rows
from headway.train.config import TrainConfig, load_recipe
from headway.train.features import FIGURE_BYTES, choose_cache, free_memory
from headway.train.lora import add_lora, head_fields
from headway.train.optimizers import is_hidden_matrix
from headway.train.run_folder import KEEP
from headway.train.schedule import steps_by_count

GPUS = {
    "A100": (312, 80), "A100-40G": (312, 40), "A10": (125, 24), "B200": (2250, 180), "H100": (989, 80), "H200": (989, 141),
    "L4": (121, 24), "L40S": (362, 48), "MI300X": (1307, 192), "RTX3090": (71, 24), "RTX4090": (165, 24), "V100": (125, 32),
}  # fmt: skip
"""The makers' figures: dense tensor operations in 16 bits with sums in 32, 10^12 a second, and GB of memory.

Checked, where data sheets quote a figure with sparsity against half of it:
A100: NVIDIA data sheet nvidia-a100-datasheet-us-nvidia-1758950-r4, as tabled on glennklockwood.com/garden/processors/A100.
H100, H200 (SXM; a PCIe card is slower), B200 (HGX at 1000 W): the same site's pages H100 and B200, of NVIDIA's white papers and
data sheets. B200 has 180 GB of its 192 in DGX and HGX systems, as emergentmind.com/topics/amd-mi300x-gpu quotes.
L40S: 362.05 | 733 with sparsity, in NVIDIA's table on mullet.se/product.html?product_id=355414. L4: 242 with sparsity,
grokipedia.com/page/NVIDIA_L4_vs_L40S. MI300X: 1307.4, the specifications in github.com/alpharomercoma/MI300X-vs-H200.
RTX4090: 165.15, waredb.com/processor/nvidia-geforce-rtx-4090. RTX3090: half of the 142 with sums in 16 bits that
holynerdvana.blogspot.com quotes, the ratio that hmc-tech.com has for the 3090 Ti.
V100 (SXM2): developer.nvidia.com/programming-tensor-cores-cuda-9-0.
Not verified: A10's 125 (its 24 GB are); no sheet with it was at hand.
"""
GPU_SHARE = 0.35
"""Share of the maker's figure that training reaches, taken for all of them. An assumption."""
CPU_SHARE = 0.5
"""Share of the speed of one large product that a step reaches on a CPU. An assumption too."""
STATE_BYTES, ADAM_BYTES = 4, 8
"""Of each trained weight: itself, and its two moments, in float32."""
MUON_BYTES = 4
"""Of each weight that Muon takes: its momentum."""


@dataclass(frozen=True)
class Data:
    """How much text there is; `given` on the command line rather than counted."""

    rows: int
    positions: int
    """Of all rows, padded as they will be."""
    batches: int
    goals: int
    longest: int
    given: bool = False

    @property
    def mean(self) -> float:
        """Positions of a row."""
        return self.positions / self.rows


@dataclass(frozen=True)
class Place:
    """What a run is to run on: `devices` of `flops` a second and `memory` bytes each."""

    name: str
    devices: int
    flops: float
    memory: int
    here: bool
    is_cpu: bool = False


@dataclass(frozen=True)
class Work:
    """What a training step of a head takes."""

    num_weights: int
    """Trained ones."""
    kept_bytes: int
    """Of the weights, the optimizer's state and, with ema, the average: in memory and in a state on disk."""
    flops: float
    """Floating-point operations a position, forward and backward, without the target's pass."""
    peak_bytes: int
    """Memory that a step needs at once, gradients included, weights and optimizer not."""
    followed: bool = True
    """A step was followed through the head; else both are guessed from the number of weights."""


@dataclass
class Estimate:
    """The figures of a run. Bytes, seconds, operations; nothing was measured but the speed of one product on a CPU."""

    target: dict[str, Any]
    head: dict[str, Any]
    data: dict[str, Any]
    place: dict[str, Any]
    features: dict[str, Any]
    memory: dict[str, int]
    disk: dict[str, int]
    time: dict[str, float]
    problems: list[str] = field(default_factory=list)
    """What does not fit, and the remedy."""
    computed: bool = True


def estimate(
    config: TrainConfig, *, rows: int | None = None, mean_tokens: int | None = None, on: str | None = None
) -> Estimate:
    """Return what the recipe's run will take on this machine, or `on` such as 8xH100.

    `rows` of `mean_tokens` stand in for dialogs that are not there yet. Raises HeadwayError for a target whose config
    cannot be read, and where there are neither dialogs nor `rows`.
    """
    if config.joint is not None:
        raise HeadwayError(
            "joint: the gradient through the target is not estimated; leave out joint for the rest (joint=null), and "
            "reckon with two passes of the target and one backward at each step, on top of the activations they keep"
        )
    if rows is None and mean_tokens is not None:
        raise HeadwayError(f"--mean-tokens is {mean_tokens}, of how many rows? give --rows too")
    sizes = read_sizes(config.target, revision=config.revision)
    place = find_place(config, on)
    dtype = _dtype(config, place)
    data = given_data(config, rows, mean_tokens) if rows is not None else count_data(config)
    head = lay_out(config, sizes)
    work = follow(head, sizes, config, data)
    problems: list[str] = []
    features = _price_features(config, sizes, head, data, place, problems)
    steps, time = _price_time(config, sizes, data, place, work, features)
    return Estimate(
        target={
            "name": config.target, "weights": sizes.num_weights, "active": sizes.num_active, "dtype": dtype,
            "layers": sizes.info.num_layers, "hidden_size": sizes.info.hidden_size, "vocab_size": sizes.info.vocab_size,
        },
        head={
            "family": config.family, "weights": work.num_weights, "taps": list(head.config.taps), "followed": work.followed,
        },
        data={**asdict(data), "steps": steps, "trained_positions": round(steps * _step_positions(config, data, place))},
        place={**asdict(place), "free_disk": free_disk(Path(config.out))},
        features=features,
        memory=_price_memory(sizes, place, work, features, DTYPES[dtype].itemsize, problems),
        disk=_price_disk(config, work, features, problems),
        time=time,
        problems=problems,
    )  # fmt: skip


def _step_positions(config: TrainConfig, data: Data, place: Place) -> float:
    """Return the positions of an optimizer step."""
    return config.grad_accum * place.devices * data.positions / data.batches


def _price_features(
    config: TrainConfig, sizes: Sizes, head: Head, data: Data, place: Place, problems: list[str]
) -> dict[str, Any]:
    """Return the bytes of all features in either store, and what becomes of them."""
    taps = 1 if tuple(head.config.taps) == ("last",) else len(head.config.taps) + 1
    size_of: dict[str, Any] = {s: feature_bytes(data.positions, sizes.info.hidden_size, taps, s) for s in STORES}
    size = size_of[config.store] + data.positions * FIGURE_BYTES
    per_step = config.grad_accum * place.devices
    steps = steps_by_count(config, per_step, data.batches)
    repeats = steps is None or steps * per_step > data.batches
    kept: str = config.cache
    try:
        kept, why = choose_cache(config.cache, size, repeats, place.devices, Path(config.out))
    except HeadwayError as error:
        why = str(error)
        problems.append(why)
    captured = _captured(config, head)
    return {**size_of, "store": config.store, "kept": kept, "kept_bytes": size, "captured": captured, "why": why}


def _price_time(
    config: TrainConfig, sizes: Sizes, data: Data, place: Place, work: Work, features: dict[str, Any]
) -> tuple[int, dict[str, float]]:
    """Return the steps, and the seconds of the target's passes and of the head's steps.

    The target's pass and the teacher's figures are computed once where features are kept, else each time.
    """
    rate = place.devices * place.flops
    per_step = _step_positions(config, data, place)
    target_flops = sizes.pass_flops(data.mean / 2) + sizes.logit_flops * data.goals / data.positions
    target_flops = 0.0 if features["captured"] else target_flops
    keeps = features["kept"] in ("memory", "disk")
    target_each, head_each = target_flops * per_step / rate, work.flops * per_step / rate
    num_once = data.positions / per_step if keeps else math.inf  # steps until all features are kept
    steps, budget = steps_by_count(config, config.grad_accum * place.devices, data.batches), config.max_seconds
    if budget is not None:
        bought = budget / (target_each + head_each)
        if bought > num_once:
            bought = num_once + (budget - num_once * (target_each + head_each)) / head_each
        steps = max(1, round(min(bought, math.inf if steps is None else steps)))
    assert steps is not None, "the recipe says an end"
    target_seconds, head_seconds = min(steps, num_once) * target_each, steps * head_each
    return steps, {"target": target_seconds, "head": head_seconds, "together": target_seconds + head_seconds}


def _price_memory(
    sizes: Sizes, place: Place, work: Work, features: dict[str, Any], itemsize: int, problems: list[str]
) -> dict[str, int]:
    """Return the bytes of each device's memory."""
    weights = sizes.num_weights * itemsize
    memory = {"target": weights, "head": work.kept_bytes, "step": work.peak_bytes}
    if itemsize == 2:
        memory["head in 16 bits"] = 2 * work.num_weights
    if place.is_cpu and weights <= PACKED_SHARE * place.memory:
        memory["packed copies"] = weights
    if place.is_cpu and features["kept"] == "memory":
        memory["features"] = features["kept_bytes"]
    memory["together"] = sum(memory.values())
    if memory["together"] > place.memory:
        smaller = "" if itemsize == 2 else "dtype=bfloat16, "
        problems.append(
            f"memory: {gib(memory['together'])} are needed, {gib(place.memory)} are there; {smaller}a smaller "
            "tokens_per_batch or head.draft_vocab_size, or a larger machine"
        )
    return memory


def _price_disk(config: TrainConfig, work: Work, features: dict[str, Any], problems: list[str]) -> dict[str, int]:
    """Return the bytes that the run folder takes at most."""
    disk = {"states": (KEEP + 1) * work.kept_bytes, "head": work.num_weights * STATE_BYTES}
    if features["kept"] == "disk":
        disk["features"] = features["kept_bytes"]
    disk["together"] = sum(disk.values())
    free = free_disk(Path(config.out))
    if disk["together"] > free and not any("disk" in problem for problem in problems):
        problems.append(f"disk: {gb(disk['together'])} are needed, {gb(free)} are free at {config.out} here")
    return disk


def count_data(config: TrainConfig) -> Data:
    """Return how much text the recipe's dialogs hold. Raises HeadwayError where there are none."""
    if not (Path(config.dialogs) / "manifest.json").is_file():
        raise HeadwayError(
            f"{config.dialogs} holds no dialogs yet; give --rows and --mean-tokens for an estimate, or make them with "
            "`headway distill`"
        )
    dialogs = read_dialogs(config.dialogs)
    rows = make_rows(dialogs, config.max_length, config.eval_fraction, config.eval_rows, config.supervise).train
    batches = make_batches(rows, config.tokens_per_batch)
    longest = max(len(row.token_ids) for row in rows)
    positions = sum(len(b) * max(len(row.token_ids) for row in b) for b in batches)
    return Data(len(rows), positions, len(batches), sum(row.num_goals for row in rows), longest)


def given_data(config: TrainConfig, rows: int, mean_tokens: int | None) -> Data:
    """Return that many rows, every token a goal. Raises HeadwayError for numbers that are none."""
    mean = config.max_length if mean_tokens is None else mean_tokens
    if rows < 1 or mean < 3:
        raise HeadwayError(f"--rows is {rows} and --mean-tokens {mean}; give at least 1 and 3")
    batches = max(1, math.ceil(rows * mean / config.tokens_per_batch))
    return Data(rows, rows * mean, batches, rows * mean, max(mean, config.max_length), given=True)


def find_place(config: TrainConfig, on: str | None) -> Place:
    """Return what the run is to run on. Raises HeadwayError for a GPU that is not in the table."""
    if on is not None:
        match = re.fullmatch(r"(?:(\d+)x)?([\w-]+)", on, re.IGNORECASE)
        names = {name.lower(): name for name in GPUS}
        if match is None or match[2].lower() not in names or match[1] == "0":
            raise HeadwayError(f"--on is {on!r}; give one of {', '.join(GPUS)}, or several such as 8xH100")
        name = names[match[2].lower()]
        return _gpus(name, int(match[1] or 1), here=False)
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        found = next((gpu for gpu in sorted(GPUS, key=len, reverse=True) if gpu in name.replace(" ", "")), None)
        if found is None:
            raise HeadwayError(f"nothing is known of {name}; say what comes near it: --on {', '.join(GPUS)}")
        return _gpus(found, torch.cuda.device_count(), here=True)
    dtype = DTYPES.get(config.dtype, torch.float32)
    return Place("this machine's CPU", 1, CPU_SHARE * product_flops(dtype), free_memory(), here=True, is_cpu=True)


def _gpus(name: str, devices: int, *, here: bool) -> Place:
    flops, memory = GPUS[name]
    return Place(f"{devices} x {name}", devices, GPU_SHARE * flops * 1e12, memory * 10**9, here)


def product_flops(dtype: torch.dtype) -> float:
    """Return the operations a second of one large product on this CPU, timed in a fraction of a second."""
    x_MD, weight = torch.randn(512, 1024).to(dtype), torch.randn(4096, 1024).to(dtype)
    best = math.inf
    for _ in range(6):
        begin = perf_counter()
        nn.functional.linear(x_MD, weight)
        best = min(best, perf_counter() - begin)
    return 2 * 512 * 1024 * 4096 / best


def lay_out(config: TrainConfig, sizes: Sizes) -> Head:
    """Return the recipe's head without its weights."""
    config_class, head_class = find_family(config.family)
    with torch.device("meta"):
        head = head_class(config_class.for_target(sizes.info, **head_fields(config)), empty_frozen(sizes.info))
        head = head if config.lora is None else add_lora(head, config.lora)
    head.objective = config.objective()
    return head


def kept_bytes(config: TrainConfig, head: Head) -> int:
    """Return the bytes of a head's trained weights with their optimizer's state and, with ema, their average."""
    each = STATE_BYTES * (2 if config.ema else 1)
    named = [(name, p) for name, p in head.named_parameters() if p.requires_grad]
    of_muon = [p for name, p in named if config.optimizer == "muon" and is_hidden_matrix(name, p)]
    num_weights, num_muon = (sum(p.numel() for p in some) for some in ([p for _, p in named], of_muon))
    return each * num_weights + ADAM_BYTES * (num_weights - num_muon) + MUON_BYTES * num_muon


def follow(head: Head, sizes: Sizes, config: TrainConfig, data: Data) -> Work:
    """Return what a step takes: operations with rows of the mean length, memory with the longest."""
    num_weights = sum(p.numel() for p in head.parameters() if p.requires_grad)
    kept = kept_bytes(config, head)
    mean = max(3, min(round(data.mean), config.max_length))
    rows = max(1, config.tokens_per_batch // mean)
    longest = min(data.longest, config.max_length)
    try:
        flops, _ = follow_step(head, rows, mean, sizes.info.hidden_size)
        _, peak = follow_step(head, max(1, config.tokens_per_batch // longest), longest, sizes.info.hidden_size)
    except (RuntimeError, NotImplementedError):  # a loss that asks tensors for their contents
        # Forward and backward are 6 operations a weight, in each step of a head that runs several.
        return Work(
            num_weights, kept, 6.0 * num_weights * getattr(head.config, "steps", 1), 4 * num_weights, followed=False
        )
    return Work(num_weights, kept, flops / (rows * mean), peak)


def follow_step(head: Head, B: int, T: int, D: int) -> tuple[float, int]:
    """Return the floating-point operations of one step over B rows of T positions, all goals, and its greatest memory."""
    device = next(head.parameters()).device
    # What a step branches on has contents; what it multiplies has none.
    batch = Batch(
        token_BT=torch.zeros(B, T, dtype=torch.long),
        length_B=torch.full((B,), T),
        supervised_BT=torch.ones(B, T, dtype=torch.bool),
        tap_BTF=torch.zeros(B, T, D * len(head.config.taps), device=device),
        last_BTD=torch.zeros(B, T, D, device=device),
        normaliser_BT=torch.zeros(B, T, device=device),
        argmax_BT=torch.zeros(B, T, dtype=torch.long),
    )
    memory = _Memory()
    with FlopCounterMode(display=False) as counter, memory:
        head.loss(batch).loss.backward()
    head.zero_grad(set_to_none=True)
    return counter.get_total_flops(), memory.peak


class _Memory(TorchDispatchMode):
    """Follows what is alive among the tensors made inside the block; one without contents makes others be without."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if any(x.is_meta for x in given):
            if func in (torch.ops.aten.equal.default, torch.ops.aten._local_scalar_dense.default):
                return True  # as good as any answer
            args, kwargs = tree_map_only(Tensor, lambda x: x.to("meta"), (args, kwargs))
        out = func(*args, **(kwargs or {}))
        before = {x.untyped_storage()._cdata for x in given}
        fresh = False
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and (storage := x.untyped_storage())._cdata not in before:
                self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
                fresh = True
        if fresh:
            self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
            self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return out


def require_memory(config: TrainConfig, dtype: str, device: str) -> None:
    """Raise HeadwayError, before any weights are read, when target and head cannot be in the memory of the device.

    Of GGUF and quantised targets, whose weights are of other sizes, nothing is known beforehand.
    """
    if config.target.endswith(".gguf"):
        return
    sizes = read_sizes(config.target, revision=config.revision)
    if sizes.info.text_config.get("quantization_config"):
        return
    weights = sizes.num_weights * DTYPES[dtype].itemsize
    head = lay_out(config, sizes)
    gradients = STATE_BYTES * sum(p.numel() for p in head.parameters() if p.requires_grad)
    head_bytes = kept_bytes(config, head) + gradients
    if config.target_device is not None:
        head_bytes = 0  # it is elsewhere
    free = torch.cuda.mem_get_info(device)[0] if device.startswith("cuda") else free_memory()
    if weights + head_bytes > free:
        raise HeadwayError(
            f"{config.target} takes {gib(weights)} in {dtype}, the head with its optimizer {gib(head_bytes)}, and "
            f"{gib(free)} of memory are free; use dtype=bfloat16, a smaller target, or a larger machine (`--estimate` "
            "says what a run takes)"
        )


def require_disk(config: TrainConfig, head: Head) -> None:
    """Raise HeadwayError when the states of a run cannot be kept where its folder is."""
    size = STATE_BYTES * sum(p.numel() for p in head.parameters() if p.requires_grad)
    need, free = (KEEP + 1) * kept_bytes(config, head) + size, free_disk(Path(config.out))
    if need > free:
        raise HeadwayError(
            f"the states of this run take {gb(need)}, {config.out} has {gb(free)} free; give an out=... on a larger disk"
        )


def _dtype(config: TrainConfig, place: Place) -> str:
    if config.dtype != "auto":
        return config.dtype
    if not place.here or torch.cuda.is_available():
        return "bfloat16"
    return fast_dtype("cpu", config.tokens_per_batch, training=True)


def _captured(config: TrainConfig, head: Head) -> bool:
    """Return whether the features seem to be there already; the run itself looks closer."""
    folder = Path(config.features or Path(config.dialogs) / FOLDER)
    if not (folder / "manifest.json").is_file():
        return False
    known = read_json(folder / "manifest.json")
    return known.get("target") == config.target and {*head.config.taps, "last"} <= set(known.get("taps") or ())


def gib(size: float) -> str:
    """Return bytes of memory as one says them."""
    return f"{size / 2**30:.2f} GiB" if size < 100 * 2**30 else f"{size / 2**30:.0f} GiB"


def gb(size: float) -> str:
    """Return bytes of disk as one says them."""
    return f"{size / 1e9:.2f} GB" if size < 1e12 else f"{size / 1e12:.2f} TB"


def clock(seconds: float) -> str:
    """Return a time as one says it."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def spell(found: Estimate) -> str:
    """Return an estimate as text."""
    target, head, data, features = found.target, found.head, found.data, found.features
    rows = [
        ("target", f"{target['name']}: {target['weights'] / 1e9:.3g} B weights, {target['dtype']}, {target['layers']} layers of "
                   f"{target['hidden_size']}, vocabulary {target['vocab_size']}"),
        ("head", f"{head['family']}, taps {head['taps']}, {head['weights'] / 1e6:.4g} M trained weights"
                 + ("" if head["followed"] else "; its step could not be followed: time and memory are guessed from them")),
        ("data", f"{data['rows']} rows, {data['positions']} positions{' (given)' if data['given'] else ''}; {data['steps']} "
                 f"steps over {data['trained_positions']} positions"),
        ("features", f"{gb(features['bfloat16'])} in bfloat16, {gb(features['int8'])} in int8; "
                     + ("captured, they are read" if features["captured"] else f"kept: {features['kept']}")),
        ("memory", ", ".join(f"{name} {gib(size)}" for name, size in found.memory.items()) + " (each device)"),
        ("disk", ", ".join(f"{name} {gb(size)}" for name, size in found.disk.items())
                 + f"; {gb(found.place['free_disk'])} are free here"),
        ("time", ", ".join(f"{name} {clock(s)}" for name, s in found.time.items())
                 + f", on {found.place['name']} at {found.place['flops'] / 1e12:.3g} TFLOP/s each"),
    ]  # fmt: skip
    text = "estimate (computed from the config, not measured; evaluations and start-up not counted)\n"
    text += "\n".join(f"  {name:<9} {line}" for name, line in rows)
    return text + "".join(f"\n  does not fit: {problem}" for problem in found.problems)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise HeadwayError(f"--estimate: {message}; see --help")


def main(argv: Sequence[str]) -> int:
    """Print the estimate of `RECIPE [key=value ...] --estimate ...`; return 0, or 1 where something does not fit."""
    parser = _Parser(prog="train --estimate", add_help=False)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--estimate", action="store_true")
    parser.add_argument("--rows", type=int)
    parser.add_argument("--mean-tokens", type=int)
    parser.add_argument("--on")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_intermixed_args(list(argv))
    config = load_recipe(given.recipe, given.overrides)
    found = estimate(config, rows=given.rows, mean_tokens=given.mean_tokens, on=given.on)
    print(json.dumps(asdict(found)) if given.json else spell(found))
    if found.problems and given.json:
        print("\n".join(found.problems), file=sys.stderr)
    return 1 if found.problems else 0
