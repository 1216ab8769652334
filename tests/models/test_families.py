"""The classes of each family are made from its row, and are as others: they have a source and a place."""

import ast
import inspect
import pickle
import sys
from pathlib import Path

import pytest
from models.fresh_process import run_python
from transformers import CONFIG_MAPPING

from midus_hf.anatomy.types import MAIN_TYPES, model_type_of
from midus_hf.models import FAMILIES
from midus_hf.models.families import template
from midus_hf.models.families.template import family_source
from midus_hf.version import NEWEST_TRIED_TRANSFORMERS


@pytest.mark.parametrize("model_type", MAIN_TYPES)
def test_module_of_a_family_has_a_source_and_a_place(model_type):
    family = FAMILIES[model_type]
    module = sys.modules[family.__module__]
    hosts = [each for each in vars(module).values() if getattr(each, "__module__", None) == module.__name__]
    assert family in hosts and family.config_class in hosts
    for each in hosts:
        path = Path(inspect.getfile(each))
        assert path.name == f"{model_type}.py" and inspect.getsource(each) in path.read_text()
    source = family_source(model_type_of(model_type))
    assert inspect.getsource(module) == Path(module.__file__).read_text() == source


def test_source_of_a_family_is_renewed_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    paths = [Path(template._write_source("llama", source)) for source in ("a = 1\n", "a = 2\n")]
    assert [path.read_text() for path in paths] == ["a = 1\n", "a = 2\n"] and len({*paths}) == 2
    paths[0].write_text("a")
    assert template._write_source("llama", "a = 1\n") == str(paths[0]) and paths[0].read_text() == "a = 1\n"
    assert all(path.is_relative_to(tmp_path / "midus_hf" / "families") for path in paths)


def test_unwritable_cache_leaves_the_source_in_memory(tmp_path):
    (tmp_path / "file").write_text("")
    code = """
import inspect, os
os.environ["XDG_CACHE_HOME"] = "file"
from midus_hf.models import FAMILIES
print(inspect.getsource(FAMILIES["llama"]).splitlines()[1])
"""
    assert run_python(code, tmp_path, package_present=True).startswith("class MidusLlamaForCausalLM(")


def test_importing_the_models_builds_none(tmp_path):
    code = """
from torch import nn
built, init = [], nn.Module.__init__
nn.Module.__init__ = lambda self, *args, **kwargs: (built.append(type(self).__name__), init(self, *args, **kwargs))[1]
from midus_hf.models import FAMILIES
print([name for name in built if name != "Module"], len(FAMILIES))
"""
    assert run_python(code, tmp_path, package_present=True) == f"[] {len(MAIN_TYPES)}\n"


@pytest.mark.parametrize(("model_type", "network"), [("cohere", "mlp"), ("lfm2", "feed_forward"), ("mixtral", "mlp")])
def test_parts_of_other_names_and_orders_are_read(model_type, network):
    source = family_source(model_type_of(model_type))
    compile(source, model_type, "exec")
    assert ("feed_forward_name" in source) == (network != "mlp")
    assert ("adds_mixer = False" in source) == (model_type == "cohere")


def test_fresh_process_unpickles_configs_and_makes_named_types(tmp_path):
    config = FAMILIES["llama"].config_class(num_hidden_layers=1)
    (tmp_path / "config.pkl").write_bytes(pickle.dumps(config))
    code = """
import pickle
print(pickle.load(open("config.pkl", "rb")).model_type)
import midus_hf.models.families as families
from transformers import AutoConfig
print("olmo" in families.FAMILIES, AutoConfig.for_model("midus_olmo", num_hidden_layers=2).model_type, "olmo" in families.FAMILIES)
"""
    printed = run_python(code, tmp_path, package_present=True)
    assert printed == f"{config.model_type}\nFalse midus_olmo True\n"


def test_type_that_cannot_host_memory_does_not_join():
    assert "midus_gpt2" not in CONFIG_MAPPING and "midus_nothing" not in CONFIG_MAPPING


def test_newer_transformers_than_was_tried_is_told_once(tmp_path):
    major, minor = NEWEST_TRIED_TRANSFORMERS.split(".")
    tried, newer = ["5.23.9", f"{NEWEST_TRIED_TRANSFORMERS}.7"], f"{major}.{int(minor) + 1}.0"
    newer = [newer, f"{newer}.dev0", "6.0"]
    code = f"""
import importlib, sys, warnings, transformers
for transformers.__version__ in {tried + newer!r}:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if "midus_hf.models" in sys.modules:
            importlib.reload(sys.modules["midus_hf.models"])
        import midus_hf.models
        from midus_hf import models
    print([str(each.message) for each in caught if "was tried with" in str(each.message)])
"""
    reports = [ast.literal_eval(line) for line in run_python(code, tmp_path, package_present=True).splitlines()]
    assert [len(report) for report in reports] == [0] * len(tried) + [1] * len(newer)
    for version, (line,) in zip(newer, reports[len(tried) :], strict=True):
        assert f"up to {NEWEST_TRIED_TRANSFORMERS}, and {version} is installed" in line
