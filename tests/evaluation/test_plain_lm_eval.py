"""The harness's own command on a saved model, where this project is not installed."""

import json

import pytest
import yaml
from evaluation.byte_models import byte_tokenizer, save_byte_model, save_upscaled
from evaluation.questions import write_questions
from models.fresh_process import run_python
from transformers import AutoModelForCausalLM

from midus_hf.evaluation.local_tasks import load_local_task

pytest.importorskip("lm_eval")

from midus_hf.evaluation.harness import Tasks

# Without lists of packages and compilers, and without the harness's own tasks, whose files take ten seconds to read.
_LM_EVAL = """
import sys
from functools import partialmethod
sys.argv = ["lm_eval", *{arguments!r}]
from lm_eval import evaluator
from lm_eval.__main__ import cli_evaluate
from lm_eval.tasks import TaskManager
evaluator.add_env_info = lambda results: None
TaskManager.__init__ = partialmethod(TaskManager.__init__, include_defaults=False)
cli_evaluate()
assert "midus_hf" not in sys.modules
"""


def test_plain_lm_eval_scores_a_saved_model_without_this_project(tmp_path):
    base = save_byte_model("gemma3", tmp_path / "base", max_position_embeddings=256)
    upscaled = save_upscaled(base, tmp_path / "upscaled")
    data = write_questions(tmp_path / "questions")
    (tmp_path / "tasks").mkdir()
    for name in ("piqa", "boolq"):
        (tmp_path / "tasks" / f"midus_{name}.yaml").write_text(yaml.safe_dump(load_local_task(name, data)))
    arguments = ["run", "--model", "hf", "--model_args", f"pretrained={upscaled},trust_remote_code=True"]
    arguments += ["--tasks", "midus_piqa,midus_boolq", "--include_path", str(tmp_path / "tasks")]
    arguments += ["--device", "cpu", "--output_path", str(tmp_path / "scores.json")]
    run_python(_LM_EVAL.format(arguments=arguments), tmp_path, package_present=False)

    (written,) = tmp_path.glob("scores*.json")
    results = json.loads(written.read_text())["results"]
    expected = Tasks(["piqa", "boolq"], data=data).run(AutoModelForCausalLM.from_pretrained(base), byte_tokenizer())
    for task, metric in (("piqa", "acc"), ("piqa", "acc_norm"), ("boolq", "acc")):
        assert results[f"midus_{task}"][f"{metric},none"] == expected[task][metric]
