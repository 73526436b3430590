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
_DEFAULT_FILES = ("ppo_trainer.yaml", "ppo_megatron_trainer.yaml")
_KL = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
_SIDES = {"left": "right", "right": "left", "middle": "middle"}  # verl names the side that is kept


@dataclass
class Imported:
    """A configuration, and the overrides that did not fit into it.

    Attributes:
        values: values by key of this project.
        sources: for each key in ``values``, the origin of its value, which becomes a comment.
        leftovers: overrides that were not translated, as lines ``where: key=value: reason``, by
            sort: ``unknown``, ``no meaning``, ``choice`` or ``no effect``.
    """

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    leftovers: dict[str, list[str]] = field(default_factory=dict)

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

    def leave(self, sort: str, line: str) -> None:
        """Note an override that was not translated."""
        self.leftovers.setdefault(sort, []).append(line)


def import_verl(overrides: Mapping[str, Override]) -> Imported:
    """Translate overrides of verl, verl-tool or AgentFly.

    Raises:
        ConfigError: no model or no rows are named, or what was translated is not valid together.
    """
    imported = Imported()
    resolved = {}
    for key, override in overrides.items():
        if not override.unresolved:
            resolved[key] = override.value
    for key in overrides:
        _translate(key, overrides, resolved, imported)
    _complete(imported, overrides)
    _drop_refused(imported)
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
        resolved: the values of all overrides that are resolved.
        imported: changed in place.
    """
    if key in ("trainer.default_local_dir", "trainer.experiment_name"):
        return  # see _complete

    override = overrides[key]
    line = f"{override.where}: {key}={override.value}"
    our_key = _our_key(key, overrides)
    if override.unresolved:
        reason = f"the file does not define {', '.join(override.unresolved)}"
        sort, explained = ("choice", line) if our_key else _explain(key, line)
        imported.leave(sort, f"{explained}: {reason}" if sort == "choice" else explained)
        if our_key in ("model.path", "data.train", "data.eval"):
            imported.put(our_key, override.value, key)  # a path, for the user to complete
        return
    if override.value is None:
        return  # verl's way to leave a key unset
    if key == CONFIG_NAME:
        file = f"{override.value}.yaml"
        was_read = any(other.where.startswith(f"{file}:") for other in overrides.values())
        if file not in _DEFAULT_FILES and not was_read:
            imported.leave(
                "choice", f"{line}: the script changes {file}; give that file before the script"
            )
        return

    try:
        derived = _derive(key, override.value, resolved)
    except (TypeError, AttributeError, ValueError, ZeroDivisionError, IndexError):
        imported.leave("choice", f"{line}: not a value that verl documents")
        return
    if derived is not None:
        for name, value in derived.items():
            if name == "choice":
                imported.leave("choice", f"{line}: {value}")
            else:
                imported.put(name, value, key)
    elif our_key:
        imported.put(our_key, override.value, key)
    else:
        imported.leave(*_explain(key, line))


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


def _explain(key: str, line: str) -> tuple[str, str]:
    """Return the sort of leftover that a key is, and its line with the reason."""
    for sort, patterns in (("choice", CHOICES), ("no meaning", NO_MEANING)):
        for pattern, reason in patterns.items():
            if re.fullmatch(pattern, key):
                return sort, f"{line}: {reason}"
    return "unknown", line


def _derive(  # noqa: C901  # one case after another
    key: str, value: Any, verl: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return this project's keys and values for a key of verl whose value changes.

    Args:
        verl: the values of all keys of verl that are resolved.

    Returns:
        Values by key, and under ``choice`` what the user has to decide. Empty if the key needs
        nothing here. None if its value does not change, or the key is unknown.
    """
    leaf = key.rpartition(".")[2]

    # --- rows, rewards and sampling
    match = re.fullmatch(r"(.*overlong_buffer(?:_cfg)?\.)(enable|len|penalty_factor|log)", key)
    if match and leaf != "len":
        return {}  # read with the length
    if match and verl.get(f"{match[1]}enable", False):
        return {
            "algorithm.shaping.overlong_buffer": value,
            "algorithm.shaping.overlong_factor": verl.get(f"{match[1]}penalty_factor", 1.0),
        }
    if key == "data.prompt_key":
        return {} if value == "prompt" else {"choice": "rename the rows' column to prompt"}
    if key.endswith("custom_reward_function.name") and value == "compute_score":
        return {}
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
    if key == f"{ROLLOUT}val_kwargs.temperature":
        if not verl.get(f"{ROLLOUT}val_kwargs.do_sample"):
            return {}
        return {"rollout.eval_temperature": value}
    if key == f"{ROLLOUT}val_kwargs.do_sample":
        return {}  # read with the temperature

    # --- turns and tools
    if key == f"{TURNS}enable":
        if not value or f"{ROLLOUT}agent.default_agent_loop" in verl:
            return {}
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
            return {}
        if leaf == "target_modules" and value == "all-linear":
            return {}  # the default of both
        our_name = {"lora_rank": "rank", "lora_alpha": "alpha", "target_modules": "targets"}[leaf]
        return {f"learner.lora.{our_name}": value}

    # --- the algorithm
    if key in (f"{ACTOR}use_kl_loss", "algorithm.use_kl_in_reward"):
        return _derive_kl(verl, key) if value else {}
    if key in (f"{ACTOR}kl_loss_coef", f"{ACTOR}kl_loss_type", "algorithm.kl_penalty"):
        return {}  # read with the switches above; without them, verl does not use them either
    if "kl_ctrl." in key:
        return {}  # likewise
    if key == "algorithm.adv_estimator":
        divides_by_std = verl.get("algorithm.norm_adv_by_std_in_grpo", True)
        is_dr_grpo = value == "grpo" and not divides_by_std
        return {"algorithm.adv_estimator": "dr_grpo" if is_dr_grpo else value}
    if key == "algorithm.norm_adv_by_std_in_grpo":
        return {}  # read with the estimator
    if key.startswith("algorithm.filter_groups."):
        return _derive_filter(verl) if leaf == "enable" else {}

    # --- the training loop
    if key == "trainer.test_freq":
        return {"trainer.eval_every": max(value, 0)}
    if key == "trainer.save_freq":
        return {"trainer.checkpoint_every": max(value, 0)}
    if key == "trainer.logger":
        return _derive_logger(value)
    if key == "trainer.remove_previous_ckpt_in_save":
        return {"trainer.keep_checkpoints": 1} if value else {}
    if key == "trainer.total_epochs" and "trainer.total_training_steps" in verl:
        return {}
    return None


