"""What to write instead of names of other programs that are neither keys nor flags of sansgpu.

The names are from transformers' TrainingArguments and example scripts, TRL, LLaMA-Factory, axolotl, Lightning,
Accelerate, llm-trainer and oxidizr. Names whose values mean the same are in other_names.py, and accepted.
"""

from __future__ import annotations

# A key of sansgpu, or a key and its value, by the other program's name.
_KEYS = {
    "accelerator": "device",
    "accumulate_grad_batches": "training.gradient_accumulation_steps",
    "base_model": "model.name_or_path",
    "cpu": "training.force_cpu=true",
    "cutoff_len": "data.max_length",
    "data_seed": "training.seed",
    "dataset": "data.dataset_name",
    "dataset_num_proc": "data.preprocessing_num_workers",
    "dataset_text_field": "data.text_column",
    "datasets": "data.dataset_name",
    "ddp_timeout": "training.timeout_seconds",
    "deepspeed": "training.sharding",
    "deepspeed_config": "training.sharding",
    "dtype": "training.precision",
    "eval_dataset": "data.validation_name",
    "eval_strategy": "training.eval_steps",
    "evals_per_epoch": "training.eval_steps",
    "evaluation_strategy": "training.eval_steps",
    "finetuning_type": "model.adapter",
    "fsdp": "training.sharding",
    "gradient_clip_val": "training.max_grad_norm",
    "label_column_name": "data.label_column",
    "label_smoothing_factor": "training.label_smoothing",
    "limit_val_batches": "training.eval_batches",
    "load_in_4bit": "model.base_precision=int4",
    "load_in_8bit": "model.base_precision=int8",
    "log_every_n_steps": "training.logging_steps",
    "logging_strategy": "training.logging_steps",
    "lora_r": "model.lora_rank",
    "lora_target": "model.lora_targets",
    "lora_target_linear": "model.lora_targets=all-linear",
    "lora_target_modules": "model.lora_targets",
    "loss_type": "training.preference.loss",
    "max_epochs": "training.num_epochs",
    "max_eval_samples": "training.eval_batches",
    "max_time": "training.max_hours",
    "micro_batch_size": "training.batch_size",
    "mixed_precision": "training.precision",
    "mlm_probability": "data.mask_ratio",
    "model_revision": "model.revision",
    "num_generations": "training.grpo.group_size",
    "optim": "training.optimizer",
    "packing": "data.pack_sequences",
    "pref_beta": "training.preference.beta",
    "pref_loss": "training.preference.loss",
    "quantization_bit": "model.base_precision",
    "remove_duplicates": "data.deduplicate",
    "reward_funcs": "training.grpo.reward",
    "rl": "task",
    "sample_packing": "data.pack_sequences",
    "save_strategy": "training.save_steps",
    "saves_per_epoch": "training.save_steps",
    "seed_everything": "training.seed",
    "sequence_len": "data.max_length",
    "stage": "task",
    "strategy": "training.sharding",
    "template": "data.chat_template",
    "text_column_name": "data.text_column",
    "tokenizer_name": "data.tokenizer",
    "torch_compile": "training.compile",
    "torch_dtype": "training.precision",
    "use_peft": "model.adapter=lora",
    "val_check_interval": "training.eval_steps",
    "val_set_size": "data.validation_split",
    "val_size": "data.validation_split",
    "validation_split_percentage": "data.validation_split",
    "wandb_project": "training.report_to=wandb",
    "warmup_ratio": "training.warmup_steps",
}
_PACKED = "rows are packed without padding; remove it"
_ONLY_ANSWERS = "the loss counts only the answers of conversations; remove it"
_OWN_KERNELS = "sansgpu has its own CPU kernels; remove it"
_PROCESSES = "`--processes N` or torchrun starts several processes"
_FOR_GRPO = "the training.grpo keys of task grpo have its settings; remove it"
_NO_MAMBA = "Mamba layers are not trained from scratch; remove it, or fine-tune a Mamba model with task sft"
_NO_EXPERTS = (
    "mixtures of experts are not trained from scratch; remove it, or fine-tune e.g. OLMoE or Qwen3-MoE with task sft"
)
_NO_LATENT = "latent attention is not trained from scratch; remove it, and set n_kv_heads for smaller keys and values"
_TEXTS = {
    "assistant_only_loss": _ONLY_ANSWERS,
    "beta": "set training.preference.beta, or training.grpo.beta with task grpo",
    "beta_kl": _FOR_GRPO,
    "cache_dir": "HF_HOME chooses the folder of the Hugging Face cache, and data.cache_dir that of tokenized data",
    "ckpt_path": "pass `--resume` and `--output-dir RUN`",
    "completion_only_loss": _ONLY_ANSWERS,
    "config_name": "the keys of section model describe a model to train from scratch",
    "config_overrides": "the keys of section model describe a model to train from scratch",
    "d_rope": _NO_LATENT,
    "dataset_dir": "data.dataset_name takes the path of a file or folder",
    "default_root_dir": "pass `--output-dir DIR`",
    "devices": _PROCESSES,
    "do_eval": "`sansgpu train` always evaluates; remove it",
    "do_predict": "`sansgpu predict RUN` writes predictions",
    "do_train": "`sansgpu train` always trains; remove it",
    "experts_per_tok": _NO_EXPERTS,
    "flash_attention": _OWN_KERNELS,
    "flash_attn": _OWN_KERNELS,
    "fp16": "CPUs compute in bf16 or fp32; use bf16",
    "group_by_length": _PACKED,
    "group_size": _FOR_GRPO,
    "hub_model_id": "`sansgpu export RUN --push-to-hub OWNER/NAME` uploads the model",
    "jit_mode_eval": "the kernels are already compiled; remove it",
    "kv_latent_dim": _NO_LATENT,
    "load_balance_alpha": _NO_EXPERTS,
    "load_best_model_at_end": "commands that load a run take the best snapshot with `--snapshot best`; remove it",
    "max_prompt_length": "data.max_length limits the prompt and the answer together",
    "max_samples": "use a shorter file, or max_steps for a shorter run",
    "max_train_samples": "use a shorter file, or max_steps for a shorter run",
    "metric_for_best_model": "the snapshot with the lowest validation loss is kept as the best; remove it",
    "name": "the run is named by its folder, --output-dir; remove it",
    "neftune_noise_alpha": "noise on embeddings is not supported; remove it",
    "num_experts": _NO_EXPERTS,
    "num_machines": _PROCESSES,
    "num_nodes": _PROCESSES,
    "num_processes": _PROCESSES,
    "output_dir": "the run folder is not part of a configuration; remove it, and pass `--output-dir DIR`",
    "overwrite_cache": "tokenized data is found again only if its files are unchanged; remove it",
    "overwrite_output_dir": "a run never overwrites an existing one; remove it and choose a new --output-dir",
    "pad_to_max_length": _PACKED,
    "pad_to_sequence_len": _PACKED,
    "per_device_eval_batch_size": "evaluation uses the training batch size; remove it",
    "plot_loss": "`sansgpu report RUN` plots the loss; remove it",
    "push_to_hub": "`sansgpu export RUN --push-to-hub OWNER/NAME` uploads the model",
    "q_latent_dim": _NO_LATENT,
    "resume_from_checkpoint": "pass `--resume` and `--output-dir RUN`",
    "run_name": "the run is named by its folder, --output-dir; remove it",
    "save_only_model": "final/ has only the model; remove it",
    "shared_expert_enabled": _NO_EXPERTS,
    "task_name": "set data.dataset_name and data.dataset_config to the dataset and its subset",
    "test_file": "`sansgpu predict RUN --data FILE` writes predictions",
    "tf32": "CPUs compute in bf16 or fp32; remove it",
    "train_on_inputs": _ONLY_ANSWERS,
    "use_fast_tokenizer": "fast tokenizers are always used; remove it",
    "use_ipex": _OWN_KERNELS,
}
_PREFIXES = {"mamba": _NO_MAMBA}


def counterpart(name: str) -> str | None:
    """Returns the key of sansgpu that replaces another program's name, or `key=value`, or None."""
    return _KEYS.get(name)


def advice(name: str) -> str | None:
    """Returns a clause that says what to do about another program's name without a counterpart, or None."""
    prefixed = next((text for prefix, text in _PREFIXES.items() if name.startswith(prefix)), None)
    return _TEXTS.get(name, prefixed)
