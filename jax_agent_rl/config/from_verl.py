"""Translation of overrides of verl, verl-tool and AgentFly into a configuration.

``jax-agent-rl import-config verl run.sh`` prints it. The tables of ``verl_keys`` map keys whose
values carry over, and explain keys without a counterpart; ``_derive`` translates keys that need
more. docs/moving/verl.md shows the same tables.
"""

from __future__ import annotations

import json
import os.path
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax_agent_rl.config.agent import AgentConfig
from jax_agent_rl.config.loading import valid_keys
from jax_agent_rl.config.overrides_script import CONFIG_NAME, Override
from jax_agent_rl.config.run import Config, build
from jax_agent_rl.config.verl_keys import (
    ACTOR,
    AGENT,
    AGENTFLY,
    CHOICES,
    DEFAULTS,
    MODEL,
    NO_MEANING,
    ROLLOUT,
    SAME,
    TURNS,
    VLLM,
)
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.outcomes import ACCURACY_PARTS
from jax_agent_rl.utils.text import printable

_DEFAULT = "verl's default"
_DIVIDES_BY_STD = "algorithm.norm_adv_by_std_in_grpo"
_DEFAULT_FILES = ("ppo_trainer.yaml", "ppo_megatron_trainer.yaml")
_KL = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
_SORTS = ("choice", "no effect", "no meaning", "same")
_SIDES = {"left": "right", "right": "left", "middle": "middle"}  # verl names the side that is kept


@dataclass
class Imported:
    """A configuration, and the overrides that did not fit into it.

    Attributes:
        values: values by key of this project.
        sources: for each key in ``values``, the origin of its value, which becomes a comment:
            verl's keys, separated by commas, or words.
        leftovers: overrides that were not translated, as lines ``where: key=value: reason``, by
            sort: ``unknown``, ``no meaning``, ``choice``, ``no effect`` or ``same``.
        left: verl's keys that ``leftovers`` name.
    """

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    leftovers: dict[str, list[str]] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)

    @property
    def defaults(self) -> list[str]:
        """Lines ``key=value`` of defaults of verl that were written because ours differ."""
        lines = []
        for key, source in self.sources.items():
            if source == _DEFAULT:
                lines.append(f"{key}={_to_flow_yaml(self.values[key])}")
        return lines

    def put(self, key: str, value: Any, source: str) -> None:
        """Set a key of this project."""
        self.values[key] = value
        self.sources[key] = source

    def leave(self, sort: str, override: Override, reason: str = "") -> None:
        """Note an override that was not translated."""
        line = f"{override.where}: {override.key}={override.value}"
        if reason:
            line = f"{line}: {reason}"
        self.leftovers.setdefault(sort, []).append(line)
        self.left.add(override.key)


@dataclass(frozen=True)
class _Read:
    """A value that is not that of the key being translated, and where it comes from."""

    value: Any
    source: str


def import_verl(overrides: Mapping[str, Override]) -> Imported:
    """Translate overrides of verl, verl-tool or AgentFly.

    Raises:
        ConfigError: no model or no rows are named, or what was translated is not valid together.
    """
    imported = Imported()
    resolved = {}
    for key, override in overrides.items():
        if not override.unresolved and override.value is not None:
            resolved[key] = override.value
    for key in overrides:
        _translate(key, overrides, resolved, imported)
    _complete(imported, overrides)
    _leave_the_rest(imported, overrides)
    _drop_refused(imported, overrides)
    return imported


