"""Train small models from the beginning on the same text, and measure them on held-out headwords.

    python -m experiments.from_scratch --work outputs/scratch
    python -m experiments.from_scratch --work outputs/scratch --only dense moda dense-564 --seeds 0 1
    python -m experiments.from_scratch --table --picture scratch.png

The models are `configs/scratch/NAME.json`, all with the keys of `configs/scratch/train.yaml`. The text is a dictionary of English
(GCIDE) with a BPE tokenizer of 8,192 tokens that is trained on it; no headword is both learned and measured. Each run is a `midus
train` that a person could type, which the same command resumes; its losses are a file in `experiments/results/from-scratch`. A
model is listed beside the one that it is compared with, of equal cost or equal parameters. Projections into the stream start
divided by the root of 2 L, for L layers, as in UltraMemV2's recipe (arXiv:2508.18756, appendix B.3). What a run's name has behind
a config's:

- `-document-mask`: tokens attend within their entries. A model that fetches blocks by topic reads sequences of one topic, which would
  help it otherwise. All other models read the same sequences in the same order.
- `+one-row`, `+random-slots`: a null control of the config's memory.
"""

import argparse
import dataclasses
import json
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, set_seed

from material.dictionaries import gcide
from material.minilm import minilm
from midus_hf.compare.run import code_version
from midus_hf.look.page import as_png, new_figure
from midus_hf.memories.bank import banks_of
from midus_hf.memories.registry import memory_type
from midus_hf.models.host import MemoryConfig
from midus_hf.topics.tree import RECORD_FILE

CONFIGS = Path(__file__).parent.parent / "configs" / "scratch"
RESULTS = Path(__file__).parent / "results" / "from-scratch"
_VOCABULARY = 8192
_END = "<|endoftext|>"
_DOCUMENT_MASK = "-document-mask"


@dataclasses.dataclass(frozen=True)
class Claim:
    """What a paper says of a model beside another one, both by the names of their runs."""

    model: str
    beside: str
    equal: str
    says: str


# In the order of the runs.
CLAIMS = (
    Claim("dense-twice", "dense", "nothing: twice the parameters", "what a larger model gives"),
    Claim("ultramem-v2", "olmoe", "total and active parameters", "as good, after a slow start"),
    Claim("ultramem-v2", "dense-564", "FLOPs", "nothing"),
    Claim("ultramem-v2", "dense", "nothing: the same without the memory", "nothing"),
    Claim("ultramem-v2", "ultramem-v2+one-row", "all but its rows", "nothing: a null control"),
    Claim("ultramem-v2", "ultramem-v2+random-slots", "all but addressing", "nothing: a null control"),
    Claim("moc-sequence", "dense-704", "FLOPs", "better: 2.79 for 2.86"),
    Claim("moc-sequence", "dense", "nothing: the same without the memory", "better: 2.79 for 2.92"),
    Claim("moc-chunk", "dense-1024", "FLOPs", "nothing: chunks are ours"),
    Claim("moda", "dense-564", "FLOPs and parameters", "better, by least with norms in front"),
    Claim("olmo2-moda", "olmo2-564", "FLOPs and parameters", "better: ln 18.21 for ln 18.31, 0.005"),
    Claim("engram", "dense-704", "parameters", "better than mixtures of experts"),
    Claim("engram", "engram+random-slots", "all but addressing", "nothing: a null control"),
    Claim(
        "hier-ffn-document-mask",
        "dense-564-document-mask",
        "FLOPs",
        "better than a generic memory: ln 15.6 for ln 17.8, 0.13",
    ),
    Claim(
        "hier-ffn-document-mask",
        "dense-twice-document-mask",
        "nothing: half of it, and a bank",
        "as good as 2.6 times the size, from a trained model",
    ),
)


@dataclasses.dataclass(frozen=True)
class Result:
    """Losses of a run, in nats per token."""

    model: str
    seed: int
    parameters: int
    learning_rate: float
    tokens: list[int]  #: trained tokens at each measurement
    validation: list[float]
    held_out: list[float]
    code: str


def models_of(claims: Iterable[Claim]) -> list[str]:
    """Return the models of claims, each once, those that others are compared with first."""
    return list(dict.fromkeys(["dense", *(name for claim in claims for name in (claim.beside, claim.model))]))


def config_of(model: str) -> Path:
    """Return the config of a run's model, or of the one that it is a control of."""
    return CONFIGS / f"{model.partition('+')[0].removesuffix(_DOCUMENT_MASK)}.json"


