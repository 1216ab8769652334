"""What importing the package does in a process that has done nothing else, and what it leaves alone."""

import gc
import importlib
import json
import subprocess
import sys

import pytest

import midus_hf
from midus_config.memory_types import MEMORY_TYPES

CODE = """
import json, sys
import midus_hf
from midus_config.memories.ultramem_statistics import MEASURED
from midus_hf.memory.registry import MEMORY_MODULES

imported = sorted(sys.modules)
from midus_hf.models import FAMILIES

config_class = FAMILIES["llama"].config_class
FAMILIES["llama"](config_class(vocab_size=8, hidden_size=8, intermediate_size=8, num_attention_heads=2, num_hidden_layers=1))
print(json.dumps({"imported": imported, "with a model": sorted(sys.modules), "memories": sorted(MEMORY_MODULES),
    "drawn": ["scores of UltraMemV2"] if MEASURED else []}))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    """What such a process sees."""
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120, check=True)
    return json.loads(done.stdout)


def test_no_model_imports_what_only_training_and_evaluation_need(found):
    assert "midus_hf.models" in found["imported"]
    assert not {"midus_hf.config_file", "midus_hf.documents"} & {*found["imported"], *found["with a model"]}


def test_a_model_does_not_import_peft(found):
    assert "peft" not in found["with a model"]


def test_importing_the_package_registers_every_memory_module(found):
    assert set(found["memories"]) == set(MEMORY_TYPES)


def test_declarations_are_registered_without_what_takes_long_to_work_out(found):
    assert found["drawn"] == []


@pytest.mark.parametrize("collects", [True, False])
def test_garbage_is_collected_after_importing_the_package_as_it_was_before(collects):
    was = gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        importlib.reload(midus_hf)
        assert gc.isenabled() == collects
    finally:
        (gc.enable if was else gc.disable)()
