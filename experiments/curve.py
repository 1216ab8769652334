"""Train the variants of a comparison at each of their rates in one pass, and measure them at some steps on the way.

    python -m experiments.curve CONFIG --set KEY=VALUE... --models DIR --steps 20 40 80 160 320 --ends 80 320

CONFIG and `--set` are those of `midus compare`, which cannot stop a run and go on with it. All variants train up to the first of
`--ends`, then up to the next, at their first rate before their second. Results of runs are files of `output_dir`, which
`midus compare --report` reads too; checkpoints are in `--models`, so that the same command continues, also with later ends.
With `--picture FILE` nothing is trained: the results are drawn, the first rate of each variant solid and others dashed, and printed.
"""

import argparse
import itertools
import json
import multiprocessing
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from midus_hf.compare.plan import Comparison, Run, check, list_searches, plan
from midus_hf.compare.run import (
    Result,
    build_request,
    code_version,
    input_hasher,
    mean_loss,
    read_curve,
    read_result,
    write_result,
)
from midus_hf.config.errors import RequestError
from midus_hf.config.yaml_options import from_mapping, options_from_files
from midus_hf.look.page import as_png, new_figure
from midus_hf.training import TrainArguments, run_training
from midus_hf.training.prepare import Prepared
from midus_hf.training.run import make_memory_trainer
from upscalers import upscale


class Milestones(TrainerCallback):
    """Measures and saves at some steps, and stops training at the last."""

    def __init__(self, steps: list[int]):
        self.steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_evaluate = control.should_save = state.global_step in self.steps
        control.should_training_stop = state.global_step >= self.steps[-1]


def advance(run: Run, comparison: Comparison, models: Path, steps: list[int], inputs: dict[str, str]) -> Result:
    """Train a run up to the last of some steps, from its latest checkpoint if there is one, and write its result."""
    trained, upscaled = models / run.name / "trained", models / run.name / "upscaled"
    earlier = read_result(run.folder(comparison))
    if run.variant.upscale is not None and not upscaled.exists():
        upscale(base=comparison.base, output=upscaled, seed=run.seed, **run.variant.upscale)
    model = comparison.base
    starts_at_base = None
    if run.variant.upscale is not None:
        model = str(upscaled)
        starts_at_base = json.loads((upscaled / "upscale.json").read_text())["identity"]["max_abs_diff"] == 0.0
    keys = {**run.training_keys(comparison, model, str(trained)), "resume_from_checkpoint": "auto"}
    keys["eval_on_start"] = not any(trained.glob("checkpoint-*"))

    def make_trainer(prepared: Prepared) -> Any:
        trainer = make_memory_trainer(prepared)
        trainer.add_callback(Milestones(steps))
        return trainer

    outcome = run_training(from_mapping(TrainArguments, keys), make_trainer=make_trainer)
    seconds = next(event["train_runtime"] for event in reversed(outcome.log) if "train_runtime" in event)
    result = Result(
        variant=run.variant.name,
        rate=dict(run.rate),
        seed=run.seed,
        curve=read_curve(outcome.log, list(comparison.texts)),
        new_parameters=run.variant.new_parameters,
        trained_parameters=outcome.log[-1]["trained_parameters"],
        tokens=outcome.tokens,
        starts_at_base=starts_at_base,
        seconds=seconds + (earlier.seconds if earlier else 0.0),
        peak_memory_bytes=outcome.log[-1]["peak_memory_bytes"],
        request=build_request(run, comparison),
        origin={**inputs, "code": code_version()},
    )
    write_result(run.folder(comparison), result)
    return result


def table_rows(comparison: Comparison, results: Sequence[Result]) -> list[list[str]]:
    """Return a heading and a row per variant and rate: seeds, what is learned after so many tokens, and the change of other text.

    Variants are in the order of the comparison. Cells are means of the seeds that came so far; where none did, they are empty.
    """
    names = list(comparison.variants)
    tokens_per_step = results[0].tokens // results[0].curve[-1].step
    steps = sorted({point.step for result in results for point in result.curve} - {0})
    ends = sorted({steps[0], steps[-1]})
    tokens = {step: f"{step * tokens_per_step:,}" for step in steps}
    other_text = ", ".join(comparison.retention)
    rows = [["one pass", "rate", "seeds", *tokens.values(), *(f"{other_text}, {tokens[step]}" for step in ends)]]
    by_rate: dict[tuple[str, float], list[Result]] = {}
    for result in sorted(results, key=lambda one: (names.index(one.variant), -list(one.rate.values())[-1], one.seed)):
        by_rate.setdefault((result.variant, list(result.rate.values())[-1]), []).append(result)

    def mean_fall(runs: Sequence[Result], texts: Sequence[str], step: int) -> float | None:
        falls = [
            mean_loss(run.start.losses, texts) - mean_loss(point.losses, texts)
            for run in runs
            for point in run.curve
            if point.step == step
        ]
        return statistics.mean(falls) if falls else None

    for (variant, rate), runs in by_rate.items():
        learned = [mean_fall(runs, list(comparison.domain), step) for step in steps]
        kept = [mean_fall(runs, list(comparison.retention), step) for step in ends]
        cells = ["" if fall is None else f"{fall:.3f}" for fall in learned]
        cells += ["" if fall is None else f"{-fall:+.3f}" for fall in kept]
        rows.append([variant, f"{rate:g}", ", ".join(str(run.seed) for run in runs), *cells])
    return rows


