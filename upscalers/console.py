"""Output of the commands on a terminal: progress on standard error, tables on standard output."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import rich.box
from rich import progress as rich_progress
from rich.console import Console as RichConsole
from rich.table import Table
from rich.text import Text
from tqdm import tqdm

from midus_hf.config.errors import format_count
from midus_hf.config.yaml_options import write_yaml
from midus_hf.files.secrets import without_secrets
from midus_hf.sources.progress import show_progress
from midus_hf.version import __version__
from upscalers.edits.chapters import format_numbers
from upscalers.edits.checkpoint_edit import describe_edit
from upscalers.record.provenance import UpscaleReport
from upscalers.request import Progress
from upscalers.tensors.recipes import summary_table

_MAX_ENTRY_CHARACTERS = 60


class Console(Progress):
    """Progress on standard error: a bar, or a line each minute if it is no terminal."""

    def __init__(self, command: str = "upscale") -> None:
        self._command = command
        self._console = RichConsole(stderr=True)
        self._bar: rich_progress.Progress | None = None
        self._task: rich_progress.TaskID | None = None
        self._lines: tqdm | None = None

    def start(self) -> None:
        if not self._console.is_terminal:
            self._lines = show_progress(total=1, leave=False)
            return
        self._bar = rich_progress.Progress(
            rich_progress.SpinnerColumn(),
            rich_progress.TextColumn("{task.description}"),
            rich_progress.BarColumn(),
            rich_progress.TextColumn("{task.completed:,.0f} of {task.total:,.0f} {task.fields[unit]}"),
            rich_progress.TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        self._bar.start()

    def stage(self, name: str, num_steps: int, unit: str = "steps") -> None:
        if self._bar:
            if self._task is None:
                self._task = self._bar.add_task(name, total=num_steps, unit=unit)
            self._bar.reset(self._task, description=name, total=num_steps, unit=unit)
        elif self._lines:
            self._lines.unit = f" {unit}"
            self._lines.unit_scale = unit == "bytes"
            self._lines.reset(num_steps)
            self._lines.set_description(name)

    def advance(self, num_steps: int = 1) -> None:
        if self._bar and self._task is not None:
            self._bar.advance(self._task, num_steps)
        elif self._lines:
            self._lines.update(num_steps)

    def warn(self, message: str) -> None:
        self.note(f"{self._command}: warning: {message}")

    def note(self, message: str) -> None:
        self._console.print(without_secrets(message), markup=False, highlight=False, soft_wrap=True)

    def finish(self) -> None:
        if self._bar:
            self._bar.stop()
        elif self._lines:
            self._lines.close()


def _print_table(header: Sequence[str], *rows: Sequence[str], bold: Iterable[bool] = ()) -> None:
    table = Table(box=rich.box.SIMPLE_HEAD, show_edge=False)
    for column in header:
        table.add_column(Text(column), overflow="fold")
    for cells, is_bold in itertools.zip_longest(rows, bold):
        table.add_row(*map(Text, cells), style="bold" if is_bold else None)
    RichConsole().print(table)


def _print_text(text: str) -> None:
    RichConsole().print(Text(text), soft_wrap=True)


def print_report(report: UpscaleReport, dry_run: bool) -> None:
    """Print the summary of an upscaling."""
    counts = report.parameters
    removed = counts.base + counts.new - counts.total
    rows = {
        "base": report.base,
        "output": report.output or "(none: dry run)",
        "model type": report.model_type,
        "layers": f"{report.num_layers}, new: {', '.join(map(str, report.new_layer_indices)) or 'none'}",
        "parameters": f"{counts.base:,} + {counts.new:,}{f' - {removed:,}' if removed else ''} = {counts.total:,}",
        "trainable": f"{counts.trainable:,} ({100 * counts.trainable / (counts.total + (counts.bank or 0)):.1f} %)",
    }
    if counts.bank is not None:
        rows["bank"] = _bank(counts.bank, counts.fetched)
    if report.renumbers_layers:
        rows["adapters"] = "a LoRA that was made for the base does not fit, since layers are renumbered"
    beyond = "" if report.identity_except is None else f", but for {report.identity_except}"
    if dry_run:
        rows["would write"] = _gigabytes(report.bytes.written)
        rows["identity"] = ("promised" if report.promises_identity else "not promised by the method") + beyond
        if report.training is not None:
            rows |= _training(report.training)
    else:
        rows["written"] = (
            f"{_gigabytes(report.bytes.written)} in {report.seconds:.1f} s, peak memory {_gigabytes(report.peak_rss_bytes)}"
        )
        rows["identity"] = _identity(report, beyond)
    _print_table(["", report.method], *rows.items())
    if report.measurements:
        _print_table(*summary_table(report.measurements))


def _training(cost: dict[str, int]) -> dict[str, str]:
    whole, *adapted = (_gigabytes(cost[f"{name}_bytes"]) for name in ("base", "lora", "qlora"))
    hours = cost["flops_per_token"] * 100e6 / 400e12 / 3600
    return {
        "training": f"{_gigabytes(cost['bytes'])} of GPU memory with {cost['tokens']:,} tokens, computed",
        "the base": f"{whole} to train all of it, {adapted[0]} with LoRA, {adapted[1]} with QLoRA",
        "time": f"{hours:,.1f} hours for 100 M tokens at 400 TFLOP/s, computed",
    }


def _identity(report: UpscaleReport, beyond: str) -> str:
    if report.identity.checked is None:
        return (
            f"{'promised' if report.promises_identity else 'not promised'} by the method{beyond}; nothing was compared"
        )
    promise = "" if report.promises_identity else "not promised by the method; "
    divergence = f", KL {report.kl_divergence:.3g} nats" if report.kl_divergence else ""
    difference = f"largest difference {report.identity.max_abs_diff:g}{divergence} ({report.identity.compared})"
    return f"{promise}{report.identity.checked}: {difference}{beyond}"


def print_method_list(methods: list[dict[str, Any]]) -> None:
    """Print a line per method: its name, whether its model starts as the base, and its summary."""
    for method in methods:
        start, qualification = _start_of(method)
        marked = f"{start}*" if qualification else start
        summary = method["summary"].removesuffix(" (identity at start)")
        _print_text(f"{method['name']:<20} {marked:<9} {summary}")
    _print_text(
        "\nexact: until it is trained, the model computes the same as the base; exact*: except for some texts; "
        "changed*: exact with --set identity=auto."
    )
    _print_text("'upscale methods NAME' says for which, and prints a method's options, their defaults and the paper.")


def print_methods(methods: list[dict[str, Any]]) -> None:
    """Print methods and their options."""
    for method in methods:
        if method["trainable"] == "all":
            trains = "everything"
        elif method["adds_layers"]:
            trains = "the new layers"
        else:
            trains = "what is new" if method["adds_parameters"] else "nothing"
        own_placement = "its own" if method["adds_layers"] else "none: it adds no layers"
        start, qualification = _start_of(method)
        rows = [
            ("identity", f"{'exact at the start' if start == 'exact' else 'no'}{qualification}"),
            ("trains", trains),
            ("placement", method["placement"] or own_placement),
        ]
        for option in method["options"]:
            default = "" if option["default"] is None else f"={_yaml(option['default'])}"
            rows.append((f"--set {option['name']}{default}", f"{option['help']} ({option['type']})"))
        if method["paper"]:
            rows.append(("paper", f"{method['paper']['title']} ({method['paper']['reference']})"))
        _print_table([method["name"], method["summary"]], *rows)
        print()


def _start_of(method: dict[str, Any]) -> tuple[str, str]:
    if method["identity"]:
        left_out = method["identity_except"]
        return "exact", "" if left_out is None else f", but for {left_out}"
    chosen = any(option["name"] == "identity" for option in method["options"])
    return "changed", "; exact with --set identity=auto" if chosen else ""


def _yaml(value: Any) -> str:
    return write_yaml(value, flow=True).removesuffix("\n").removesuffix("\n...")


def print_inspection(inspection: dict[str, Any]) -> None:
    """Print what was done to a checkpoint, after code that was not compared with what this package generates."""
    if "other_code" in inspection:
        _print_text(f"NOT checked, and run with trust_remote_code=True: {_other_code(inspection['other_code'])}\n")
    rows: list[tuple[str, str]] = []
    counts = inspection["parameters"]
    stripped = inspection.get("stripped")
    if stripped is not None:
        layers, memories = (stripped.get(f"removed_{name}") or () for name in ("layers", "memories"))
        removed = _removed(layers, memories)
        source = f"{stripped.get('model')}, upscaled with {stripped.get('method')}; took out {removed}"
        rows += [("stripped from", source), ("", f"its weights {_confirmation(stripped, 'were')}")]
    if "method" not in inspection:
        rows += [("model type", inspection["model_type"]), ("layers", str(inspection["num_layers"]))]
        _print_table(["", "stripped"], *rows, ("parameters", f"{counts['total']:,}"))
        return
    rows += [("base", str(inspection["base"])), ("model type", inspection["model_type"])]
    if not inspection["causal"]:
        rows.append(("not causal", "the output of a token depends on later tokens"))
    rows.append(("options", ", ".join(f"{key}={_yaml(value)}" for key, value in inspection["options"].items())))
    rows.append(("seed", str(inspection["seed"])))
    rows += [("edited", describe_edit(edit)) for edit in inspection.get("edits", [])]
    rows.append(("parameters", f"{counts['total']:,}, of them new {counts['new']:,}"))
    if "bank" in counts:
        rows.append(("bank", _bank(counts["bank"], counts["fetched"])))
    if inspection["code"] is not None:
        rows.append(("carried code", _carried_code(inspection["code"])))
    layers = inspection["layers"]
    has_new_layers = any(layer["new"] for layer in layers)
    if not has_new_layers:
        rows.append(("added", _added(inspection)))
    _print_table(["", inspection["method"]], *rows)
    if has_new_layers:
        cells = [(str(layer["index"]), layer["from"], f"{layer['parameters']:,}") for layer in layers]
        _print_table(["layer", "from", "parameters"], *cells, bold=[layer["new"] for layer in layers])
    if inspection["measurements"]:
        _print_table(*summary_table(inspection["measurements"]))


def _added(inspection: dict[str, Any]) -> str:
    new = [entry for entry in inspection["memory"] if entry.get("name") in inspection["new_memories"]]
    parts = [f"memory {entry['name']} ({entry['site']}) in layers {format_numbers(entry['layers'])}" for entry in new]
    parts += [f"a glossary of {format_count(inspection['entries'], 'entry')}"] if "entries" in inspection else []
    return "; ".join(parts) or "nothing"


def _bank(bank: int, fetched: int | None) -> str:
    return f"{bank:,} parameters beside the checkpoint; a text fetches {fetched:,}"


def _carried_code(code: dict[str, Any]) -> str:
    if code["as_generated"]:
        return f"{code['file']}, as midus-hf {code['version']} generates it"
    if code["version"] not in (None, __version__):
        return f"{code['file']}, written by midus-hf {code['version']}; install that version to compare it"
    return f"{code['file']} is NOT what midus-hf {__version__} generates: read it before you trust it"


def _other_code(named: Sequence[dict[str, Any]]) -> str:
    told = []
    for each in named:
        name = each["file"] if each["name"] is None else f"{each['file']} names {each['name']}"
        files = ", ".join(each["modules"]) if each["name"] is not None else ""
        told.append(f"{name} ({files})" if files else name)
    return "; ".join(told)


def _confirmation(record: dict[str, Any], verb: str) -> str:
    confirmed, differing = record.get("base_confirmed"), record.get("differing_tensors")
    if confirmed is None:
        return f"{verb} not known to be the base's: its config holds no digest of the base"
    if confirmed:
        return f"{verb} the base's, byte for byte"
    verbs = "differs" if differing == 1 else "differ"
    which = "" if differing is None else f": {format_count(differing, 'tensor')} {verbs}"
    return f"{verb} not the base's, byte for byte{which}"


def print_stripped(result: dict[str, Any]) -> None:
    """Print what `strip` or `extract` left, and whether the weights equal the base's."""
    if "left_out" in result:
        done = f"left out {format_count(result['left_out'], 'tensor')} of the composite model."
    else:
        removed = _removed(result["removed_layer_indices"], result["removed_memories"])
        done = f"took out {removed}. Its weights {_confirmation(result, 'are')}."
    _print_text(f"{result['output']}: {result['model_type']} with {result['num_layers']} layers; {done}")


