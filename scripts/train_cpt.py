"""Continue the pretraining of an upscaled model with the Trainer of Transformers. Copy this script and change it.

    upscale --base HuggingFaceTB/SmolLM2-135M-Instruct --method midus-hml --output smollm2-hml
    python scripts/train_cpt.py --model_name_or_path smollm2-hml --train_files 'texts/*.txt' --output_dir trained \
        --learning_rate 1e-4 --per_device_train_batch_size 4 --max_steps 50

Two lines differ from a script for any other model: `set_trainable` freezes the base, and `MemoryTrainer` gives memory keys and values
a separate learning rate without weight decay. All arguments of `TrainingArguments` are arguments of the script.
"""

from dataclasses import dataclass, field

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, TrainingArguments

from midus_hf.training import MemoryTrainer, set_trainable
from midus_hf.training.arguments import computes_bfloat16


@dataclass
class ScriptArguments:
    """Arguments of the script, besides the arguments of `TrainingArguments`."""

    model_name_or_path: str = field(metadata={"help": "Folder or Hub id of the model to train."})
    train_files: str = field(metadata={"help": "Text files to train on, as a pattern."})
    sequence_length: int = field(default=1024, metadata={"help": "Tokens per sequence."})
    trainable: str = field(default="new", metadata={"help": "new: train only the added layers; all: everything."})


def main() -> None:
    """Train the model that the command line names."""
    parser = HfArgumentParser((ScriptArguments, TrainingArguments))
    parser.set_defaults(bf16=computes_bfloat16())
    script, arguments = parser.parse_args_into_dataclasses()
    tokenizer = AutoTokenizer.from_pretrained(script.model_name_or_path, trust_remote_code=False)
    # Weights in float32: in bfloat16 most updates with a small learning rate would be lost to rounding.
    model = AutoModelForCausalLM.from_pretrained(script.model_name_or_path, dtype="float32", trust_remote_code=False)
    print(set_trainable(model, script.trainable))

    def sequences(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        documents = tokenizer(rows["text"])["input_ids"]
        tokens = [token for document in documents for token in [*document, tokenizer.eos_token_id]]
        starts = range(0, len(tokens) - script.sequence_length + 1, script.sequence_length)
        # `midus train` also begins each sequence with what the tokenizer puts before a text, which Llama and Gemma need.
        cut = [tokens[start : start + script.sequence_length] for start in starts]
        return {"input_ids": cut, "labels": cut}

    texts = load_dataset("text", data_files=script.train_files, sample_by="document", split="train")
    dataset = texts.map(sequences, batched=True, remove_columns=texts.column_names)
    trainer = MemoryTrainer(model, arguments, train_dataset=dataset)
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
    trainer.save_model()
    tokenizer.save_pretrained(arguments.output_dir)


if __name__ == "__main__":
    main()