def _translate(
    key: str,
    overrides: Mapping[str, Override],
    resolved: Mapping[str, Any],
    imported: Imported,
) -> None:
    """Put one override into the configuration, or leave it with a reason.

    Args:
        overrides: all overrides; the meaning of some depends on others.
        resolved: the values of all overrides that are resolved and set.
        imported: changed in place.
    """
    override = overrides[key]
    is_run = key in ("trainer.default_local_dir", "trainer.experiment_name")
    if is_run and override.value is not None:
        return  # see _complete

    our_key = _our_key(key, overrides)
    if override.unresolved:
        undefined = f"the file does not define {', '.join(override.unresolved)}"
        sort, reason = ("choice", "") if our_key else _explain(key)
        if sort == "choice":
            reason = f"{reason}: {undefined}" if reason else undefined
        imported.leave(sort, override, reason)
        if our_key in ("model.path", "data.train", "data.eval"):
            imported.put(our_key, override.value, key)  # a path, for the user to complete
        return
    if override.value is None:
        imported.leave("no effect", override, "null leaves a key of verl's unset")
        return
    if key == CONFIG_NAME:
        file = f"{override.value}.yaml"
        was_read = any(other.where.startswith(f"{file}:") for other in overrides.values())
        if was_read:
            imported.leave("no meaning", override, f"{file} was given, and is translated too")
        elif file in _DEFAULT_FILES:
            imported.leave("no meaning", override, "verl's defaults are written where ours differ")
        else:
            imported.leave(
                "choice", override, f"the script changes {file}; give that file before the script"
            )
        return

    try:
        derived = _derive(key, override.value, resolved)
    except (TypeError, AttributeError, ValueError, ZeroDivisionError, IndexError):
        imported.leave("choice", override, "not a value that verl documents")
        return
    if derived is not None:
        for name, value in derived.items():
            if name in _SORTS:
                imported.leave(name, override, value)
            elif isinstance(value, _Read):
                imported.put(name, value.value, value.source)
            else:
                imported.put(name, value, key)
    elif our_key:
        imported.put(our_key, override.value, key)
    else:
        sort, reason = _explain(key)
        imported.leave(sort, override, reason)


def _our_key(key: str, overrides: Mapping[str, Override]) -> str | None:
    """Return this project's key for one of verl or verl-tool whose value carries over."""
    name = key.removeprefix(AGENT)
    if key.startswith(AGENT) and name in AgentConfig.model_fields:
        return f"agent.{name}"

    section, _, argument = key.rpartition(".")
    if section == "data.apply_chat_template_kwargs":
        return f"{SAME[section]}.{argument}"

    our_key = SAME.get(key) or AGENTFLY.get(key)
    if our_key is None and f"{ROLLOUT}name" in overrides:
        if overrides[f"{ROLLOUT}name"].value == "vllm":
            our_key = VLLM.get(key)
    return our_key


def _explain(key: str) -> tuple[str, str]:
    """Return the sort of leftover that a key is, and the reason."""
    for sort, patterns in (("choice", CHOICES), ("no meaning", NO_MEANING)):
        for pattern, reason in patterns.items():
            if re.fullmatch(pattern, key):
                return sort, reason
    return "unknown", ""