def make_tokenizer(folder: Path, texts: Iterable[str]) -> None:
    """Train a byte-level BPE on texts, unless the folder has one."""
    if folder.exists():
        return
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options: dict[str, Any] = {"special_tokens": [_END], "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=_VOCABULARY, **options))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_END).save_pretrained(folder)


def assign_topics(work: Path, texts: Path, config: Path) -> Path:
    """Cluster the entries to train on into the config's tree of topics, and return a folder of all entries with their paths."""
    (memory,) = json.loads(config.read_text(encoding="utf-8"))["memory"]
    tree = work / "tree"
    assigned = work / "assigned"
    assigned.mkdir(exist_ok=True)
    corpus = str(texts / "train.jsonl")
    if not (tree / RECORD_FILE).exists():
        words = ["--corpus", corpus, "--output", str(tree), "--embedding-model", str(minilm()), "--max-tokens", "48"]
        words += ["--tokenizer", str(work / "tokenizer"), "--branching", str(memory["branching"])]
        words += ["--levels", str(len(memory["sizes"]))]
        run("cluster", "build", *words)
    for part in ("train", "validation", "held_out"):
        output = assigned / f"{part}.jsonl"
        if not output.exists():
            words = ["--tree", str(tree), "--corpus", str(texts / f"{part}.jsonl"), "--output", str(output)]
            run("cluster", "assign", *words)
    return assigned


def write_config(model: str, work: Path) -> Path:
    """Write the config of a run's model, with the options of a null control, and return its path."""
    values = json.loads(config_of(model).read_text(encoding="utf-8"))
    control = model.partition("+")[2]
    if control:
        (memory,) = values["memory"]
        memory |= memory_type(memory["type"]).controls[control]
    path = work / f"{model}.json"
    path.write_text(json.dumps(values, indent=2), encoding="utf-8")
    return path


@torch.no_grad()
def make_start(model: str, seed: int, work: Path) -> Path:
    """Make a random model whose projections into the stream are divided by `sqrt(2 L)`, and return its folder."""
    folder = work / f"{model}-{seed}-start"
    if not folder.exists():
        set_seed(seed)
        config = AutoConfig.from_pretrained(write_config(model, work))
        start = AutoModelForCausalLM.from_config(config)
        are_divided = any(hasattr(module, "initial_scale") for module in start.modules())
        if not are_divided:
            for name, parameter in start.named_parameters():
                # Parameters of experts have no ".weight".
                if name.removesuffix(".weight").endswith(("o_proj", "down_proj")):
                    parameter.mul_((2 * config.num_hidden_layers) ** -0.5)
        start.save_pretrained(folder)
        if isinstance(config, MemoryConfig):
            for bank in banks_of(config.memories()).values():
                bank.create(folder, "float32", seed)
        PreTrainedTokenizerFast.from_pretrained(work / "tokenizer").save_pretrained(folder)
    return folder


def run(*words: str) -> None:
    """Print a command of midus and run it."""
    command = [sys.executable, "-m", "midus_hf", *words]
    print(f"$ {shlex.join(command)}", flush=True)
    subprocess.run(command, check=True)


def train(model: str, seed: int, work: Path, keys: Sequence[str]) -> Result:
    """Train a model, from its latest checkpoint if it has one, and return its losses."""
    texts = gcide()
    output = work / f"{model}-{seed}"
    config = config_of(model)
    words = [str(CONFIGS / "train.yaml"), "--model_name_or_path", str(make_start(model, seed, work))]
    words += ["--seed", str(seed), "--output_dir", str(output)]
    if model.endswith(_DOCUMENT_MASK):
        words += ["--document_mask", "true"]
    if config.stem == "hier-ffn":
        texts = assign_topics(work, texts, config)
        words += ["--path_column", "memory_ids", "--generic_share", "0"]
    eval_text = {name: str(texts / f"{name}.jsonl") for name in ("validation", "held_out")}
    words += ["--corpus", str(texts / "train.jsonl"), "--eval_text", json.dumps(eval_text)]
    run("train", *words, *keys)
    state = json.loads((output / "trainer_state.json").read_text(encoding="utf-8"))
    log = state["log_history"]
    measured = [event for event in log if "eval_held_out_loss" in event]
    tokens_per_step = state["num_input_tokens_seen"] / state["global_step"]
    by_step = {event["step"]: event for event in log if "eval_validation_loss" in event}
    return Result(
        model=model,
        seed=seed,
        parameters=next(event["trained_parameters"] for event in log if "trained_parameters" in event),
        learning_rate=max(event["learning_rate"] for event in log if "learning_rate" in event),
        tokens=[round(event["step"] * tokens_per_step) for event in measured],
        validation=[by_step[event["step"]]["eval_validation_loss"] for event in measured],
        held_out=[event["eval_held_out_loss"] for event in measured],
        code=code_version(),
    )


def read_results(folder: Path) -> dict[str, list[Result]]:
    """Return the results in a folder by model, in the order of their seeds."""
    results: dict[str, list[Result]] = {}
    for path in sorted(folder.glob("*.json")):
        result = Result(**json.loads(path.read_text(encoding="utf-8")))
        results.setdefault(result.model, []).append(result)
    return results


def table_rows(results: dict[str, list[Result]]) -> list[list[str]]:
    """Return a heading, and a row for each claim of which both models were trained: held-out losses at the end, and difference."""
    rows = [["model", "beside", "equal", "the paper says", "held out", "beside", "difference by seed"]]
    for claim in CLAIMS:
        by_seed = {result.seed: result.held_out[-1] for result in results.get(claim.model, ())}
        beside = {result.seed: result.held_out[-1] for result in results.get(claim.beside, ())}
        seeds = sorted(by_seed.keys() & beside.keys())
        if seeds:
            means = [statistics.mean(losses[seed] for seed in seeds) for losses in (by_seed, beside)]
            differences = ", ".join(f"{by_seed[seed] - beside[seed]:+.3f}" for seed in seeds)
            named = [claim.model, claim.beside, claim.equal, claim.says]
            rows.append([*named, *(f"{mean:.3f}" for mean in means), differences])
    return rows


def panel_of(model: str) -> str:
    """Return the title of the panel in which a model is drawn: only models that can be compared stand side by side."""
    if model.endswith(_DOCUMENT_MASK):
        return "tokens attend within entries"
    return "norms behind (OLMo 2)" if model.startswith("olmo2") else "norms in front (Llama)"


def draw(results: dict[str, list[Result]]) -> bytes:
    """Return a picture of held-out loss against trained tokens, as PNG: for each model but controls, the mean of its seeds."""
    panels: dict[str, list[str]] = {}
    for name in models_of(CLAIMS):
        if name in results and "+" not in name:
            panels.setdefault(panel_of(name), []).append(name)
    figure = new_figure(4.0 * len(panels), 5.0)
    row = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (title, names) in zip(row, panels.items(), strict=True):
        dense = [name for name in names if name.startswith(("dense", "olmo2-5"))]
        others = [name for name in names if name not in dense]
        for name in names:
            runs = results[name]
            losses = [statistics.mean(each) for each in zip(*(run.held_out for run in runs), strict=True)]
            millions = [tokens / 1e6 for tokens in runs[0].tokens]
            grey = str(0.7 * dense.index(name) / len(dense)) if name in dense else None
            color = grey or f"C{others.index(name)}"
            style = "--" if name in dense else "-"
            axes.plot(millions, losses, color=color, linestyle=style, marker=".", label=name)
        axes.set_title(title, fontsize=9, loc="left")
        axes.set(xlabel="million tokens")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8, frameon=False)
    figure.axes[0].set_ylabel("held-out loss, nats per token")
    return as_png(figure)