def draw(comparison: Comparison, results: Sequence[Result]) -> bytes:
    """Return a picture of what is learned and what is forgotten against tokens, as PNG."""
    texts = {
        "learned: fall of the loss, mean of " + " and ".join(comparison.domain): (list(comparison.domain), 1),
        "forgotten: change of the loss on " + " and ".join(comparison.retention): (list(comparison.retention), -1),
    }
    figure = new_figure(10.0, 4.5)
    names = list(comparison.variants)
    ticks = list[float]()
    for axes, (title, (measured, sign)) in zip(figure.subplots(1, 2), texts.items(), strict=True):
        for result in sorted(results, key=lambda one: names.index(one.variant)):
            number = names.index(result.variant)
            is_first = comparison.list_rates(result.variant)[0] == result.rate
            falls = [
                mean_loss(result.start.losses, measured) - mean_loss(one.losses, measured) for one in result.curve
            ]
            tokens = [one.step / result.curve[-1].step * result.tokens / 1000 for one in result.curve]
            ticks = sorted({*ticks, *tokens[1:]})
            axes.plot(
                tokens[1:],
                [sign * fall for fall in falls[1:]],
                color=f"C{number}",
                linestyle="-" if is_first else "--",
                marker=".",
                linewidth=1.8 if is_first else 1.1,
                label=result.variant if is_first and result.seed == comparison.seeds[0] else None,
            )
        axes.set_xscale("log")
        axes.set_xticks(ticks, [f"{tick:.0f}" for tick in ticks])
        axes.minorticks_off()
        axes.axhline(0.0, color="#888888", linewidth=1.0, linestyle=":", zorder=0)
        axes.set(xlabel="thousand tokens", ylabel="nats per token")
        axes.set_title(title, fontsize=9, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    return as_png(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--models", type=Path, help="folder of upscaled models and checkpoints")
    parser.add_argument("--steps", nargs="+", type=int, default=[20, 40, 80, 160, 320, 640])
    parser.add_argument("--ends", nargs="+", type=int, default=[320])
    parser.add_argument("--picture", type=Path)
    asked = parser.parse_args()
    if (asked.picture is None) == (asked.models is None):
        parser.error("expected --models, the folder to train in, or --picture, the file to draw in.")
    try:
        comparison = options_from_files(Comparison, [asked.config], asked.set)
        if asked.picture is not None:
            paths = sorted((Path(comparison.output_dir) / "runs").rglob("seed-*.json"))
            read = (read_result(path.with_suffix("")) for path in paths)
            results = [result for result in read if result]
            asked.picture.write_bytes(draw(comparison, results))
            heading, *rows = (f"| {' | '.join(row)} |" for row in table_rows(comparison, results))
            print("\n".join([heading, f"|{'---|' * (heading.count('|') - 1)}", *rows]))
            return
        comparison, variants = plan(comparison)
        check(comparison, variants)
    except RequestError as error:
        parser.error(str(error))
    by_variant = (list_searches(variant, comparison) for variant in variants)
    by_rate = [list(filter(None, runs)) for runs in itertools.zip_longest(*by_variant)]
    digests_for = input_hasher(comparison)
    failed = False
    in_order = [(run, end) for runs in by_rate for end in asked.ends for run in runs]
    for run, end in in_order:
        done = read_result(run.folder(comparison))
        if done is not None and done.curve[-1].step >= end:
            continue
        steps = [step for step in asked.steps if step < end] + [end]
        digests = digests_for(run.variant)
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:  # whose memory is given back
            try:
                result = process.submit(advance, run, comparison, asked.models, steps, digests).result()
            except Exception as error:  # others may not fail
                failed = True
                print(f"{run.name}, up to step {end}: {error}", flush=True)
            else:
                print(f"{run.name}: {result.curve[-1]}", flush=True)
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
