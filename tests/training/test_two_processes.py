"""Two processes that share a batch train as one process that has all of it."""

import pytest
from training.outcomes import largest_difference, logged
from training.tiny_run import save_upscaled
from training.two_processes import METHODS, in_two_processes, write_recipe

from midus_hf.cli.training.train import main

OPTIONS = {
    "llama-pro": {},
    "midus-hml": {"document_mask": "true"},
    "ultramem-v2": {},
}


@pytest.mark.product
@pytest.mark.parametrize("method", METHODS)
def test_two_processes_train_as_one(method, corpus, tmp_path):
    recipe = write_recipe(tmp_path, save_upscaled("llama", tmp_path, method), corpus, **OPTIONS[method])
    assert main([str(recipe), "per_device_train_batch_size=4", f"output_dir={tmp_path / 'one'}"]) == 0
    in_two_processes(recipe, f"output_dir={tmp_path / 'two'}")
    for name in ("loss", "grad_norm"):
        one, two = (logged(tmp_path / folder, name) for folder in ("one", "two"))
        assert two == pytest.approx(one, rel=1e-4) and len(one) == 6, name
    assert largest_difference(tmp_path / "one", tmp_path / "model") > 1e-2
    assert largest_difference(tmp_path / "two", tmp_path / "one") < 1e-4
