"""Train on several texts one after the other, and measure after each stage what was learned and what was forgotten.

    STAGES=$(python -m material stages)
    python -m experiments.stages SMOLLM2 $STAGES/addresses $STAGES/factbook $STAGES/glosses $STAGES/elements --output DIR \
        --retention ARTICLES --train 'adapters={r: 29, lora_alpha: 58}' learning_rate=1e-3 max_steps=12 sequence_length=128

The folder of a stage has `corpus.jsonl`, `validation.jsonl` and `text.jsonl`; words after `--train` are keys of `midus train`. One
model learns all stages, and adapters are merged after each. Other ways:

    --replay 0.2                 a share of a stage's tokens comes from the corpora of earlier stages, evenly
    --routed MINILM              each stage trains a separate model from the base; a document is measured with the nearest stage's
    --upscale '{method: engram, options: {table: exact, corpus: "{corpus}"}}' --protect-earlier
                                 the model is upscaled before each stage, with the stage's `{corpus}`; earlier ones are `protect`

A line of JSON per stage has the losses in nats per token, document by document; the last has the gains over the base at the end, and
the backward transfer: the mean, over earlier stages, of the loss right after the stage minus the loss at the end.
"""

import argparse
import contextlib
import json
import random
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from midus_hf.config.yaml_options import from_mapping, read_yaml
from midus_hf.data.corpus import read_corpus
from midus_hf.evaluation.text_rows import row_losses, text_rows
from midus_hf.sources.names import check_model_name
from midus_hf.topics.building import calibrate
from midus_hf.topics.memory_retriever import TextEmbedder
from midus_hf.topics.tree import ClusterTree
from midus_hf.training import TrainArguments, run_training
from upscalers import upscale

# Number of documents, evenly spread over a corpus, whose mean embedding is the centroid of its stage.
MOST_DOCUMENTS = 1000

# Negative log-likelihood in nats, and number of predicted tokens, of each document of a text.
Losses = Sequence[tuple[float, int]]


def texts_of(path: Path | str) -> list[str]:
    """Return the documents of a file or a folder."""
    return read_corpus(str(path))["text"][:]


