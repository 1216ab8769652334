"""Stands in place of `midus_hf.compare.run_process`: notes what it was started with, and writes a result that tests have chosen.

`behaviour.json` in the working folder tells of runs by name: `loss`, `seconds` to take, `fails` with words, `exits` with a status.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from midus_hf.compare.measuring import base_request
from midus_hf.compare.options import Comparison, VariantOptions
from midus_hf.compare.results import Point, Result, write_result
from midus_hf.compare.runs import Run
from midus_hf.compare.variants import Variant


def note(**told) -> None:
    with open("notes.jsonl", "a") as notes:
        print(json.dumps(told), file=notes)


specification = Path(sys.argv[1])
told = json.loads(specification.read_text())
variants = {name: VariantOptions(**options) for name, options in told["comparison"]["variants"].items()}
comparison = Comparison(**{**told["comparison"], "variants": variants})
run = None
if "run" in told:
    run = Run(**{**told["run"], "variant": Variant(**told["run"]["variant"])})
name = "base" if run is None else run.name
behaviour = json.loads(Path("behaviour.json").read_text()).get(name, {})


def end(number, frame) -> None:
    note(name=name, moment="terminated")
    sys.exit(128 + number)


signal.signal(signal.SIGTERM, end)
chosen = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
note(name=name, moment="began", parent=told["parent"], **{variable: os.environ.get(variable) for variable in chosen})
print("printed by a run")
time.sleep(behaviour.get("seconds", 0))
if "fails" in behaviour:
    (specification.parent / "failed.txt").write_text(behaviour["fails"] + "\n")
    sys.exit(1)
if "exits" in behaviour:
    print("said before the end", file=sys.stderr)
    os.kill(os.getpid(), -behaviour["exits"]) if behaviour["exits"] < 0 else sys.exit(behaviour["exits"])
losses = dict.fromkeys(comparison.texts, behaviour.get("loss", 2.0))
curve = [Point(0, 0, None, dict.fromkeys(comparison.texts, 3.0)), Point(4, 8, 1.0, losses)]
if run is None:
    result = Result("base", {}, 0, curve[:1], request=base_request(comparison))
else:
    controls = {}
    if run.variant.upscale is not None and run.variant.control is None:
        controls = {
            "one-row": {"options": {"n": 1}, "trainable": []},
            "shuffled-addresses": {"options": {}, "trainable": []},
        }
    request = run.request(comparison)
    result = Result(
        run.variant.name, dict(run.rate), run.seed, curve, controls=controls, control=run.variant.control,
        control_of=run.variant.control_of, request=request,
    )  # fmt: skip
write_result(specification.parent, result)
note(name=name, moment="ended")
