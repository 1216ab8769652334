"""`python -m demo`: give SmolLM2-135M head-wise memory, teach it presidential addresses, and show what changed.

Every step is a command that a person would type; it is printed before it runs.
"""

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from demo.report import write_report
from material.addresses import addresses
from material.benchmarks import benchmarks
from material.registry import MaterialError
from material.smollm2 import smollm2_135m

_BIN = Path(sys.executable).parent
_CONFIGS = Path(__file__).parent.parent / "configs"
PROMPT = "Fellow-citizens of the Senate and House of Representatives: I congratulate you on"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("outputs/demo"), help="default: outputs/demo")
    parser.add_argument("--steps", type=int, help="training steps (default: as configs/train/demo.yaml says)")
    arguments = parser.parse_args()
    output: Path = arguments.output
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)

    try:
        base, corpus, questions = smollm2_135m(), addresses(), benchmarks()
    except MaterialError as error:
        sys.exit(f"demo: {error}")
    upscaled, trained = output / "upscaled", output / "trained"
    started = time.perf_counter()
    commands: list[str] = []

    def run(*words: str | Path) -> str:
        command = shlex.join(map(str, words))
        commands.append(command)
        print(f"\n$ {command}", flush=True)
        done = subprocess.run(list(map(str, words)), stdout=subprocess.PIPE, text=True)
        print(done.stdout, end="", flush=True)
        if done.returncode:
            sys.exit(f"demo: the command above failed with exit status {done.returncode}.")
        return done.stdout

    def evaluate(*models: Path) -> list[dict]:
        config = ["--config", _CONFIGS / "eval" / "demo.yaml", "--text", corpus.held_out, "--data", questions]
        return json.loads(run(_BIN / "midus", "eval", *models, *config, "--json"))["models"]

    run(_BIN / "upscale", "--config", _CONFIGS / "upscale" / "demo.yaml", "--base", base, "--output", upscaled)
    before = evaluate(base, upscaled)
    steps = [f"max_steps={arguments.steps}"] if arguments.steps else []
    training = [_CONFIGS / "train" / "demo.yaml", f"model_name_or_path={upscaled}"]
    run(_BIN / "midus", "train", *training, f"output_dir={trained}", f"corpus={corpus.train}", *steps)
    after = evaluate(trained)
    sample = [sys.executable, "-m", "demo.sample", "--prompt", PROMPT, base, upscaled, trained]
    samples = json.loads(run(*sample))

    table = write_report(
        output,
        models=dict(zip(("base", "upscaled", "trained"), [*before, *after], strict=True)),
        samples=dict(zip(("base", "upscaled", "trained"), samples, strict=True)),
        prompt=PROMPT,
        log=trained / "log.jsonl",
        upscale_record=json.loads((upscaled / "upscale.json").read_text(encoding="utf-8")),
        commands=commands,
        seconds=time.perf_counter() - started,
    )
    print(f"\n{table}\n\nreport: {output / 'report.html'}")


if __name__ == "__main__":
    main()
