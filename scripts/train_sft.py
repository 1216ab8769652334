"""Fine-tune an upscaled model with the SFTTrainer of TRL. Copy this script and change it.

    python scripts/train_sft.py --model_name_or_path trained --train_file chats.jsonl --output_dir tuned \
        --learning_rate 1e-5 --per_device_train_batch_size 4 --num_train_epochs 1 --max_length 1024 --bf16

`MemoryTrainerMixin` before a trainer class gives memory keys and values a separate learning rate without weight decay.
All arguments of TRL's `SFTConfig` are arguments of the script.
"""

from dataclasses import dataclass, field

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser
from trl import SFTConfig, SFTTrainer

from midus_hf.training import MemoryTrainerMixin, set_trainable


@dataclass
class ScriptArguments:
    """Arguments of the script, besides the arguments of `SFTConfig`."""

    model_name_or_path: str = field(metadata={"help": "Folder or Hub id of the model to train."})
    train_file: str = field(metadata={"help": "JSON lines with messages, or with prompt and completion."})
    trainable: str = field(
        default="all", metadata={"help": "all: train everything, as in MIDUS; new: only the added layers."}
    )


class MemorySFTTrainer(MemoryTrainerMixin, SFTTrainer):
    """TRL's trainer with the parameter groups and learning rates of a memory model."""


def main() -> None:
    """Fine-tune the model that the command line names."""
    script, arguments = HfArgumentParser((ScriptArguments, SFTConfig)).parse_args_into_dataclasses()
    tokenizer = AutoTokenizer.from_pretrained(script.model_name_or_path, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(script.model_name_or_path, dtype="float32", trust_remote_code=False)
    print(set_trainable(model, script.trainable))
    dataset = load_dataset("json", data_files=script.train_file, split="train")
    trainer = MemorySFTTrainer(model, arguments, train_dataset=dataset, processing_class=tokenizer)
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
    trainer.save_model()


if __name__ == "__main__":
    main()
