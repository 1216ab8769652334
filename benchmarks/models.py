"""Compare a base with its upscaled models, with random weights at real sizes: training steps, generation and prefill.

    python -m benchmarks.models                                                      # the sizes of SmolLM2-135M-Instruct
    python -m benchmarks.models --base llama-3.1-8b --methods base,llama-pro,opt-deus,midus-hml

A step trains the parameters that the method trains, with AdamW whose moments have the dtype of the weights; `lora` is PEFT's, of rank
32 in all linear layers but the last. Memory is the peak of tensors, including weights. Defaults follow the paper's efficiency
experiments on a GPU and are smaller on a CPU.
Rows are appended to `results/model.csv`.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import midus_hf  # noqa: F401 - registers the classes that host memory
from benchmarks.measuring import (
    RESULTS,
    Row,
    add_device,
    add_list,
    command_line,
    is_out_of_memory,
    numbers,
    peak_bytes,
    release_memory,
    run_columns,
    tell,
    timed,
)
from midus_hf.memories.module import MemoryModule, tensor_names
from upscalers.checkpoint.base_checkpoint import open_base
from upscalers.methods.contract import get_method
from upscalers.plan import Base, Plan
from upscalers.request import parse_options

# Folder of the configs of bases with a name, one `NAME.json` each.
CONFIGS = Path(__file__).parent / "configs"

BASE, LORA = "base", "lora"
METHODS = [BASE, LORA, "llama-pro", "opt-deus", "midus-hml", "midus-pkm", "midus-linear", "moc", "solar"]
PHASES = ["train", "generate", "prefill"]


@dataclass(frozen=True)
class Variant:
    """Model of the comparison: the base or a method.

    Args:
        method: Name of the method, `"base"` or `"lora"`.
        placement: Where new layers go; empty for the base, and for a method that has no placement.
        config: The config, as in `config.json`.
        plan: The plan, which knows the tensors that the base does not have.
        trained: Whether all parameters are trained, or only new ones.
    """

    method: str
    placement: str
    config: dict[str, Any]
    plan: Plan
    trained: Literal["new", "all"]


def read_base(base: str) -> tuple[str, dict[str, Any]]:
    """Read the name and the raw config of a base, a name in `CONFIGS` or the path of a `config.json`."""
    path = CONFIGS / f"{base}.json"
    if not path.is_file():
        path = Path(base)
        if not path.is_file():
            known = ", ".join(sorted(file.stem for file in CONFIGS.glob("*.json")))
            raise SystemExit(f"base is {base!r}; expected one of {known}, or the path of a config.json.")
    name = path.parent.name if path.name == "config.json" else path.stem
    return name, json.loads(path.read_text(encoding="utf-8"))


def variant_of(config: dict[str, Any], name: str, placement: str | None) -> Variant:
    """Return the model that a method makes from a base's config, with its default placement unless one is given."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        base = open_base(Path(folder), needs_weights=False)
    if name in (BASE, LORA):
        layers = tuple(map(Base, range(base.num_layers)))
        trained: Literal["new", "all"] = "all" if name == BASE else "new"
        return Variant(name, "", dict(base.config), Plan(layers, base.num_layers), trained)
    method_class = get_method(name)
    method = method_class(parse_options(method_class.options_class, {}, name))
    method.check(base)
    if method_class.default_placement is None:
        placement = None
    plan = method.plan(base, None, placement)
    placement = placement or method_class.default_placement or ""
    return Variant(name, placement, method.surgery(base, plan, seed=0).config, plan, method.trainable)


def build(variant: Variant, dtype: str, device: str) -> PreTrainedModel:
    """Build a model with random weights. Memories hold random values, because zero values might save work."""
    values = dict(variant.config)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    if variant.method == LORA:
        from peft import LoraConfig, inject_adapter_in_model

        inject_adapter_in_model(LoraConfig(r=32, target_modules="all-linear"), model)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, MemoryModule):
                for name in tensor_names(module, "value"):
                    getattr(module, name).normal_(0.0, 0.02)
    return model


def new_parameters(model: PreTrainedModel, variant: Variant) -> list[torch.nn.Parameter]:
    """Return the parameters that the base does not have: new layers, attached memory, and adapters."""
    is_new = (lambda name: "lora_" in name) if variant.method == LORA else variant.plan.owns
    return [parameter for name, parameter in model.named_parameters() if is_new(name)]


