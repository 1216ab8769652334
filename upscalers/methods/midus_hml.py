"""MIDUS with head-wise memory: new layers of attention and memory, no feed-forward network."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from upscalers.engine.base_model import BaseModel
from upscalers.engine.errors import RequestError
from upscalers.engine.families import ATTENTION_ROLES, FAMILIES, MEMORY_PREFIX, Config
from upscalers.engine.memory_shapes import memory_shapes
from upscalers.engine.method import Method, register_method
from upscalers.engine.options import option
from upscalers.engine.plan import New, Plan
from upscalers.engine.recipes import Copy, Initialise, Recipe, tensor_seed
from upscalers.methods.papers import MIDUS

if TYPE_CHECKING:
    import torch


@dataclass
class HeadwiseMemoryOptions:
    """Size of the memory of each head."""

    n: int = option(64, "sub-keys a side; every head addresses n * n slots")
    k: int = option(4, "slots retrieved a head and token")

    def __post_init__(self) -> None:
        if self.n < 1:
            raise RequestError(f"n is {self.n}; expected at least one sub-key a side.")
        if not 1 <= self.k <= self.n:
            raise RequestError(f"k is {self.k}; expected 1 <= k <= n = {self.n}. Lower k or raise n.")


@register_method("midus-hml")
class MidusHml(Method):
    """Insert `M(x) = x + HML(Attn'(LN(x)))`; attention and norm are copied from the next layer (MIDUS, section 4.1)."""

    summary = "memory blocks: attention of the next layer, then a product-key memory a head (identity at start)"
    paper = MIDUS
    options_class = HeadwiseMemoryOptions
    identity = True
    memory_type = "headwise"

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
                "writes an equal share of the residual stream. This base needs another method."
            )
        if base.family.head_dim(base.config) % 2:
            raise RequestError(
                f"head_dim is {base.family.head_dim(base.config)}; expected an even number, half for rows and half for columns."
            )

    def memory_entry(self) -> dict[str, Any]:
        """The entry of the config's `memory` list, without its layers."""
        return {"type": self.memory_type, "n": self.options.n, "k": self.options.k}

    def config(self, base: BaseModel, plan: Plan) -> Config:
        config = super().config(base, plan)
        entry = self.memory_entry()
        config["model_type"] = MEMORY_PREFIX + base.family.model_type
        config["architectures"] = [f"Midus{base.family.class_name}ForCausalLM"]
        config["memory"] = [*(config.get("memory") or []), {**entry, "layers": plan.new_indices}]
        return config

    def new_layer_recipes(self, base: BaseModel, layer: New, index: int, seed: int) -> dict[str, Recipe]:
        donor = layer.sources[0]
        sources = base.layer_names(donor)
        recipes: dict[str, Recipe] = {
            name: Copy(tensor.shape, sources[name])
            for name, tensor in base.layer_tensors(donor).items()
            if tensor.role in ATTENTION_ROLES
        }
        for name, shape in memory_shapes(base.family, base.config, self.memory_entry()).items():
            full_name = base.new_name(index, name)
            recipes[name] = Initialise(
                shape, self._initialiser(base, name.removeprefix("memory.")), tensor_seed(seed, full_name)
            )
        return recipes

    def _initialiser(self, base: BaseModel, parameter: str) -> "Callable[[torch.Tensor, torch.Generator], None]":
        heads, head_dim = base.family.num_heads(base.config), base.family.head_dim(base.config)
        hidden, options = base.config["hidden_size"], self.options

        def initialise(tensor: "torch.Tensor", generator: "torch.Generator") -> None:
            import torch

            from midus_hf.memory.headwise import HeadwiseMemory

            with torch.device("meta"):
                memory = HeadwiseMemory(
                    hidden_size=hidden, num_heads=heads, head_dim=head_dim, n=options.n, k=options.k
                )
            assert memory.get_parameter(parameter).shape == tensor.shape
            memory.init_parameter(parameter, tensor, generator)

        return initialise