def _removed(layers: Sequence[int], memories: Sequence[str]) -> str:
    return " and ".join(
        f"{one if len(names) == 1 else many} {', '.join(map(str, names))}"
        for names, one, many in ((layers, "layer", "layers"), (memories, "memory", "memories"))
        if names
    )


def _gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e7 else f"{num_bytes / 1e6:.2f} MB"


def print_memories(listed: dict[str, Any]) -> None:
    """Print a line per entry of a glossary, and a table of chapters per bank."""
    if "entries" in listed:
        _print_entries(listed["entries"], listed["max_tokens"])
    for memory in listed.get("memories", ()):
        _print_text(
            f"memory {memory['name']} at {memory['site']}: {format_count(memory['chapters'], 'chapter')} of "
            f"{format_count(memory['chapter_tokens'], 'row')}, {memory['shared_chapters']} of them shared; routing "
            f"{memory['routing']}, k = {memory['k']}"
        )
        for number, bank in enumerate(memory["banks"]):
            _print_text(f"\nbank {number}, read by layers {format_numbers(bank['layers'])}; biases of their routers")
            rows = []
            for chapter, norm in enumerate(bank["row_norms"]):
                biases = [layer[chapter] for layer in bank["router_biases"].values() if layer[chapter] is not None]
                figures = (norm, min(biases, default=None), max(biases, default=None))
                numbers = ["not finite" if figure is None else f"{figure:.4g}" for figure in figures]
                rows.append([str(chapter), "shared" if chapter < memory["shared_chapters"] else "routed", *numbers])
            _print_table(["chapter", "", "row norm", "lowest bias", "highest bias"], *rows)
    for edit in listed.get("edits", ()):
        _print_text(f"edited: {describe_edit(edit)}")


def _print_entries(entries: Sequence[dict[str, Any]], most: int) -> None:
    tokens = sum(entry["tokens"] for entry in entries)
    print(f"{format_count(len(entries), 'entry')} of {format_count(tokens, 'token')}")
    for entry in entries:
        names = " / ".join(entry["names"])
        exact = " (exact)" if entry["exact"] else ""
        read = f", {most:,} of them read" if entry["tokens"] > most else ""
        text = " ".join(entry["text"].split())
        text = text if len(text) <= _MAX_ENTRY_CHARACTERS else f"{text[:_MAX_ENTRY_CHARACTERS]}..."
        print(f"{names}{exact}: {text} ({format_count(entry['tokens'], 'token')}{read})")


def print_edit(result: dict[str, Any]) -> None:
    """Print what an edit did, by its result."""
    edit = {key: value for key, value in result.items() if key not in ("model", "output", "bytes_written", "seconds")}
    _print_text(f"{result['output']}: {describe_edit(edit)}")
