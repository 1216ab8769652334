"""Learn several texts one after the other with PEFT's orthogonal subspace fine-tuning, and measure as `experiments.stages` does.

    STAGES=$(python -m material stages)
    python -m experiments.osf SMOLLM2 $STAGES/addresses $STAGES/factbook $STAGES/glosses $STAGES/elements --output DIR \
        --retention ARTICLES --rate 3e-5 --steps 12 --sequence-length 128

Half of the directions of each projection are kept in each stage, and the result is merged before the next one.
"""

import argparse
import json
import random
from itertools import chain
from pathlib import Path

import torch
from peft import OSFConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, get_cosine_schedule_with_warmup

from experiments.stages import in_random_order, means, measure, texts_of

ROWS = 4
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def train_stage(start: str, corpus: Path, output: Path, seed: int, rate: float, steps: int, length: int) -> None:
    """Train a model on a corpus in batches of four sequences, and save it with what it learned merged."""
    torch.manual_seed(seed)
    tokenizer, model = AutoTokenizer.from_pretrained(start), AutoModelForCausalLM.from_pretrained(start)
    documents = in_random_order(texts_of(corpus), tokenizer, random.Random(seed))
    tokens = chain.from_iterable([*ids, tokenizer.eos_token_id] for _, ids in documents)
    ids = torch.tensor([next(tokens) for _ in range(steps * ROWS * length)]).view(steps, ROWS, length)
    adapted = get_peft_model(model, OSFConfig(target_modules=PROJECTIONS, effective_rank=0.5)).train()
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, rate, weight_decay=0.0)
    schedule = get_cosine_schedule_with_warmup(optimizer, -(-steps // 10), steps)
    for batch in ids:
        optimizer.zero_grad()
        adapted(input_ids=batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
    adapted.merge_and_unload().save_pretrained(output)
    tokenizer.save_pretrained(output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base")
    parser.add_argument("stages", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--retention", nargs="*", default=[], type=Path)
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--sequence-length", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    texts = {stage.name: texts_of(stage / "text.jsonl") for stage in asked.stages}
    texts |= {path.stem: texts_of(path) for path in asked.retention}
    model, points = asked.base, [means(measure(asked.base, texts, asked.sequence_length))]
    for stage in asked.stages:
        output = asked.output / stage.name
        train_stage(model, stage / "corpus.jsonl", output, asked.seed, asked.rate, asked.steps, asked.sequence_length)
        model = str(output)
        points.append(means(measure(model, texts, asked.sequence_length)))
        print(json.dumps({"after": stage.name, "losses": points[-1]}), flush=True)
    names = [stage.name for stage in asked.stages]
    kept = [points[number + 1][name] - points[-1][name] for number, name in enumerate(names[:-1])]
    gains = {name: points[0][name] - points[-1][name] for name in texts}
    print(json.dumps({"gains": gains, "backward_transfer": sum(kept) / len(kept) if kept else None}))


if __name__ == "__main__":
    main()
