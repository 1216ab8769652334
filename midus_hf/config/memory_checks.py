"""Checks of a memory's options, of the model that it is to fit, and of its layers, registered by the class of options."""

import math
from collections.abc import Mapping

from midus_hf.config.by_type import ByType
from midus_hf.config.memories.chapters import ChaptersOptions
from midus_hf.config.memories.depth_attention import DepthAttentionOptions
from midus_hf.config.memories.headwise import HeadwiseOptions
from midus_hf.config.memories.hierarchical import HierarchicalOptions, HierKVOptions, HierLoraOptions
from midus_hf.config.memories.linear import LinearOptions
from midus_hf.config.memories.product_key import ProductKeyOptions
from midus_hf.config.memories.retrieval import RetrievalOptions, SharedValueOptions, ValueBits
from midus_hf.config.memories.ultramem import UltraMemOptions
from midus_hf.config.memory_types import MemoryOptions, check_fit, check_options
from midus_hf.config.model_sizes import ModelSizes

_MOST_LEAVES = 2**63
_MOST_SLOTS = 2**31 - 1


@ByType
def check_layers(options: MemoryOptions, layers: tuple[int, ...]) -> None:
    """Refuse a choice of layers that does not work together. A type registers its check; without one, every choice works.

    Args:
        options: Options of the memory.
        layers: Indices of the layers that have the memory, ascending.

    Raises:
        ValueError: If the choice does not work. The message names the layers, the expected layers and a remedy.
    """


@ByType
def layer_projections(options: MemoryOptions, sizes: ModelSizes) -> dict[str, tuple[int, int]]:
    """Return the input and output width of the projections that a layer must have for a memory, by role. Default: none."""
    return {}


@layer_projections.register
def _(options: HierLoraOptions, sizes: ModelSizes) -> dict[str, tuple[int, int]]:
    return options.layer_projections(sizes)


@layer_projections.register(HierKVOptions)
@layer_projections.register(DepthAttentionOptions)
def _(options: MemoryOptions, sizes: ModelSizes) -> dict[str, tuple[int, int]]:
    """Return the widths of the projections around heads whose keys and values a memory adds to."""
    of_keys = sizes.num_key_value_heads * sizes.head_dim
    return {
        "key": (sizes.hidden_size, of_keys),
        "value": (sizes.hidden_size, of_keys),
        "output_projection": (sizes.num_heads * sizes.head_dim, sizes.hidden_size),
    }


@check_options.register
def _(options: RetrievalOptions) -> None:
    if not (math.isfinite(options.temperature) and options.temperature > 0):
        raise ValueError(f"temperature is {options.temperature!r}; expected a number above 0.")


@check_fit.register
def _(options: RetrievalOptions, sizes: ModelSizes) -> None:
    if sizes.hidden_size % sizes.num_heads:
        raise ValueError(
            f"hidden_size is {sizes.hidden_size}; expected a multiple of the {sizes.num_heads} attention heads, since each "
            "has an equal share of the residual stream. This model needs another memory."
        )
    width = options.read_width(sizes)
    if options.adds_block_input and width != sizes.hidden_size:
        raise ValueError(
            f"inner_residual adds the block's input of width {sizes.hidden_size} to an attention output of width {width}; "
            "expected equal widths. Set output_projection to true as well."
        )


def check_size(options: RetrievalOptions, name: str, what: str) -> None:
    """Refuse a size below one, or a `k` above it.

    Args:
        name: Name of the option that bounds `k`.
        what: Singular noun for what the option counts, for the message.
    """
    size = getattr(options, name)
    if size < 1:
        raise ValueError(f"{name} is {size}; expected at least one {what}.")
    if not 1 <= options.k <= size:
        raise ValueError(f"k is {options.k}; expected 1 <= k <= {name} = {size}. Lower k or raise {name}.")


def check_halves(options: RetrievalOptions, sizes: ModelSizes) -> None:
    """Refuse a model whose queries have an odd width, which product keys cannot halve."""
    width = options.query_width(sizes)
    if width % 2:
        name = "hidden_size / num_attention_heads" if options.keeps_output_projection else "head_dim"
        raise ValueError(f"{name} is {width}; expected an even number, half for rows and half for columns.")


@check_options.register
def _(options: SharedValueOptions) -> None:
    check_options.dispatch(RetrievalOptions)(options)
    if options.gate == "head":
        raise ValueError("gate is 'head'; expected 'none' or 'token', since the heads' outputs are summed.")


@check_fit.register
def _(options: SharedValueOptions, sizes: ModelSizes) -> None:
    check_fit.dispatch(RetrievalOptions)(options, sizes)
    check_bits(options.value_bits, {"hidden_size": sizes.hidden_size})


