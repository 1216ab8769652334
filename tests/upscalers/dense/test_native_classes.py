"""Dense methods save the family's own architecture: what comes out needs none of this project's code."""

import json

import pytest
import torch
from models.fresh_process import run_python
from tiny import NATIVE_FAMILIES, WINDOW, prompt

import upscalers.methods  # noqa: F401 - fills the table
from tests.upscalers.checkpoints import save_base
from tests.upscalers.dense.requests import REQUESTS, TRAINS_ALL, upscaled
from upscalers.methods.contract import METHODS
from upscalers.methods.dense_block import DenseMethod

ROUNDING = {"float32": 0.0, "bfloat16": 2**-7}
"""How far below the best logit, as a share of the largest, a token may lie that generation with cache chooses."""

LOAD_AND_GENERATE = """
import json, sys
import transformers
from transformers import AutoModelForCausalLM

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
request = json.load(open("request.json"))
tokens = torch.tensor(request["tokens"])
for case in request["cases"]:
    model, info = AutoModelForCausalLM.from_pretrained(case, dtype="auto", output_loading_info=True)
    settings = {"max_new_tokens": 6, "do_sample": False}
    with_cache = model.eval().generate(tokens, use_cache=True, **settings)
    without = model.generate(tokens, use_cache=False, **settings)
    with torch.no_grad():
        logits = model(with_cache[:, :-1], use_cache=False).logits[:, tokens.shape[1] - 1:].float()
    chosen = logits.gather(-1, with_cache[:, tokens.shape[1]:, None])[..., 0]
    print(json.dumps({
        "case": case,
        "class": [type(model).__module__.split(".")[0], type(model).__name__],
        "dtype": str(model.dtype).removeprefix("torch."),
        "layers": len(model.model.layers),
        "wrong": [sorted(map(str, info[key])) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")],
        "generated": with_cache.shape[1] - tokens.shape[1],
        "same": torch.equal(with_cache, without),
        "below": ((logits.amax(-1) - chosen) / logits.abs().max()).max().item(),
    }))
assert not {"midus_hf", "upscalers"} & {name.partition(".")[0] for name in sys.modules}
"""


def test_every_dense_method_has_a_request_here():
    dense = {name for name, method in METHODS.items() if issubclass(method, DenseMethod)}
    assert set(REQUESTS) == dense


@pytest.mark.parametrize("method", REQUESTS)
def test_the_config_is_the_bases_but_for_layers_and_record_and_no_code_is_added(
    native_family, method, shared_base, tmp_path
):
    base = shared_base(native_family)
    report = upscaled(base, tmp_path / "out", method)
    old, new = (json.loads((folder / "config.json").read_text()) for folder in (base, tmp_path / "out"))
    assert (new["model_type"], new["architectures"]) == (old["model_type"], old["architectures"])
    assert "auto_map" not in new and "memory" not in new
    assert new["num_hidden_layers"] == report.num_layers == len(new["upscale"]["plan"])
    assert report.model_type == old["model_type"]
    follows = {"num_hidden_layers", "layer_types", "upscale"}
    if old.get("use_sliding_window"):
        follows.add("max_window_layers")
        assert new["max_window_layers"] == new["layer_types"].index("sliding_attention")
    assert {key: value for key, value in new.items() if key not in follows} == {
        key: value for key, value in old.items() if key not in follows
    }
    assert new["upscale"]["trainable"] == ("all" if method in TRAINS_ALL else "new")
    assert new["upscale"]["new_layers"] == report.new_layer_indices
    added = {path.name for path in (tmp_path / "out").iterdir()} - {path.name for path in base.iterdir()}
    assert added == {"README.md", "upscale.json"}
    assert "trust_remote_code" not in (tmp_path / "out" / "README.md").read_text()


def test_without_this_project_every_result_loads_as_the_native_class_and_generates_with_its_cache(request, tmp_path):
    """Each method on some families, and each family with some methods, other ones in bfloat16; with the product, on every one."""
    product = request.config.getoption("--product")
    assert prompt().shape[1] > WINDOW
    expected = {}
    for number, dtype in enumerate(ROUNDING):
        for row, family in enumerate(NATIVE_FAMILIES):
            base = save_base(tmp_path / f"{dtype} {family}", family, getattr(torch, dtype))
            (class_name,) = json.loads((base / "config.json").read_text())["architectures"]
            for column, method in enumerate(REQUESTS):
                if (row + column) % 4 != 2 * number and not (product and dtype == "float32"):
                    continue
                report = upscaled(base, tmp_path / f"{dtype} {family} {method}", method)
                expected[f"{dtype} {family} {method}"] = {
                    "class": ["transformers", class_name],
                    "dtype": dtype,
                    "layers": report.num_layers,
                    "wrong": [[], [], []],
                    "generated": 6,
                }
    (tmp_path / "request.json").write_text(json.dumps({"tokens": prompt().tolist(), "cases": list(expected)}))
    rows = [json.loads(line) for line in run_python(LOAD_AND_GENERATE, tmp_path, package_present=False).splitlines()]
    for row in rows:
        assert row.pop("below") <= ROUNDING[row["dtype"]], row
        assert row.pop("same") or row["dtype"] != "float32", row
    assert {row.pop("case"): row for row in rows} == expected
