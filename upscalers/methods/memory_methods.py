"""Base classes of methods that add a memory: attached to layers of the base, or in new layers."""

import re
from abc import abstractmethod
from dataclasses import fields, make_dataclass, replace
from typing import Any, ClassVar

from midus_hf.anatomy.types import MEMORY_PREFIX
from midus_hf.config.declared_tensors import ZEROS, DeclaredTensor
from midus_hf.config.errors import RequestError
from midus_hf.config.options import option
from midus_hf.memories.options import InsertedOptions, MemoryOptions, SiteName
from midus_hf.memories.registry import ATTACHED, INSERTED, TABLES, MemoryEntry, tensors_in_layer
from upscalers.architecture.layer_tensors import kept_roles, projections_of, roles_of
from upscalers.checkpoint.base_checkpoint import BaseCheckpoint
from upscalers.methods.contract import METHODS, Method, Paper, Surgery
from upscalers.plan import Base, New, Plan
from upscalers.tensors.recipes import Copy, Fill, Initialise, Recipe, tensor_seed

_SPAN = 1


class HostedMemoryMethod(Method):
    """Method whose result is a model of the family that hosts one more memory."""

    memory_options: ClassVar[type[MemoryOptions]]
    #: Sites for the memory, the default first.
    sites: ClassVar[list[SiteName]]

    def check_hosting(self, base: BaseCheckpoint, site: SiteName) -> None:
        """Refuse a base that was not proven to host the memory at a site."""
        if base.composite is not None:
            base.composite.check_hosts()
        row = base.family
        memory_type = self.memory_options.type
        failure = row.refusal(site, memory_type)
        if failure is None:
            return
        others = [each for each in self.sites if each != site and row.refusal(each, memory_type) is None]
        remedy = f"Pass --set site={others[0]}, or choose" if others else "Choose"
        hosting = {name: method for name, method in METHODS.items() if issubclass(method, HostedMemoryMethod)}
        taking = [
            name
            for name, method in hosting.items()
            if row.refusal(method.sites[0], method.memory_options.type) is None
        ]
        raise RequestError(
            f"model_type {row.model_type!r} does not support memory of type {memory_type!r} at the site {site!r} (proof on a tiny "
            f"model: {failure.rstrip('.')}). {remedy} one of {', '.join(taking) or 'the dense methods'} (docs/families.md)."
        )

    @abstractmethod
    def entry(self, base: BaseCheckpoint, plan: Plan) -> MemoryEntry:
        """Return the entry that is added to the config's `memory` list."""

    def surgery(self, base: BaseCheckpoint, plan: Plan, seed: int) -> Surgery:
        surgery = super().surgery(base, plan, seed)
        entry = self.entry(base, plan)
        config = {
            **surgery.config,
            "model_type": MEMORY_PREFIX + base.family.model_type,
            "architectures": [f"Midus{base.family.class_name}ForCausalLM"],
            "memory": [*(surgery.config.get("memory") or []), entry.to_dict()],
        }
        surgery = replace(surgery, config=config)
        return _with_attached_tensors(surgery, entry, base, seed) if entry.is_attached else surgery


def _with_attached_tensors(surgery: Surgery, entry: MemoryEntry, base: BaseCheckpoint, seed: int) -> Surgery:
    """Add recipes for the tensors of a memory in its layers, and for its tables."""
    sizes = base.layout.sizes
    layers = [*surgery.layers]
    for layer in entry.layers:
        tensors = {
            f"{ATTACHED}.{entry.name}.{name}": each for name, each in tensors_in_layer(entry, layer, sizes).items()
        }
        made = {name: initialised(tensor, base.new_name(layer, name), seed) for name, tensor in tensors.items()}
        layers[layer] = layers[layer] | made
    outer = {**surgery.outer}
    for number, shared in enumerate(entry.options.tables(sizes, entry.layers)):
        for name, tensor in shared.tensors.items():
            name = f"{base.prefix}{TABLES}.{entry.name}.{number}.{name}"
            outer[name] = initialised(tensor, name, seed)
    return replace(surgery, layers=layers, outer=outer)


def initialised(tensor: DeclaredTensor, full_name: str, seed: int) -> Recipe:
    """Return the recipe of a memory's declared initial values; zeros become a hole in the file."""
    if tensor.initial == ZEROS:
        return Fill(tensor.shape, 0.0)
    return Initialise(tensor.shape, tensor.initial.fill, tensor_seed(seed, full_name))


