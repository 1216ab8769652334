"""Train a model with a custom function, and evaluate it like `experiments.stages`: here plain SGD on only the embeddings.

    STAGES=$(python -m material stages)
    python -m experiments.own_training SMOLLM2 $STAGES/addresses --output DIR --rate 0.1 --steps 12 --sequence-length 128

Replace `train_embeddings` by your own training; `midus eval BASE DIR --text FILE` evaluates the model, too.
"""

import argparse
import json
import random
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from experiments.stages import check_paths, means, measure, texts_of


def train_embeddings(
    base: str, corpus: list[str], output: Path, seed: int, rate: float, steps: int, sequence_length: int
) -> dict[str, int]:
    """Train the embeddings of a base on batches of four sequences, and save the model; return what it was trained on."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(base)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    documents = random.Random(seed).sample(corpus, len(corpus))
    ids = torch.tensor([token for text in documents for token in [*tokenizer(text, verbose=False)["input_ids"], *end]])
    rows = ids[: len(ids) // sequence_length * sequence_length].view(-1, sequence_length)
    if len(rows) < 4 * steps:
        raise ValueError(f"the corpus has {len(rows)} sequences; expected {4 * steps}, four for each step.")
    trained = model.get_input_embeddings().weight
    optimizer = torch.optim.SGD([trained], rate)
    for batch in rows[: 4 * steps].split(4):
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    return {"trained_parameters": trained.numel(), "tokens": 4 * steps * sequence_length}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base")
    parser.add_argument("stage", type=Path, help="folder with corpus.jsonl and text.jsonl")
    parser.add_argument("--output", type=Path, required=True, help="folder for the model, which must not exist")
    parser.add_argument("--rate", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--sequence-length", type=int, default=128)
    asked = parser.parse_args()
    check_paths(parser, asked.base, [asked.stage], ("corpus.jsonl", "text.jsonl"), asked.output)
    texts = {asked.stage.name: texts_of(asked.stage / "text.jsonl")}
    before = means(measure(asked.base, texts, asked.sequence_length))
    corpus = texts_of(asked.stage / "corpus.jsonl")
    counts = train_embeddings(asked.base, corpus, asked.output, 0, asked.rate, asked.steps, asked.sequence_length)
    after = means(measure(str(asked.output), texts, asked.sequence_length))
    print(json.dumps({"before": before, "after": after, **counts}))


if __name__ == "__main__":
    main()
