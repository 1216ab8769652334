"""The base class of services: what a model does for its memories beside calling them in its layers."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from midus_hf.memories.entries import Memories
from midus_hf.memories.module import MemoryModule


class Service:
    """Service of a model to its memories: what it makes in every pass for them, and what it does around passes.

    A layer of a memory names the classes of the services that it needs, and the stack of layers makes one object of each. A service
    keeps nothing of a pass.

    Args:
        model: The stack of layers, whose memories are built.
        memories: Memories of the model.
        hosted: The layer of each memory that needs the service, by the memory's name and the index of its layer; the name of an
            inserted memory is empty.
    """

    #: Name of the service in a stack's `services`.
    key: ClassVar[str]
    #: Whether to skip a memory when this service produced nothing for it; the value of a pass then has the memory's name as a key.
    is_required: ClassVar[bool] = False
    #: Whether a pass may get a cache from the service, which then comes after services that ask whether there is one.
    may_add_cache: ClassVar[bool] = False

    def __init__(self, model: Any, memories: Memories, hosted: Mapping[tuple[str, int], MemoryModule]):
        pass

    def of_pass(self, model: Any, arguments: dict[str, Any], own: Mapping[str, Any]) -> Any:
        """Return the value of a pass of the stack, which `given` takes. Default: None.

        The service may change the `arguments` of the family's forward; `own` are those that the family's forward does not get.
        """
        return None

    @staticmethod
    def given(value: Any, name: str, layer: int) -> dict[str, Any]:
        """Return a memory's keyword arguments in a layer, from the value of the pass; None for one without inputs. Default: none."""
        return {}

    def run(self, model: Any, forward: Callable[[dict[str, Any]], Any], arguments: dict[str, Any]) -> Any:
        """Run the family's forward, which takes its arguments as one mapping, of a model with a head. Default: as it is."""
        return forward(arguments)

    def prepare_inputs(self, inputs: dict[str, Any], attention_mask: Any) -> None:
        """Add to the inputs of the next pass of a generation, from its attention mask. Default: nothing."""

    def before_generate(self, arguments: dict[str, Any]) -> None:
        """Check and change the keyword arguments of `generate`. Default: nothing."""

    def check_assistant(self) -> None:
        """Refuse assisted decoding, before any token is drafted. Default: allowed."""

    def check_continuous_batching(self, arguments: Mapping[str, Any]) -> None:
        """Refuse continuous batching, which lays the tokens of several requests in one row, with its arguments. Default: allowed."""

    def after_loading(self, name: Any, arguments: Mapping[str, Any]) -> None:
        """Load what lies beside a checkpoint, with the arguments of `from_pretrained`. Default: nothing."""

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Refuse the tokenizer beside a checkpoint, where a command reads both. Default: allowed."""

    def before_saving(self, folder: Any) -> None:
        """Write what belongs beside the weights in a folder, and is uploaded with them. Default: nothing."""

    def after_saving(self, folder: Any) -> None:
        """Write what belongs beside the weights in a folder. Default: nothing."""

    def check_upload(self) -> None:
        """Refuse an upload by Transformers. Default: allowed."""
