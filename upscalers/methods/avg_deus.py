"""Method `avg-deus`: new layers that are the mean of the layers on both sides."""

from upscalers.architecture.family import LayerTensor
from upscalers.checkpoint.base_model import BaseModel
from upscalers.methods.contract import OPT_DEUS, register_method
from upscalers.methods.dense_block import FusionMethod, FusionOptions, mean
from upscalers.plan.plan import New
from upscalers.tensors.recipes import Recipe


@register_method("avg-deus")
class AvgDeus(FusionMethod):
    """New layers with each tensor the mean of its neighbours' tensors (the averaging baseline of OpT-DeUS)."""

    summary = "new layers are the mean of the layers on both sides"
    paper = OPT_DEUS
    options_class = FusionOptions
    identity = False

    def tensor_recipe(self, base: BaseModel, layer: New, name: str, tensor: LayerTensor) -> Recipe:
        return mean(base, name, tensor, layer.sources)
