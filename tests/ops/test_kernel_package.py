"""The package of ops for Hugging Face's `kernels`: its files, and that it computes what `midus_hf.ops` does."""

import ast
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from ops.interpreter import mended_interpreter

from midus_hf import ops
from scripts.build_kernels import BACKENDS, build, imported_modules, package_files, with_relative_imports
from tests.docs.snippets import take

(LOADING,) = take("docs/serve.md", "python", having="from kernels import")
HEADS, N, K, WIDTH, TOKENS = 3, 8, 3, 8, 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The package."""
    folder = tmp_path_factory.mktemp("kernels") / "midus-memory"
    build(folder)
    return folder


@pytest.fixture(scope="module")
def package(folder) -> ModuleType:
    """The package for the CPU, imported under its identifier, beside `midus_hf`."""
    variant = folder / "build" / "torch-cpu"
    name = json.loads((variant / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def tables(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Return tables of a head-wise memory and queries, by the name of the argument."""
    generator = torch.Generator().manual_seed(2)
    shapes = {
        "query": (TOKENS, HEADS, WIDTH),
        "row_keys": (HEADS, N, WIDTH // 2),
        "column_keys": (HEADS, N, WIDTH // 2),
        "value_bank": (N * N, WIDTH),
        "value_transform": (HEADS, WIDTH, WIDTH),
    }
    return {name: torch.randn(shape, generator=generator).to(dtype).requires_grad_() for name, shape in shapes.items()}


def computed(module: ModuleType, dtype: torch.dtype, backend: str) -> list[torch.Tensor]:
    """Return outputs of the ops and gradients of all tables."""
    arguments = tables(dtype)
    output = module.headwise_memory(**arguments, k=K, backend=backend)
    keys = {name: arguments[name] for name in ("query", "row_keys", "column_keys")}
    scores, slots = module.product_key_topk(**keys, k=K, backend=backend)
    rows = module.weighted_gather(arguments["value_bank"], slots, scores.softmax(-1).to(dtype), backend=backend)
    (output.square().sum() + scores.square().sum() + rows.square().sum()).backward()
    with torch.no_grad():
        without_gradients = module.headwise_memory(**arguments, k=K, backend=backend)
    return [output, scores, slots, rows, without_gradients, *(table.grad for table in arguments.values())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["auto", "reference", "torch", "triton"])
def test_the_package_computes_the_same(package, dtype, backend):
    with mended_interpreter():
        expected, results = (computed(module, dtype, backend) for module in (ops, package))
    for result, wanted in zip(results, expected, strict=True):
        assert torch.equal(result, wanted)


def test_ops_of_the_package_have_a_namespace_of_their_own(package):
    assert hasattr(getattr(torch.ops, package.__name__), "headwise_lookup")
    assert package.headwise_memory is not ops.headwise_memory


def test_layers_compute_the_same(package):
    arguments = tables()
    query = arguments.pop("query")
    module = torch.nn.Module()
    for name, value in (arguments | {"k": K}).items():
        setattr(module, name, torch.nn.Parameter(value) if isinstance(value, torch.Tensor) else value)
    output = package.layers.HeadwiseMemory.forward(module, query)
    assert torch.equal(output, ops.headwise_memory(query, **arguments, k=K))
    keys = (arguments["row_keys"], arguments["column_keys"])
    outcome = package.layers.ProductKeys.forward(module, query)
    for result, wanted in zip(outcome, ops.product_key_topk(query, *keys, K), strict=True):
        assert torch.equal(result, wanted)


def test_the_package_imports_only_itself_torch_and_triton(folder):
    files = sorted((folder / "build" / "torch-cpu").rglob("*.py"))
    assert len(files) > 20
    outside = set()
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                outside |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                outside.add(node.module.partition(".")[0])
    assert outside - sys.stdlib_module_names == {"torch", "triton"}


def test_every_backend_has_the_same_files_and_its_own_identifier(folder):
    assert {path.name for path in (folder / "build").iterdir()} == {f"torch-{backend}" for backend in BACKENDS}
    names = set()
    for backend in BACKENDS:
        variant = folder / "build" / f"torch-{backend}"
        metadata = json.loads((variant / "metadata.json").read_text())
        assert metadata["backend"] == {"type": backend}
        names.add(metadata["id"])
        files = (path for path in variant.rglob("*") if path.is_file() and path.parent.name != "__pycache__")
        result = {str(path.relative_to(variant)): path.read_bytes() for path in files}
        assert result == {**package_files(), "metadata.json": result["metadata.json"]}
    assert len(names) == len(BACKENDS)


@pytest.mark.parametrize(
    ("package", "written", "expected"),
    [
        ("midus_hf.ops.gather", "from midus_hf.ops.gather.rows import a", "from .rows import a"),
        ("midus_hf.ops.gather", "    from midus_hf.ops.dispatch import calling", "    from ..dispatch import calling"),
        ("midus_hf.ops.chapters.triton", "from midus_hf.config.wording import a", "from ....config.wording import a"),
        ("midus_hf", "from midus_hf.ops import a", "from .ops import a"),
        ("midus_hf.ops", "from torch import midus_hf", "from torch import midus_hf"),
    ],
)
def test_imports_become_relative(package, written, expected):
    assert with_relative_imports(written, package) == expected


def test_what_cannot_become_relative_is_refused():
    with pytest.raises(ValueError, match=r"line 2 has 'import midus_hf.ops'; expected 'from midus_hf\.\.\. import"):
        imported_modules("import torch\nimport midus_hf.ops\n")


def test_a_folder_that_exists_is_kept(tmp_path):
    (tmp_path / "kept").write_text("text")
    with pytest.raises(ValueError, match=r"exists; expected a folder that does not\. Remove it, or choose another"):
        build(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_kernels_loads_the_folder_and_its_layers(folder, monkeypatch):
    kernels = pytest.importorskip("kernels", reason="kernels is no dependency: `make test-kernels` has it")
    monkeypatch.chdir(folder.parent)
    names = {**tables(), "k": K}
    exec(compile(LOADING.text, str(LOADING), "exec"), names)
    assert torch.equal(names["output"], ops.headwise_memory(**tables(), k=K))
    loaded = names["memory"]
    for result, wanted in zip(
        computed(loaded, torch.float32, "auto"), computed(ops, torch.float32, "auto"), strict=True
    ):
        assert torch.equal(result, wanted)

    @kernels.use_kernel_forward_from_hub("ProductKeys")
    class Selection(torch.nn.Module):
        """Slots of sub-keys."""

        def __init__(self):
            super().__init__()
            arguments = tables()
            self.row_keys = torch.nn.Parameter(arguments["row_keys"])
            self.column_keys = torch.nn.Parameter(arguments["column_keys"])
            self.k = K

        def forward(self, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            raise AssertionError("the kernel takes the place of this method")

    repository = kernels.LocalLayerRepository(folder, layer_name="ProductKeys")
    with kernels.use_kernel_mapping({"ProductKeys": {"cpu": repository}}):
        module = kernels.kernelize(Selection(), mode=kernels.Mode.TRAINING, device="cpu")
    query = tables()["query"]
    for result, wanted in zip(
        module(query), ops.product_key_topk(query, module.row_keys, module.column_keys, K), strict=True
    ):
        assert torch.equal(result, wanted)
