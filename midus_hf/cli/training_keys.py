"""Names of the keys of `midus train` and `midus sft`, which are checked before torch is imported."""

from importlib.metadata import version

# Versions of the libraries that have these keys; a newer one may have others.
_VERSIONS = {"transformers": "5.24.0", "trl": "1.16.0"}
_SHARED = """
    accelerator_config activation_checkpointing activation_checkpointing_kwargs adam_beta1 adam_beta2 adam_epsilon
    adapters attn_implementation auto_find_batch_size average_tokens_across_devices base_kl batch_eval_metrics bf16
    bf16_full_eval config_name data_seed dataloader_drop_last dataloader_in_order
    dataloader_multiprocessing_context dataloader_num_workers dataloader_persistent_workers dataloader_pin_memory
    dataloader_prefetch_factor ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters
    ddp_static_graph ddp_timeout debug deepspeed disable_tqdm do_eval do_predict do_train enable_jit_checkpoint
    eval_accumulation_steps eval_delay eval_do_concat_batches eval_on_start eval_steps eval_strategy eval_text
    eval_use_gather_object fp16 fp16_full_eval frozen fsdp fsdp_config full_determinism generic_share
    gradient_accumulation_steps gradient_checkpointing gradient_checkpointing_kwargs greater_is_better
    hub_always_push hub_model_id hub_private_repo hub_revision hub_strategy hub_token ignore_data_skip
    include_for_metrics include_num_input_tokens_seen key_value_learning_rate label_names label_smoothing_factor
    learning_rate length_column_name liger_kernel_config load_best_model_at_end local_rank log_level
    log_level_replica log_on_each_node logging_first_step logging_nan_inf_filter logging_steps logging_strategy
    lr_scheduler_kwargs lr_scheduler_type max_grad_norm max_steps memory_keys memory_learning_rate
    metric_for_best_model model_name_or_path neftune_noise_alpha num_train_epochs optim optim_args
    optim_target_modules output_dir parallelism_config per_device_eval_batch_size per_device_train_batch_size
    prediction_loss_only project protect push_to_hub remove_unused_columns report_to
    restore_callback_states_from_checkpoint resume_from_checkpoint run_name save_on_each_node save_only_model
    save_steps save_strategy save_total_limit seed skip_memory_metrics sparse_values tf32 tokenizer_name
    torch_compile torch_compile_backend torch_compile_mode torch_empty_cache_steps trackio_bucket_id
    trackio_space_id trackio_static_space_id train_sampling_strategy trainable use_cache use_cpu use_liger_kernel
    value_learning_rate value_schedule value_weight_decay warmup_steps weight_decay
"""
_TRAIN = """
    corpus corpus_name corpus_split document_mask path_column sequence_length text_column tree
"""
_SFT = """
    activation_offloading assistant_only_loss chat_template_path completion_only_loss dataset_config
    dataset_kwargs dataset_name dataset_num_proc dataset_text_field dataset_train_split eos_token eval_packing
    loss_type max_length model_init_kwargs packing packing_strategy pad_to_multiple_of pad_token padding_free
    router_aux_loss_coef shuffle_dataset truncation_mode trust_remote_code
"""
KEYS = {"train": frozenset((_SHARED + _TRAIN).split()), "sft": frozenset((_SHARED + _SFT).split())}


def are_all_known(command: str) -> bool:
    """Return whether the installed libraries of a command have no other keys than these."""
    names = ("transformers",) if command == "train" else _VERSIONS
    return all(_numbers(version(name)) <= _numbers(_VERSIONS[name]) for name in names)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])
