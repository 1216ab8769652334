"""A saved folder loads where this package is not installed, with the code that was saved in it."""

import importlib
import sys
from pathlib import Path

import pytest
from models.upscaled import memory_config, upscaled_model
from tiny import tiny_model

from midus_hf.carried.module import carried_module, write_code
from midus_hf.carried.standins import ENTRY_MODULE
from midus_hf.memories.headwise.options import HeadwiseOptions


def test_a_model_without_memory_entries_saves_no_memory_layer(family, tmp_path):
    base = tiny_model(family)
    paths = write_code(tmp_path / "new" / "folder", memory_config(base, new_layers=()))
    assert paths == [tmp_path / "new" / "folder" / f"{ENTRY_MODULE}.py"]
    assert "HeadwiseMemory" not in paths[0].read_text()


def test_only_the_main_process_writes_code(family, tmp_path):
    upscaled_model(family).save_pretrained(tmp_path, is_main_process=False)
    assert not list(tmp_path.glob("*.py"))


@pytest.fixture
def somebody(tmp_path, monkeypatch) -> Path:
    """The folder of another package, `somebody`, which can be imported."""
    package = tmp_path / "packages" / "somebody"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path / "packages")
    yield package
    for name in [name for name in sys.modules if name.partition(".")[0] == "somebody"]:
        del sys.modules[name]


def test_the_code_names_the_outputs_that_trainer_leaves_out_of_predictions(family):
    assert 'keys_to_ignore_at_inference = [CACHE, "router_logits", "aux_loss"]\n' in carried_module(
        memory_config(tiny_model(family))
    )


@pytest.mark.parametrize(
    "form", ["from somebody import tables", "from . import tables", "import somebody.tables as tables"]
)
def test_a_module_of_another_package_that_imports_modules_is_refused(form, somebody, tmp_path, monkeypatch):
    (somebody / "tables.py").write_text("SIZE = 3\n")
    (somebody / "memory.py").write_text(
        f"from midus_hf.memories.module import MemoryModule\n{form}\n\n\n"
        "class Memory(MemoryModule):\n    def forward(self, attention_output):\n        return tables.SIZE\n"
    )
    monkeypatch.setattr(HeadwiseOptions, "layer", importlib.import_module("somebody.memory").Memory)
    monkeypatch.setattr("midus_hf.carried.module._written", {})
    with pytest.raises(
        ValueError, match=r"somebody\.memory reads tables, which no module of somebody defines .* Import names from"
    ):
        write_code(tmp_path / "out", memory_config(tiny_model("llama")))


def test_modules_of_other_packages_may_import_one_another_in_either_form(somebody, tmp_path, monkeypatch):
    (somebody / "tables.py").write_text("SIZE = 3\nUNUSED = 4\n")
    (somebody / "more.py").write_text("from .tables import SIZE\n\n\ndef size():\n    return SIZE\n")
    (somebody / "memory.py").write_text(
        "from midus_hf.memories.module import MemoryModule\nfrom somebody.more import size\nfrom .tables import SIZE as AGAIN\n\n\n"
        "class Memory(MemoryModule):\n    def forward(self, attention_output):\n        return size() + AGAIN\n"
    )
    memory = importlib.import_module("somebody.memory").Memory
    monkeypatch.setattr(HeadwiseOptions, "layer", memory)
    monkeypatch.setattr("midus_hf.carried.module._written", {})
    (path,) = write_code(tmp_path / "out", memory_config(tiny_model("llama")))
    source = path.read_text()
    assert "SIZE = 3\n" in source and "UNUSED" not in source
    assert "AGAIN = SIZE\n" in source and "return size() + AGAIN\n" in source
    assert "somebody" not in "".join(line for line in source.splitlines() if "import" in line)
