"""Generate with vLLM: a script for the Python of an environment with vLLM, which imports nothing from this project.

    python engine.py REQUEST.json RESULT.json

The request has `models` (folders; several are loaded into this process, and answer in turn), `prompts` (token ids of each
prompt), `max_tokens`, `runs` (how often all are answered), and `engine` (arguments of `vllm.LLM`). The result has, for each model,
`tokens` (the tokens that follow each prompt, run by run), `seconds` and `cpu_seconds` of each run (the latter of this process, in
which several models run), `cached` (tokens of prompts that the last run found in the prefix cache), `preempted` (how often requests
were preempted, if the engine counts) and `load_seconds`.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def main(request_file: str, result_file: str) -> None:
    """Answer one request."""
    request = json.loads(Path(request_file).read_text(encoding="utf-8"))
    arguments = request["engine"]
    if len(request["models"]) > 1:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        arguments |= {"distributed_executor_backend": "uni"}
    from vllm import LLM, SamplingParams

    prompts = [{"prompt_token_ids": tokens} for tokens in request["prompts"]]
    sampling = SamplingParams(temperature=0, max_tokens=request["max_tokens"], ignore_eos=True, detokenize=False)
    engines = []
    results: list[dict[str, Any]] = []
    for model in request["models"]:
        began = time.perf_counter()
        engines.append(LLM(model=model, trust_remote_code=True, skip_tokenizer_init=True, **arguments))
        results.append({"load_seconds": time.perf_counter() - began, "tokens": [], "seconds": [], "cpu_seconds": []})
    for engine in engines:
        engine.generate(prompts[:2], SamplingParams(temperature=0, max_tokens=2, detokenize=False), use_tqdm=False)
    for _ in range(request["runs"]):
        for engine, result in zip(engines, results, strict=True):
            began = time.perf_counter()
            cpu_began = time.process_time()
            answers = engine.generate(prompts, sampling, use_tqdm=False)
            result["seconds"].append(time.perf_counter() - began)
            result["cpu_seconds"].append(time.process_time() - cpu_began)
            result["tokens"] += [list(answer.outputs[0].token_ids) for answer in answers]
            result["cached"] = sum(answer.num_cached_tokens or 0 for answer in answers)
    for engine, result in zip(engines, results, strict=True):
        counted = [] if arguments.get("disable_log_stats") else engine.get_metrics()
        result["preempted"] = sum(int(each.value) for each in counted if each.name == "vllm:num_preemptions")
    Path(result_file).write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":  # vLLM starts a process that imports this script again
    main(*sys.argv[1:])
