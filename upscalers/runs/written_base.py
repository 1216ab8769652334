"""A base whose weights are read from the result, where the result has them byte for byte, in place of being fetched again."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from upscalers.checkpoint.base_model import BaseModel
from upscalers.checkpoint.content_digest import TensorDigests, weight_names
from upscalers.checkpoint.hub_shards import HubShard
from upscalers.checkpoint.quantised_weights import with_products
from upscalers.checkpoint.safetensors_format import StoredTensor
from upscalers.request.errors import VerificationError
from upscalers.tensors.recipes import Copy
from upscalers.tensors.writer import OutputTensor


def base_in_result(
    base: BaseModel, written: Sequence[OutputTensor], stored: Mapping[str, StoredTensor], digests: Mapping[str, str]
) -> BaseModel:
    """Return the base with each weight that lies on the hub read from the result, if the result holds a copy.

    A copy counts as the base's weight only if its SHA-256 is that of the bytes that were fetched, so that a comparison
    with the returned model is a comparison with the base.

    Args:
        base: The base, whose weights are fetched when they are read.
        written: The tensors that were written.
        stored: The tensors that the files of the result hold, by full name.
        digests: SHA-256 of each weight of the base, by its name in digests.

    Raises:
        VerificationError: If a copy differs from what was fetched.
    """
    names = weight_names(base)
    copies = {
        one.recipe.source: stored[one.name]
        for one in written
        if isinstance(one.recipe, Copy)
        and one.recipe.source in names
        and isinstance(base.tensors[one.recipe.source].in_file.file, HubShard)
        and stored[one.name].dtype == base.tensors[one.recipe.source].as_stored.dtype
    }
    with TensorDigests(copies, {source: names[source] for source in copies}) as digested:
        copied = digested.finish()
    different = next((name for name, digest in copied.items() if digests[name] != digest), None)
    if different is not None:
        raise VerificationError(f"the copy of {different} is not what the base has; the disk may be faulty.")
    kept = {name: tensor.as_stored for name, tensor in base.tensors.items()}
    return replace(base, tensors=with_products({**kept, **copies}, base.config))
