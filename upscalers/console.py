"""Output of the commands on a terminal: progress on standard error, tables on standard output."""

from collections.abc import Iterable, Sequence
from typing import Any

import rich.box
import yaml
from rich import progress as rich_progress
from rich.console import Console as RichConsole
from rich.table import Table
from rich.text import Text

from midus_hf.files.secrets import without_secrets
from midus_hf.version import __version__
from upscalers.edits.checkpoint_edit import described
from upscalers.record.report import UpscaleReport
from upscalers.request.progress import Progress
from upscalers.tensors.solver import summary_table


class Console(Progress):
    """A progress bar of the current stage on standard error, if that is a terminal; `command` stands in front of warnings."""

    def __init__(self, command: str = "upscale") -> None:
        self._command = command
        self._console = RichConsole(stderr=True)
        self._bar: rich_progress.Progress | None = None
        self._task: rich_progress.TaskID | None = None

    def start(self) -> None:
        self._bar = rich_progress.Progress(
            rich_progress.SpinnerColumn(),
            rich_progress.TextColumn("{task.description}"),
            rich_progress.BarColumn(),
            _Amount(),
            rich_progress.TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
            transient=True,
        )
        self._bar.start()

    def stage(self, name: str, num_steps: int, unit: str = "steps") -> None:
        if self._bar:
            if self._task is None:
                self._task = self._bar.add_task(name, total=num_steps, unit=unit)
            self._bar.reset(self._task, description=name, total=num_steps, unit=unit)

    def advance(self, num_steps: int = 1) -> None:
        if self._bar and self._task is not None:
            self._bar.advance(self._task, num_steps)

    def warn(self, message: str) -> None:
        self._console.print(
            f"{self._command}: warning: {without_secrets(message)}", markup=False, highlight=False, soft_wrap=True
        )

    def note(self, message: str) -> None:
        self._console.print(without_secrets(message), markup=False, highlight=False, soft_wrap=True)

    def finish(self) -> None:
        if self._bar:
            self._bar.stop()


class _Amount(rich_progress.ProgressColumn):
    """Column that shows how much of a bar's total is done, in bytes or in another unit."""

    def render(self, task: rich_progress.Task) -> Text:
        done, total, unit = task.completed, task.total or 0, task.fields["unit"]
        if unit == "bytes":
            return Text(f"{_gigabytes(done)} of {_gigabytes(total)}")
        return Text(f"{done:.0f} of {total:.0f} {unit}" if total > 1 else "")


def _table(*columns: str) -> Table:
    table = Table(box=rich.box.SIMPLE_HEAD, show_edge=False)
    for column in columns:
        table.add_column(Text(column), overflow="fold")
    return table


def _say(line: str) -> None:
    RichConsole().print(Text(line), soft_wrap=True)


def _add(table: Table, *cells: str, style: str | None = None) -> None:
    """Add a row of plain text, so that brackets in names are not read as markup."""
    table.add_row(*map(Text, cells), style=style)


def _print_rows(table: Table, rows: Iterable[Iterable[str]]) -> None:
    for row in rows:
        _add(table, *row)
    RichConsole().print(table)


def print_report(report: UpscaleReport, dry_run: bool) -> None:
    """Print the summary of an upscaling."""
    counts = report.parameters
    removed = counts.base + counts.new - counts.total
    table = _table("", report.method)
    rows = {
        "base": report.base,
        "output": report.output or "(none: dry run)",
        "model type": report.model_type,
        "layers": f"{report.num_layers}, new: {', '.join(map(str, report.new_layer_indices)) or 'none'}",
        "parameters": f"{counts.base:,} + {counts.new:,}{f' - {removed:,}' if removed else ''} = {counts.total:,}",
        "trainable": f"{counts.trainable:,} ({100 * counts.trainable / (counts.total + (counts.bank or 0)):.1f} %)",
    }
    if counts.bank is not None:
        rows["bank"] = f"{counts.bank:,} parameters beside the checkpoint, of which a text fetches {counts.fetched:,}"
    if report.renumbers_layers:
        rows["adapters"] = (
            "a LoRA that was made for the base does not fit: layers have other numbers. 'upscale adapter' writes one that fits"
        )
    if dry_run:
        rows["would write"] = _gigabytes(report.bytes.written)
        rows["identity"] = "promised" if report.promises_identity else "not promised by the method"
    else:
        rows["written"] = (
            f"{_gigabytes(report.bytes.written)} in {report.seconds:.1f} s, peak memory {_gigabytes(report.peak_rss_bytes)}"
        )
        rows["identity"] = _identity(report)
    _print_rows(table, rows.items())
    if report.measurements:
        print_measurements(report.measurements)