def set_trained(model: PreTrainedModel, variant: Variant) -> list[torch.nn.Parameter]:
    """Enable gradients for the parameters that the method trains, and only for these; return them."""
    model.requires_grad_(variant.trained == "all")
    for parameter in new_parameters(model, variant):
        parameter.requires_grad_(True)
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@dataclass(frozen=True)
class Point:
    """Setting of one measurement.

    Args:
        phase: One of `PHASES`.
        batch: Sequences per optimizer step, or per forward pass in other phases than `"train"`.
        accumulation: Forward passes per optimizer step; 1 in other phases.
        length: Tokens per sequence, or of a prompt.
        new_tokens: Tokens to generate per sequence. Default: 0.
    """

    phase: str
    batch: int
    accumulation: int
    length: int
    new_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Number of tokens in the measured time, generated or read, over all sequences."""
        return self.batch * (self.new_tokens or self.length)


def points(arguments: argparse.Namespace, base: str) -> list[Point]:
    """Return the points that the command line names."""
    gpu = arguments.device == "cuda"
    batch, accumulation, length, prompt, new_tokens = (16, 16, 2048, 128, 128) if gpu else (4, 2, 64, 32, 32)
    if gpu and "1b" in base:
        batch = 64
    prompts = [512, 2048, 8192] if gpu else [64, 256]
    for size in arguments.batches or []:
        if size % accumulation:
            raise SystemExit(f"batch is {size}; expected a multiple of accumulation = {accumulation}.")
    steps = [(size, tokens) for size in arguments.batches or [batch] for tokens in arguments.lengths or [length]]
    wanted = [
        Point("generate", 1, 1, prompt, new_tokens),
        *(Point("train", size, accumulation, tokens) for size, tokens in steps),
        *(Point("prefill", 1, 1, tokens) for tokens in arguments.prompts or prompts),
    ]
    return [point for point in wanted if point.phase in arguments.phases]


def work_of(model: PreTrainedModel, variant: Variant, point: Point, device: str) -> tuple[Callable[[], object], int]:
    """Return a call that does the work of a point, and the bytes that weights, moments and tokens hold all the time."""
    held: list[torch.Tensor] = [*model.parameters(), *model.buffers()]
    if point.phase == "train":
        model.train()
        optimizer = torch.optim.AdamW(set_trained(model, variant), lr=1e-5, fused=device == "cuda")
        shape = (point.accumulation, point.batch // point.accumulation, point.length)
        tokens = torch.randint(model.config.vocab_size, shape, device=device)

        def step() -> None:
            for part in tokens:
                (model(input_ids=part, labels=part, use_cache=False).loss / len(tokens)).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        step()  # makes the moments
        held += [tokens, *(moment for state in optimizer.state.values() for moment in state.values())]
        run: Callable[[], object] = step
    else:
        model.eval().requires_grad_(False)
        prompt = torch.randint(model.config.vocab_size, (point.batch, point.length), device=device)
        if point.phase == "prefill":
            run = lambda: model(input_ids=prompt, use_cache=True, logits_to_keep=1)  # noqa: E731
        else:
            count = point.new_tokens
            options = {"do_sample": False, "min_new_tokens": count, "max_new_tokens": count}
            run = lambda: model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)  # noqa: E731
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in held}
    return run, sum(storages.values())


def rows(arguments: argparse.Namespace) -> Iterator[Row]:
    """Yield a row per base, method and point."""
    for base in arguments.base:
        name, config = read_base(base)
        for method in arguments.methods:
            variant = variant_of(config, method, arguments.placement)
            model = build(variant, arguments.dtype, arguments.device)
            counts = {
                "new_parameters": sum(parameter.numel() for parameter in new_parameters(model, variant)),
                "trained_parameters": sum(parameter.numel() for parameter in set_trained(model, variant)),
                "total_parameters": model.num_parameters(),
            }
            model_columns = {"base": name, "method": method, "placement": variant.placement, "dtype": arguments.dtype}
            for point in points(arguments, name):
                try:
                    measured = measure(model, variant, point, arguments.device, arguments.seconds)
                except Exception as error:
                    if not is_out_of_memory(error):
                        raise
                    print(f"{name} {method} {point}: out of memory", file=sys.stderr)
                else:
                    yield {**model_columns, **vars(point), **measured, **counts}
                release_memory(arguments.device)
            del model
            release_memory(arguments.device)


def measure(model: PreTrainedModel, variant: Variant, point: Point, device: str, seconds: float) -> Row:
    """Return the median seconds of a point's work, its tokens per second, and its peak in GB."""
    run, held = work_of(model, variant, point, device)
    time = timed(run, seconds)
    peak = held + peak_bytes(run, device)
    model.zero_grad(set_to_none=True)
    return {
        "seconds": round(time.median, 5),
        "tokens_per_s": round(point.tokens / time.median, 2),
        "peak_gb": round(peak / 1e9, 3),
    }


COLUMNS = {name: f"{{{name}}}" for name in ("base", "method", "placement", "dtype", "phase", "batch", "length")}
COLUMNS |= {"s": "{seconds:.3f}", "tokens/s": "{tokens_per_s:.1f}", "peak, GB": "{peak_gb:.3f}"}


def main(command_arguments: list[str] | None = None, results: Path = RESULTS / "model.csv") -> int:
    """Measure what the command line names; return 0."""
    parser = command_line(__doc__)
    add_device(parser)
    names = ", ".join(sorted(file.stem for file in CONFIGS.glob("*.json")))
    parser.add_argument(
        "--base", type=lambda text: text.split(","), default=["smollm2-135m"], help=f"{names}, or a config.json"
    )
    add_list(parser, "--methods", METHODS)
    parser.add_argument("--placement", help="of every method that takes one (default: its own)")
    add_list(parser, "--phases", PHASES)
    parser.add_argument("--batches", type=numbers, help="sequences per step (default: 16, of 1B models 64; CPU 4)")
    parser.add_argument("--lengths", type=numbers, help="tokens per sequence of a step (default: 2048; CPU 64)")
    parser.add_argument("--prompts", type=numbers, help="lengths of prefill (default: 512,2048,8192; CPU 64,256)")
    arguments = parser.parse_args(command_arguments)
    tell(rows(arguments), COLUMNS, None if arguments.no_append else results, run_columns(arguments.device))
    return 0


if __name__ == "__main__":
    sys.exit(main())
