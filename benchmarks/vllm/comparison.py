"""Checkpoints whose tokens vLLM generates greedily, and the tokens that Transformers would choose after the same ones."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.gemma3.configuration_gemma3 import Gemma3TextConfig
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

from material.smollm2 import smollm2_135m
from upscalers.runs.upscale import upscale

_ENGINE = Path(__file__).with_name("engine.py")
_ROOT = Path(__file__).parents[2]
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
    """The engine ended without a result; `output` are the last lines that it printed."""

    def __init__(self, output: str):
        super().__init__(f"vLLM ended without a result:\n{output}")


class Answers(NamedTuple):
    """The tokens that follow each prompt, run by run; the seconds of each run, and of loading the model.

    `cached` is the number of tokens of prompts that the last run found computed, in vLLM's prefix cache; `preempted` is how often
    requests were preempted, 0 unless `disable_log_stats` is false. `cpu_seconds` are those of the process, if models share one.
    """

    tokens: list[list[int]]
    seconds: list[float]
    load_seconds: float
    cached: int
    preempted: int
    cpu_seconds: list[float]

    @property
    def rates(self) -> list[float]:
        """Tokens per second of each run."""
        return [sum(map(len, self.tokens)) / len(self.seconds) / seconds for seconds in self.seconds]

    @property
    def rate(self) -> float:
        """Tokens per second of the last run."""
        return self.rates[-1]


class Agreement(NamedTuple):
    """Numbers of an engine's tokens: all, equal to the greedy choices of Transformers, and others with nearly equal logits."""

    tokens: int
    equal: int
    ties: int

    @property
    def different(self) -> int:
        """Number of tokens that Transformers would not choose."""
        return self.tokens - self.equal - self.ties


def generate(
    python: Path,
    model: Path,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    work: Path,
    *,
    runs: int = 1,
    package: bool = False,
    **engine: Any,
) -> Answers:
    """Return what vLLM generates greedily after prompts, one run after another.

    Args:
        python: Python of an environment with vLLM.
        model: Folder of the model.
        prompts: Token ids of each prompt.
        max_tokens: Number of tokens that follow each.
        work: Folder in which the process works.
        runs: How often the prompts are answered. Default: once.
        package: Whether the process sees this package as an installed one. Default: it runs the code that the checkpoint carries.
        engine: Arguments of `vllm.LLM`.

    Raises:
        EngineFailed: If the engine ends without a result.
    """
    return generate_by_turns(python, [model], prompts, max_tokens, work, runs=runs, package=package, **engine)[0]


def generate_by_turns(
    python: Path,
    models: Sequence[Path],
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    work: Path,
    *,
    runs: int = 1,
    package: bool = False,
    **engine: Any,
) -> list[Answers]:
    """Return what vLLM generates with each of several models in one process, run by run in turn.

    Arguments and errors are those of `generate`.
    """
    request = {"models": [*map(str, models)], "prompts": prompts, "max_tokens": max_tokens, "runs": runs}
    request["engine"] = ENGINE | engine
    request_file, result_file = work / "request.json", work / "result.json"
    request_file.write_text(json.dumps(request), encoding="utf-8")
    result_file.unlink(missing_ok=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(work / "modules")}
    if package:
        environment["PYTHONPATH"] = package_path(work)
    command = [str(python), str(_ENGINE), str(request_file), str(result_file)]
    # vLLM leaves its sockets behind; a path that is short, as that of a socket has to be.
    with tempfile.TemporaryDirectory(prefix="vllm-") as sockets:
        environment["VLLM_RPC_BASE_PATH"] = sockets
        run = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, check=False)
    if run.returncode or not result_file.exists():
        raise EngineFailed("\n".join((run.stdout + run.stderr).splitlines()[-400:]))
    return [Answers(**result) for result in json.loads(result_file.read_text(encoding="utf-8"))]


def package_path(work: Path) -> str:
    """Return a `PYTHONPATH` by which a process sees this package with its entry points, as `pip install` makes them."""
    command = [sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", str(work)]
    subprocess.run(command, cwd=_ROOT, check=True, capture_output=True)
    return os.pathsep.join((str(work), str(_ROOT)))


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


#: Methods whose memories vLLM serves with the package, not with the code that a checkpoint carries, with options.
PACKAGE_METHODS: dict[str, dict[str, Any]] = {"engram": {"rows": 4096}}

_BLOCKS = {"memory_tokens": 1024, "chapters": 256, "k": 4, "routing": "token"}
#: Methods that add a memory that looks at one token, with options.
MEMORY_METHODS: dict[str, dict[str, Any]] = {
    "midus-hml": {},
    "midus-pkm": {},
    "midus-linear": {},
    "ultramem-v2": {},
    "moc": _BLOCKS,
}
#: Methods whose result is a model of the base's type, with options.
DENSE_METHODS: dict[str, dict[str, Any]] = {
    "llama-pro": {},
    "solar": {},
    "lesa": {"hidden_size": 8, "epochs": 1},
    "opt-deus": {},
    "avg-deus": {},
}

_RANDOM: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "initializer_range": 0.06,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def _random_base(config: Any) -> Callable[[Path], Path]:
    def save(folder: Path) -> Path:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        return folder

    return save


#: Functions by family that return the folder of a base, in which they may write. Weights of Qwen3 and Gemma 3 are random.
BASES: dict[str, Callable[[Path], Path]] = {
    "llama": lambda folder: smollm2_135m(),
    "qwen3": _random_base(Qwen3Config(**_RANDOM)),
    "gemma3_text": _random_base(
        Gemma3TextConfig(**_RANDOM, sliding_window=48, layer_types=["sliding_attention", "full_attention"] * 3)
    ),
}


def upscaled(base: Path, method: str, output: Path) -> Path:
    """Write an upscaled model in which no new tensor is zero, and return its folder.

    Tensors that start at 0, so that the model computes the same as the base, get noise.
    """
    options = MEMORY_METHODS.get(method, {}) | PACKAGE_METHODS.get(method, {}) | DENSE_METHODS.get(method, {})
    upscale(base=base, method=method, options=options, output=output, verify=False)
    model = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    std = 0.02 if method in DENSE_METHODS else 0.2
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=std, generator=generator)
    model.save_pretrained(output)
    return output
