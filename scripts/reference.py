"""Write `docs/reference.md` from docstrings: `python scripts/reference.py`.

The source is parsed and not imported, so that the page does not depend on which libraries are installed.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference.md"
MODULES = {
    "upscalers": [],
    "upscalers.runs.inspection": ["inspect_checkpoint"],
    "upscalers.chapters.checkpoint_edit": ["EditRequest"],
    "upscalers.chapters.editing": ["zero", "swap", "prune", "import_file"],
    "upscalers.chapters.quantising": ["quantise"],
    "upscalers.chapters.exporting": ["export"],
    "upscalers.chapters.listing": ["list_chapters"],
    "upscalers.controls.shuffling": ["shuffle"],
    "midus_hf.config.controls": ["controls_of", "Change"],
    "midus_hf.training": [],
    "midus_hf.sft": [],
    "midus_hf.memory": [],
    "midus_hf.analysis.slots.usage": ["record_usage", "summarise", "Usage", "MemoryUsage"],
    "midus_hf.analysis.chapters.edits": ["zero_chapters", "swap_chapters"],
    "midus_hf.analysis.chapters.records": ["record_chapters", "ChapterRecords"],
    "midus_hf.analysis.chapters.stats": ["chapter_stats", "ChapterStats", "TextReading"],
    "midus_hf.analysis.depth.records": ["record_depth", "DepthRecords"],
    "midus_hf.analysis.depth.reading": ["depth_readings", "writers", "DepthReading", "WriterReading"],
    "midus_hf.analysis.depth.readers": ["readers_of_depth", "DepthReader", "ReadSlot"],
    "midus_hf.analysis.depth.map": ["depth_map", "DepthMap"],
    "midus_hf.analysis.text_rows": ["text_rows", "read_rows"],
    "midus_hf.analysis.chapters.ablation": ["ablate"],
    "midus_hf.analysis.chapters.interventions": ["zero_in_layers", "swap_in_layers", "close_chapters"],
    "midus_hf.analysis.chapters.tokens": ["nearest_tokens"],
    "midus_hf.analysis.inside.added_parts": ["added_parts", "switched_off", "AddedParts", "Part"],
    "midus_hf.analysis.inside.layer_effects": ["layer_effects", "LayerEffects", "PartEffect"],
    "midus_hf.analysis.inside.drift": ["drift", "base_within", "other_base", "TextDrift", "MovedRow"],
    "midus_hf.analysis.slots.slot_tokens": ["slot_tokens", "memory_of_slots", "NearSlot"],
    "midus_hf.analysis.chapters.usage": ["record_chapter_usage"],
    "midus_hf.analysis.slots.block_usage": ["record_block_usage", "BlockUsage", "BankLevel"],
    "midus_hf.evaluation": [],
    "midus_hf.retrieval": [],
    "midus_hf.clusters.building": ["build_tree", "TreeOptions", "BuiltTree"],
    "midus_hf.clusters.run": ["build", "BuildRequest", "build_from_embeddings", "open_build"],
    "midus_hf.clusters.finished_nodes": ["FinishedNodes"],
    "midus_hf.clusters.datatrove_steps": ["EmbedWindows", "BuildTree", "AssignPaths"],
    "midus_hf.clusters.assigning": ["document_paths"],
    "midus_hf.clusters.report": ["level_reports", "node_reports"],
}
"""What is documented: the listed names of each module, or all names of its `__all__`."""

WIDTH = 100
HEAD = """# Reference

Signatures and arguments of what is meant to be imported. `make reference` writes this page from the docstrings, which say more: what
is returned, what is raised, and why.
"""

Definition = ast.FunctionDef | ast.ClassDef | ast.AnnAssign


@dataclass(frozen=True)
class Documented:
    """A public name.

    Args:
        name: Name by which it is imported.
        signature: Signature of a function or class; name and type of a constant.
        summary: The first paragraph of the docstring.
        arguments: The docstring's description of each argument.
        methods: Public methods of a class, documented the same way.
    """

    name: str
    signature: str
    summary: str
    arguments: dict[str, str]
    methods: list["Documented"]


def public_names(module: str) -> list[str]:
    """Return the names in a module's `__all__`."""
    for node in _parse(module).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    raise ValueError(f"module {module} has no __all__; name what is documented of it in MODULES.")


