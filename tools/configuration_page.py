"""Writes the tables of docs/configuration.md, a section for each purpose, from the schema.

    python -m tools.configuration_page docs/configuration.md

The text above the first table stays as it is.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

from pydantic.fields import FieldInfo

from sansgpu.config import Config
from sansgpu.config.other_names import KEYS
from sansgpu.config.section import all_keys
from sansgpu.tasks.configuration import SCHEMA, TASK_FOLDERS

FIRST_LINE = "| section | its keys are for |"
EVERY_TASK = "all tasks"


class Group(NamedTuple):
    """A section of the page."""

    title: str
    purpose: str
    keys: str


GROUPS = (
    Group(
        "Task, device and seed",
        "what is trained and where; reproducible runs",
        "task objective training.device training.seed",
    ),
    Group(
        "Length of the run",
        "epochs, steps, tokens, hours, a deadline",
        "training.num_epochs training.max_steps training.max_tokens training.max_hours training.until",
    ),
    Group(
        "Batch and length of examples",
        "batch size, gradient accumulation, sequence length, packing, truncation",
        """training.batch_size training.gradient_accumulation_steps data.max_length data.pack_sequences data.long_rows
        data.doc_stride training.window_warmup_ratio""",
    ),
    Group(
        "Learning rate: warmup and schedule",
        "learning rate, warmup, cosine, linear, WSD",
        """training.learning_rate training.warmup_steps training.warmup_ratio training.lr_scheduler training.decay_ratio
        training.min_lr_ratio training.lr_power""",
    ),
    Group(
        "Optimizer",
        "Muon, AdamW, Adam, SGD, weight decay, gradient clipping, memory of the optimizer",
        """training.optimizer training.weight_decay training.beta1 training.beta2 training.muon_momentum_start
        training.muon_embedding_rate training.max_grad_norm
        training.master_weights training.optimizer_state""",
    ),
    Group(
        "Model trained from scratch",
        "architecture, width, layers, heads, vocabulary, dropout",
        """model.architecture model.vocab_size model.d_model model.n_layers model.n_heads model.n_kv_heads model.d_ff
        model.max_seq_len model.activation model.norm model.bias model.positions model.rope_theta model.qk_norm
        model.tie_embeddings model.initialization model.dropout model.attention_dropout""",
    ),
    Group(
        "Pretrained model",
        "the model to fine-tune",
        "model.name_or_path model.revision model.trust_remote_code model.pooling",
    ),
    Group(
        "Static embeddings",
        "dimensions, weighting of tokens (model2vec)",
        "model.embedding_dim model.sif_coefficient",
    ),
    Group(
        "Adapters: LoRA, DoRA and quantized bases",
        "rank, alpha, target modules, trained adapters, int8 and int4 (QLoRA), frozen layers",
        """model.adapter model.lora_rank model.lora_alpha model.lora_dropout model.lora_targets model.base_precision
        model.merge_adapter model.trained_layers model.freeze_after
        model.keep_activations""",
    ),
    Group(
        "Datasets and validation",
        "files, separators, encodings, Hub datasets, the validation part, bad rows",
        "data.dataset_name data.dataset_config data.max_tokens data.max_gb data.streaming data.validation_name "
        "data.validation_split data.separator data.encoding data.on_bad_row data.max_bad_rows",
    ),
    Group(
        "Cleaning of the text",
        "duplicates, near duplicates (MinHash), a quality filter",
        "data.deduplicate data.quality_model data.quality_label data.quality_share",
    ),
    Group(
        "Columns and labels",
        "names of columns, labels, classes, scores, tags",
        """data.text_column data.text_pair_column data.label_column data.label_kind data.label_separator data.labels
        data.class_weights data.score_scale data.pair_labels data.prompts data.tag_column data.span_offsets""",
    ),
    Group(
        "Tokenizer and chat template",
        "vocabulary size, BPE, an existing tokenizer, chat templates",
        """data.tokenizer data.vocab_size data.tokenizer_sample_mb data.chat_template data.template_variables
        data.parse_special_tokens""",
    ),
    Group(
        "Conversations",
        "system messages, tools, which answers are learned, order of turns",
        "data.system_column data.tools_column data.learn data.merge_turns",
    ),
    Group("Loss of decoders", "label smoothing, z-loss", "training.label_smoothing training.z_loss"),
    Group(
        "Loss of preferences",
        "DPO, IPO, SimPO, ORPO, KTO",
        """training.preference.loss training.preference.beta training.preference.label_smoothing
        training.preference.gamma training.preference.desirable_weight training.preference.undesirable_weight""",
    ),
    Group(
        "Reinforcement learning",
        "rewards, groups of completions, KL divergence (GRPO)",
        """training.grpo.reward training.grpo.group_size training.grpo.max_completion_length
        training.grpo.temperature training.grpo.scale_rewards training.grpo.beta""",
    ),
    Group(
        "Distillation",
        "learning from a teacher's predictions",
        """training.distillation.teacher training.distillation.weight training.distillation.temperature
        training.distillation.token_share""",
    ),
    Group(
        "Embeddings and few-shot classification",
        "contrastive losses, Matryoshka dimensions, SetFit",
        "training.embedding_loss training.matryoshka_dims training.few_shot",
    ),
    Group(
        "Question answering",
        "candidates, length of answers, questions without an answer",
        "data.n_best_size data.max_answer_length data.null_answers data.null_score_diff_threshold",
    ),
    Group(
        "Graph encoder: model",
        "leaves, relations, entities, attention by distance",
        """model.leaves model.n_relations model.n_entities model.entity_rank model.position_embedding
        model.slot_embedding model.decay model.decay_base model.fusion model.relation_rank model.relation_dropout
        model.embedding_norm""",
    ),
    Group(
        "Graph encoder: masking, triples and losses",
        "masked tokens (MLM), masked leaves (MNM), entity queries",
        """data.mask_ratio data.max_span data.leaf_mask_ratio data.min_leaf_groups data.triples data.long_tails
        data.inverse_relations data.entity_query_ratio data.kge_triples training.mlm_weight training.mnm_weight
        training.mnm_ramp_steps training.mnm_reduction training.entity_weight training.sbo_weight""",
    ),
    Group(
        "Evaluation and samples",
        "how often and on how much to evaluate; early stopping; generated samples",
        """training.eval_steps training.eval_on_start training.eval_batches training.early_stopping_patience
        training.load_best_model_at_end training.sample_tokens training.sample_prompt training.sample_temperature""",
    ),
    Group(
        "Checkpoints (snapshots) and logging",
        "how often to save and log, TensorBoard, Weights & Biases",
        """training.save_steps training.keep_last training.checkpoint_dir training.logging_steps training.report_to
        training.logging_dir""",
    ),
    Group(
        "Precision, speed and memory",
        "bf16, kernels, torch.compile, threads, gradient checkpointing",
        """training.precision training.kernels training.compile training.threads training.adapt_threads
        model.gradient_checkpointing""",
    ),
    Group(
        "Loading data",
        "workers, prefetching, the cache",
        """data.cache_dir data.preprocessing_num_workers training.dataloader_num_workers
        training.dataloader_prefetch_factor training.dataloader_pin_memory data.timeout_seconds""",
    ),
    Group(
        "Several processes",
        "gloo, network, ZeRO and FSDP, local SGD (DiLoCo)",
        """training.sharding training.gradient_reduction training.sync_every training.distributed_backend
        training.network_interface training.timeout_seconds""",
    ),
    Group(
        "Files of other trainers",
        "keys and names in files of llm-trainer, oxidizr and transformers; what loads and what does not",
        "training.use_amp training.force_cpu training.world_size model.pre_norm",
    ),
)

# The last part of the last section: files of other programs.
OTHER_FILES = """
What loads, and what does not:

