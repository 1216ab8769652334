"""The families that most tests leave out host memory blocks as the others do."""

import pytest
import torch
from tiny import FAMILIES, NATIVE_FAMILIES, prompt, save_tiny_model
from transformers import AutoModelForCausalLM

from tests.upscalers.checkpoints import load
from upscalers.runs.strip import strip
from upscalers.runs.upscale import upscale

FURTHER = [family for family in NATIVE_FAMILIES if family not in FAMILIES]
METHODS = [
    ("midus-hml", {"n": 8}),
    ("midus-hml", {"n": 8, "output_projection": True, "inner_residual": True}),
    ("midus-pkm", {"n": 8}),
    ("midus-linear", {"slots": 20}),
]


@pytest.mark.parametrize(("method", "options"), METHODS, ids=str)
@pytest.mark.parametrize("family", FURTHER)
def test_a_further_family_hosts_memory_blocks(family, method, options, tmp_path):
    folder = save_tiny_model(family, tmp_path / "base")
    upscale(base=folder, method=method, output=tmp_path / "checked", options=options, verify=False)
    report = upscale(base=folder, method=method, output=tmp_path / "out", options=options)
    assert report.identity.checked == "logits" and report.identity.max_abs_diff == 0.0
    base, model = AutoModelForCausalLM.from_pretrained(folder).eval(), load(tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(model(prompt()).logits, base(prompt()).logits)
        for name, parameter in model.named_parameters():
            if name.endswith("value_bank"):
                parameter.normal_(generator=torch.Generator().manual_seed(0))
        assert not torch.allclose(model(prompt()).logits, base(prompt()).logits)
        generated = model.generate(prompt()[:, :8], max_new_tokens=8, do_sample=False)
        again = model(generated, use_cache=False).logits[:, 7:-1].argmax(-1)
    assert torch.equal(again, generated[:, 8:])
    strip(tmp_path / "out", tmp_path / "stripped")
    assert (tmp_path / "stripped" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
