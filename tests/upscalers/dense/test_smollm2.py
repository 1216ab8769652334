"""Every dense method on a real checkpoint, loaded where this project is not installed."""

import json

import pytest
from models.fresh_process import run_python
from pairs import by_default
from transformers import AutoModelForCausalLM, AutoTokenizer

from material.smollm2 import smollm2_135m
from tests.upscalers.dense.requests import REQUESTS
from upscalers.runs.upscale import upscale

pytestmark = pytest.mark.material

NUM_LAYERS = 4
"""Of thirty, which the base keeps: the first ones, as they are."""

QUICK = {
    "lesa": {"num_new_layers": 2, "options": {"epochs": 1, "hidden_size": 32, "batch_size": 512}},
    "opt-deus": {"num_new_layers": 2, "options": {"tolerance": 1e-2}},
}
"""Methods that would compute for long: fewer layers, less training."""

GENERATE = """
import json, sys
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
for case in json.load(open("cases.json")):
    model, info = AutoModelForCausalLM.from_pretrained(case, dtype="auto", output_loading_info=True)
    tokens = AutoTokenizer.from_pretrained(case)("The seven wonders of the ancient world", return_tensors="pt")
    settings = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    with_cache = model.eval().generate(**tokens, use_cache=True, **settings)
    without = model.generate(**tokens, use_cache=False, **settings)
    with torch.no_grad():
        logits = model(**tokens).logits
    print(json.dumps({
        "class": [type(model).__module__.split(".")[0], type(model).__name__],
        "wrong": [sorted(map(str, info[key])) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")],
        "same": torch.equal(with_cache, without),
        "logits": str(logits.double().sum().item()),
    }))
assert not {"midus_hf", "upscalers"} & {name.partition(".")[0] for name in sys.modules}
"""


BY_DEFAULT = ("llama-pro", "avg-deus")
"""One that promises identity and one that fuses; of the others `test_native_classes` says as much on tiny models."""
OTHERS = tuple(method for method in REQUESTS if method not in BY_DEFAULT)


@pytest.mark.parametrize(("methods",), by_default([(BY_DEFAULT,)], [(BY_DEFAULT,), (OTHERS,)]), ids=len)
def test_every_method_makes_a_native_model_that_generates_and_equals_the_base_where_promised(methods, tmp_path):
    base = tmp_path / "base"
    AutoModelForCausalLM.from_pretrained(smollm2_135m(), num_hidden_layers=NUM_LAYERS).save_pretrained(base)
    AutoTokenizer.from_pretrained(smollm2_135m()).save_pretrained(base)
    promising = []
    for method in methods:
        request = {**REQUESTS[method], **QUICK.get(method, {})}
        report = upscale(base=base, method=method, output=tmp_path / method, verify=False, **request)
        if report.promises_identity:
            assert (report.identity.checked, report.identity.max_abs_diff) == ("blocks", 0.0)
            promising.append(method)
    assert promising == [method for method in methods if method in ("llama-pro", "opt-deus")]
    cases = [str(base), *(str(tmp_path / method) for method in methods)]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    of_base, *rows = map(json.loads, run_python(GENERATE, tmp_path, package_present=False).splitlines())
    assert len(rows) == len(methods)
    for method, row in zip(methods, rows, strict=True):
        assert row["class"] == ["transformers", "LlamaForCausalLM"], method
        assert row["wrong"] == [[], [], []], method
        assert row["same"], method
        assert (row["logits"] == of_base["logits"]) == (method in promising), method