| file | what happens |
|---|---|
| llm-trainer: `cpu_small_model.yaml`, `cpu_medium_model.yaml` | loads unchanged. If the file does not exist, `configs/cpu_small.yaml` or `configs/cpu_medium.yaml` is used |
| oxidizr: decoders with `hidden_size`, `kv_heads` and a section `trainer` | loads unchanged |
| oxidizr: `nano.yaml` and others with Mamba layers, mixtures of experts or latent attention | refused, because such models are not trained from scratch; the message names every key. Without these keys the file loads |
| transformers: names of `TrainingArguments` in a section `training` | those above load; others are refused, with the key to write. `output_dir` is a flag, `--output-dir` |
| LLaMA-Factory, axolotl, Accelerate: all keys at the top level | refused, with the section and key to write instead of each |
| Lightning: a section `trainer` with `max_epochs`, `accumulate_grad_batches`, ... | refused, with the key to write instead of each |
"""  # noqa: E501  a row of a table is one line


def tables() -> str:
    """Returns the table of sections, and the sections. Raises ValueError unless every key is in exactly one group."""
    fields = dict(all_keys(Config))
    grouped = [key for group in GROUPS for key in group.keys.split()]
    if sorted(grouped) != sorted(fields):
        raise ValueError(f"keys in no group or in several: {sorted({*grouped} ^ {*fields}) or sorted(grouped)}")
    lines = [FIRST_LINE, "|---|---|"]
    lines += [f"| [{group.title}](#{_anchor(group.title)}) | {group.purpose} |" for group in GROUPS]
    for group in GROUPS:
        lines += ["", *_section(group, fields)]
    return "\n".join(lines) + "\n"


def _section(group: Group, fields: dict[str, FieldInfo]) -> Iterator[str]:
    keys = group.keys.split()
    tasks = {key: _tasks(key) for key in keys}
    common, number = Counter(tasks.values()).most_common(1)[0]
    if 2 * number < len(keys):
        common = EVERY_TASK
    yield f"## {group.title}"
    yield ""
    if common != EVERY_TASK:
        yield from (f"For {common}{'' if number == len(keys) else ', if a key does not name others'}.", "")
    yield from ("| key | default | meaning |", "|---|---|---|")
    for key in keys:
        default, meaning = _default_and_meaning(key, fields[key])
        only = "" if tasks[key] == common else f" For {tasks[key]}."
        yield f'| <a id="{key}"></a>`{key}` | {default} | {meaning}{only} |'
    if "task" in keys:
        yield from ("", "| `task` | meaning |", "|---|---|")
        yield from (f"| `{task}` | {SCHEMA.tasks.kinds[task].description} |" for task in TASK_FOLDERS)
        yield "| `package.module:Class` | [your own task](../CONTRIBUTING.md#a-new-task) |"
    if "model.pre_norm" in keys:
        yield from ("", "Other names, which are read as sansgpu's:", "", "| name | key |", "|---|---|")
        for section, names in KEYS.items():
            yield from (
                f"| `{section}.{name}` | [`{section}.{key}`](#{section}.{key}) |" for name, key in names.items()
            )
        yield OTHER_FILES.rstrip()


def _default_and_meaning(key: str, field: FieldInfo) -> tuple[str, str]:
    """Returns both cells of a key. A default that the description states in words goes to the cell of defaults."""
    meaning, default = field.description or "", "–"
    if field.default is not None:
        default = _code(field.default)
    elif stated := re.search(r"\. Default: (.+?)(\. |$)", meaning):
        default = stated[1]
        meaning = meaning[: stated.start()] + stated[2] + meaning[stated.end() :]
    if choices := [f"`{choice}`" for choice in _choices(field.annotation)]:
        meaning += f". Values: {', '.join(choices)}"
    others = "".join(f"<br>{kinds}: {value}" for value, kinds in _other_defaults(key, field.default))
    return default + others, meaning.rstrip(".") + "."


def _choices(annotation: Any) -> list[str]:
    """Returns the strings of the `Literal` in a type, unless `auto` is the only one."""
    parts = [[part] if isinstance(part, str) else _choices(part) for part in get_args(annotation)]
    found = list(dict.fromkeys(itertools.chain.from_iterable(parts)))
    return found if found != ["auto"] else []


def _code(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value).replace('"', "").replace("e-0", "e-")
    return f"`{text}`" if text else "empty"


def _other_defaults(key: str, default: Any) -> Iterator[tuple[str, str]]:
    """Yields defaults that differ from the schema's, with the names of the kinds of runs that have them."""
    section, _, name = key.rpartition(".")
    known = SCHEMA.tasks.kinds
    values = {
        kind: _code(one.default(section, name, default)) for kind, one in known.items() if SCHEMA.tasks.acts(one, key)
    }
    tuned = Counter(value for kind, value in values.items() if known[kind].fine_tunes)
    usual, number = tuned.most_common(1)[0] if tuned else (_code(default), 0)
    if usual != _code(default) and number >= tuned.total() - 1:
        yield usual, "fine-tuning"
    else:
        usual = _code(default)
    kinds: dict[str, list[str]] = defaultdict(list)
    for kind, value in values.items():
        if value != (usual if known[kind].fine_tunes else _code(default)):
            kinds[value].append(kind)
    for value, found in kinds.items():
        yield value, ", ".join(_names(found, list(values)))
    adapted: dict[str, list[str]] = defaultdict(list)
    for kind in values:
        if name in known[kind].adapter_defaults.get(section, {}):
            adapted[_code(known[kind].adapter_defaults[section][name])].append(kind)
    for value, found in adapted.items():
        yield value, f"with an adapter, {', '.join(_names(found, list(values)))}"