def _identity(report: UpscaleReport) -> str:
    if report.identity.checked is None:
        return f"{'promised' if report.promises_identity else 'not promised'} by the method; nothing was compared"
    promise = "" if report.promises_identity else "not promised by the method; "
    divergence = f", KL {report.kl_divergence:.3g} nats" if report.kl_divergence else ""
    difference = f"largest difference {report.identity.max_abs_diff:g}{divergence} ({report.identity.compared})"
    return f"{promise}{report.identity.checked}: {difference}"


def print_measurements(measurements: list[dict[str, Any]]) -> None:
    """Print what solvers measured, one row per kind of tensor: mean, lowest and highest value over the new layers."""
    header, *rows = summary_table(measurements)
    _print_rows(_table(*header), rows)


def print_method_list(methods: list[dict[str, Any]]) -> None:
    """Print a line per method: its name, whether its model starts as the base, and its summary."""
    starts = {"exact at the start": "exact", "no": "changed"}
    lines = [
        f"{method['name']:<20} {starts.get(_starts_as(method), 'changed*'):<9} "
        f"{method['summary'].removesuffix(' (identity at start)')}"
        for method in methods
    ]
    lines += [
        "",
        "exact: until it is trained, the model computes what the base computes; changed*: with --set identity=auto, too.",
        "'upscale methods NAME' says a method's options, their defaults and the paper.",
    ]
    _say("\n".join(lines))


def print_methods(methods: list[dict[str, Any]]) -> None:
    """Print methods and their options."""
    for method in methods:
        table = _table(method["name"], method["summary"])
        _add(table, "identity", _starts_as(method))
        added = "the new layers" if method["adds_layers"] else "the new memory"
        _add(table, "trains", "everything" if method["trainable"] == "all" else added)
        own = "its own" if method["adds_layers"] else "none: it adds no layers"
        _add(table, "placement", method["placement"] or own)
        for option in method["options"]:
            default = "" if option["default"] is None else f"={_yaml(option['default'])}"
            _add(table, f"--set {option['name']}{default}", f"{option['help']} ({option['type']})")
        if method["paper"]:
            _add(table, "paper", f"{method['paper']['title']} ({method['paper']['reference']})")
        RichConsole().print(table)
        print()


def _starts_as(method: dict[str, Any]) -> str:
    if method["identity"]:
        return "exact at the start"
    chosen = any(option["name"] == "identity" for option in method["options"])
    return "no; exact with --set identity=auto" if chosen else "no"


def _yaml(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False).removesuffix("\n").removesuffix("\n...")


