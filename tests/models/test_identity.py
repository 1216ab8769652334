"""A new model computes exactly what its base computes: every family, precision and placement, through files.

The comparison runs in a process of its own that cannot import this package: base and upscaled model come from their
folders, the latter with the code saved in it.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models.fresh_process import run_python
from pairs import wanted_by_tests
from tiny import WINDOW, prompt, save_tiny_model
from transformers import AutoModelForCausalLM

from upscalers.runs.upscale import upscale

PLACEMENTS = {"distributed": [1, 4], "top-heavy": [2, 4], "bottom-heavy": [0, 2]}
# Methods and options beside plain midus-hml, all of them placed as by default.
MEMORIES = {
    "hml with everything": (
        "midus-hml",
        {"n": 8, "k": 3, "output_projection": True, "inner_residual": True, "query_norm": "batch"},
    ),
    "pkm": ("midus-pkm", {"n": 8, "k": 3}),
    "linear": ("midus-linear", {"slots": 20, "k": 3}),
}  # fmt: skip
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

_COMPARE = """
import json
from transformers import AutoModelForCausalLM

prompt = torch.load("prompt.pt")
greedy = {"max_new_tokens": 4, "do_sample": False}

def outputs(model):
    with torch.no_grad():
        return {
            "logits": model(prompt).logits,
            "logits without a cache": model(prompt, use_cache=False).logits,
            "greedy tokens": model.generate(prompt, **greedy),
            "greedy tokens with a static cache": model.generate(prompt, **greedy, cache_implementation="static"),
        }

findings = {}
for group, cases in json.load(open("cases.json")).items():
    base = AutoModelForCausalLM.from_pretrained(f"{group}/base")
    default = base.config._attn_implementation
    expected = {}
    for attention in sorted({default, "eager"}):
        base.set_attn_implementation(attention)
        expected[attention] = outputs(base)
    for case in cases:
        model = AutoModelForCausalLM.from_pretrained(case, trust_remote_code=True)
        assert type(model).__module__.startswith("transformers_modules."), type(model)
        found = findings[case] = {
            "attention": model.config._attn_implementation == default,
            "dtype": str(model.dtype) == str(base.dtype) == "torch." + group.split("/")[1],
            "blocks": [i for i, layer in enumerate(model.model.layers) if hasattr(layer, "memory")],
        }
        for attention, of_base in expected.items():
            model.set_attn_implementation(attention)
            for name, output in outputs(model).items():
                found[f"{name}, {attention} attention"] = torch.equal(output, of_base[name])
print(json.dumps(findings))
"""


@pytest.fixture(scope="module")
def findings(request, tmp_path_factory) -> dict[str, dict]:
    """What the other process saw, by `family/dtype/placement`, or a key of `MEMORIES` in its place."""
    folder = tmp_path_factory.mktemp("identity")
    cases: dict[str, list[str]] = {}
    for family, dtype, case in wanted_by_tests(request, "family", "dtype", "case"):
        group = f"{family}/{dtype}"
        if group not in cases:
            save_tiny_model(family, folder / group / "base", DTYPES[dtype])
        cases.setdefault(group, []).append(f"{group}/{case}")
        placement = case if case in PLACEMENTS else "distributed"
        make(folder / group / "base", folder / group / case, placement, *MEMORIES.get(case, ()))
    assert prompt().shape[1] > 2 * WINDOW
    torch.save(prompt(), folder / "prompt.pt")
    (folder / "cases.json").write_text(json.dumps(cases))
    return json.loads(run_python(_COMPARE, folder, package_present=False).splitlines()[-1])


def make(
    base: Path, output: Path, placement: str, method: str = "midus-hml", options: dict[str, Any] | None = None
) -> None:
    upscale(
        base=base,
        method=method,
        output=output,
        num_new_layers=2,
        placement=placement,
        options=options or {"n": 8, "k": 3},
        verify=False,
    )


@pytest.mark.parametrize("case", [*PLACEMENTS, *MEMORIES])
@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_and_greedy_tokens_equal_those_of_the_base(family, dtype, case, findings):
    result = dict(findings[f"{family}/{dtype}/{case}"])
    assert result.pop("blocks") == PLACEMENTS.get(case, PLACEMENTS["distributed"])
    assert {"attention", "dtype", "logits, eager attention", "greedy tokens, eager attention"} < set(result)
    assert [name for name, equal in result.items() if not equal] == []


@pytest.mark.parametrize("method, options", [("midus-hml", {"n": 8, "k": 3}), *MEMORIES.values()])
def test_the_memory_of_a_new_model_is_ready_to_learn(family, tmp_path, method, options):
    """Identity comes from zero values alone: one step on them and the model has left its base."""
    base = save_tiny_model(family, tmp_path / "base")
    make(base, tmp_path / "model", "distributed", method, options)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").train()
    with torch.no_grad():
        before = model(prompt()).logits
    model(prompt(), labels=prompt(), use_cache=False).loss.backward()
    for layer in (1, 4):
        block = model.model.layers[layer]
        moved = {name for name, parameter in block.named_parameters() if parameter.grad.any()}
        assert moved == {"memory.value_bank"}
    torch.optim.SGD([model.model.layers[layer].memory.value_bank for layer in (1, 4)], lr=1.0).step()
    with torch.no_grad():
        assert not torch.equal(model(prompt()).logits, before)