def _tasks(key: str) -> str:
    """Names the tasks in which a key has an effect."""
    known = SCHEMA.tasks.kinds
    names = _names([kind for kind, settings in known.items() if SCHEMA.tasks.acts(settings, key)], list(known))
    if names == [f"`{task}`" for task in TASK_FOLDERS]:
        return EVERY_TASK
    return " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)


def _names(chosen: list[str], among: list[str]) -> list[str]:
    """Names kinds of runs, e.g. "`classify` with `training.few_shot`". A task with all its variants has one name."""
    known, names = SCHEMA.tasks.kinds, []
    for task in TASK_FOLDERS:
        kinds = [kind for kind in among if known[kind].task == task]
        found = [kind for kind in kinds if kind in chosen]
        if found and found == kinds:
            names.append(f"`{task}`")
        elif found == [task]:
            names.append(f"`{task}` without `{known[task].variants[0].key}`")
        else:
            names += [re.sub(r"[\w.]+", lambda word: _as_code(word[0]), known[kind].display_name) for kind in found]
    return names


def _as_code(word: str) -> str:
    return f"`{word}`" if word in TASK_FOLDERS or "." in word else word


def _anchor(title: str) -> str:
    """Returns the fragment that GitHub and the site give to a heading."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def write(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    page.write_text(text[: text.index(FIRST_LINE)] + tables(), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path, help="docs/configuration.md")
    write(parser.parse_args().page)


if __name__ == "__main__":
    main()
