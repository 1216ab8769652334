"""Learning without forgetting: LoRA and memories at weights of `base_kl` on one text, measured on such text and on two others.

    python -m material smollm2 addresses/train stages articles/excerpts factbook          # prints the paths of the following
    head -n 8 STAGES/addresses/text.jsonl > TEXTS/addresses.jsonl
    head -n 4 STAGES/addresses/validation.jsonl > TEXTS/validation.jsonl
    head -n 24 ARTICLES/text.jsonl > TEXTS/articles.jsonl
    head -n 8 STAGES/factbook/text.jsonl > TEXTS/countries.jsonl
    python -m experiments.base_kl run BASE ADDRESSES_TRAIN TEXTS RESULTS.csv lora --rate 0.001 --weight 0.1 --seed 0
    python -m experiments.base_kl scale START TRAINED ADDRESSES_TRAIN TEXTS SCALED.csv --factor 0.75 --by uniform
    python -m experiments.base_kl draw RESULTS.csv PICTURE.png

`run` appends a row to the results: of the model before training if the variant is `base`. Sizes and rates are those of
configs/compare/smollm2-135m-instruct.yaml, 20 steps of 4 sequences of 128 tokens. `run --keep FOLDER` leaves models there, `upscaled`
and `trained`; `scale` moves the tensors of a trained one back towards its start (the base, or `upscaled`), and appends a row. `--by
rising` scales the first layer by the factor and the last by 1, as LiNeS (arXiv:2410.17146) does by depth, `falling` the other way.
"""

import argparse
import contextlib
import csv
import re
import shutil
import statistics
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Any

import matplotlib
import torch
from safetensors.torch import load_file, save_file

from midus_hf.config.yaml_options import from_mapping
from midus_hf.look.pictures import as_png, new_figure
from midus_hf.training.arguments import TrainArguments
from midus_hf.training.run import measure_texts, run_training
from upscalers.runs.upscale import upscale

