"""What methods share whose new layers are attention and a memory, no feed-forward network."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from upscalers.architecture.families import FAMILIES, MEMORY_PREFIX, Config
from upscalers.architecture.memory_shapes import head_width, kept_roles, memory_shapes
from upscalers.checkpoint.base_model import BaseModel
from upscalers.methods.contract import Method
from upscalers.methods.papers import MIDUS
from upscalers.plan.plan import New, Plan
from upscalers.request.errors import RequestError
from upscalers.request.options import option
from upscalers.tensors.recipes import Copy, Initialise, Recipe, tensor_seed

if TYPE_CHECKING:
    import torch

QueryNorm = Literal["none", "batch", "layer"]
QUERY_NORM_HELP = "of each head's query: layer over its features, or batch over all tokens of a batch, as BatchNorm1d"
INNER_RESIDUAL_HELP = "whether the block's input is added to the attention output that the memory reads"


@dataclass
class RetrievalOptions:
    """Options of every memory, as `midus_hf.memory.retrieval` has them."""

    k: int = option(4, "slots retrieved a head and token")
    query_norm: QueryNorm = option("none", QUERY_NORM_HELP)
    temperature: float = option(1.0, "scores are divided by it before the softmax")
    gate: Literal["none", "token", "head"] = option(
        "none", "a sigmoid of the attention output that scales what a token retrieves, or what each head of it does"
    )
    inner_residual: bool = option(False, INNER_RESIDUAL_HELP)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise RequestError(f"temperature is {self.temperature!r}; expected a number above 0.")

    def check_slots(self, name: str, what: str) -> None:
        """Refuse a size below one, or a `k` above it.

        Args:
            name: The option that bounds `k`.
            what: What it counts, for the message.
        """
        size = getattr(self, name)
        if size < 1:
            raise RequestError(f"{name} is {size}; expected at least one {what}.")
        if not 1 <= self.k <= size:
            raise RequestError(f"k is {self.k}; expected 1 <= k <= {name} = {size}. Lower k or raise {name}.")


@dataclass
class SharedValueOptions(RetrievalOptions):
    """Options of a memory whose heads read the same values of full width: as the paper's other layers by default."""

    query_norm: QueryNorm = option("batch", QUERY_NORM_HELP)
    inner_residual: bool = option(True, INNER_RESIDUAL_HELP)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gate == "head":
            raise RequestError("gate is 'head'; expected 'none' or 'token', since the heads' outputs are summed.")


class MemoryMethod(Method):
    """Inserts `M(x) = x + Mem(Attn'(LN(x)))`; attention and norm are copied from the next layer (MIDUS, section 4.1)."""

    paper = MIDUS
    identity = True
    memory_type: ClassVar[str]
    """The `type` of its entries in the config's `memory` list."""

    def check(self, base: BaseModel) -> None:
        if not base.family.hosts_memory:
            raise RequestError(
                f"model_type is {base.family.model_type!r}, which cannot host memory; expected one of: "
                f"{', '.join(name for name, family in FAMILIES.items() if family.hosts_memory)}. Dense methods take it."
            )
        heads, hidden = base.family.num_heads(base.config), base.config["hidden_size"]
        if hidden % heads:
            raise RequestError(
                f"hidden_size is {hidden}, no multiple of the {heads} attention heads; expected D % H = 0, since each head "
                "has an equal share of the residual stream. This base needs another method."
            )

    def check_halves(self, base: BaseModel) -> None:
        """Refuse a base whose heads give queries that product keys cannot halve.

        Raises:
            RequestError: If their width is odd.
        """
        width = head_width(base.family, base.config, self.memory_entry())
        if width % 2:
            name = "head_dim" if width == base.family.head_dim(base.config) else "hidden_size / num_attention_heads"
            raise RequestError(f"{name} is {width}; expected an even number, half for rows and half for columns.")

    def memory_entry(self) -> dict[str, Any]:
        """The entry of the config's `memory` list, without its layers."""
        return {"type": self.memory_type, **dataclasses.asdict(self.options)}

    def sources(self, base: BaseModel, layer: New, index: int, number: int) -> tuple[int, ...]:
        """The next base layer of its phase that has all that the block keeps, or the nearest before it: memory blocks may lack
        some.
        """
        wanted = {
            tensor.role
            for tensor in base.family.layer_tensors(base.config).values()
            if tensor.role in kept_roles(self.memory_entry())
        }
        period = layer.period
        if layer.next is not None:
            following = layer.next
        else:
            assert layer.previous is not None
            following = layer.previous + period
        for source in (*range(following, base.num_layers, period), *range(following - period, -1, -period)):
            if wanted <= {tensor.role for tensor in base.layer_tensors(source).values()}:
                return (source,)
        raise RequestError(
            f"new layer {index} needs an attention with an output projection, which no layer of the base has; expected one "
            "to copy. Choose midus-hml without output_projection."
        )

    def config(self, base: BaseModel, plan: Plan) -> Config:
        config = super().config(base, plan)
        config["model_type"] = MEMORY_PREFIX + base.family.model_type
        config["architectures"] = [f"Midus{base.family.class_name}ForCausalLM"]
        config["memory"] = [*(config.get("memory") or []), {**self.memory_entry(), "layers": plan.new_indices}]
        return config

    def new_layer_recipes(self, base: BaseModel, layer: New, index: int, seed: int) -> dict[str, Recipe]:
        donor, entry = layer.sources[0], self.memory_entry()
        sources, roles = base.layer_names(donor), kept_roles(entry)
        recipes: dict[str, Recipe] = {
            name: Copy(tensor.shape, sources[name])
            for name, tensor in base.layer_tensors(donor).items()
            if tensor.role in roles
        }
        for name, shape in memory_shapes(base.family, base.config, entry).items():
            full_name = base.new_name(index, name)
            recipes[name] = Initialise(
                shape, self._initialiser(base, name.removeprefix("memory.")), tensor_seed(seed, full_name)
            )
        return recipes

    def _initialiser(self, base: BaseModel, name: str) -> "Callable[[torch.Tensor, torch.Generator], None]":
        entry = self.memory_entry()
        sizes = {
            "hidden_size": base.config["hidden_size"],
            "num_attention_heads": base.family.num_heads(base.config),
            "head_dim": base.family.head_dim(base.config),
        }

        def initialise(tensor: "torch.Tensor", generator: "torch.Generator") -> None:
            from types import SimpleNamespace

            import torch

            from midus_hf.memory.registry import parse_memory_entry

            memory_class, options = parse_memory_entry({**entry, "layers": [0]})
            config: Any = SimpleNamespace(**sizes)
            with torch.device("meta"):
                memory = memory_class.from_config(config, options)
            assert memory.state_dict()[name].shape == tensor.shape
            memory.init_parameter(name, tensor, generator)

        return initialise
