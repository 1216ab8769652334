"""Compare upscaled models whose matrices or tables of values are integers: quality, bytes, and tokens per second.

    python -m experiments.quantised
    python -m experiments.quantised --methods midus-hml --tokens 128 --rounds 2 --no-append

The base is SmolLM2-135M, in float32. Values of memories are noise, so that memories act. Matrices become integers by torchao while
`from_pretrained` loads the model (`Int8WeightOnlyConfig`, and PyTorch's kernel of 4 bits for CPUs with groups of 64), and tables of
values by `midus_hf.memory.quantise_tables`. The weights of the material were 4 bits in groups of 32 before, so groups of 32 would
give them back exactly. Perplexity is that of a held-out presidential address. The divergence is the mean over its tokens of
KL(unquantised || quantised), in nats, against the same model without integers. Bytes count all weights and buffers, and of these the
tables of values. `generate` makes tokens greedily for one prompt of 32, all variants of a method in turns; medians of the rounds are
given, and of the ratios to the model without integers in the same round.
"""

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TorchAoConfig

from benchmarks.study import Row, listed, run_columns, tell
from experiments.steps import results_of, study
from material.addresses import addresses
from material.smollm2 import smollm2_135m
from midus_hf.memory import quantise_tables
from upscalers import upscale

# Methods with options; the base alone is the model without memory.
METHODS: dict[str, dict[str, Any]] = {"base": {}, "midus-hml": {}, "midus-pkm": {}, "ultramem-v2": {"n": 128}}
# Bits of matrices and of tables; None is not rounded.
VARIANTS: dict[str, tuple[int | None, int | None]] = {
    "unquantised": (None, None),
    "matrices 8": (8, None),
    "matrices 4": (4, None),
    "tables 8": (None, 8),
    "tables 4": (None, 4),
    "both 8": (8, 8),
}
_GROUP = 64


def main() -> None:
    parser = study(__doc__, work=None)
    listed(parser, "--methods", METHODS)
    parser.add_argument("--tokens", type=int, default=256, help="tokens of the held-out text (default: 256)")
    parser.add_argument("--new-tokens", type=int, default=8, help="tokens that generate makes (default: 8)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of generation (default: 3)")
    parser.add_argument("--noise", type=float, default=0.3, help="standard deviation of values (default: 0.3)")
    arguments = parser.parse_args()
    columns = {
        "method": "{method}",
        "integers": "{variant}",
        "perplexity": "{perplexity:.3f}",
        "KL": "{divergence:.5f}",
        "MB": "{mb:,.1f}",
        "of tables, MB": "{tables_mb:,.1f}",
        "tokens/s": "{tokens_per_second:.1f}",
        "tokens/s, ratio": "{speed_ratio:.2f}",
    }
    text = sorted(addresses().held_out.iterdir())[-1].read_text(encoding="utf-8")
    ids = AutoTokenizer.from_pretrained(smollm2_135m())(text, return_tensors="pt").input_ids[:, : arguments.tokens]
    results = results_of("quantised", arguments)
    with tempfile.TemporaryDirectory() as folder:
        for method in arguments.methods.split(","):
            checkpoint = made(method, Path(folder) / method, arguments.noise)
            tell(_rows(method, checkpoint, ids, arguments), columns, results, run_columns())


def made(method: str, folder: Path, noise: float) -> Path:
    """Return the checkpoint of a method with noise in its values, or the base itself."""
    if method == "base":
        return smollm2_135m()
    upscale(base=smollm2_135m(), method=method, output=folder, options=dict(METHODS[method]), verify=False)
    model = AutoModelForCausalLM.from_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for table in tables_of(model).values():
            table.copy_(torch.randn(table.shape, generator=generator) * noise)
    model.save_pretrained(folder)
    return folder


def loaded(checkpoint: Path, matrices: int | None, tables: int | None) -> Any:
    """Return a model whose matrices and tables are integers of so many bits."""
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
    from torchao.quantization import Int8WeightOnlyConfig

    kinds = {8: Int8WeightOnlyConfig(), 4: PrototypeInt4WeightOnlyConfig(group_size=_GROUP)}
    # The kernel of 4 bits takes matrices with a multiple of 16 rows alone, which this projection of UltraMemV2 need not have.
    left_out = ["lm_head", r".*\.pre_projection"] if matrices == 4 else None
    config = {}
    if matrices is not None:
        config["quantization_config"] = TorchAoConfig(kinds[matrices], modules_to_not_convert=left_out)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, **config)
    if tables is not None:
        quantise_tables(model, tables)
    return model.eval()


def tables_of(model: Any) -> dict[str, torch.Tensor]:
    """Return the tables of values of a model, or their integers and scales, by name."""
    ends = ("value_bank", "value_table", "_integers", "_scales")
    return {name: tensor for name, tensor in _tensors(model) if name.endswith(ends)}


def bytes_of(tensor: torch.Tensor) -> int:
    """Count the bytes of a tensor, also of one that wraps others."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor.nbytes
    return sum(bytes_of(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])


@torch.no_grad()
def log_probabilities(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return log-probabilities `[T, V]` of one text, float32."""
    return model(ids).logits[0].float().log_softmax(-1)


def _tensors(model: Any) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _rows(method: str, checkpoint: Path, ids: torch.Tensor, arguments: Any) -> Iterator[Row]:
    variants = {
        name: bits for name, bits in VARIANTS.items() if bits[1] is None or method != "base"
    }  # the base has no tables
    models = {name: loaded(checkpoint, *bits) for name, bits in variants.items()}
    rates = _rates(models, ids[:, :32], arguments.new_tokens, arguments.rounds)
    exact = log_probabilities(models["unquantised"], ids)
    for name, model in models.items():
        of_model = log_probabilities(model, ids)
        loss = -of_model[:-1].gather(1, ids[0, 1:, None]).mean()
        yield {
            "method": method,
            "variant": name,
            "tokens": ids.shape[1],
            "noise": arguments.noise,
            "perplexity": loss.exp().item(),
            "divergence": (exact.exp() * (exact - of_model)).sum(-1).mean().item(),
            "mb": sum(bytes_of(tensor) for _, tensor in _tensors(model)) / 1e6,
            "tables_mb": sum(map(bytes_of, tables_of(model).values())) / 1e6,
            "tokens_per_second": statistics.median(rates[name]),
            "speed_ratio": statistics.median(
                rate / base for rate, base in zip(rates[name], rates["unquantised"], strict=True)
            ),
        }


def _rates(models: dict[str, Any], ids: torch.Tensor, new_tokens: int, rounds: int) -> dict[str, list[float]]:
    """Return tokens per second of `generate`, per model and round, after a round that is not counted."""
    rates: dict[str, list[float]] = {name: [] for name in models}
    for number in range(rounds + 1):
        for name, model in models.items():
            begin = time.perf_counter()
            model.generate(ids, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
            if number:
                rates[name].append(new_tokens / (time.perf_counter() - begin))
    return rates


if __name__ == "__main__":
    main()
