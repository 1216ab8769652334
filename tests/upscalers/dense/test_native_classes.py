"""Dense methods save the family's own architecture: what comes out needs none of this project's code."""

import pytest

import upscalers.methods  # noqa: F401 - fills the table
from tests.upscalers.checkpoints import config_of
from tests.upscalers.dense.requests import REQUESTS, TRAINS_ALL, upscaled
from upscalers.methods.contract import METHODS
from upscalers.methods.dense_block import DenseMethod


def test_every_dense_method_has_a_request_here():
    dense = {name for name, method in METHODS.items() if issubclass(method, DenseMethod)}
    assert set(REQUESTS) == dense


@pytest.mark.parametrize("method", REQUESTS)
def test_the_config_is_the_bases_but_for_layers_and_record_and_no_code_is_added(
    native_family, method, shared_base, tmp_path
):
    base = shared_base(native_family)
    report = upscaled(base, tmp_path / "out", method)
    old, new = (config_of(folder) for folder in (base, tmp_path / "out"))
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
