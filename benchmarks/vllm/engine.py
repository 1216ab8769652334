"""Generate with vLLM: a script for the Python of an environment with vLLM, which imports nothing from this project.

    python engine.py REQUEST.json RESULT.json

The request has `model` (a folder), `prompts` (token ids of each prompt), `max_tokens`, `runs` (how often all are answered), and
`engine` (arguments of `vllm.LLM`). The result has `tokens` (the tokens that follow each prompt, run by run), `seconds` of each run,
`cached` (tokens of prompts that the last run found in the prefix cache), and `load_seconds`.
"""

import json
import sys
import time
from pathlib import Path


def main(request_file: str, result_file: str) -> None:
    """Answer one request."""
    from vllm import LLM, SamplingParams

    request = json.loads(Path(request_file).read_text(encoding="utf-8"))
    began = time.perf_counter()
    engine = LLM(model=request["model"], trust_remote_code=True, skip_tokenizer_init=True, **request["engine"])
    load_seconds = time.perf_counter() - began
    prompts = [{"prompt_token_ids": tokens} for tokens in request["prompts"]]
    sampling = SamplingParams(temperature=0, max_tokens=request["max_tokens"], ignore_eos=True, detokenize=False)
    engine.generate(prompts[:2], SamplingParams(temperature=0, max_tokens=2, detokenize=False), use_tqdm=False)
    tokens, seconds = [], []
    for _ in range(request["runs"]):
        began = time.perf_counter()
        answers = engine.generate(prompts, sampling, use_tqdm=False)
        seconds.append(time.perf_counter() - began)
        tokens += [list(answer.outputs[0].token_ids) for answer in answers]
    cached = sum(answer.num_cached_tokens or 0 for answer in answers)
    result = {"tokens": tokens, "seconds": seconds, "cached": cached, "load_seconds": load_seconds}
    Path(result_file).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":  # vLLM starts a process that imports this script again
    main(*sys.argv[1:])
