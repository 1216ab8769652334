"""Code that lies beside a checkpoint which exists already."""

from pathlib import Path


def write_code_of(folder: Path) -> None:
    """Write the code that a checkpoint's config needs into its folder, so that the checkpoint loads without this package."""
    from transformers import AutoConfig

    import midus_hf  # noqa: F401 - registers the classes
    from midus_hf.carried.module import write_code

    write_code(folder, AutoConfig.from_pretrained(folder, local_files_only=True))
