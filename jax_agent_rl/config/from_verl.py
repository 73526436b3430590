"""Overrides of verl, verl-tool and AgentFly as a configuration of ours: ``jax-agent-rl import-config verl run.sh``.

The tables of ``verl_keys`` map keys whose values carry over and explain those without a
counterpart; ``_derive`` translates those that need more. docs/moving/verl.md shows the same tables.
"""

from __future__ import annotations

import json
import os.path
import re
from collections.abc import Mapping
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
    """A configuration and what did not fit into it.

    Attributes:
        values: value by key of ours.
        sources: for each of them where it came from, as a comment.
        leftovers: sorts ``unknown``, ``no meaning``, ``choice``, ``no effect`` -> lines ``where:
            key=value: reason``.
    """

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    leftovers: dict[str, list[str]] = field(default_factory=dict)

    @property
    def defaults(self) -> list[str]:
        """Lines about verl's defaults that were written because ours differ."""
        return [
            f"{key}={_flow(self.values[key])}"
            for key, source in self.sources.items()
            if source == _DEFAULT
        ]

    def put(self, key: str, value: Any, source: str) -> None:
        """Set a key of ours."""
        self.values[key], self.sources[key] = value, source

    def leave(self, sort: str, line: str) -> None:
        """Note what was not translated."""
        self.leftovers.setdefault(sort, []).append(line)


def import_verl(given: Mapping[str, Override]) -> Imported:
    """Translate overrides of verl, verl-tool or AgentFly.

    Raises:
        ConfigError: no model or no rows are named, or what was translated is not valid together.
    """
    made = Imported()
    known = {key: one.value for key, one in given.items() if not one.unresolved}
    for key, one in given.items():
        if key in ("trainer.default_local_dir", "trainer.experiment_name"):
            continue  # see _complete
        line = f"{one.where}: {key}={one.value}"
        ours = _same(key, given)
        if one.unresolved:
            reason = f"the file does not define {', '.join(one.unresolved)}"
            sort, explained = ("choice", line) if ours else _reason(key, line)
            made.leave(sort, f"{explained}: {reason}" if sort == "choice" else explained)
            if ours in ("model.path", "data.train", "data.eval"):
                made.put(ours, one.value, key)
            continue
        if one.value is None:
            continue  # verl's way to leave a key unset
        if key == CONFIG_NAME:
            file = f"{one.value}.yaml"
            if not (
                file in _DEFAULT_FILES
                or any(other.where.startswith(f"{file}:") for other in given.values())
            ):
                made.leave(
                    "choice", f"{line}: the script changes {file}; give that file before the script"
                )
            continue
        try:
            derived = _derive(key, one.value, known)
        except (TypeError, AttributeError, ValueError, ZeroDivisionError, IndexError):
            made.leave("choice", f"{line}: not a value that verl documents")
            continue
        if derived is not None:
            for name, value in derived.items():
                (
                    made.leave("choice", f"{line}: {value}")
                    if name == "choice"
                    else made.put(name, value, key)
                )
        elif ours:
            made.put(ours, one.value, key)
        else:
            made.leave(*_reason(key, line))
    _complete(made, given)
    _drop_refused(made)
    return made


def _same(key: str, given: Mapping[str, Override]) -> str | None:
    """Return our key for one of verl's or verl-tool's whose value carries over."""
    name = key.removeprefix(AGENT)
    if key.startswith(AGENT) and name in AgentConfig.model_fields:
        return f"agent.{name}"
    holder, _, argument = key.rpartition(".")
    if holder == "data.apply_chat_template_kwargs":
        return f"{SAME[holder]}.{argument}"
    on_vllm = f"{ROLLOUT}name" in given and given[f"{ROLLOUT}name"].value == "vllm"
    return SAME.get(key) or AGENTFLY.get(key) or (VLLM.get(key) if on_vllm else None)


def _reason(key: str, line: str) -> tuple[str, str]:
    for sort, patterns in (("choice", CHOICES), ("no meaning", NO_MEANING)):
        for pattern, reason in patterns.items():
            if re.fullmatch(pattern, key):
                return sort, f"{line}: {reason}"
    return "unknown", line