def check_bits(bits: ValueBits | None, widths: Mapping[str, int]) -> None:
    """Refuse rows that their number of bits does not fit.

    Args:
        bits: Bits per element, 8 or 4; None for tables that train.
        widths: Width of the rows of each table, by the name of the option or size that sets it.

    Raises:
        ValueError: If `bits` is 4 and a width is odd.
    """
    for name, width in widths.items():
        if bits == 4 and width % 2:
            raise ValueError(
                f"value_bits is 4 and {name} is {width}; expected an even width, two elements per byte. Choose 8 bits."
            )


@check_options.register
def _(options: HeadwiseOptions) -> None:
    check_options.dispatch(RetrievalOptions)(options)
    check_size(options, "n", "sub-key per side")


@check_fit.register
def _(options: HeadwiseOptions, sizes: ModelSizes) -> None:
    check_fit.dispatch(RetrievalOptions)(options, sizes)
    check_halves(options, sizes)
    check_bits(options.value_bits, {"hidden_size / num_attention_heads": sizes.hidden_size // sizes.num_heads})


@check_options.register
def _(options: LinearOptions) -> None:
    check_options.dispatch(SharedValueOptions)(options)
    check_size(options, "slots", "slot")


@check_options.register
def _(options: ProductKeyOptions) -> None:
    check_options.dispatch(SharedValueOptions)(options)
    check_size(options, "n", "sub-key per side")


@check_fit.register
def _(options: ProductKeyOptions, sizes: ModelSizes) -> None:
    check_fit.dispatch(SharedValueOptions)(options, sizes)
    check_halves(options, sizes)


@check_options.register
def _(options: HierarchicalOptions) -> None:
    if options.branching < 2:
        raise ValueError(f"branching is {options.branching}; expected 2 or more.")
    if not options.sizes or any(size < 0 for size in options.sizes) or not any(options.sizes):
        raise ValueError(
            f"sizes is {options.sizes}; expected a size for each level of the tree, 0 or more, and not all of them 0, such as "
            "[256, 64, 16, 0]."
        )
    if options.branching ** len(options.sizes) > _MOST_LEAVES:
        raise ValueError(
            f"branching is {options.branching} and sizes has {len(options.sizes)} levels, which make more leaves than memory_ids, "
            "int64, can name; expected at most 2 ** 63. Lower branching, or give fewer sizes."
        )


@check_options.register
def _(options: HierLoraOptions) -> None:
    check_options.dispatch(HierarchicalOptions)(options)
    if not (math.isfinite(options.alpha) and options.alpha > 0):
        raise ValueError(f"alpha is {options.alpha!r}; expected a number above 0.")


@check_options.register
def _(options: ChaptersOptions) -> None:
    for name, least in (("memory_tokens", 1), ("chapters", 1), ("shared_chapters", 0), ("chunk_size", 1)):
        if getattr(options, name) < least:
            raise ValueError(f"{name} is {getattr(options, name)}; expected {least} or more.")
    if options.first_chunk is not None and not 1 <= options.first_chunk <= options.chunk_size:
        raise ValueError(
            f"first_chunk is {options.first_chunk}; expected 1 to chunk_size = {options.chunk_size}, or null. Lower it or raise "
            "chunk_size."
        )
    if options.memory_tokens % options.chapters:
        raise ValueError(
            f"chapters is {options.chapters}, which does not divide memory_tokens = {options.memory_tokens}; expected chapters of "
            f"equal size. The nearest that do are {', '.join(map(str, _nearest_divisors(options.memory_tokens, options.chapters)))}."
        )
    if options.routed_chapters < 1:
        raise ValueError(
            f"shared_chapters is {options.shared_chapters}; expected fewer than chapters = {options.chapters}, so that some are left "
            "for the router. Lower it or raise chapters."
        )
    if not 1 <= options.k <= options.routed_chapters:
        raise ValueError(
            f"k is {options.k}; expected 1 <= k <= {options.routed_chapters}, the chapters = {options.chapters} less "
            f"shared_chapters = {options.shared_chapters}. Lower k or raise chapters."
        )
    for name in ("heads", "kv_heads", "bank_rank", "bank_width"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; expected 1 or more, or null.")
    if options.bank_rank is not None and options.bank_width is not None:
        raise ValueError(
            f"bank_rank is {options.bank_rank} and bank_width is {options.bank_width}; expected one of them."
        )
    if not (math.isfinite(options.routed_scale) and options.routed_scale > 0):
        raise ValueError(f"routed_scale is {options.routed_scale!r}; expected a number above 0.")
    for name in ("router_aux_loss_coef", "router_z_loss_coef"):
        if getattr(options, name) < 0:
            raise ValueError(f"{name} is {getattr(options, name)}; expected 0 or more.")
    if options.share not in ("all", "none") and options.neighbours() is None:
        raise ValueError(f"share is {options.share!r}; expected all, none, or every:K such as every:2.")


@check_fit.register
def _(options: ChaptersOptions, sizes: ModelSizes) -> None:
    heads, kv_heads, width = options.num_heads(sizes), options.num_kv_heads(sizes), options.width(sizes)
    if width % heads:
        name = "hidden_size" if options.bank_width is None else "bank_width"
        raise ValueError(f"heads is {heads}, which does not divide {name} = {width}; expected a divisor. Set heads.")
    if heads % kv_heads:
        raise ValueError(f"kv_heads is {kv_heads}, which does not divide the {heads} query heads; expected a divisor.")
    if options.bank_bits == 4 and options.row_width(sizes) % 2:
        raise ValueError(
            f"bank_bits is 4 and rows of the bank have {options.row_width(sizes)} elements; expected an even number, two per "
            "byte. Set bank_bits to 8."
        )


@check_options.register
def _(options: UltraMemOptions) -> None:
    for name in ("n", "key_pairs", "rank", "k", "heads"):
        if getattr(options, name) < 1:
            raise ValueError(f"{name} is {getattr(options, name)}; expected 1 or more.")
    if options.num_virtual_slots > _MOST_SLOTS:
        raise ValueError(
            f"n is {options.n}, key_pairs {options.key_pairs} and share {options.share!r}, which make "
            f"{options.num_virtual_slots:,} slots; expected at most {_MOST_SLOTS:,}. Lower n."
        )
    if options.side_k is not None and not 1 <= options.side_k <= options.keys:
        raise ValueError(
            f"side_k is {options.side_k}; expected 1 <= side_k <= {options.keys}, the keys of a set, or null."
        )
    if options.k > options.key_pairs**2 * options.side**2:
        raise ValueError(
            f"k is {options.k}; expected at most {options.key_pairs**2 * options.side**2}, the pairs of {options.side} rows "
            f"and {options.side} columns that the first stage keeps. Lower k, or raise side_k."
        )
    if options.scoring == "sum" and (options.rank, options.key_pairs) != (1, 1):
        raise ValueError(
            f"scoring is 'sum', which has no core, with rank {options.rank} and key_pairs {options.key_pairs}; expected 1 for both."
        )
    if options.scoring == "sum" and (options.side_k is not None or options.k > options.keys):
        raise ValueError(
            f"scoring is 'sum', which keeps k keys of each side, with k {options.k} and side_k "
            f"{options.side_k or 'null'}; expected k of at most {options.keys}, the keys of a set, and side_k null."
        )
    for name in ("balance_coef", "penalty_coef", "penalty_margin"):
        if not (math.isfinite(getattr(options, name)) and getattr(options, name) >= 0):
            raise ValueError(f"{name} is {getattr(options, name)}; expected 0 or more.")
    if options.penalty_coef and (options.scoring == "sum" or options.rank == 1):
        why = (
            "scoring 'sum', which has no core"
            if options.scoring == "sum"
            else "rank 1, whose cores have one singular value"
        )
        raise ValueError(
            f"penalty_coef is {options.penalty_coef} with {why}; expected 0, since there are no smaller singular values that could "
            "cost something. Leave penalty_coef out, or set scoring: tucker and rank: 2."
        )


@check_fit.register
def _(options: UltraMemOptions, sizes: ModelSizes) -> None:
    key_width = options.width("key_width", sizes)
    for name in ("value_width", "pre_value_width"):
        options.width(name, sizes)
    if options.rank > key_width:
        raise ValueError(
            f"rank is {options.rank}, more than the {key_width} features of a key; expected fewer. Lower rank."
        )
    check_bits(options.value_bits, {name: options.width(name, sizes) for name in ("value_width", "pre_value_width")})


@check_options.register
def _(options: DepthAttentionOptions) -> None:
    if not options.sources:
        raise ValueError(
            "attention_slots is 'none' and ffn_slots is false; expected one of them, for there is nothing to read."
        )
    if options.slots < 0:
        raise ValueError(f"slots is {options.slots}; expected 0 or more.")


@check_layers.register
def _(options: DepthAttentionOptions, layers: tuple[int, ...]) -> None:
    if len(layers) < 2:
        raise ValueError(
            f"layers is {list(layers)}; expected two or more, for a layer reads what another in front of it wrote."
        )
    most = len(options.sources) * (len(layers) - 1)
    if options.slots > most:
        raise ValueError(
            f"slots is {options.slots}; expected {most} or fewer, which is what the last of {len(layers)} layers can read, or 0 "
            "for all of them."
        )


def _nearest_divisors(number: int, wanted: int) -> list[int]:
    """Return the nearest divisors of a number below and above the wanted divisor."""
    divisors = [
        divisor
        for small in range(1, math.isqrt(number) + 1)
        if number % small == 0
        for divisor in (small, number // small)
    ]
    below, above = [d for d in divisors if d < wanted], [d for d in divisors if d > wanted]
    return [*([max(below)] if below else []), *([min(above)] if above else [])]
