"""The classes of each family are made from the model that transformers builds, and are as others: they have a source and a place."""

import inspect
import pickle
import subprocess
import sys

import pytest
from tiny import FAMILIES as NATIVE
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

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


@pytest.mark.parametrize("model_type", ["gpt2", "cohere", "opt"])
def test_layers_of_other_parts_are_refused(model_type):
    with pytest.raises(
        ValueError, match=rf"layers of '{model_type}' .* expected self_attn, mlp and one of these sets of norms"
    ):
        family_source(model_type)