NAMES = ("addresses", "articles", "countries", "validation")  # of texts
COLUMNS = ("variant", "rate", "base_kl", "seed", "commit", "trained", "seconds", "peak_bytes", *NAMES)
TRAIN = {
    **{"sequence_length": 128, "per_device_train_batch_size": 4, "max_steps": 20, "lr_scheduler_type": "cosine"},
    **{"warmup_steps": 0.1, "bf16": False, "logging_steps": 5, "dataloader_drop_last": True},
}
# How each variant is upscaled and trained; the key of the rate that is given.
VARIANTS: dict[str, tuple[dict[str, Any] | None, dict[str, Any], str]] = {
    "lora": (None, {"adapters": {"r": 29, "lora_alpha": 58}}, "learning_rate"),
    "llama-pro": ({"method": "llama-pro", "num_new_layers": 3}, {}, "learning_rate"),
    "midus-hml": (
        {"method": "midus-hml", "num_new_layers": 10, "options": {"n": 64, "k": 4}},
        {"learning_rate": 1e-3},
        "value_learning_rate",
    ),
    "ultramem-v2": ({"method": "ultramem-v2", "options": {"layers": 8, "n": 48}}, {}, "learning_rate"),
    "moda": ({"method": "moda"}, {}, "learning_rate"),
}


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Train a variant, measure the result on all texts, and return the row."""
    row: dict[str, Any] = {"variant": options.variant, "seed": options.seed}
    kept = contextlib.nullcontext(str(options.keep)) if options.keep else tempfile.TemporaryDirectory()
    with kept as folder:
        model = options.base
        if options.variant != "base":
            request, keys, rate = VARIANTS[options.variant]
            if request is not None:
                model = f"{folder}/upscaled"
                upscale(base=options.base, output=model, seed=options.seed, **request)
            keys = {**TRAIN, **keys, rate: options.rate, "corpus": options.corpus, "seed": options.seed}
            keys |= {"base_kl": options.weight, "model_name_or_path": model, "output_dir": f"{folder}/trained"}
            result = run_training(from_mapping(TrainArguments, keys))
            row |= {"rate": options.rate, "base_kl": options.weight, "trained": result.log[-1]["trained_parameters"]}
            row["seconds"] = round([event["train_runtime"] for event in result.log if "train_runtime" in event][-1])
            row["peak_bytes"], model = result.log[-1]["peak_memory_bytes"], result.output
        row |= measure(model, options.corpus, options.texts, f"{folder}/measured")
    return {**row, "commit": commit()}


def measure(model: str, corpus: str, folder: str, output: str) -> dict[str, float]:
    """Return the losses of all texts of a folder."""
    texts = {name: f"{folder}/{name}.jsonl" for name in NAMES}
    keys = {**TRAIN, "corpus": corpus, "model_name_or_path": model, "output_dir": output, "eval_text": texts}
    return measure_texts(from_mapping(TrainArguments, {**keys, "trainable": "all", "eval_steps": 20}))


def scale(options: argparse.Namespace) -> dict[str, Any]:
    """Measure a trained model of which a part of the way from its start is taken back, and return the row."""
    before, after = (
        {name: tensor for file in Path(folder).glob("*.safetensors") for name, tensor in load_file(file).items()}
        for folder in (options.start, options.trained)
    )
    layer_of = {name: int(found[1]) for name in after if (found := re.search(r"layers\.(\d+)\.", name))}
    last, shares = (
        max(layer_of.values()),
        {"uniform": lambda _: 0.0, "rising": lambda x: x, "falling": lambda x: 1 - x},
    )
    for name, tensor in after.items():
        start = before.get(name, tensor)  # a tied head is saved by one of its names
        factor = options.factor + (1 - options.factor) * shares[options.by](layer_of.get(name, last) / last)
        if not torch.equal(start, tensor):
            after[name] = start + factor * (tensor - start)
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(options.trained, f"{folder}/model", ignore=shutil.ignore_patterns("*.safetensors*"))
        save_file(after, f"{folder}/model/model.safetensors", metadata={"format": "pt"})
        losses = measure(f"{folder}/model", options.corpus, options.texts, f"{folder}/measured")
    return {
        "trained": Path(options.trained).name,
        "by": options.by,
        "factor": options.factor,
        "commit": commit(),
        **losses,
    }


def commit() -> str:
    return subprocess.run(
        ["git", "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()


def append(row: dict[str, Any], path: Path, columns: Collection[str]) -> None:
    is_new = not path.exists()
    with path.open("a", encoding="utf-8", newline="") as file:
        writer: Any = csv.DictWriter(file, columns)
        if is_new:
            writer.writeheader()
        writer.writerow(row)


def draw(rows: list[dict[str, str]]) -> bytes:
    """Draw a line per variant and rate, whose points are weights: what was learned, against the change of the articles' loss."""
    (base,) = (row for row in rows if row["variant"] == "base")
    points: dict[tuple[str, str], dict[float, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row is not base:
            learned, risen = (float(base[name]) - float(row[name]) for name in ("addresses", "articles"))
            points[row["variant"], row["rate"]][float(row["base_kl"])].append((learned, -risen))
    figure = new_figure(9.0, 5.5)
    axes, colors = figure.subplots(), matplotlib.colormaps["tab10"]
    for number, ((variant, rate), by_weight) in enumerate(points.items()):
        weights = sorted(by_weight)
        means = [[statistics.fmean(values) for values in zip(*by_weight[weight], strict=True)] for weight in weights]
        count = len(by_weight[0.0])
        label = f"{variant}, {float(rate):g} ({count} seed{'s' * (count > 1)})"
        axes.plot(*zip(*means, strict=True), marker="o", color=colors(number), label=label)
        for weight, (learned, risen) in zip(weights, means, strict=True):
            axes.annotate(f"{weight:g}", (learned, risen), (4, 4), textcoords="offset points", fontsize=8)
    axes.axhline(0.0, color="#888888", linewidth=1.0, linestyle=":", zorder=0)
    axes.set(xlabel="learned (nats per token)", ylabel="change of the loss of articles (nats per token)")
    axes.set_title("points are weights of base_kl; means over seeds, those of 0.3 seed 0", fontsize=9, loc="left")
    axes.legend(fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return as_png(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("run")
    for name in ("base", "corpus", "texts"):
        one.add_argument(name)
    one.add_argument("results", type=Path)
    one.add_argument("variant", choices=["base", *VARIANTS])
    one.add_argument("--rate", type=float)
    one.add_argument("--weight", type=float, default=0.0)
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--keep", type=Path, help="an absent folder, for the models `upscaled` and `trained`")
    scaling = commands.add_parser("scale")
    for name in ("start", "trained", "corpus", "texts"):
        scaling.add_argument(name)
    scaling.add_argument("results", type=Path)
    scaling.add_argument("--factor", type=float, required=True)
    scaling.add_argument("--by", choices=["uniform", "rising", "falling"], default="uniform")
    drawing = commands.add_parser("draw")
    drawing.add_argument("results", type=Path)
    drawing.add_argument("picture", type=Path)
    options = parser.parse_args()
    if options.command == "run":
        append(run(options), options.results, COLUMNS)
    elif options.command == "scale":
        row = scale(options)
        append(row, options.results, list(row))
    else:
        with options.results.open(encoding="utf-8", newline="") as file:
            options.picture.write_bytes(draw(list(csv.DictReader(file))))


if __name__ == "__main__":
    main()
