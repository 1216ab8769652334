"""Room on the disk for new banks, which are holes at first and fill up as they train."""

from collections.abc import Mapping

from midus_config.fetched_blocks import BankLayout
from upscalers.landing.output_folder import OutputFolder
from upscalers.request.errors import RequestError


def check_room_for_banks(folder: OutputFolder, layouts: Mapping[str, BankLayout], item_bytes: int) -> list[str]:
    """Refuse banks that the file system cannot hold even as holes, and tell of those that may outgrow the disk.

    A bank larger than the disk is no fault by itself: its blocks take room when they are written, and of a large tree training
    may fetch few.

    Args:
        folder: That will have them.
        layouts: By the name of the memory.
        item_bytes: Of an element of a block.

    Returns:
        What a person should know, a sentence or two for each bank that the disk has no room for as a whole.

    Raises:
        RequestError: If a level is larger than a file can be.
    """
    concerns, free = [], f"{folder.disk} has {folder.free_bytes() / 1e9:,.2f} GB free"
    for name, layout in layouts.items():
        sizes = {level: layout.file_bytes(level, item_bytes) for level in layout.levels}
        remedy = "Lower branching, or the sizes of deep levels"
        for level, num_bytes in sizes.items():
            if not folder.can_hold_file(num_bytes):
                raise RequestError(
                    f"branching is {layout.blocks.branching}, so level {level} of the bank of {name} has "
                    f"{layout.blocks.nodes(level):,} blocks, a file of {num_bytes / 1e9:,.2f} GB, which the file system cannot hold "
                    f"even while it is empty ({free}); expected a smaller one. {remedy}, or choose another disk."
                )
        if sum(sizes.values()) > folder.free_bytes():
            concerns.append(
                f"the bank of {name} takes {sum(sizes.values()) / 1e9:,.2f} GB once all of its blocks are trained, but {free}; a "
                f"block that was never trained takes none. {remedy}, if texts are to fetch more of it than there is room for."
            )
    return concerns