def main() -> None:
    names = models_of(CLAIMS)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="folder of the tokenizer, the models and their checkpoints")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="MODEL", help=", ".join(names))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="print the table of the results there are")
    parser.add_argument("--picture", type=Path, help="file for a picture of loss against tokens, as PNG")
    asked, keys = parser.parse_known_args()  # further arguments are those of `midus train`
    if keys and asked.work is None:
        parser.error(f"{' '.join(keys)}: keys of training are given, and no --work to train in.")
    if asked.work is not None:
        texts = (gcide() / "train.jsonl").read_text(encoding="utf-8").splitlines()
        make_tokenizer(asked.work / "tokenizer", (json.loads(line)["text"] for line in texts))
        for seed in asked.seeds:
            for name in asked.only:
                path = asked.results / f"{name}-{seed}.json"
                if not path.is_file():
                    result = train(name, seed, asked.work, keys)
                    asked.results.mkdir(parents=True, exist_ok=True)
                    path.write_text(json.dumps(dataclasses.asdict(result), indent=1) + "\n", encoding="utf-8")
    results = read_results(asked.results)
    if asked.table:
        heading, *rows = (f"| {' | '.join(row)} |" for row in table_rows(results))
        print("\n".join([heading, f"|{'---|' * (heading.count('|') - 1)}", *rows]))
    if asked.picture is not None:
        asked.picture.write_bytes(draw(results))


if __name__ == "__main__":
    main()
