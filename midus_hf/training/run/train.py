"""One run of pretraining, from its options to the trained model."""

from transformers import PreTrainedModel, default_data_collator

from midus_hf.config.fetched_blocks import BankLayout
from midus_hf.models.host import MemoryConfig
from midus_hf.training.data.held_out import describe_held_out, prepare_held_out
from midus_hf.training.data.mixture import Mixture
from midus_hf.training.data.sequence_audit import NumberedSequences
from midus_hf.training.data.training_data import audit_of, build_dataset, describe_corpus, open_corpora
from midus_hf.training.options import TrainConfig
from midus_hf.training.output.resumption import settle_resumption
from midus_hf.training.run.run_setup import Chosen, check_request, choose_what_trains, make_run
from midus_hf.training.run.run_trainer import RunTrainer
from midus_hf.training.run.run_tree import describe_tree, tree_of_run, use_tree
from midus_hf.training.run.trainer_arguments import training_arguments
from midus_hf.training.run.training_run import TrainingRun, TrainResult


def train(config: TrainConfig) -> TrainResult:
    """Pretrain a model, from its weights or from the beginning.

    The function prints which layers train, and writes to `config.output_dir` the trained model and its tokenizer,
    checkpoints, `log.jsonl` and the options (`train_config.yaml`).

    Returns:
        The folder of the trained model, and the steps, tokens and last loss of the run.

    Raises:
        ValueError: If the options are wrong; nothing but cached tokens has been written then.
        FloatingPointError: If the loss, a gradient or a trained tensor stops being finite.
    """
    return prepare(config).execute()


def prepare(config: TrainConfig) -> TrainingRun:
    """Check the options of a run, cheapest checks first, load the model and the data, and open the output.

    Raises:
        ValueError: If the options are wrong; nothing but cached tokens has been written then.
    """
    requested, config = config, settle_resumption(config)
    request = check_request(config, "sequence_length")
    model_config = request.model_config
    memories = model_config.memories() if isinstance(model_config, MemoryConfig) else None
    if memories is not None and memories.reads_prompts:
        raise ValueError(
            "routing is 'prompt', and plain text has no prompts; expected chats, which midus sft trains on, or a model upscaled with "
            "routing = 'chunk'."
        )
    banks: dict[str, BankLayout] = {} if memories is None else memories.banks
    corpora = open_corpora(config, request.tokenizer, request.model_config.vocab_size, banks)
    arguments = training_arguments(config, gradient_accumulation_steps=request.passes)
    sequences_per_step = config.per_device_train_batch_size * request.passes * arguments.world_size
    dataset = build_dataset(config, corpora, sequences_per_step)
    if isinstance(dataset, Mixture):
        arguments.max_steps, arguments.train_sampling_strategy = dataset.steps, "sequential"
    corpus = config.corpora[0]
    held_out = prepare_held_out(config, request.tokenizer, request.model_config, corpus, banks)

    tree = tree_of_run(config, dataset, held_out)

    audit = None if not config.audit else audit_of(dataset, config)

    def choose(model: PreTrainedModel) -> Chosen:
        use_tree(model, tree)
        return choose_what_trains(config, model)

    return make_run(
        config,
        requested,
        config,
        request,
        arguments,
        dataset if audit is None else NumberedSequences(dataset),
        data_lines=[
            *describe_corpus(config, dataset),
            *describe_tree(tree, dataset),
            *describe_held_out(held_out, corpus),
        ],
        held_out=held_out,
        choose=choose,
        trainer_class=RunTrainer,
        data_collator=default_data_collator,
        audit=audit,
        generic_share=config.generic_share,
    )
