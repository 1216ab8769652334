"""The classes of each family are made from the model that transformers builds, and are as others: they have a source and a place."""

import inspect
import pickle
import subprocess
import sys

import pytest
from tiny import FAMILIES as NATIVE
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

from midus_hf.models import FAMILIES
from midus_hf.models.families import family_source


def test_the_classes_of_a_family_extend_its_own(family):
    native = MODEL_FOR_CAUSAL_LM_MAPPING[NATIVE[family].config_class]
    hosting = FAMILIES[NATIVE[family].config_class.model_type]
    assert issubclass(hosting, native) and hosting.__name__ == f"Midus{native.__name__}"
    assert issubclass(hosting.config_class, NATIVE[family].config_class)
    assert f"class {hosting.__name__}(MemoryForCausalLM, {native.__name__}):" in inspect.getsource(hosting)


def test_a_config_that_was_pickled_is_read_in_another_process(family, tmp_path):
    config = FAMILIES[NATIVE[family].config_class.model_type].config_class(num_hidden_layers=1)
    (tmp_path / "config.pkl").write_bytes(pickle.dumps(config))
    if family != "llama":
        assert pickle.loads((tmp_path / "config.pkl").read_bytes()).to_dict() == config.to_dict()
        return
    code = "import pickle, sys; print(pickle.load(open(sys.argv[1], 'rb')).model_type)"
    line = [sys.executable, "-c", code, str(tmp_path / "config.pkl")]
    assert subprocess.run(line, capture_output=True, text=True, timeout=120).stdout == f"{config.model_type}\n"


@pytest.mark.parametrize(
    ("model_type", "path"),
    [("gpt2", r"transformer\.h"), ("opt", r"model\.decoder\.layers"), ("bloom", r"transformer\.h")],
)
def test_layers_at_another_path_are_refused(model_type, path):
    with pytest.raises(ValueError, match=rf"'{model_type}' has its layers at {path}; expected .* at model\.layers"):
        family_source(model_type)


@pytest.mark.parametrize(("model_type", "network"), [("cohere", "mlp"), ("lfm2", "feed_forward"), ("mixtral", "mlp")])
def test_parts_of_other_names_and_orders_are_read(model_type, network):
    source = family_source(model_type)
    compile(source, model_type, "exec")
    assert ("feed_forward_name" in source) == (network != "mlp")
    assert ("adds_mixer = False" in source) == (model_type == "cohere")


def test_a_config_of_a_type_with_memory_joins_when_it_is_named():
    """Know `midus_` types in the Auto classes without an import of the type, and no type that cannot host memory."""
    code = (
        "import midus_hf.models.families as families; from transformers import AutoConfig; "
        "before = 'olmo' in families.FAMILIES; config = AutoConfig.for_model('midus_olmo', num_hidden_layers=2); "
        "print(before, config.model_type, 'olmo' in families.FAMILIES)"
    )
    line = [sys.executable, "-c", code]
    printed = subprocess.run(line, capture_output=True, text=True, timeout=120)
    assert printed.stdout == "False midus_olmo True\n", printed.stderr


def test_a_type_that_cannot_host_memory_does_not_join():
    assert "midus_gpt2" not in CONFIG_MAPPING and "midus_nothing" not in CONFIG_MAPPING