def print_inspection(inspection: dict[str, Any]) -> None:
    """Print what was done to a checkpoint."""
    table = _table("", inspection.get("method", "stripped"))
    if "stripped" in inspection:
        stripped = inspection["stripped"]
        removed = _removed(stripped.get("removed_layers") or (), stripped.get("removed_memories") or ())
        origin = f"{stripped.get('model')}, upscaled with {stripped.get('method')}"
        _add(table, "stripped from", f"{origin}; took out {removed}")
        _add(table, "", f"its weights {_confirmation(stripped, 'were')}")
    if "method" not in inspection:
        _add(table, "model type", inspection["model_type"])
        _add(table, "layers", str(inspection["num_layers"]))
        _add(table, "parameters", f"{inspection['parameters']['total']:,}")
        RichConsole().print(table)
        return
    _add(table, "base", str(inspection["base"]))
    _add(table, "model type", inspection["model_type"])
    if not inspection["causal"]:
        _add(table, "not causal", "what a token gets depends on later tokens")
    _add(table, "options", ", ".join(f"{key}={_yaml(value)}" for key, value in inspection["options"].items()))
    _add(table, "seed", str(inspection["seed"]))
    for edit in inspection.get("edits", []):
        _add(table, "edited", described(edit))
    _add(
        table, "parameters", f"{inspection['parameters']['total']:,}, of them new {inspection['parameters']['new']:,}"
    )
    if "bank" in inspection["parameters"]:
        fetched, bank = (inspection["parameters"][name] for name in ("fetched", "bank"))
        _add(table, "bank", f"{bank:,} parameters beside the checkpoint, of which a text fetches {fetched:,}")
    if inspection["code"] is not None:
        _add(table, "carried code", _carried_code(inspection["code"]))
    RichConsole().print(table)
    layers = _table("layer", "from", "parameters")
    for layer in inspection["layers"]:
        style = "bold" if layer["new"] else None
        _add(layers, str(layer["index"]), layer["from"], f"{layer['parameters']:,}", style=style)
    RichConsole().print(layers)
    if inspection["measurements"]:
        print_measurements(inspection["measurements"])


def _carried_code(code: dict[str, Any]) -> str:
    """Return as text whether the code that a checkpoint carries is the code that its version generates."""
    if code["as_generated"]:
        return f"{code['file']}, as midus-hf {code['version']} generates it"
    if code["version"] not in (None, __version__):
        return f"{code['file']}, written by midus-hf {code['version']}; install that version to compare it"
    return f"{code['file']} is NOT what midus-hf {__version__} generates: read it before you trust it"


def _confirmation(record: dict[str, Any], verb: str) -> str:
    """Return whether the weights that `strip` wrote equal the base's, as text."""
    confirmed, differing = record.get("base_confirmed"), record.get("differing_tensors")
    if confirmed is None:
        return f"{verb} not known to be the base's: its config holds no digest of the base"
    if confirmed:
        return f"{verb} the base's, byte for byte"
    return f"{verb} not the base's, byte for byte" + ("" if differing is None else f": {differing} tensors differ")


def print_stripped(result: dict[str, Any]) -> None:
    """Print what `strip` took out, and whether the weights left equal the base's."""
    removed = _removed(result["removed_layer_indices"], result["removed_memories"])
    _say(
        f"{result['output']}: {result['model_type']} with {result['num_layers']} layers; took out {removed}. "
        f"Its weights {_confirmation(result, 'are')}."
    )


def print_extracted(result: dict[str, Any]) -> None:
    """Print which language model was extracted."""
    model = f"{result['model_type']} with {result['num_layers']} layers"
    _say(f"{result['output']}: {model}; left out {result['left_out']} tensors of the composite model.")


def print_adapter(result: dict[str, Any]) -> None:
    """Print which layers of the upscaled model have the adapter."""
    layers = ", ".join(map(str, result["layers"])) or "no layer"
    summary = f"{result['peft_type']} adapter on {result['modules']} modules, in layers {layers} of {result['onto']}"
    _say(f"{result['output']}: {summary}.")


def _removed(layers: Sequence[int], memories: Sequence[str]) -> str:
    """Return as text what `strip` took out: inserted layers, and memories that were attached to layers of the base."""
    parts = [
        f"{one if len(names) == 1 else many} {', '.join(map(str, names))}"
        for names, one, many in ((layers, "layer", "layers"), (memories, "memory", "memories"))
        if names
    ]
    return " and ".join(parts)


def _gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e7 else f"{num_bytes / 1e6:.2f} MB"