def _derive(key: str, value: Any, given: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return our keys for one whose value changes, None for others; under ``choice`` stands what to decide."""
    leaf = key.rpartition(".")[2]
    match = re.fullmatch(r"(.*overlong_buffer(?:_cfg)?\.)(enable|len|penalty_factor|log)", key)
    if match and leaf != "len":
        return {}
    if match and given.get(f"{match[1]}enable", False):
        factor = given.get(f"{match[1]}penalty_factor", 1.0)
        return {
            "algorithm.shaping.overlong_buffer": value,
            "algorithm.shaping.overlong_factor": factor,
        }
    if key == f"{ROLLOUT}name":
        other = {
            "choice": "set rollout.backend (jetstream, vllm, remote); jetstream is the default"
        }
        return {"rollout.backend": "vllm"} if value == "vllm" else other
    if key == f"{TURNS}enable":
        named = f"{ROLLOUT}agent.default_agent_loop" in given
        unnamed = (
            "rows without an agent_name are plain generation; for tools, set"
            " agent.default_agent=tool_agent"
        )
        return {"choice": unnamed} if value and not named else {}
    if key == "data.prompt_key":
        return {} if value == "prompt" else {"choice": "rename the rows' column to prompt"}
    if key.endswith("custom_reward_function.name") and value == "compute_score":
        return {}
    if key == f"{ROLLOUT}top_k":
        return {"rollout.top_k": max(value, 0)}
    if key == f"{ROLLOUT}val_kwargs.temperature":
        return (
            {"rollout.eval_temperature": value}
            if given.get(f"{ROLLOUT}val_kwargs.do_sample")
            else {}
        )
    if key == f"{TURNS}tool_response_truncate_side":
        return {"agent.tool_response_truncate_side": _SIDES.get(value, value)}
    if key == f"{AGENT}tool_server_url":
        return {"agent.tool_server_url": str(value).removesuffix("/get_observation")}
    if key == f"{ACTOR}ppo_mini_batch_size":
        batch = given.get("data.train_batch_size", 1024)
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
    if key in (f"{ACTOR}use_kl_loss", "algorithm.use_kl_in_reward"):
        return _kl(given, key) if value else {}
    if (
        key in (f"{ACTOR}kl_loss_coef", f"{ACTOR}kl_loss_type", "algorithm.kl_penalty")
        or "kl_ctrl." in key
    ):
        return {}  # read with the switches above; without them, verl does not use them either
    if key in (f"{ROLLOUT}val_kwargs.do_sample", "algorithm.norm_adv_by_std_in_grpo"):
        return {}  # read with the keys that it changes
    if key in (f"{MODEL}lora_rank", f"{MODEL}lora_alpha", f"{MODEL}target_modules"):
        lora = given.get(f"{MODEL}lora_rank", 0) > 0 and not (
            leaf == "target_modules" and value == "all-linear"
        )
        ours = {"lora_rank": "rank", "lora_alpha": "alpha", "target_modules": "targets"}[leaf]
        return {f"learner.lora.{ours}": value} if lora else {}
    if key == "algorithm.adv_estimator":
        scaled = given.get("algorithm.norm_adv_by_std_in_grpo", True)
        return {"algorithm.adv_estimator": "dr_grpo" if value == "grpo" and not scaled else value}
    if key.startswith("algorithm.filter_groups."):
        return _filter_groups(given) if leaf == "enable" else {}
    if key in ("trainer.test_freq", "trainer.save_freq"):
        ours = "trainer.eval_every" if leaf == "test_freq" else "trainer.checkpoint_every"
        return {ours: max(value, 0)}
    if key == "trainer.logger":
        known = [name for name in value if name in ("tensorboard", "wandb", "trackio")]
        rest = [name for name in value if name not in (*known, "console")]
        return {"trainer.logger": known} | (
            {"choice": f"there is no logger {', '.join(rest)}"} if rest else {}
        )
    if key == "trainer.remove_previous_ckpt_in_save":
        return {"trainer.keep_checkpoints": 1} if value else {}
    if key == "trainer.total_epochs" and "trainer.total_training_steps" in given:
        return {}
    return None


def _kl(given: Mapping[str, Any], switch: str) -> dict[str, Any]:
    """Return the section ``algorithm.kl`` for the switch that is on."""
    if given.get(f"{ACTOR}use_kl_loss") and given.get("algorithm.use_kl_in_reward"):
        return {"choice": "verl adds both; set algorithm.kl.where to loss or to reward"}
    if switch.endswith("use_kl_loss"):
        where, coef = "loss", given.get(f"{ACTOR}kl_loss_coef", 0.001)
        estimator = given.get(f"{ACTOR}kl_loss_type", "low_var_kl")
    else:
        where, coef = "reward", given.get("algorithm.kl_ctrl.kl_coef", 0.001)
        estimator = given.get("algorithm.kl_penalty", "kl")
    if not coef:
        return {}  # a weight of zero: no second copy of the model is needed
    base = estimator.removesuffix("+")
    name = _KL.get(base, base) + estimator[len(base) :]
    made = {"algorithm.kl.where": where, "algorithm.kl.coef": coef, "algorithm.kl.estimator": name}
    if where == "reward" and given.get("algorithm.kl_ctrl.type") == "adaptive":
        made["algorithm.kl.controller"] = "adaptive"
        made["algorithm.kl.target"] = given.get("algorithm.kl_ctrl.target_kl", 0.1)
        made["algorithm.kl.horizon"] = given.get("algorithm.kl_ctrl.horizon", 10000)
    return made


def _filter_groups(given: Mapping[str, Any]) -> dict[str, Any]:
    if not given["algorithm.filter_groups.enable"]:
        return {"algorithm.filter_zero_variance": False}
    made: dict[str, Any] = {"algorithm.filter_zero_variance": True}
    choices = []
    metric = given.get("algorithm.filter_groups.metric")
    if metric in ACCURACY_PARTS:
        made["algorithm.filter_metric"] = "accuracy"
    elif metric in ("score", "seq_reward", "seq_final_reward"):
        made["algorithm.filter_metric"] = "reward"
    elif metric is not None:
        choices.append(
            f"groups are not filtered by {metric}; set algorithm.filter_metric to accuracy or"
            " reward"
        )
    batches = given.get("algorithm.filter_groups.max_num_gen_batches", 0)
    if batches < 1:
        choices.append("verl generates without limit; set algorithm.max_resample_rounds")
    else:
        made["algorithm.max_resample_rounds"] = batches - 1
    if choices:
        made["choice"] = "; ".join(choices)
    return made


def _complete(made: Imported, given: Mapping[str, Override]) -> None:
    """Add the run folder, lengths that follow from others, and verl's defaults that differ."""
    named = given.get("trainer.default_local_dir") or given.get("trainer.experiment_name")
    if named and not named.unresolved:
        folder = named.key.endswith("local_dir")
        made.put("run_dir", str(named.value) if folder else f"runs/{named.value}", named.key)
    else:
        made.put("run_dir", "runs/imported", "a name of the importer's")
        if named:
            made.leave("choice", f"{named.where}: {named.key}={named.value}: set run_dir")
    longest = sum(
        made.values.get(f"agent.max_{part}_length", 512) for part in ("prompt", "response")
    )
    made.values.setdefault("rollout.max_model_len", longest)
    made.sources.setdefault(
        "rollout.max_model_len", "max_prompt_length + max_response_length, as in verl"
    )
    made.put(
        "learner.pack_length", longest, "max_prompt_length + max_response_length, which must fit"
    )
    missing = [key for key in ("model.path", "data.train") if key not in made.values]
    if missing:
        theirs = {"model.path": f"{MODEL}path", "data.train": "data.train_files"}
        raise ConfigError(
            [f"{key}: the overrides lack {theirs[key]}; add it to the file" for key in missing]
        )
    for key, value in DEFAULTS.items():
        if key in made.values or (
            key == "learner.num_minibatches" and f"{ACTOR}ppo_mini_batch_size" in given
        ):
            continue
        if key == "learner.num_minibatches":
            batch = made.values["rollout.prompts_per_step"]
            value = max(batch // 256, 1) if isinstance(batch, int) else value
        made.put(key, value, _DEFAULT)


def _drop_refused(made: Imported) -> None:
    """Remove keys that the configuration refuses, with its reason, until it is valid.

    Raises:
        ConfigError: a problem names no key that was translated.
    """
    while True:
        try:
            build({}, [f"{key}={_flow(value)}" for key, value in made.values.items()])
            return
        except ConfigError as error:
            refused = {
                m[0]: p
                for p in error.problems
                if (m := re.match(r"[\w.]+", p)) and m[0] in made.values
            }
            if not refused:
                raise
            for key, problem in refused.items():
                del made.values[key]
                source = made.sources.pop(key)
                if source != _DEFAULT:
                    made.leave(
                        "no effect" if " is used only " in problem else "choice",
                        f"{source}: {problem}",
                    )


def _flow(value: Any) -> str:
    """Write a value as YAML on one line."""
    text = json.dumps(value, ensure_ascii=False)
    return text if printable(text, one_line=True) == text else json.dumps(value)


def as_yaml(made: Imported) -> str:
    """Write the configuration section by section; a comment beside each line says where it came from."""
    order = {key: index for index, key in enumerate(valid_keys(Config))}
    lines: list[str] = []
    above: list[str] = []
    for key in sorted(made.values, key=lambda key: order.get(key, len(order))):
        *sections, leaf = key.split(".")
        for depth in range(len(os.path.commonprefix([sections, above])), len(sections)):
            lines += ([""] if depth == 0 and lines else []) + [f"{'  ' * depth}{sections[depth]}:"]
        above = sections
        source = printable(made.sources[key], one_line=True)
        lines.append(f"{'  ' * len(sections)}{leaf}: {_flow(made.values[key])}  # {source}")
    return "\n".join(lines) + "\n"
