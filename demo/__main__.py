"""`python -m demo`: give SmolLM2-135M head-wise memory, teach it presidential addresses, and show what changed.

Every step is a command that a person would type; it is printed before it runs.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

from demo import BIN, CONFIGS, empty_folder, run
from demo.report import write_report
from material.addresses import addresses
from material.excerpts import address_excerpts, article_excerpts
from material.registry import MaterialError
from material.smollm2 import smollm2_135m
from midus_hf.compare.origins import machine, short

OUTPUT = Path("outputs/demo")
# What the run measures while it trains: text like the corpus, and text that tells what is forgotten.
TEXTS = {"addresses": "held-out addresses, to be learned", "articles": "encyclopedia articles, to be kept"}
PROMPT = "Fellow-citizens of the Senate and House of Representatives: I congratulate you on"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=OUTPUT, help=f"default: {OUTPUT}")
    parser.add_argument("--steps", type=int, help="training steps (default: as configs/train/demo.yaml says)")
    arguments = parser.parse_args()
    output = empty_folder(arguments.output, OUTPUT)

    try:
        base, corpus = smollm2_135m(), addresses()
        texts = {"addresses": address_excerpts(), "articles": article_excerpts()}
    except MaterialError as error:
        sys.exit(f"demo: {error}")
    upscaled, trained = output / "upscaled", output / "trained"
    started, load = time.perf_counter(), os.getloadavg()[0]
    commands: list[str] = []

    def step(*words: object) -> str:
        command, printed = run(*words)
        commands.append(command)
        return printed

    def evaluate(*models: Path) -> list[dict]:
        windows = ["--sequence-length", "256", "--max-tokens", "8192", "--batch-size", "4"]
        return json.loads(step(BIN / "midus", "eval", *models, "--text", corpus.held_out, *windows, "--json"))[
            "models"
        ]

    step(BIN / "upscale", "--config", CONFIGS / "upscale" / "demo.yaml", "--base", base, "--output", upscaled)
    before = evaluate(base, upscaled)
    steps = [f"max_steps={arguments.steps}"] if arguments.steps is not None else []
    training = [CONFIGS / "train" / "demo.yaml", f"model_name_or_path={upscaled}"]
    measured = [f"eval_text={json.dumps({name: str(path) for name, path in texts.items()})}"]
    measured += ["eval_on_start=true", "eval_steps=0.2"]
    step(BIN / "midus", "train", *training, f"output_dir={trained}", f"corpus={corpus.train}", *measured, *steps)
    after = evaluate(trained)
    sample = [sys.executable, "-m", "demo.sample", "--prompt", PROMPT, base, upscaled, trained]
    samples = json.loads(step(*sample))

    table = write_report(
        output,
        models=dict(zip(("base", "upscaled", "trained"), [*before, *after], strict=True)),
        samples=dict(zip(("base", "upscaled", "trained"), samples, strict=True)),
        prompt=PROMPT,
        log=trained / "trainer_state.json",
        texts=TEXTS,
        upscale_record=json.loads((upscaled / "upscale.json").read_text(encoding="utf-8")),
        commands=commands,
        seconds=time.perf_counter() - started,
        machine=f"{short('machine', {'machine': machine()})} (load before: {load:.1f} of {os.cpu_count()} CPUs)",
    )
    print(f"\n{table}\n\nreport: {output / 'report.html'}")


if __name__ == "__main__":
    main()