def _derive_kl(verl: Mapping[str, Any], switch: str) -> dict[str, Any]:
    """Return the section ``algorithm.kl`` for the switch that is on."""
    if verl.get(f"{ACTOR}use_kl_loss") and verl.get("algorithm.use_kl_in_reward"):
        return {"choice": "verl adds both; set algorithm.kl.where to loss or to reward"}

    if switch.endswith("use_kl_loss"):
        where = "loss"
        coef = verl.get(f"{ACTOR}kl_loss_coef", 0.001)
        estimator = verl.get(f"{ACTOR}kl_loss_type", "low_var_kl")
    else:
        where = "reward"
        coef = verl.get("algorithm.kl_ctrl.kl_coef", 0.001)
        estimator = verl.get("algorithm.kl_penalty", "kl")
    if not coef:
        return {}  # a weight of zero: no second copy of the model is needed

    base_name = estimator.removesuffix("+")
    suffix = estimator[len(base_name) :]
    derived = {
        "algorithm.kl.where": where,
        "algorithm.kl.coef": coef,
        "algorithm.kl.estimator": _KL.get(base_name, base_name) + suffix,
    }
    if where == "reward" and verl.get("algorithm.kl_ctrl.type") == "adaptive":
        derived["algorithm.kl.controller"] = "adaptive"
        derived["algorithm.kl.target"] = verl.get("algorithm.kl_ctrl.target_kl", 0.1)
        derived["algorithm.kl.horizon"] = verl.get("algorithm.kl_ctrl.horizon", 10000)
    return derived


def _derive_filter(verl: Mapping[str, Any]) -> dict[str, Any]:
    """Return the filter of groups for the section ``algorithm.filter_groups``."""
    if not verl["algorithm.filter_groups.enable"]:
        return {"algorithm.filter_zero_variance": False}

    derived: dict[str, Any] = {"algorithm.filter_zero_variance": True}
    choices = []
    metric = verl.get("algorithm.filter_groups.metric")
    if metric in ACCURACY_PARTS:
        derived["algorithm.filter_metric"] = "accuracy"
    elif metric in ("score", "seq_reward", "seq_final_reward"):
        derived["algorithm.filter_metric"] = "reward"
    elif metric is not None:
        choices.append(
            f"groups are not filtered by {metric}; set algorithm.filter_metric to accuracy or"
            " reward"
        )

    batches = verl.get("algorithm.filter_groups.max_num_gen_batches", 0)
    if batches < 1:
        choices.append("verl generates without limit; set algorithm.max_resample_rounds")
    else:
        derived["algorithm.max_resample_rounds"] = batches - 1  # the first is not a resampling

    if choices:
        derived["choice"] = "; ".join(choices)
    return derived


def _derive_logger(value: str | Sequence[str]) -> dict[str, Any]:
    """Return the loggers that exist here; the console is always written to."""
    names = [value] if isinstance(value, str) else value
    loggers = [name for name in names if name in ("tensorboard", "wandb", "trackio")]
    unknown = [name for name in names if name not in (*loggers, "console")]
    derived: dict[str, Any] = {"trainer.logger": loggers}
    if unknown:
        derived["choice"] = f"there is no logger {', '.join(unknown)}"
    return derived


def _complete(imported: Imported, overrides: Mapping[str, Override]) -> None:
    """Add the run folder, lengths that follow from others, and verl's defaults that differ.

    Raises:
        ConfigError: the model or the rows are not named.
    """
    run = overrides.get("trainer.default_local_dir") or overrides.get("trainer.experiment_name")
    if run is None:
        imported.put("run_dir", "runs/imported", "a name of the importer's")
    elif run.unresolved:
        imported.put("run_dir", "runs/imported", "a name of the importer's")
        imported.leave("choice", f"{run.where}: {run.key}={run.value}: set run_dir")
    elif run.key.endswith("local_dir"):
        imported.put("run_dir", str(run.value), run.key)
    else:
        imported.put("run_dir", f"runs/{run.value}", run.key)

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


def _drop_refused(imported: Imported) -> None:
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
            if source != _DEFAULT:
                sort = "no effect" if " is used only " in problem else "choice"
                imported.leave(sort, f"{source}: {problem}")


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
