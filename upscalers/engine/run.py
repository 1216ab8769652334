"""One upscaling from request to report."""

import contextlib
import json
import math
import resource
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upscalers.engine.base_model import BaseModel, open_base
from upscalers.engine.errors import RequestError, one_line
from upscalers.engine.families import MEMORY_PREFIX, Config
from upscalers.engine.hub import check_repo_id, push_folder
from upscalers.engine.method import Method, get_method
from upscalers.engine.model_card import model_card
from upscalers.engine.options import parse_options
from upscalers.engine.output_folder import OutputFolder
from upscalers.engine.plan import Plan
from upscalers.engine.progress import NoProgress, Progress, shown
from upscalers.engine.provenance import CONFIG_KEY, base_record, config_entry, paper_entry, write_record
from upscalers.engine.recipes import Copy, Recipe
from upscalers.engine.report import Bytes, Identity, ParameterCounts, UpscaleReport
from upscalers.engine.safetensors_format import SAFETENSORS_NAMES, TORCH_NAMES, read_header
from upscalers.engine.sizes import parse_size
from upscalers.engine.solver import Measurement, Solved
from upscalers.engine.source import Source, copy_travelling_files, resolve_source
from upscalers.engine.tokenizer import TOKENIZER_CONFIG, keep_tokenizer_class
from upscalers.engine.writer import CheckpointWriter, OutputTensor, split_shards

DTYPES = ("auto", "float32", "bfloat16", "float16")
_SPARE_BYTES = 64_000_000


def upscale(
    *,
    base: str | Path,
    method: str,
    output: str | Path | None = None,
    num_new_layers: int | None = None,
    placement: str | Sequence[int] | None = None,
    options: Mapping[str, Any] | None = None,
    seed: int = 0,
    dtype: str = "auto",
    max_shard_size: str | int = "5GB",
    dry_run: bool = False,
    verify: bool = True,
    allow_nan: bool = False,
    overwrite: bool = False,
    push_to_hub: str | None = None,
    progress: Progress | None = None,
) -> UpscaleReport:
    """Upscale a checkpoint.

    Args:
        base: A folder, a `.gguf` file or a hub id. For a dry run a folder with nothing but `config.json` will do.
        method: Name of a method.
        output: The folder to make; needed unless `dry_run`.
        num_new_layers: K. Default: half the layers of the base.
        placement: `distributed`, `top-heavy`, `bottom-heavy`, `llama-pro`, or indices, `"1,4,7"` or `[1, 4, 7]`.
            Default: the method's own.
        options: The method's options.
        seed: Of everything random. Default: 0.
        dtype: `auto` keeps the base's. Default: `"auto"`.
        max_shard_size: Such as `"5GB"`, or bytes. Default: `"5GB"`.
        dry_run: Only say what would be done. Default: False.
        verify: Compare both models' logits and refuse NaN in the base; otherwise each new block is checked alone.
            Default: True.
        allow_nan: Let NaN in the base pass. Default: False.
        overwrite: Replace an existing checkpoint. Default: False.
        push_to_hub: A repository to upload the result to. Default: None.
        progress: Told of every step. Default: silent.

    Returns:
        The report.

    Raises:
        RequestError: If the request cannot be carried out; nothing was written.
        VerificationError: If the result is not what the method promises; nothing is left.
        OSError: If reading or writing fails; nothing is left.
    """
    started = time.perf_counter()
    progress = progress or NoProgress()
    chosen = _method(method, options)
    if dtype not in DTYPES:
        raise RequestError(f"dtype is {dtype!r}; expected one of: {', '.join(DTYPES)}.")
    for name, value in (("num-new-layers", num_new_layers), ("seed", seed)):
        if value is not None and type(value) is not int:
            raise RequestError(f"{name} is {value!r}; expected an integer.")
    if placement is not None and not isinstance(placement, str):
        placement = ",".join(map(str, placement))
    max_shard_bytes = parse_size(max_shard_size)
    if output is None and not dry_run:
        raise RequestError("output is missing; expected the folder to make. Pass --output DIR, or --dry-run.")
    if push_to_hub:
        check_repo_id(push_to_hub)
    local = Path(base).expanduser()
    if output is not None:
        OutputFolder(Path(output).expanduser(), local if local.is_dir() else None, overwrite)
    if not dry_run and not local.is_dir():
        # Before a download or a conversion, which take long, see that the request fits the base's config.
        with resolve_source(str(base), config_only=True) as source:
            _planned(chosen, open_base(source.folder, needs_weights=False), num_new_layers, placement)
    if not dry_run:
        chosen.check_machine()

    with resolve_source(str(base), config_only=dry_run) as source:
        opened = open_base(source.folder, needs_weights=not dry_run)
        if opened.unexpected:
            progress.warn(
                f"the base holds {len(opened.unexpected)} tensors its architecture does not have; they are carried along."
            )
        job = _Job(chosen, opened, source, _planned(chosen, opened, num_new_layers, placement), seed, dtype)
        for concern in chosen.concerns(opened, job.plan):
            progress.warn(concern)
        counts, num_bytes = job.counts(), sum(tensor.num_bytes for tensor in job.tensors)
        identity, volume = Identity(None, None), Bytes(0, num_bytes)
        if output is not None:
            folder = OutputFolder(Path(output).expanduser(), source.folder, overwrite)
            folder.check_space(num_bytes + job.scratch_bytes() + _SPARE_BYTES)
            if not dry_run:
                identity, volume = job.write(folder, max_shard_bytes, verify, allow_nan, progress)
    report = UpscaleReport(
        method=chosen.name,
        base=str(base),
        output=None if output is None else str(output),
        model_type=job.config["model_type"],
        num_layers=job.plan.num_layers,
        new_layer_indices=job.plan.new_indices,
        parameters=counts,
        bytes=volume,
        identity=identity,
        seconds=time.perf_counter() - started,
        peak_rss_bytes=_peak_rss_bytes(),
        promises_identity=chosen.promises_identity,
        kl_divergence=job.kl_divergence,
        measurements=job.measurements,
    )
    if push_to_hub and not dry_run:
        progress.note(push_folder(Path(str(output)).expanduser(), push_to_hub))
    return report


