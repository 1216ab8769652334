"""Two processes that share a batch train as one process that has all of it."""

import pytest
from training.two_processes import (
    METHODS,
    in_two_processes,
    largest_difference,
    logged,
    save_method,
    weights,
    write_recipe,
)

from midus_commands.train import main

OPTIONS = {
    "llama-pro": {},
    "midus-hml": {"balance_loss": 0.5, "usage_every": 1, "document_mask": "true"},
    "ultramem-v2": {},
}
ALSO_LOGGED = {"midus-hml": ["balance_loss", "memory_used_share", "memory_perplexity"]}


@pytest.mark.parametrize(
    "method",
    [method if method == "midus-hml" else pytest.param(method, marks=pytest.mark.product) for method in METHODS],
)
def test_two_processes_train_as_one(method, corpus, tmp_path):
    recipe = write_recipe(tmp_path / "recipe.yaml", save_method(method, tmp_path), corpus, **OPTIONS[method])
    assert main([str(recipe), "batch_size=4", f"output={tmp_path / 'one'}"]) == 0
    in_two_processes(recipe, f"output={tmp_path / 'two'}")
    for name in ("loss", "grad_norm", *ALSO_LOGGED.get(method, [])):
        one, two = (logged(tmp_path / folder, name) for folder in ("one", "two"))
        print(name, one, two)
        assert two == pytest.approx(one, rel=1e-4) and len(one) == 6, name
    start = weights(tmp_path / "model")
    one, two = (weights(tmp_path / folder) for folder in ("one", "two"))
    print(largest_difference(one, start), largest_difference(two, one))
    assert largest_difference(one, start) > 1e-2
    assert largest_difference(two, one) < 1e-4
