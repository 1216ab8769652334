"""`python -m demo.sample --prompt TEXT MODEL...`: continue a prompt greedily with each model, and time it."""

import argparse
import json
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import midus_hf  # noqa: F401 - registers the classes
from midus_hf.sources.progress import limit_bars
from midus_hf.sources.tokenizers import without_suffix_tokens


def sample(model_name: str, prompt: str, new_tokens: int) -> dict:
    """Generate `new_tokens` tokens after `prompt`."""
    tokenizer = AutoTokenizer.from_pretrained(model_name, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(model_name, trust_remote_code=False).eval()
    inputs = without_suffix_tokens(tokenizer)(prompt, return_tensors="pt")
    greedy = {"do_sample": False, "pad_token_id": tokenizer.pad_token_id, "temperature": None, "top_p": None}
    with torch.no_grad():
        model.generate(**inputs, max_new_tokens=4, min_new_tokens=4, **greedy)
        started = time.perf_counter()
        tokens = model.generate(**inputs, max_new_tokens=new_tokens, min_new_tokens=new_tokens, **greedy)
        seconds = time.perf_counter() - started
    text = tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return {"text": text, "tokens_per_second": new_tokens / seconds}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m demo.sample")
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--new-tokens", type=int, default=48)
    arguments = parser.parse_args()
    with limit_bars():
        samples = [sample(model, arguments.prompt, arguments.new_tokens) for model in arguments.models]
    print(json.dumps(samples, indent=2))


if __name__ == "__main__":
    main()
