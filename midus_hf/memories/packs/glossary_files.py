"""The files of a glossary next to the weights, as a model opens and saves them."""

import hashlib
import os
import warnings
from pathlib import Path
from typing import Any

from midus_hf.anatomy.record import iter_recorded_options, record_entry
from midus_hf.config.errors import RequestError
from midus_hf.files.checkpoint_files import GLOSSARY_FILE
from midus_hf.memories.hosting.parts import Keywords
from midus_hf.memories.hosting.service import BankService, Hosted, HostStack
from midus_hf.memories.packs.glossary import Glossary, read_glossary, write_glossary
from midus_hf.memories.registry import Memories


class GlossaryFiles(BankService):
    """The bank of packs: the glossary and its tokenizer, opened and saved with the weights."""

    key = "glossary"
    digest_name = "packs"
    runs_passes = True
    files = (GLOSSARY_FILE, "*.json", "*.model", "*.txt", "*.jinja")

    def __init__(self, model: HostStack, memories: Memories, hosted: Hosted):
        names = {name for name, _ in hosted}
        if len(names) > 1:
            raise RequestError(
                f"the memories {', '.join(map(repr, sorted(names)))} are packs; expected one, whose glossary has all entries. Add "
                "entries with midus edit add."
            )
        super().__init__(model, memories, hosted)
        (self.name,) = names
        self.options: Any = next(iter(hosted.values())).options
        self.glossary: Glossary | None = None
        self._config = model.config
        parameter = next(model.parameters())
        if parameter.device.type != "meta" and not hasattr(parameter, "ds_id"):  # as in from_pretrained
            _warn_without_folder()

    def digest(self) -> str | None:
        """Return a digest of the entries; None without a glossary."""
        if self.glossary is None:
            return None
        return hashlib.sha256("".join(map(repr, self.glossary)).encode()).hexdigest()

    def after_loading(self, name: str | os.PathLike | None, arguments: Keywords) -> None:
        """Open the glossary next to the weights; warn about a model without a folder."""
        if name is None:
            _warn_without_folder()
        super().after_loading(name, arguments)

    def open_bank(self, folder: Path | None, arguments: Keywords) -> None:
        """Read the glossary and the tokenizer, or raise `RequestError` if either is absent or wrong."""
        if folder is None:
            raise RequestError(
                "the glossary of this model is not at hand, without which no name would be known; expected a folder, or a repository "
                "that can be read. Download it while the Hub can be reached."
            )
        from transformers import AutoTokenizer

        trusted = arguments.get("trust_remote_code")
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trusted)
        self.glossary = Glossary(tokenizer, read_glossary(folder), self._config.vocab_size, self.options)
        self.glossary.recorded = [*iter_recorded_options(record_entry(self._config), "packs")]
        if self.glossary.chat_remark is not None:
            warnings.warn(self.glossary.chat_remark, stacklevel=2)

    def before_saving(self, folder: str | os.PathLike) -> None:
        """Write the glossary next to the weights, and the tokenizer for finding names, if there is none."""
        if self.glossary is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
            write_glossary(folder, self.glossary)
            if not any(Path(folder).glob("tokenizer*")):
                self.glossary.spelling.tokenizer.save_pretrained(folder)

    def check_upload(self) -> None:
        """Allow an upload, which includes files that were written before."""


def _warn_without_folder() -> None:
    warnings.warn(
        "this model has packs and is made without a folder, so that it has no glossary and computes as if no text had a name; "
        "expected from_pretrained(FOLDER), which reads the glossary next to the weights.",
        stacklevel=2,
    )