def measure(model: str, texts: Mapping[str, Sequence[str]], sequence_length: int) -> dict[str, Losses]:
    """Return the losses of each document of texts by name, in windows of the length of training sequences."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype="auto").to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    measured = {}
    for name, documents in texts.items():
        rows = text_rows(name, documents, tokenizer, loaded.config, sequence_length=sequence_length)
        losses = row_losses(loaded, rows)
        sums, counts = [0.0] * len(documents), [0] * len(documents)
        for document, nats, tokens in zip(rows.documents, losses.sums.tolist(), losses.tokens.tolist(), strict=True):
            sums[document] += nats
            counts[document] += tokens
        measured[name] = list(zip(sums, counts, strict=True))
    return measured


def means(losses: Mapping[str, Losses]) -> dict[str, float]:
    """Return the loss of each text in nats per token, over all its documents."""
    return {name: sum(nats for nats, _ in each) / sum(count for _, count in each) for name, each in losses.items()}


def write_replayed(
    output: Path, corpora: Sequence[Sequence[str]], share: float, tokens: int, tokenizer: Any, seed: int
) -> list[int]:
    """Write the last stage's corpus with a share of its tokens from earlier corpora; return what each gives.

    Documents are drawn without replacement, again from the beginning where a corpus has too few, and the last of each corpus is cut.
    """
    earlier = len(corpora) - 1
    counts = [int(share * tokens / earlier)] * earlier
    # A token of each corpus may be lost at a cut; a sequence that is not whole is not trained on.
    counts.append(tokens - sum(counts) + len(corpora))
    rows = []
    for number, (documents, left) in enumerate(zip(corpora, counts, strict=True)):
        for text, ids in in_random_order(documents, tokenizer, random.Random(f"{seed}/{number}")):
            if left <= 1:
                break
            if len(ids) + 1 > left:  # a document counts with the token that training appends to it
                text = tokenizer.decode(ids[: left - 1], skip_special_tokens=True)
                ids = ids[: left - 1]
            rows.append(text)
            left -= len(ids) + 1
    output.write_text("".join(json.dumps({"text": text}) + "\n" for text in rows), encoding="utf-8")
    return counts


def in_random_order(documents: Sequence[str], tokenizer: Any, order: random.Random) -> Iterator[tuple[str, Any]]:
    """Yield documents with their tokens in random order, without end, each as often as the others."""
    while True:
        for text in order.sample(documents, len(documents)):
            yield text, tokenizer(text, verbose=False)["input_ids"]


class Router:
    """Finds the stage whose corpus is nearest to a document, by the embedding of its first tokens.

    A document that is less similar to the nearest stage than 95 % of pieces of validation texts are to theirs has none, -1.
    """

    def __init__(self, embedder: TextEmbedder, corpora: Sequence[Sequence[str]], validation: Sequence[Sequence[str]]):
        spread = [
            [each[n * len(each) // MOST_DOCUMENTS] for n in range(MOST_DOCUMENTS)]
            if len(each) > MOST_DOCUMENTS
            else each
            for each in corpora
        ]
        self.embedder = embedder
        self.validation = validation
        self.centroids = torch.stack(
            [torch.nn.functional.normalize(embedder.embed(each).mean(0), dim=-1) for each in spread]
        )

    def stages_of(self, embeddings: torch.Tensor, num_stages: int) -> list[int]:
        """Return the nearest of the first stages for each embedding."""
        # A tree has two topics or more.
        lacking = torch.full((max(0, 2 - num_stages), self.centroids.shape[1]), torch.nan)
        tree = ClusterTree(2, [torch.cat([self.centroids[:num_stages], lacking])])
        calibrate(
            tree, [text for texts in self.validation[:num_stages] for text in texts], self.embedder.embed, seed=0
        )
        near = tree.similarity(embeddings) >= (-1 if tree.min_similarity is None else tree.min_similarity)
        return torch.where(near, tree.paths(embeddings)[:, 0], -1).tolist()


def check_paths(
    parser: argparse.ArgumentParser, base: str, stages: Sequence[Path], files: Sequence[str], output: Path
) -> None:
    """End the program with a message if the base is not a model, a file of a stage is absent, or the output exists."""
    try:
        check_model_name("base", base)
    except ValueError as error:
        parser.error(str(error))
    absent = [str(stage / file) for stage in stages for file in files if not (stage / file).is_file()]
    if absent:
        parser.error(f"no file {absent[0]}; expected the folder of a stage, as 'python -m material stages' makes it.")
    if output.exists():
        parser.error(f"--output is {str(output)!r}, which exists; expected a new folder.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base")
    parser.add_argument("stages", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, required=True, help="folder for models, which must not exist")
    parser.add_argument("--retention", nargs="*", default=[], type=Path)
    parser.add_argument("--train", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--upscale", type=lambda text: read_yaml(text, "--upscale"))
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--replay", type=float)
    way.add_argument("--routed", metavar="EMBEDDING_MODEL")
    parser.add_argument("--protect-earlier", action="store_true")
    asked = parser.parse_args()
    pairs = (word.partition("=") for word in asked.train)
    keys = {key: read_yaml(value, f"--train {key}") for key, _, value in pairs}
    if "max_steps" not in keys or not 0 < (asked.replay or 0.5) < 1 or (asked.upscale and asked.routed):
        parser.error("expected --train max_steps=N, a --replay above 0 and below 1, and --upscale or --routed.")
    files = ("corpus.jsonl", "text.jsonl", *(["validation.jsonl"] if asked.routed else []))
    check_paths(parser, asked.base, asked.stages, files, asked.output)
    for path in asked.retention:
        if not path.exists():
            parser.error(f"--retention is {str(path)!r}, which does not exist; expected a text.")
    keys = {"sequence_length": 256, "per_device_train_batch_size": 4, "seed": 0, "dataloader_drop_last": True, **keys}
    if asked.upscale is None and "adapters" not in keys:
        keys.setdefault("trainable", "all")
    learn_stages(asked, keys)


def learn_stages(asked: argparse.Namespace, keys: dict[str, Any]) -> None:
    """Train the stages one after another; print the losses of all texts after each."""
    corpora = [stage / "corpus.jsonl" for stage in asked.stages]
    texts = {stage.name: texts_of(stage / "text.jsonl") for stage in asked.stages}
    texts |= {path.stem: texts_of(path) for path in asked.retention}
    models = [measure(asked.base, texts, keys["sequence_length"])]
    points = [means(models[0])]
    names = [stage.name for stage in asked.stages]
    print(json.dumps({"after": "base", "losses": points[0]}), flush=True)
    if asked.routed:
        validation = [texts_of(stage / "validation.jsonl") for stage in asked.stages]
        router = Router(TextEmbedder(asked.routed), [texts_of(corpus) for corpus in corpora], validation)
        embedded = {name: router.embedder.embed(documents) for name, documents in texts.items()}
    model = asked.base
    for stage, name in enumerate(names):
        here = asked.output / f"{stage + 1}-{name}"
        here.mkdir(parents=True)
        own = {**keys, "corpus": str(corpora[stage])}
        start = asked.base if asked.routed else model
        if asked.upscale:
            options = json.loads(json.dumps(asked.upscale).replace("{corpus}", str(corpora[stage])))
            upscale(base=start, output=here / "upscaled", seed=keys["seed"], **options)
            start = str(here / "upscaled")
        if asked.protect_earlier and stage:
            own["protect"] = [*keys.get("protect", []), *map(str, corpora[:stage])]
        if asked.replay and stage:
            tokens = keys["max_steps"] * keys["per_device_train_batch_size"] * keys["sequence_length"]
            tokens *= keys.get("gradient_accumulation_steps", 1)
            documents = [texts_of(corpus) for corpus in corpora[: stage + 1]]
            own["corpus"] = str(here / "replayed.jsonl")
            tokenizer = AutoTokenizer.from_pretrained(start)
            write_replayed(here / "replayed.jsonl", documents, asked.replay, tokens, tokenizer, keys["seed"])
        arguments = from_mapping(
            TrainArguments, {**own, "model_name_or_path": start, "output_dir": str(here / "trained")}
        )
        with contextlib.redirect_stdout(sys.stderr):  # standard output is for results
            trained = run_training(arguments)
        if stage and not asked.routed:
            shutil.rmtree(Path(model).parent)
        model = str(here / "trained")
        losses = measure(model, texts, keys["sequence_length"])
        if asked.routed:
            models.append(losses)
            chosen = {text: router.stages_of(rows, stage + 1) for text, rows in embedded.items()}
            losses = {text: [models[which + 1][text][n] for n, which in enumerate(chosen[text])] for text in texts}
            shutil.rmtree(here)
        points.append(means(losses))
        numbers = {"tokens": trained.tokens, "trained_parameters": trained.log[-1]["trained_parameters"]}
        print(json.dumps({"after": name, "losses": points[-1], **numbers}), flush=True)
    kept = [points[stage + 1][name] - points[-1][name] for stage, name in enumerate(names[:-1])]
    end: dict[str, Any] = {"gains": {name: points[0][name] - points[-1][name] for name in texts}}
    end["backward_transfer"] = sum(kept) / len(kept) if kept else None
    if asked.routed:
        end["at_their_stage"] = {
            name: chosen[name].count(stage) / len(chosen[name]) for stage, name in enumerate(names)
        }
    print(json.dumps(end))


if __name__ == "__main__":
    main()