def _derive(  # noqa: C901  # one case after another
    key: str, value: Any, verl: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return this project's keys and values for a key of verl whose value changes.

    Args:
        verl: the values of all keys of verl that are resolved and set.

    Returns:
        Values by key, and under a sort of leftovers the reason, such as what the user has to
        decide. Empty if the key is read with another, which names it as a source. None if its
        value does not change, or the key is unknown.
    """
    leaf = key.rpartition(".")[2]

    # --- rows, rewards and sampling
    match = re.fullmatch(r"(.*overlong_buffer(?:_cfg)?\.)(enable|len|penalty_factor|log)", key)
    if match:
        return _derive_overlong(verl, match[1], leaf)
    if key == "data.prompt_key":
        if value == "prompt":
            return {"same": "the rows' column prompt"}
        return {"choice": "rename the rows' column to prompt"}
    if key.endswith("custom_reward_function.name") and value == "compute_score":
        return {"same": "compute_score of the file in reward.path"}
    if key == f"{ROLLOUT}name":
        if value == "vllm":
            return {"rollout.backend": "vllm"}
        return {
            "choice": (
                "set rollout.backend (jetstream, vllm, sglang, remote); jetstream is the default"
            )
        }
    if key == f"{ROLLOUT}top_k":
        return {"rollout.top_k": max(value, 0)}
    if key.startswith(f"{ROLLOUT}val_kwargs."):
        return _derive_evaluation(verl, leaf)

    # --- turns and tools
    if key == f"{TURNS}enable":
        if f"{ROLLOUT}agent.default_agent_loop" in verl:
            return {"no effect": "agent.default_agent, or a row's agent_name, selects the loop"}
        if not value:
            return {"same": "rows without an agent_name are plain generation"}
        return {
            "choice": (
                "rows without an agent_name are plain generation; for tools, set"
                " agent.default_agent=tool_agent"
            )
        }
    if key == f"{TURNS}tool_response_truncate_side":
        return {"agent.tool_response_truncate_side": _SIDES.get(value, value)}
    if key == f"{AGENT}tool_server_url":
        return {"agent.tool_server_url": str(value).removesuffix("/get_observation")}

    # --- the learner and its losses
    if key == f"{ACTOR}ppo_mini_batch_size":
        batch = verl.get("data.train_batch_size", 1024)
        if batch % value:
            return {
                "choice": f"{batch} prompts are not a multiple of it; set learner.num_minibatches"
            }
        return {"learner.num_minibatches": batch // value}
    if key == f"{ACTOR}optim.lr_warmup_steps":
        return {"learner.lr_warmup_steps": max(value, 0)}
    if key == f"{ACTOR}optim.betas":
        return {"learner.adam_b1": value[0], "learner.adam_b2": value[1]}
    if key == f"{ACTOR}policy_loss.loss_mode":
        return {"algorithm.policy_loss.loss_mode": value.replace("-", "_")}
    if key == f"{ACTOR}use_token_level_loss":
        return {"algorithm.loss_agg_mode": "token-mean" if value else "seq-mean-token-mean"}
    if key in (f"{MODEL}lora_rank", f"{MODEL}lora_alpha", f"{MODEL}target_modules"):
        if verl.get(f"{MODEL}lora_rank", 0) <= 0:
            if leaf == "lora_rank":
                return {"same": "all weights are trained"}
            return {"no effect": f"{MODEL}lora_rank is 0"}
        if leaf == "target_modules" and value == "all-linear":
            return {"same": "learner.lora.targets is all-linear"}
        our_name = {"lora_rank": "rank", "lora_alpha": "alpha", "target_modules": "targets"}[leaf]
        return {f"learner.lora.{our_name}": value}

    # --- the algorithm
    if key in (f"{ACTOR}use_kl_loss", "algorithm.use_kl_in_reward"):
        return _derive_kl(verl, key) if value else {"same": "no KL is added there"}
    if key in (f"{ACTOR}kl_loss_coef", f"{ACTOR}kl_loss_type"):
        return {} if verl.get(f"{ACTOR}use_kl_loss") else {"no effect": "use_kl_loss is off"}
    if key == "algorithm.kl_penalty" or "kl_ctrl." in key:
        return _derive_kl_in_reward(verl, leaf)
    if key == "algorithm.adv_estimator":
        divides_by_std = verl.get(_DIVIDES_BY_STD, True)
        is_dr_grpo = value == "grpo" and not divides_by_std
        source = key
        if value == "grpo" and _DIVIDES_BY_STD in verl:
            source = f"{key}, {_DIVIDES_BY_STD}"
        return {"algorithm.adv_estimator": _Read("dr_grpo" if is_dr_grpo else value, source)}
    if key == _DIVIDES_BY_STD:
        if verl.get("algorithm.adv_estimator") == "grpo":
            return {}
        return {"no effect": "read only with algorithm.adv_estimator=grpo"}
    if key.startswith("algorithm.filter_groups."):
        return _derive_filter(verl, leaf)

    # --- the training loop
    if key == "trainer.test_freq":
        return {"trainer.eval_every": max(value, 0)}
    if key == "trainer.save_freq":
        return {"trainer.checkpoint_every": max(value, 0)}
    if key == "trainer.logger":
        return _derive_logger(value)
    if key == "trainer.remove_previous_ckpt_in_save":
        if value:
            return {"trainer.keep_checkpoints": 1}
        if "trainer.max_actor_ckpt_to_keep" in verl:
            return {"no effect": "trainer.max_actor_ckpt_to_keep limits them"}
        return {"choice": "verl keeps all checkpoints; set trainer.keep_checkpoints (default 2)"}
    if key == "trainer.total_epochs" and "trainer.total_training_steps" in verl:
        return {
            "no effect": (
                "trainer.total_training_steps sets trainer.steps; verl ends sooner if these epochs"
                " have fewer steps"
            )
        }
    return None


def _read(verl: Mapping[str, Any], key: str, default: Any) -> _Read:
    """Return the value of a key of verl's, or its default there."""
    if key in verl:
        return _Read(verl[key], key)
    return _Read(default, f"verl's default of {key}")


def _derive_overlong(verl: Mapping[str, Any], section: str, leaf: str) -> dict[str, Any]:
    """Return the penalty of long responses for a key of the section ``overlong_buffer``."""
    length = f"{section}len"
    if not verl.get(f"{section}enable"):
        if leaf == "enable":
            return {"same": "long responses are not penalized"}
        return {"no effect": f"{section}enable is off"}
    if leaf == "log":
        return {"no meaning": "the penalty is always kept, as overlong_penalty"}
    if leaf != "enable":
        return {}
    if length not in verl:
        return {"choice": "set algorithm.shaping.overlong_buffer, the tokens that are penalized"}
    return {
        "algorithm.shaping.overlong_buffer": _Read(verl[length], f"{length}, {section}enable"),
        "algorithm.shaping.overlong_factor": _read(verl, f"{section}penalty_factor", 1.0),
    }


def _derive_evaluation(verl: Mapping[str, Any], leaf: str) -> dict[str, Any] | None:
    """Return the sampling of evaluations for a key of the section ``val_kwargs``.

    verl's default temperature there is 0 even if ``do_sample`` is on.
    """
    section = f"{ROLLOUT}val_kwargs."
    value = verl[f"{section}{leaf}"]
    samples = verl.get(f"{section}do_sample", False)
    if leaf == "temperature":
        if not samples:
            return {"no effect": "val_kwargs.do_sample is off, and evaluation greedy"}
        return {"rollout.eval_temperature": _Read(value, f"{section}{leaf}, {section}do_sample")}
    if leaf == "do_sample":
        if samples and f"{section}temperature" in verl:
            return {}
        return {"same": "rollout.eval_temperature is 0, as val_kwargs.temperature of verl"}
    if leaf == "n" and value == 1:
        return {"same": "one trajectory per row"}
    return None


def _derive_kl(verl: Mapping[str, Any], switch: str) -> dict[str, Any]:
    """Return the section ``algorithm.kl`` for the switch that is on."""
    if verl.get(f"{ACTOR}use_kl_loss") and verl.get("algorithm.use_kl_in_reward"):
        return {"choice": "verl adds both; set algorithm.kl.where to loss or to reward"}

    if switch.endswith("use_kl_loss"):
        where = "loss"
        coef = _read(verl, f"{ACTOR}kl_loss_coef", 0.001)
        estimator = _read(verl, f"{ACTOR}kl_loss_type", "low_var_kl")
    else:
        where = "reward"
        coef = _read(verl, "algorithm.kl_ctrl.kl_coef", 0.001)
        estimator = _read(verl, "algorithm.kl_penalty", "kl")
    if not coef.value:
        # No second copy of the model is needed.
        return {"no effect": f"the KL's coefficient is 0 ({coef.source})"}

    base_name = estimator.value.removesuffix("+")
    suffix = estimator.value[len(base_name) :]
    our_name = _KL.get(base_name, base_name) + suffix
    derived = {
        "algorithm.kl.where": where,
        "algorithm.kl.coef": coef,
        "algorithm.kl.estimator": _Read(our_name, estimator.source),
    }
    if where == "reward" and verl.get("algorithm.kl_ctrl.type") == "adaptive":
        derived["algorithm.kl.controller"] = _read(verl, "algorithm.kl_ctrl.type", "adaptive")
        derived["algorithm.kl.target"] = _read(verl, "algorithm.kl_ctrl.target_kl", 0.1)
        derived["algorithm.kl.horizon"] = _read(verl, "algorithm.kl_ctrl.horizon", 10000)
    return derived


def _derive_kl_in_reward(verl: Mapping[str, Any], leaf: str) -> dict[str, Any]:
    """Return what becomes of a key that describes the KL in the reward.

    The values are read by :func:`_derive_kl`.
    """
    if not verl.get("algorithm.use_kl_in_reward"):
        return {"no effect": "algorithm.use_kl_in_reward is off"}
    controller = verl.get("algorithm.kl_ctrl.type", "fixed")
    if leaf == "type" and controller == "fixed":
        return {"same": "algorithm.kl.controller is fixed"}
    if leaf in ("target_kl", "horizon") and controller == "fixed":
        return {"no effect": "algorithm.kl_ctrl.type is fixed"}
    return {}


def _derive_filter(verl: Mapping[str, Any], leaf: str) -> dict[str, Any] | None:
    """Return the filter of groups for a key of the section ``algorithm.filter_groups``."""
    is_on = verl.get("algorithm.filter_groups.enable", False)
    no_limit = "verl generates without limit; set algorithm.max_resample_rounds"
    if leaf == "enable":
        derived: dict[str, Any] = {"algorithm.filter_zero_variance": is_on}
        if is_on and "algorithm.filter_groups.max_num_gen_batches" not in verl:
            derived["choice"] = no_limit
        return derived
    if leaf not in ("metric", "max_num_gen_batches"):
        return None
    if not is_on:
        return {"no effect": "algorithm.filter_groups.enable is off"}

    value = verl[f"algorithm.filter_groups.{leaf}"]
    if leaf == "max_num_gen_batches":
        if value < 1:
            return {"choice": no_limit}
        return {"algorithm.max_resample_rounds": value - 1}  # the first is not a resampling
    if value in ACCURACY_PARTS:
        return {"algorithm.filter_metric": "accuracy"}
    if value in ("score", "seq_reward", "seq_final_reward"):
        return {"algorithm.filter_metric": "reward"}
    return {
        "choice": (
            f"groups are not filtered by {value}; set algorithm.filter_metric to accuracy or reward"
        )
    }


def _derive_logger(value: str | Sequence[str]) -> dict[str, Any]:
    """Return the loggers that exist here; the console is always written to."""
    names = [value] if isinstance(value, str) else value
    loggers = [name for name in names if name in ("tensorboard", "wandb", "trackio")]
    unknown = [name for name in names if name not in (*loggers, "console")]
    derived: dict[str, Any] = {}
    if loggers:
        derived["trainer.logger"] = loggers
    elif not unknown:
        derived["same"] = "the console is always written to"
    if unknown:
        derived["choice"] = f"there is no logger {', '.join(unknown)}"
    return derived


def _complete(imported: Imported, overrides: Mapping[str, Override]) -> None:
    """Add the run folder, lengths that follow from others, and verl's defaults that differ.

    Raises:
        ConfigError: the model or the rows are not named.
    """
    runs = []
    for key in ("trainer.default_local_dir", "trainer.experiment_name"):
        if key in overrides and overrides[key].value is not None:
            runs.append(overrides[key])
    if not runs:
        imported.put("run_dir", "runs/imported", "a name of the importer's")
    elif runs[0].unresolved:
        imported.put("run_dir", "runs/imported", "a name of the importer's")
        imported.leave("choice", runs[0], "set run_dir")
    elif runs[0].key.endswith("local_dir"):
        imported.put("run_dir", str(runs[0].value), runs[0].key)
    else:
        imported.put("run_dir", f"runs/{runs[0].value}", runs[0].key)
    for run in runs[1:]:
        imported.leave("no effect", run, f"{runs[0].key} names the run's folder")

    total_length = 0
    for key in ("agent.max_prompt_length", "agent.max_response_length"):
        length = imported.values.get(key)
        total_length += length if isinstance(length, (int, float)) else 512  # verl's default
    if "rollout.max_model_len" not in imported.values:
        imported.put(
            "rollout.max_model_len",
            total_length,
            "max_prompt_length + max_response_length, as in verl",
        )
    imported.put(
        "learner.pack_length",
        total_length,
        "max_prompt_length + max_response_length, which must fit",
    )

    problems = []
    for key, verl_key in (("model.path", f"{MODEL}path"), ("data.train", "data.train_files")):
        if key not in imported.values:
            problems.append(f"{key}: the overrides lack {verl_key}; add it to the file")
    if problems:
        raise ConfigError(problems)

    for key, value in DEFAULTS.items():
        if key in imported.values:
            continue
        if key == "learner.num_minibatches":
            if f"{ACTOR}ppo_mini_batch_size" in overrides:
                continue  # it could not be translated, which is a leftover
            batch = imported.values["rollout.prompts_per_step"]
            if isinstance(batch, int):
                value = max(batch // 256, 1)  # verl's mini-batches have 256 prompts
        imported.put(key, value, _DEFAULT)


def _leave_the_rest(imported: Imported, overrides: Mapping[str, Override]) -> None:
    """Leave the overrides that neither a comment nor a leftover names, with the reason."""
    named = set(imported.left)
    for source in imported.sources.values():
        named.update(source.split(", "))

    for key, override in overrides.items():
        if key in named:
            continue
        our_key = _our_key(key, overrides)
        if our_key in imported.sources:
            reason = f"{imported.sources[our_key]} sets {our_key}"
        else:
            reason = "the settings that it belongs to were not translated"
        imported.leave("no effect", override, reason)


def _drop_refused(imported: Imported, overrides: Mapping[str, Override]) -> None:
    """Remove keys that the configuration refuses, with its reason, until it is valid.

    Raises:
        ConfigError: a problem names no key that was translated.
    """
    while True:
        assignments = [f"{key}={_to_flow_yaml(value)}" for key, value in imported.values.items()]
        try:
            build({}, assignments)
            return
        except ConfigError as error:
            refused = {}
            for problem in error.problems:
                match = re.match(r"[\w.]+", problem)
                if match and match[0] in imported.values:
                    refused[match[0]] = problem
            if not refused:
                raise

        for key, problem in refused.items():
            del imported.values[key]
            source = imported.sources.pop(key)
            sort = "no effect" if " is used only " in problem else "choice"
            source_keys = [name for name in source.split(", ") if name in overrides]
            for source_key in source_keys:
                if source_key not in imported.left:
                    imported.leave(sort, overrides[source_key], problem)
            if not source_keys and not source.startswith(_DEFAULT):
                imported.leftovers.setdefault(sort, []).append(f"{source}: {problem}")


def _to_flow_yaml(value: Any) -> str:
    """Write a value as YAML on one line."""
    text = json.dumps(value, ensure_ascii=False)
    return text if printable(text, one_line=True) == text else json.dumps(value)


def as_yaml(imported: Imported) -> str:
    """Write the configuration section by section.

    A comment beside each value names its source.
    """
    order = {key: index for index, key in enumerate(valid_keys(Config))}
    lines: list[str] = []
    previous_sections: list[str] = []
    for key in sorted(imported.values, key=lambda key: order.get(key, len(order))):
        *sections, leaf = key.split(".")

        # Open the sections that the line above is not in.
        shared = len(os.path.commonprefix([sections, previous_sections]))
        for depth in range(shared, len(sections)):
            if depth == 0 and lines:
                lines.append("")
            lines.append(f"{'  ' * depth}{sections[depth]}:")
        previous_sections = sections

        value = _to_flow_yaml(imported.values[key])
        source = printable(imported.sources[key], one_line=True)
        lines.append(f"{'  ' * len(sections)}{leaf}: {value}  # {source}")
    return "\n".join(lines) + "\n"