def document(module: str, name: str) -> Documented:
    """Return what the source says about a name, wherever the name is defined.

    Raises:
        ValueError: If the module neither defines nor imports the name, or the name has no docstring.
    """
    node, docstring = _definition(module, name)
    if not docstring:
        raise ValueError(f"{module}.{name} has no docstring; expected one, since it is public.")
    methods = []
    if isinstance(node, ast.ClassDef):
        for method in node.body:
            text = ast.get_docstring(method) if isinstance(method, ast.FunctionDef) else None
            if text and not method.name.startswith("_"):
                methods.append(_documented(method.name, method, text))
    return _documented(name, node, docstring, methods)


def render() -> str:
    """Return the text of the page."""
    parts = [HEAD]
    for module, names in MODULES.items():
        parts.append(f"\n## {module}\n")
        for name in names or public_names(module):
            parts.extend(_section(document(module, name)))
    return "".join(parts)


def _section(of: Documented) -> Iterator[str]:
    yield f"\n### {of.name}\n\n```\n{of.signature}\n```\n\n{_wrapped(of.summary)}\n"
    if of.arguments:
        yield "\n"
    for name, text in of.arguments.items():
        yield _wrapped(f"- `{name}`: {text}", "  ") + "\n"
    for method in of.methods:
        yield "\n" + _wrapped(f"`.{' '.join(method.signature.split())}`: {method.summary}") + "\n"


def _documented(name: str, node: Definition, docstring: str, methods: list[Documented] | None = None) -> Documented:
    summary, _, rest = docstring.partition("\n\n")
    listed = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", rest, flags=re.DOTALL | re.MULTILINE)
    arguments: dict[str, str] = {}
    for entry in re.split(r"\n(?=\S)", textwrap.dedent(listed[1])) if listed else []:
        argument, _, text = entry.partition(":")
        arguments[argument.strip()] = " ".join(text.split())
    return Documented(name, _signature(name, node), " ".join(summary.split()), arguments, methods or [])


def _signature(name: str, node: Definition) -> str:
    if isinstance(node, ast.AnnAssign):
        return f"{name}: {ast.unparse(node.annotation)}"
    returns = ""
    if isinstance(node, ast.ClassDef):
        of_class = _parameters_of_class(node)
        if of_class is None:
            return f"class {name}({', '.join(map(ast.unparse, node.bases))})"
        parameters = of_class
    else:
        parameters = _parameters(node.args)
        if node.returns is not None:
            returns = f" -> {ast.unparse(node.returns)}"
    line = f"{name}({', '.join(parameters)}){returns}"
    if len(line) <= WIDTH:
        return line
    return f"{name}(\n" + "".join(f"    {parameter},\n" for parameter in parameters) + f"){returns}"


def _parameters_of_class(node: ast.ClassDef) -> list[str] | None:
    """Return the parameters of `__init__`, or the fields of a dataclass; None if a class has neither."""
    for member in node.body:
        if isinstance(member, ast.FunctionDef) and member.name == "__init__":
            return _parameters(member.args)
    if any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        return [ast.unparse(member) for member in node.body if isinstance(member, ast.AnnAssign)]
    return None


def _parameters(arguments: ast.arguments) -> list[str]:
    positional = arguments.posonlyargs + arguments.args
    without_default = len(positional) - len(arguments.defaults)
    parameters = []
    for number, argument in enumerate(positional):
        default = arguments.defaults[number - without_default] if number >= without_default else None
        if argument.arg != "self":
            parameters.append(_parameter(argument, default))
    if arguments.vararg is not None:
        parameters.append("*" + _parameter(arguments.vararg, None))
    elif arguments.kwonlyargs:
        parameters.append("*")
    parameters += [
        _parameter(argument, default)
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg is not None:
        parameters.append("**" + _parameter(arguments.kwarg, None))
    return parameters


def _parameter(argument: ast.arg, default: ast.expr | None) -> str:
    return ast.unparse(argument) + ("" if default is None else f" = {ast.unparse(default)}")


def _definition(module: str, name: str) -> tuple[Definition, str | None]:
    """Return the definition of a name, followed through imports, and its docstring."""
    tree = _parse(module)
    for node, behind in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
            return node, ast.get_docstring(node)
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name:
            is_text = isinstance(behind, ast.Expr) and isinstance(behind.value, ast.Constant)
            return node, inspect.cleandoc(behind.value.value) if is_text else None
    for imported in ast.walk(tree):
        if isinstance(imported, ast.ImportFrom) and imported.module is not None:
            if any(alias.name == name for alias in imported.names):
                return _definition(imported.module, name)
    raise ValueError(f"module {module} neither defines nor imports {name}; correct MODULES or its __all__.")


def _parse(module: str) -> ast.Module:
    path = ROOT.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
