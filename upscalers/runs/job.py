"""One upscaling that was decided on: its tensors, and how they become a checkpoint."""

import contextlib
import json
import math
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upscalers.architecture.families import MEMORY_PREFIX, Config
from upscalers.architecture.layer_tensors import memories_of
from upscalers.checkpoint.base_model import BaseModel
from upscalers.checkpoint.content_digest import TensorDigests, content_sha256, weight_names
from upscalers.checkpoint.safetensors_format import SAFETENSORS_NAMES, TORCH_NAMES, StoredTensor, read_header
from upscalers.checkpoint.source import CARD_FILE, Source, copy_travelling_files
from upscalers.checkpoint.tokenizer import TOKENIZER_CONFIG, keep_tokenizer_class
from upscalers.landing.output_folder import OutputFolder
from upscalers.machine.free_memory import available_bytes
from upscalers.methods.contract import Method
from upscalers.plan.plan import Plan
from upscalers.record.card_metadata import base_metadata
from upscalers.record.model_card import model_card
from upscalers.record.provenance import CONFIG_KEY, DIGEST_KEY, base_record, config_entry, paper_entry, write_record
from upscalers.record.report import Bytes, Identity, ParameterCounts
from upscalers.request.errors import RequestError, one_line
from upscalers.request.progress import Progress, begin_writing
from upscalers.tensors.recipe_check import check_recipes
from upscalers.tensors.recipes import Copy, Recipe
from upscalers.tensors.solver import Measurement, Solved
from upscalers.tensors.writer import CheckpointWriter, OutputTensor, split_shards


