"""Packs of a checkpoint: deletion of entries by name, which writes another checkpoint with all other bytes the same."""

import shutil
import time
from collections.abc import Sequence
from typing import Any

from midus_hf.config.fetched_blocks import BANKS_FOLDER
from midus_hf.config.wording import one_of
from midus_hf.memories.packs.options import pack_layouts
from upscalers.checkpoint.banks import banks_beside, bytes_of_banks, carry_banks
from upscalers.checkpoint.base_checkpoint import open_base
from upscalers.checkpoint.source import resolve_source
from upscalers.edits.banks import files_beside_banks
from upscalers.edits.checkpoint_edit import EditRequest
from upscalers.request.errors import RequestError
from upscalers.runs.output_folder import CheckpointFolder


def delete_names(request: EditRequest, names: Sequence[str]) -> dict[str, Any]:
    """Delete the entries of names from every bank of packs: no file of the output holds their names, tokens, keys or values.

    A text with the name is then computed as without the memory, and every other text as before.

    Args:
        request: The checkpoint to read and the folder to make; the memory whose bank alone is edited, by default all banks of packs.
        names: Names as the corpus had them. An entry of several names goes as a whole.

    Returns:
        `{"command", "model", "output", "banks", "seconds"}`, where `banks` has, by the name of the memory, the names of each deleted
        entry.

    Raises:
        RequestError: If the model has no packs, a name is none of theirs, nothing would be left, or the output cannot be made.
    """
    from midus_hf.banks.level_file import BankError
    from midus_hf.memories.packs.bank import PackBank
    from midus_hf.memories.packs.writing import write_without

    started = time.perf_counter()
    with resolve_source(str(request.model)) as source:
        memories = open_base(source.folder, needs_weights=False).layout.memories
        layouts = {name: layout for name, layout in pack_layouts(memories).items() if request.memory in (None, name)}
        if not layouts:
            raise RequestError(
                f"{source.folder} has no memory {'' if request.memory is None else f'{request.memory!r} '}of packs; expected a "
                "checkpoint that was upscaled with --method packs."
            )
        try:
            banks = {name: PackBank(source.folder / BANKS_FOLDER / name, layout) for name, layout in layouts.items()}
            titles = {name: bank.titles() for name, bank in banks.items()}
        except BankError as error:
            raise RequestError(str(error)) from None
        known = sorted({title for entries in titles.values() for entry in entries for title in entry})
        for name in names:
            if name not in known:
                raise RequestError(f"name {name!r} is none of the model's. {one_of(known)}")
        gone = {
            memory: [number for number, entry in enumerate(entries, 1) if {*entry} & {*names}]
            for memory, entries in titles.items()
        }
        if all(len(gone[memory]) == len(bank) for memory, bank in banks.items()):
            raise RequestError(
                "every entry is named; expected some that stay. To take the memory out: upscale strip MODEL --output DIR."
            )
        folder = CheckpointFolder(request.output, source.folder, request.overwrite)
        files = files_beside_banks(source.folder)
        folder.check_space(
            sum(path.stat().st_size for path in files) + bytes_of_banks(source.folder, banks_beside(memories))
        )
        with folder.writing() as partial:
            for path in files:
                target = partial / path.relative_to(source.folder)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
            carry_banks(
                source.folder,
                partial,
                {name: each for name, each in banks_beside(memories).items() if name not in banks},
            )
            for memory, bank in banks.items():
                write_without(bank, partial / BANKS_FOLDER / memory, gone[memory])
    return {
        "command": "delete",
        "model": str(request.model),
        "output": str(request.output),
        "banks": {memory: [titles[memory][number - 1] for number in numbers] for memory, numbers in gone.items()},
        "seconds": time.perf_counter() - started,
    }
