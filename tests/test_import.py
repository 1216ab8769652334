"""What importing the package does in a process that has done nothing else, and what it does not change."""

import json
import subprocess
import sys
from typing import Any

import pytest
from pairs import by_default, wanted_by_tests

import midus_hf

# Of a process that looks a type up and then makes a model, and what such a process sees.
MODELS = """
import sys, midus_hf
from transformers import CONFIG_MAPPING

before = ["llama" in CONFIG_MAPPING, "midus_hf.models" in sys.modules]
after = ["midus_llama" in CONFIG_MAPPING, "midus_hf.models" in sys.modules]

from midus_hf.memories.ultramem_v2.options import MEASURED
from midus_hf.models import FAMILIES

config_class = FAMILIES["llama"].config_class
FAMILIES["llama"](config_class(vocab_size=8, hidden_size=8, intermediate_size=8, num_attention_heads=2, num_hidden_layers=1))
found = {"before and after": [*before, *after], "imported": sorted(sys.modules), "drawn": [*map(str, MEASURED)]}
"""
TYPES_ELSEWHERE = """
import warnings
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
del CONFIG_MAPPING._extra_content
with warnings.catch_warnings(record=True) as caught:
    import midus_hf
found = str(caught[0].message)
"""
PROGRAMS = {"models": MODELS, "types are elsewhere": TYPES_ELSEWHERE}


def test_models_are_imported_on_demand(found):
    of_models = found["models"]
    assert of_models["before and after"] == [True, False, True, True]
    assert not {"peft", "midus_hf.config.yaml_options", "midus_hf.data.corpus"} & {*of_models["imported"]}
    assert of_models["drawn"] == [], "declarations are registered without what takes long to work out"
    message = "AutoModel knows no type with memory; import midus_hf.models for the families"
    assert message in found["types are elsewhere"]
    with pytest.raises(AttributeError, match="module 'midus_hf' has no attribute 'memory'"):
        midus_hf.memory  # noqa: B018


# Imports, in the first place of a process.
ORDERS = {
    "after the Auto classes": "from transformers import AutoModelForCausalLM; import midus_hf",
    "before a module that needs the Auto classes": "import midus_hf, transformers.generation.utils",
    "again": "import importlib, midus_hf; importlib.reload(midus_hf)",
    "while a thread loads the Auto classes": """
import importlib, sys, threading, time
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "transformers.dynamic_module_utils":  # which the table's module imports before it makes the table
            started.set()
            time.sleep(1)
started = threading.Event()
sys.meta_path.insert(0, Slow())
thread = threading.Thread(target=importlib.import_module, args=["transformers.models.auto.configuration_auto"])
thread.start()
started.wait(60)
import midus_hf
thread.join()
""",
    "after a hook of another package": """
import sys
class Hook:
    seen = []
    def find_spec(self, name, path=None, target=None): self.seen.append(name)
sys.meta_path.insert(0, Hook())
import midus_hf, transformers.generation.utils
assert {"transformers", "transformers.generation.utils"} <= {*Hook.seen}
""",
    "after an import that failed": "import midus_hf\ntry: import midus_hf.nothing\nexcept ImportError: pass",
}
# Each takes seconds. The others run with the product.
USUAL_ORDERS = ("after the Auto classes", "while a thread loads the Auto classes", "after a hook of another package")
# What an order of imports leads to: where the Auto classes find a config and its model, and finders of the package that stay.
REGISTERED = """
import sys
from transformers import AutoConfig, AutoModelForCausalLM
import midus_hf
config = AutoConfig.for_model("midus_qwen3", num_hidden_layers=1)
found = [
    type(config).__module__,
    AutoModelForCausalLM._model_mapping[type(config)].__module__,
    [type(finder).__name__ for finder in sys.meta_path if type(finder).__module__ == "midus_hf"],
]
"""
# Imports what transformers imports for a model, which knows nothing of the package, and forks a process for each program.
EACH_PROGRAM = """
import contextlib, json, os, sys
for name in ("torch._dynamo", "sklearn.metrics", "tokenizers", "huggingface_hub", "accelerate"):
    with contextlib.suppress(ImportError):
        __import__(name)

for name, code in json.loads(sys.argv[1]).items():
    child = os.fork()
    if child == 0:
        names = {}
        exec(code, names)
        print(json.dumps([name, names["found"]]), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def found(request) -> dict[str, Any]:
    orders = {order: f"{ORDERS[order]}\n{REGISTERED}" for (order,) in wanted_by_tests(request, "order")}
    line = [sys.executable, "-c", EACH_PROGRAM, json.dumps({**PROGRAMS, **orders})]
    done = subprocess.run(line, capture_output=True, text=True, timeout=600, check=True)
    rows = [json.loads(row) for row in done.stdout.splitlines()]
    assert [name for name, _ in rows] == [*PROGRAMS, *orders], done.stderr
    return dict(rows)


@pytest.mark.parametrize("order", by_default(USUAL_ORDERS, ORDERS))
def test_auto_classes_know_every_family_in_any_import_order(found, order):
    family = "midus_hf.models.families.qwen3"
    assert found[order] == [family, family, []]


def test_options_and_files_are_read_without_torch():
    code = "import sys, midus_hf.config, midus_hf.files.outputs; print({'torch', 'transformers', 'numpy'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "set()\n"