def _method(name: str, options: Mapping[str, Any] | None) -> Method:
    method_class = get_method(name)
    return method_class(parse_options(method_class.options_class, options or {}, f"method {name}"))


def _planned(method: Method, base: BaseModel, num_new_layers: int | None, placement: str | None) -> Plan:
    method.check(base)
    return method.plan(base, num_new_layers, placement)


@dataclass
class _Job:
    """Everything that is decided before the first byte is written."""

    method: Method
    base: BaseModel
    source: Source
    plan: Plan
    seed: int
    dtype: str

    def __post_init__(self) -> None:
        self.config: Config = self.method.config(self.base, self.plan)
        self.config[CONFIG_KEY] = config_entry(self.method, self.base, self.plan, self.seed)
        if self.dtype != "auto":
            self.config.pop("torch_dtype", None)
            self.config["dtype"] = self.dtype
        self.layers = self.method.recipes(self.base, self.plan, self.seed)
        self.tensors = self._tensors()
        self.record: dict[str, Any] = {}
        self.measurements: list[Measurement] = []
        self.kl_divergence: float | None = None

    def _tensors(self) -> list[OutputTensor]:
        outer = [
            OutputTensor(name, Copy(self.base.tensors[name].shape, name), self._cast(self.base.tensors[name].dtype))
            for name in self.base.outer_names()
        ]
        layers = [
            OutputTensor(self.base.new_name(index, name), recipe, self._dtype_of(recipe))
            for index, recipes in enumerate(self.layers)
            for name, recipe in recipes.items()
        ]
        embeddings = [tensor for tensor in outer if "embed_tokens" in tensor.name]
        return embeddings + layers + [tensor for tensor in outer if "embed_tokens" not in tensor.name]

    def _dtype_of(self, recipe: Recipe) -> str:
        return self._cast(self.base.tensors[recipe.source].dtype if isinstance(recipe, Copy) else self.base.dtype)

    def _cast(self, dtype: str) -> str:
        return dtype if self.dtype == "auto" or dtype not in TORCH_NAMES else SAFETENSORS_NAMES[self.dtype]

    def counts(self) -> ParameterCounts:
        """Numbers of parameters."""
        uncounted = {*self.base.family.tied_tensors(self.base.config), *self.base.unexpected}
        base = sum(math.prod(tensor.shape) for name, tensor in self.base.tensors.items() if name not in uncounted)
        total = sum(
            math.prod(tensor.recipe.shape)
            for tensor in self.tensors
            if not (isinstance(tensor.recipe, Copy) and tensor.recipe.source in uncounted)
        )
        new = sum(math.prod(recipe.shape) for index in self.plan.new_indices for recipe in self.layers[index].values())
        return ParameterCounts(base, new, total, new if self.method.trained == "new" else total)

    def scratch_bytes(self) -> int:
        """Room on the disk that solvers need while they work."""
        solvers = {tensor.recipe.solver for tensor in self.tensors if isinstance(tensor.recipe, Solved)}
        return sum(solver.scratch_bytes for solver in solvers)

    def write(
        self, folder: OutputFolder, max_shard_bytes: int, verify: bool, allow_nan: bool, progress: Progress
    ) -> tuple[Identity, Bytes]:
        """Write, verify, and put the folder in its place."""
        imports = threading.Thread(target=_import_slow_modules, daemon=True)
        imports.start()
        shards = split_shards(self.tensors, max_shard_bytes)
        with folder as partial, shown(progress, sum(tensor.num_bytes for tensor in self.tensors), len(shards)):
            (partial / "config.json").write_text(json.dumps(self.config, indent=2) + "\n", encoding="utf-8")
            # Two threads must not import transformers at once: its lazy modules do not stand it.
            writer = CheckpointWriter(
                self.base.tensors,
                scan=verify and not allow_nan,
                before_building=imports.join,
                progress=progress,
            )
            written = writer.write(partial, shards)
            self.measurements = written.measurements
            for concern in self.method.review(written.measurements):
                progress.warn(concern)
            progress.stage("checking")
            self._write_siblings(partial)
            identity = self._verify(partial, shards, verify)
            self._write_provenance(partial, identity)
            progress.stage("syncing")
            folder.commit()
        return identity, Bytes(written.bytes_read, written.bytes_written)

    def _write_siblings(self, partial: Path) -> None:
        copy_travelling_files(self.source.folder, partial)
        config = _validated(partial)
        tokenizer_config = partial / TOKENIZER_CONFIG
        before = tokenizer_config.read_text(encoding="utf-8") if tokenizer_config.is_file() else None
        if keep_tokenizer_class(self.source.folder, partial):
            self.record["tokenizer_config"] = before
        if self.config["model_type"].startswith(MEMORY_PREFIX):
            from midus_hf.models.export import write_code

            write_code(partial, config)
            self.config["auto_map"] = config.to_dict()["auto_map"]
            (partial / "config.json").write_text(json.dumps(self.config, indent=2) + "\n", encoding="utf-8")

    def _verify(self, partial: Path, shards: dict[str, list[OutputTensor]], verify: bool) -> Identity:
        from upscalers.engine.verify import check_blocks, compare_logits

        dtype = self._cast(self.base.dtype)
        promised = self.method.promises_identity
        if verify:
            found = compare_logits(self.source.folder, partial, dtype, promised)
            self.kl_divergence = found.kl_divergence
            return Identity("logits", found.max_abs_diff)
        if not promised:
            return Identity(None, None)
        tensors = {name: tensor for file in shards for name, tensor in read_header(partial / file).items()}
        new_layers = {index: self.base.new_name(index, "") for index in self.plan.new_indices}
        check_blocks(partial, self.config, new_layers, tensors, dtype)
        return Identity("blocks", 0.0)

    def _write_provenance(self, partial: Path, identity: Identity) -> None:
        from midus_hf.version import __version__

        counts = self.counts()
        entry = self.config[CONFIG_KEY]
        request = {
            "base": self.source.label,
            "method": self.method.name,
            **self.method.placement_request(self.plan),
            "options": entry["options"],
            "seed": self.seed,
            "dtype": self.dtype,
        }
        (partial / "README.md").write_text(
            model_card(self.method, self.source, self.plan, self.config, counts, request, self.measurements),
            encoding="utf-8",
        )
        write_record(
            partial,
            {
                "midus_hf": __version__,
                **entry,
                **self.record,
                "dtype": self.dtype,
                "base": base_record(self.base, self.source.label, self.source.revision),
                "parameters": vars(counts),
                "identity": vars(identity),
                "promises_identity": self.method.promises_identity,
                "kl_divergence": self.kl_divergence,
                "measurements": self.measurements,
                "paper": paper_entry(self.method),
            },
        )


def _validated(folder: Path) -> Any:
    """Let transformers construct the config, which checks what this package does not know of."""
    from transformers import AutoConfig

    import midus_hf  # noqa: F401 - registers the classes

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise RequestError(
            f"transformers refuses the config: {one_line(error)} Repair config.json of the base."
        ) from None


def _import_slow_modules() -> None:
    import midus_hf  # noqa: F401 - imported while bytes are copied, so that checking can begin at once


def _peak_rss_bytes() -> int:
    # Linux counts in getrusage what the parent process held when it started this one.
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