class AttachedMemoryMethod(HostedMemoryMethod):
    """Method that attaches a memory to layers of the base, which otherwise stay unchanged.

    A subclass sets `memory_options`; the method's options are these, `layers`, `site` and, with the site `skip`, `span`.
    """

    default_layers: ClassVar[Any] = "all"
    # Further options of the method: name, type and field.
    own_options: ClassVar[list[tuple[str, Any, Any]]] = []
    default_placement = None
    adds_layers = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Make the sites and options of a method from the options of its memory."""
        super().__init_subclass__(**kwargs)
        if "memory_options" not in vars(cls):
            return
        memory = cls.memory_options
        cls.sites = [site for site in memory.sites if site != "inserted"]
        forms = (
            "all | a number of evenly spaced ones | a share of all | early:N, middle:N or late:N | a list of indices"
        )
        places: list[tuple[str, Any, Any]] = [
            ("layers", Any, option(cls.default_layers, "which layers have it", forms)),
            ("site", str, option(cls.sites[0], f"where in the layer it is attached: {', '.join(cls.sites)}")),
        ]
        if "skip" in cls.sites:
            span = option(_SPAN, "of site skip: how many layers after the one that it reads it adds its output")
            places.append(("span", int, span))
        places += cls.own_options
        cls.options_class = make_dataclass(
            f"Attached{memory.__name__}",
            places,
            bases=(memory,),
            namespace={"__module__": cls.__module__},
            kw_only=True,
        )

    def check(self, base: BaseCheckpoint) -> None:
        self._memory().check_fit(base.layout.sizes)
        if self.options.site not in self.sites:
            raise RequestError(f"site is {self.options.site!r}; expected one of: {', '.join(self.sites)}.")
        if "skip" in self.sites and self.options.site != "skip" and self.options.span != _SPAN:
            raise RequestError(
                f"span is {self.options.span} and site is {self.options.site!r}; expected site skip, the only one with a span. Pass "
                "--set site=skip, or leave span out."
            )
        self.check_hosting(base, self.options.site)

    def plan(self, base: BaseCheckpoint, num_new_layers: int | None, placement: str | None) -> Plan:
        for name, value in (("num-new-layers", num_new_layers), ("placement", placement)):
            if value is not None:
                raise RequestError(
                    f"{name} is {value!r}, but {self.name} attaches memory to existing layers; expected none. Pass "
                    "--set layers=... instead."
                )
        layers = tuple(map(Base, range(base.num_layers)))
        memory = self.memory_options.default_name
        taken = base.layout.memories.attached
        names = (memory, *(f"{memory}-{number}" for number in range(2, len(taken) + 3)))
        return Plan(layers, base.num_layers, (next(name for name in names if name not in taken),))

    def entry(self, base: BaseCheckpoint, plan: Plan) -> MemoryEntry:
        site: SiteName = self.options.site
        (name,) = plan.new_memories
        layers = self.layers(base)
        into = tuple[int, ...]()
        if site == "skip":  # layers that have another layer `span` layers after them, and these other layers
            own = _layers_of_base(base)
            span = self.options.span
            if span < 0:
                raise RequestError(f"span is {span}; expected 0 or more layers.")
            pairs = [(layer, own[own.index(layer) + span]) for layer in layers if own.index(layer) + span < len(own)]
            if not pairs:
                raise RequestError(f"span is {span}; expected fewer than the {len(own)} layers of the base. Lower it.")
            layers, into = zip(*pairs, strict=True)
        return MemoryEntry(self._memory(), site, layers, name, into)

    def layers(self, base: BaseCheckpoint) -> tuple[int, ...]:
        """Return the indices of layers that get the memory; refuse `layers` if it names none or others."""
        own = self._hosting_layers(base)
        chosen = self.options.layers
        if chosen == "all":
            return tuple(own)
        if type(chosen) is float and 0 < chosen < 1:
            chosen = max(1, round(chosen * len(own)))
        if type(chosen) is int and 1 <= chosen <= len(own):
            return tuple(own[(2 * number + 1) * len(own) // (2 * chosen)] for number in range(chosen))
        segment = re.fullmatch(r"(early|middle|late):([1-9]\d*)", chosen) if isinstance(chosen, str) else None
        if segment and int(segment[2]) <= len(own):
            count = int(segment[2])
            first = {"early": 0, "middle": (len(own) - count) // 2, "late": len(own) - count}[segment[1]]
            return tuple(own[first : first + count])
        if isinstance(chosen, list) and chosen and all(type(layer) is int for layer in chosen):
            if sorted(set(chosen)) == chosen and set(chosen) <= set(own):
                return tuple(chosen)
        raise RequestError(
            f"layers is {self.options.layers!r}; expected all, a number from 1 to {len(own)}, a share such as 0.25, early:N, "
            "middle:N or late:N for N neighbours, or a list of ascending indices among the layers of the base that have "
            f"{'the projections' if self._projections(base) else 'a feed-forward network'}: {', '.join(map(str, own))}."
        )

    def _projections(self, base: BaseCheckpoint) -> dict[str, tuple[int, int]]:
        inside = self.options.site.startswith("inside-")
        return self._memory().layer_projections(base.layout.sizes) if inside else {}

    def _hosting_layers(self, base: BaseCheckpoint) -> list[int]:
        widths = self._projections(base)
        hosting = []
        for layer in _layers_of_base(base):
            matrices = {(each.role, each.shape) for each in projections_of(base.layout.backbone_layers[layer])}
            if all((role, (outputs, inputs)) in matrices for role, (inputs, outputs) in widths.items()):
                hosting.append(layer)
        if not hosting:
            needed = ", ".join(f"{role} from {inputs} to {outputs}" for role, (inputs, outputs) in widths.items())
            raise RequestError(
                f"no layer of the base has the projections that {self.name} needs; expected {needed}, as config.json says. Choose "
                "another method."
            )
        return hosting

    def _memory(self) -> MemoryOptions:
        values = {field.name: getattr(self.options, field.name) for field in fields(self.memory_options)}
        return self.memory_options(**values)


def _layers_of_base(base: BaseCheckpoint) -> list[int]:
    """Return the layers with a feed-forward network, which were not inserted for a memory."""
    return [layer for layer in range(base.num_layers) if layer not in base.layout.memories.inserted]


class InsertedMemoryMethod(HostedMemoryMethod):
    """Method that inserts `M(x) = x + Mem(Attn'(LN(x)))` (MIDUS, section 4.1), copying the next layer."""

    paper = Paper(
        key="midus",
        title="MIDUS: Memory-Infused Depth Up-Scaling",
        authors="Kim, Taero and Byun, Hoyoon and Choi, Youngjun and Park, Sungrae and Song, Kyungwoo",
        year=2025,
        reference="arXiv:2512.13751",
    )
    identity = True
    options_class: ClassVar[type[InsertedOptions]]
    options: InsertedOptions

    sites: ClassVar[list[SiteName]] = ["inserted"]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.memory_options = cls.options_class

    def check(self, base: BaseCheckpoint) -> None:
        for sizes in {base.layout.sizes.at(layer) for layer in range(base.num_layers)}:
            self.options.check_fit(sizes)
        self.check_hosting(base, "inserted")

    def sources(self, base: BaseCheckpoint, layer: New, index: int) -> tuple[int, ...]:
        """Return the nearest base layer, after or else before, with all attention tensors of a block."""
        kept = kept_roles(self.options)
        layers = base.layout.layers
        following = base.num_layers if layer.next is None else layer.next
        for source in (*range(following, base.num_layers), *range(following - 1, -1, -1)):
            wanted = roles_of(base.layout.backbone_layers[source]) & kept
            if not wanted.isdisjoint(("query", "attention")) and wanted <= roles_of(layers[source]):
                return (source,)
        raise RequestError(
            f"new layer {index} needs an attention with an output projection, which no layer of the base has; expected one "
            "to copy. Choose midus-hml without output_projection."
        )

    def entry(self, base: BaseCheckpoint, plan: Plan) -> MemoryEntry:
        return MemoryEntry(self.options, "inserted", tuple(plan.new_indices))

    def new_layer_recipes(self, base: BaseCheckpoint, layer: New, index: int, seed: int) -> dict[str, Recipe]:
        donor = layer.sources[0]
        roles = kept_roles(self.options)
        sources = base.layer_names[donor]
        recipes: dict[str, Recipe] = {
            name: Copy(tensor.shape, sources[name])
            for name, tensor in base.layout.layers[donor].items()
            if tensor.role in roles
        }
        for name, tensor in self.options.tensors(base.layout.sizes.at(donor)).items():
            name = f"{INSERTED}.{name}"
            recipes[name] = initialised(tensor, base.new_name(index, name), seed)
        return recipes
