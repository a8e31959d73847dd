"""Runs vLLM; called by vllm_job.py with the Python of vLLM's own environment, so nothing of Headway is imported here.

    python vllm_side.py job.json

job.json: {"prompts": token ids, "tokens": number, "cases": {name: {"model", "speculative", "out"}}}; `speculative` is null for
the model alone. Each `out` gets the answers as token ids and the counts of drafting that vLLM itself keeps, or the error.
Cases share a process, since most of a short run is starting one.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
COUNTS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos")


def run(case: dict[str, Any], prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """Return answers, counts and seconds; or `error`, where vLLM does not take the head."""
    from vllm import LLM, SamplingParams, __version__
    from vllm.distributed import cleanup_dist_env_and_memory

    begin = perf_counter()
    try:
        llm = LLM(
            model=case["model"],
            speculative_config=case["speculative"],
            dtype="float32",
            enforce_eager=True,
            max_model_len=2048,
            max_num_seqs=8,
            disable_log_stats=False,
        )
    except Exception as e:  # noqa: BLE001  what a loader raises has no common base, and the other cases are to go on
        return {"error": f"{type(e).__name__}: {e}"}
    loaded = perf_counter()
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    counts: dict[str, Any] = {}
    for metric in llm.get_metrics():
        name = metric.name.removeprefix("vllm:spec_decode_")
        if name in COUNTS:
            counts[name] = list(metric.values) if hasattr(metric, "values") else metric.value
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    found = {"version": __version__, "answers": answers, **counts, "seconds": [loaded - begin, perf_counter() - loaded]}
    del llm, outputs
    cleanup_dist_env_and_memory()
    gc.collect()
    return found


def main(path: Path) -> None:
    """Run the cases of a job; each result appears whole or not at all."""
    os.environ.update(SETTINGS)
    job = json.loads(path.read_text(encoding="utf-8"))
    for name, case in job["cases"].items():
        begin = perf_counter()
        found = run(case, job["prompts"], job["tokens"])
        out = Path(case["out"])
        beside = out.with_suffix(".part")
        beside.write_text(json.dumps(found), encoding="utf-8")
        beside.replace(out)
        print(f"vllm: {name}: {found.get('error') or f'{perf_counter() - begin:.0f} s'}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
