"""Tokens that vLLM generates greedily, beside the tokens that Transformers would choose after the same ones."""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

_ENGINE = Path(__file__).with_name("engine.py")
#: Arguments of `vllm.LLM` for a comparison with Transformers in float32 on a CPU.
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "model_impl": "transformers",
    "max_model_len": 512,
    "enforce_eager": True,
    "disable_log_stats": True,
}
#: The difference of two logits below which either may be the greedy token, since sums round differently.
TIE = 1e-4


class EngineFailed(RuntimeError):
    """The engine ended without a result.

    Args:
        output: The last lines of the engine's output.
    """

    def __init__(self, output: str):
        super().__init__(f"vLLM ended without a result:\n{output}")


class Answers(NamedTuple):
    """The answers of an engine.

    Args:
        tokens: For each prompt, the tokens that follow.
        seconds: Time of generation.
        load_seconds: Time of loading the model.
    """

    tokens: list[list[int]]
    seconds: float
    load_seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second of generation."""
        return sum(map(len, self.tokens)) / self.seconds


class Agreement(NamedTuple):
    """Comparison of an engine's tokens with the greedy choices of Transformers.

    Args:
        tokens: Number of tokens of the engine.
        equal: Number of tokens that Transformers chooses too.
        ties: Number of other tokens, whose logit is less than `TIE` below the largest.
    """

    tokens: int
    equal: int
    ties: int

    @property
    def different(self) -> int:
        """Number of tokens that Transformers would not choose."""
        return self.tokens - self.equal - self.ties


def generate(
    python: Path, model: Path, prompts: Sequence[Sequence[int]], max_tokens: int, work: Path, **engine: Any
) -> Answers:
    """Return what vLLM generates greedily after prompts, in a process that does not see this project's packages.

    Args:
        python: The Python of an environment with vLLM.
        model: Folder of the model.
        prompts: Token ids of each prompt.
        max_tokens: Number of tokens after each prompt.
        work: A folder for files of the engine.
        **engine: Arguments of `vllm.LLM` that replace or extend `ENGINE`.

    Raises:
        EngineFailed: If the engine ends with an error.
    """
    request = {"model": str(model), "prompts": prompts, "max_tokens": max_tokens, "engine": ENGINE | engine}
    request_file, result_file = work / "request.json", work / "result.json"
    request_file.write_text(json.dumps(request), encoding="utf-8")
    result_file.unlink(missing_ok=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(work / "modules")}
    command = [str(python), str(_ENGINE), str(request_file), str(result_file)]
    run = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, check=False)
    if run.returncode or not result_file.exists():
        raise EngineFailed("\n".join((run.stdout + run.stderr).splitlines()[-400:]))
    result = json.loads(result_file.read_text(encoding="utf-8"))
    return Answers(result["tokens"], result["seconds"], result["load_seconds"])


def load(folder: Path) -> PreTrainedModel:
    """Return the model of a folder in float32, as Transformers loads it."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def agreement(model: PreTrainedModel, prompts: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]) -> Agreement:
    """Return how many of the tokens that follow prompts are the model's greedy choices, each after the tokens before it."""
    count = equal = ties = 0
    for prompt, answer in zip(prompts, tokens, strict=True):
        chosen = torch.tensor(answer)  # [T]
        logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]  # [T, V]
        same = logits.argmax(-1) == chosen
        below = logits.amax(-1) - logits.gather(-1, chosen[:, None])[:, 0]  # [T]
        count += len(answer)
        equal += int(same.sum())
        ties += int((~same & (below < TIE)).sum())
    return Agreement(count, equal, ties)