@dataclass
class Job:
    """Everything that is decided before the first byte is written, and the writing.

    Args:
        method: With its options.
        base: Opened.
        source: Where the base came from.
        plan: Of the layers.
        seed: Of everything random.
        dtype: Of the output; `"auto"` keeps the base's.
        repository: Where it will be uploaded to. Default: None, nowhere.
    """

    method: Method
    base: BaseModel
    source: Source
    plan: Plan
    seed: int
    dtype: str
    repository: str | None = None

    def __post_init__(self) -> None:
        self.config: Config = self.method.config(self.base, self.plan)
        self.config[CONFIG_KEY] = config_entry(self.method, self.base, self.plan, self.seed)
        if self.dtype != "auto":
            self.config.pop("torch_dtype", None)
            self.config["dtype"] = self.dtype
        self.layers = self.method.recipes(self.base, self.plan, self.seed)
        outer = self.method.outer_recipes(self.base, self.plan, self.seed)
        check_recipes(self.method.name, self.base, self.plan, self.config, self.layers, outer)
        self.tensors = self._tensors(outer)
        self.record: dict[str, Any] = {}
        self.digests: dict[str, str] = {}
        self.measurements: list[Measurement] = []
        self.kl_divergence: float | None = None

    def _tensors(self, outer_recipes: dict[str, Recipe]) -> list[OutputTensor]:
        outer = [
            OutputTensor(
                name,
                recipe,
                self._cast(self.base.tensors[recipe.source].dtype if isinstance(recipe, Copy) else self.base.dtype),
            )
            for name, recipe in outer_recipes.items()
        ]
        layers = [
            OutputTensor(self.base.new_name(index, name), recipe, self._dtype_of(index, name, recipe))
            for index, recipes in enumerate(self.layers)
            for name, recipe in recipes.items()
        ]
        embeddings = [tensor for tensor in outer if "embed_tokens" in tensor.name]
        return embeddings + layers + [tensor for tensor in outer if "embed_tokens" not in tensor.name]

    def _dtype_of(self, index: int, name: str, recipe: Recipe) -> str:
        """A copy keeps its dtype; what is made has that of the same tensor in the layer it is made from."""
        if isinstance(recipe, Copy):
            return self._cast(self.base.tensors[recipe.source].dtype)
        source = self.base.layer_names(self.plan.sources[index]).get(name)
        return self._cast(self.base.dtype if source is None else self.base.tensors[source].dtype)

    def _cast(self, dtype: str) -> str:
        return dtype if self.dtype == "auto" or dtype not in TORCH_NAMES else SAFETENSORS_NAMES[self.dtype]

    def counts(self) -> ParameterCounts:
        """Numbers of parameters; buffers are none."""
        uncounted, memories = self.base.uncounted_names(), memories_of(self.base.family, self.config)
        base = sum(math.prod(tensor.shape) for name, tensor in self.base.tensors.items() if name not in uncounted)
        layers = range(self.plan.num_layers)
        buffers = {self.base.new_name(layer, name) for layer in layers for name in memories.buffers(layer)}
        total = sum(
            math.prod(tensor.recipe.shape)
            for tensor in self.tensors
            if tensor.name not in buffers
            and not (isinstance(tensor.recipe, Copy) and tensor.recipe.source in uncounted)
        )
        new = sum(
            math.prod(tensor.recipe.shape)
            for tensor in self.tensors
            if tensor.name not in buffers and self.plan.owns(tensor.name)
        )
        return ParameterCounts(base, new, total, new if self.method.trained == "new" else total)

    def scratch_bytes(self) -> int:
        """Room on the disk that solvers need while they work."""
        solvers = {tensor.recipe.solver for tensor in self.tensors if isinstance(tensor.recipe, Solved)}
        return sum(solver.scratch_bytes for solver in solvers)

    def compares_logits(self, verify: bool | None, progress: Progress) -> bool:
        """Decide how the result will be checked, by the memory that is free, before anything is written.

        Args:
            verify: True insists on comparing both models' logits, False does not want it, None leaves it to the memory.
            progress: Told of what is done instead.

        Returns:
            Whether logits are compared. Otherwise each new block is checked alone, where identity is promised.

        Raises:
            RequestError: If a person insists, and the free memory does not suffice.
        """
        if verify is False:
            return False
        progress.stage("loading libraries", 1)  # what they leave of the memory is known only afterwards
        _import_slow_modules()
        progress.advance()
        from upscalers.runs.verify import comparison_bytes

        new = {tensor.name: StoredTensor(tensor.dtype, tensor.recipe.shape) for tensor in self.tensors}
        needed = comparison_bytes(self.base.tensors, new, self.base.config, self._cast(self.base.dtype))
        free = available_bytes()
        if needed <= free:
            return True
        shortage = f"comparing both models layer by layer takes {needed / 1e9:.2f} GB of memory, but {free / 1e9:.2f} GB is free"
        if verify:
            raise RequestError(f"{shortage}. Make room, or leave --verify away to have what can be checked with less.")
        instead = (
            "each new block is checked alone instead, as with --no-verify"
            if self.method.promises_identity
            else "nothing is compared, since the method promises no identity"
        )
        progress.warn(f"{shortage}; {instead}. Make room and pass --verify to insist.")
        return False

    def write(
        self, folder: OutputFolder, max_shard_bytes: int, scan: bool, compares_logits: bool, progress: Progress
    ) -> tuple[Identity, Bytes]:
        """Write, verify, and put the folder in its place.

        Args:
            folder: To make.
            max_shard_bytes: The largest size of a file.
            scan: Whether NaN in the base is refused.
            compares_logits: Whether both models' logits are compared; otherwise each new block is checked alone.
            progress: Told of every step.
        """
        imports = threading.Thread(target=_import_early, daemon=True)
        imports.start()
        shards = split_shards(self.tensors, max_shard_bytes)
        # Where base layers were dropped, `strip` has nothing to give back that could be confirmed.
        digested = TensorDigests(self.base.tensors, {} if self.plan.dropped_layers else weight_names(self.base))
        with folder as partial, digested as digests:
            self._write_config(partial)
            begin_writing(progress, sum(tensor.num_bytes for tensor in self.tensors), len(shards))

            def before_building() -> None:
                digests.begin()
                imports.join()  # two threads must not import transformers at once: its lazy modules do not stand it

            writer = CheckpointWriter(
                self.base.tensors,
                scan=scan,
                before_building=before_building,
                progress=progress,
                copied=digests.add,
            )
            written = writer.write(partial, shards)
            self.measurements = written.measurements
            for concern in self.method.review(written.measurements):
                progress.warn(concern)
            if imports.is_alive():
                progress.stage("loading libraries", 1)
                imports.join()
                progress.advance()
            self._write_siblings(partial, progress)
            identity = self._verify(partial, shards, compares_logits, progress)
            folder.flush(progress)  # which takes as long as the digests, and no processor
            progress.stage("recording what was done", 1)
            self.digests = digests.finish()
            self._write_provenance(partial, identity, progress)
            folder.commit()
            progress.advance()
        return identity, Bytes(written.bytes_read, written.bytes_written)

    def _write_config(self, partial: Path) -> None:
        (partial / "config.json").write_text(json.dumps(self.config, indent=2) + "\n", encoding="utf-8")

    def _write_siblings(self, partial: Path, progress: Progress) -> None:
        progress.stage("checking config and tokenizer", 2)
        copy_travelling_files(self.source.folder, partial)
        config = _validated(partial)
        progress.advance()
        tokenizer_config = partial / TOKENIZER_CONFIG
        before = tokenizer_config.read_text(encoding="utf-8") if tokenizer_config.is_file() else None
        if keep_tokenizer_class(self.source.folder, partial):
            self.record["tokenizer_config"] = before
        if self.config["model_type"].startswith(MEMORY_PREFIX):
            from midus_hf.models.export import write_code

            write_code(partial, config)
            self.config["auto_map"] = config.to_dict()["auto_map"]
            self._write_config(partial)
        progress.advance()

    def _verify(
        self, partial: Path, shards: dict[str, list[OutputTensor]], compares_logits: bool, progress: Progress
    ) -> Identity:
        from upscalers.runs.block_check import check_blocks
        from upscalers.runs.verify import compare_logits

        dtype = self._cast(self.base.dtype)
        promised = self.method.promises_identity
        tensors = {name: tensor for file in shards for name, tensor in read_header(partial / file).items()}
        if compares_logits:
            found = compare_logits(self.base, partial, tensors, self.plan, dtype, promised, progress)
            self.kl_divergence = found.kl_divergence
            return Identity("logits", found.max_abs_diff)
        if not promised:
            return Identity(None, None)
        check_blocks(partial, self.config, self.base, self.plan, tensors, dtype, progress)
        return Identity("blocks", 0.0)

    def _write_provenance(self, partial: Path, identity: Identity, progress: Progress) -> None:
        from midus_hf.version import __version__

        counts = self.counts()
        entry = self.config[CONFIG_KEY]
        if self.digests:
            entry[DIGEST_KEY] = content_sha256(self.digests)
            self._write_config(partial)
        request = {
            "base": self.source.label,
            **({} if self.source.revision is None else {"revision": self.source.revision}),
            "method": self.method.name,
            **self.method.placement_request(self.plan),
            "options": entry["options"],
            "seed": self.seed,
            "dtype": self.dtype,
        }
        carried = base_metadata(self.source, progress)
        card = model_card(
            self.method,
            self.source,
            self.plan,
            self.config,
            memories_of(self.base.family, self.config),
            counts,
            request,
            self.measurements,
            carried,
            self.repository,
        )
        (partial / CARD_FILE).write_text(card, encoding="utf-8")
        write_record(
            partial,
            {
                "midus_hf": __version__,
                **entry,
                **self.record,
                "dtype": self.dtype,
                "base": base_record(self.base, self.source.label, self.source.revision, self.digests),
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
    try:
        import upscalers.runs.streamed_model  # noqa: F401 - brings torch, transformers and the classes of midus_hf
    except (ImportError, OSError, MemoryError) as error:
        raise RequestError(
            f"torch and transformers cannot be loaded ({type(error).__name__}: {one_line(error)}). Make room in memory or raise "
            "the limit on it (ulimit -v); if it is not that, install midus-hf again."
        ) from None


def _import_early() -> None:
    """Import while bytes are copied, so that checking can begin at once; whoever needs what did not load will say so."""
    with contextlib.suppress(RequestError):
        _import_slow_modules()
