"""The keys that a resumed run may change, and those that it may not.

A checkpoint holds the configuration it was trained with, and fingerprints of what its keys name
(``runtime.identity``). When a run resumes, both are compared with the new ones::

    DEFINES      another value is refused, with the key, the old and the new value
    BY_CONTENT   likewise, but compared is what the key names, such as a model or a file, which
                 may have moved
    MAY_CHANGE   another value is taken, and recorded

A refused change can be accepted by name (``--accept-change KEY``). A new key goes into one of the
three sets: ``tests/unit/config/test_resume_keys.py`` finds those that are in none. Until then it
counts as one that defines.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from jax_agent_rl.config.reference import KeyInfo, list_keys
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.utils.near_names import did_you_mean


def _paths(sections: Mapping[str, str]) -> frozenset[str]:
    """Return the paths of keys that are given as names, separated by spaces, by section."""
    paths = set()
    for section, names in sections.items():
        prefix = f"{section}." if section else ""
        paths |= {prefix + name for name in names.split()}
    return frozenset(paths)


_OPTIMIZER = (
    "optimizer learning_rate lr_scheduler_type lr_warmup_steps lr_decay_ratio min_lr_ratio"
    " weight_decay no_weight_decay adam_b1 adam_b2 adam_eps max_grad_norm"
)
_LORA = "rank alpha targets quantize seed"

DEFINES = _paths(
    {
        "": "seed compute_dtype",
        "model": "min_pixels max_pixels",
        "data": "shuffle shuffle_row_groups max_length min_reward train_on best_of",
        "data.curriculum": (
            "enabled pass_rate_of easy_threshold hard_threshold easy_fraction hard_fraction window"
        ),
        "rollout": (
            "prompts_per_step group_size min_group_size group_timeout max_model_len temperature"
            " top_p top_k min_p"
        ),
        "rollout.strategy": "name",
        "rollout.strategy.tree_grpo": "m n l k",
        "rollout.strategy.treerl": "m n l t",
        "rollout.strategy.arpo": (
            "initial_rollouts beam_size branch_probability entropy_weight entropy_tokens"
        ),
        "rollout.jetstream": "engine_factory kv_dtype quantize",
        "rollout.vllm": "engine_args",
        "rollout.sglang": "server_args",
        "agent": (
            "default_agent enable_search enable_agent tool_format tool_prompt adapter role_adapters"
            " n max_prompt_length max_response_length max_model_len max_assistant_turns"
            " max_user_turns history_window max_parallel_calls constrain_tool_calls"
            " max_tool_response_length tool_response_truncate_side edited_history max_turns"
            " min_turns action_stop_tokens max_action_length max_obs_length truncate_obs_side"
            " truncate_response_side mask_observations enable_mtrl mtrl_role mtrl_sep"
            " turn_end_token additional_eos_token_ids chat_template_kwargs call_tool_first"
            " force_finish_for_last_turn mask_overlong_loss mask_void_traj"
        ),
        "agent.command": "argv container image mounts",
        "agent.harbor": (
            "agent agent_options agent_env model environment environment_options reward_key mounts"
        ),
        "tool_config": "enabled max_tool_turns",
        "search": "topk max_turns",
        "reward.remote": "data_sources",
        "reward.judge": "max_tokens temperature max_model_len chat_template_kwargs",
        "environments": "scope",
        "algorithm": (
            "adv_estimator gamma lam bootstrap turn_reward turn_advantage_coef shared_tokens"
            " clip_ratio_low clip_ratio_high clip_ratio_c loss_agg_mode loss_scale_factor"
            " segment_weight entropy_coeff filter_zero_variance filter_metric max_resample_rounds"
        ),
        "algorithm.gigpo": "gamma step_advantage_w mode similarity",
        "algorithm.igpo": "gamma",
        "algorithm.gdpo": "reward_keys reward_weights",
        "algorithm.policy_loss": (
            "loss_mode behav_imp_weight_cap tau_pos tau_neg clip_cov_ratio clip_cov_lb"
            " clip_cov_ub kl_cov_ratio ppo_kl_coef dppo_ratio_cap dro_beta"
        ),
        "algorithm.kl": "where reference estimator top_k coef controller target horizon",
        "algorithm.feedback": "template max_length",
        "algorithm.rollout_correction": (
            "rollout_is rollout_is_threshold rollout_is_batch_normalize rollout_rs"
            " rollout_rs_threshold bypass_mode"
        ),
        "algorithm.filters": (
            "void_turn void_trajectory all_tool_calls_failed overlong repetition max_repetition"
            " final_answer"
        ),
        "algorithm.observation_loss": "coef template",
        "algorithm.shaping": "overlong_buffer overlong_factor repetition_factor repetition_ngram",
        "learner": (
            f"{_OPTIMIZER} compute_dtype router_aux_loss_coef num_minibatches ppo_epochs ema_decay"
            " freeze_vision"
        ),
        "learner.lora": _LORA,
        "critic": f"{_OPTIMIZER} critic_warmup cliprange_value",
        "trainer": "mode max_staleness stragglers oversample_prompts in_flight_update batch_size",
        "dpo": "beta label_smoothing",
        "lora": _LORA,
    }
)
"""Keys that define what is trained, on what, and how."""

BY_CONTENT = _paths(
    {
        "model": "path",
        "critic": "path",
        "distill": "teachers",
        "reward.judge": "model",
        "agent": "role_models module",
        "agent.command": "program_dir",
        "data": "train",
        "reward": "path",
        "tools": "function_tool_path tool_config_path",
        "interactions": "interaction_config_path",
        "environments": "path",
    }
)
"""Keys that name models, rows and code, which also define what is trained."""

MAY_CHANGE: Mapping[str, frozenset[str]] = {
    "how long the run is, what it keeps and shows": _paths(
        {
            "": "run_dir",
            "trainer": (
                "steps epochs checkpoint_every keep_checkpoints checkpoint_dir keep_trajectories"
                " logger project_name prometheus_port"
            ),
            "agent.harbor": "trials_dir",
            "trace": "sinks max_trajectories_per_step max_text_length project mlflow_tracking_uri",
        }
    ),
    "held-out evaluation": _paths(
        {
            "data": "eval eval_limit",
            "trainer": "eval_every target_accuracy",
            "rollout": "eval_temperature",
            "agent": "val_max_turns val_max_response_length",
        }
    ),
    "devices, memory and speed of the learner": _paths(
        {
            "learner": "pack_length micro_batch_size share_prefixes remat row_patches",
            "learner.mesh": "data fsdp expert context tensor",
            "learner.multihost": "coordinator num_processes process_id timeout",
        }
    ),
    "engines: which, where, and how they compute the same policy": _paths(
        {
            "rollout": (
                "placement num_engines gpus_per_engine ray_address sleep_during_update backend urls"
                " token_env weight_dir weight_transport full_weights_every max_in_flight"
                " max_in_flight_per_server adapters deterministic"
            ),
            "rollout.jetstream": (
                "dtype max_concurrent_decodes kv_cache_tokens state_checkpoints"
                " kv_offloading_size decode_steps num_speculative_tokens prefill_buckets"
                " device_offset patch_buckets"
            ),
            "rollout.jetstream.mesh": "data expert tensor",
            "rollout.vllm": (
                "dtype max_num_seqs tensor_parallel_size gpu_memory_utilization kv_cache_gib"
                " enforce_eager multi_modal require_probe max_logprob_difference"
                " mean_logprob_difference"
            ),
            "rollout.sglang": (
                "python device dtype max_running_requests tensor_parallel_size mem_fraction_static"
                " max_total_tokens require_probe max_logprob_difference mean_logprob_difference"
            ),
        }
    ),
    "addresses and tokens of servers": _paths(
        {
            "agent": "tool_server_url tool_server_token_env",
            "agent.harbor.endpoint": "host port url",
            "tool_config": "server_url token_env",
            "search": "server_url token_env",
            "reward.remote": "url",
        }
    ),
    "timeouts, retries and other limits that only faults and loads reach": _paths(
        {
            "rollout": "trajectory_timeout recovery_seconds wait_for_server_seconds stall_seconds",
            "agent": (
                "tool_call_timeout tool_call_max_retries tool_timeout run_timeout rollout_mode"
                " max_concurrent_trajectories"
            ),
            "agent.endpoint": (
                "request_timeout max_body_bytes max_concurrent_requests max_choices max_sessions"
                " max_session_tokens max_session_pixels session_ttl"
            ),
            "agent.command": (
                "verifier_timeout cpu_seconds memory_mb processes disk_mb max_running workspace_mb"
                " workspace_entries"
            ),
            "agent.harbor": "start_attempts max_running",
            "agent.harbor.local": (
                "cpu_seconds memory_mb processes disk_mb workspace_mb workspace_entries"
            ),
            "tool_config": "max_retries retry_delay timeout max_workers request_interval",
            "search": "timeout max_retries retry_delay",
            "interactions": "timeout",
            "reward": "timeout workers sandbox",
            "reward.remote": "timeout max_retries retry_delay max_concurrency requests_per_second",
            "reward.judge": "max_in_flight",
            "environments": "max_instances timeout warm_instances start_timeout snapshot_mb",
            "learner": "max_nonfinite_steps",
            "trainer": "max_failed_batches on_disagreement agreement_tolerance",
        }
    ),
    "the server of Tinker clients": _paths(
        {
            "": (
                "model_name state_dir host port token_env max_body_mb pack_length snapshot_every"
                " max_model_len max_concurrent_decodes max_sampled_adapters sampler_ttl_seconds"
                " session_ttl_seconds"
            ),
        }
    ),
}
"""Keys that may have other values when a run resumes, by what they are about."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A key that has another value than a checkpoint was trained with.

    Attributes:
        key: path of the key, or of its section if one side has no section.
        old: the value that the checkpoint was trained with.
        new: the configured value.
        what: the difference in the model, file or code that the key names; empty if the value of
            the key itself differs.
    """

    key: str
    old: Any
    new: Any
    what: str = ""

    def __str__(self) -> str:
        if not self.what:
            return f"{self.key} was {_shorten(self.old)}, is {_shorten(self.new)}"
        previous = "" if self.old == self.new else f", was {_shorten(self.old)}"
        return f"{self.key}: {self.what} (is {_shorten(self.new)}{previous})"


def _shorten(value: Any) -> str:
    """Return a value as JSON; a long one without its middle."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 120 else f"{text[:80]} … {text[-30:]}"


def value_differences(
    model: type[BaseModel], old: Mapping[str, Any], new: Mapping[str, Any], *, may_change: bool
) -> list[Difference]:
    """Compare the values of two configurations, as JSON; keys in :data:`BY_CONTENT` are left out.

    Args:
        old: the recorded configuration. A key that it lacks is newer, and had its default.
        new: the configuration of the run that resumes.
        may_change: compare the keys that may change, instead of the keys that define.
    """
    changeable = frozenset[str]().union(*MAY_CHANGE.values())
    differences: dict[str, Difference] = {}
    for key in _keys(model).values():
        if key.is_section or key.path in BY_CONTENT:
            continue
        if (key.path in changeable) is not may_change:
            continue

        old_entry = _lookup(old, key)
        new_entry = _lookup(new, key)
        if old_entry == new_entry:
            continue

        # A section that one side lacks is one difference, however many keys it has.
        section = old_entry.null_section or new_entry.null_section
        if section:
            differences[section] = Difference(
                key=section, old=_value_at(old, section), new=_value_at(new, section)
            )
        else:
            differences[key.path] = Difference(
                key=key.path, old=old_entry.value, new=new_entry.value
            )
    return list(differences.values())


def defining_values(config: BaseModel, names: Collection[str]) -> dict[str, Any]:
    """Return the values of the keys in :data:`DEFINES`, as JSON, by path.

    Args:
        names: keys, or sections whose keys are meant.
    """
    tree = config.model_dump(mode="json")
    values = {}
    for path, key in _keys(type(config)).items():
        if path in DEFINES and is_named(path, names):
            values[path] = _lookup(tree, key).value
    return values


@dataclass(frozen=True)
class _Entry:
    """The value of a key; ``null_section`` is the path of a section above it that is null."""

    value: Any
    null_section: str = ""


def _lookup(tree: Mapping[str, Any], key: KeyInfo) -> _Entry:
    """Return what a tree has for a key: its default if the tree lacks it."""
    node: Any = tree
    path = ""
    for name in key.path.split("."):
        path = f"{path}.{name}" if path else name
        if not isinstance(node, Mapping) or name not in node:
            return _Entry(_default(key))
        node = node[name]
        if node is None and path != key.path:
            return _Entry(None, path)
    return _Entry(node)


def _default(key: KeyInfo) -> Any:
    return None if key.default is None else json.loads(key.default)


def _value_at(tree: Mapping[str, Any], path: str) -> Any:
    """Return the value at a path; None if the tree has none."""
    node: Any = tree
    for name in path.split("."):
        if not isinstance(node, Mapping):
            return None
        node = node.get(name)
    return node


_keys = functools.cache(list_keys)


def require_known_keys(model: type[BaseModel], names: Collection[str]) -> None:
    """Check the keys of ``--accept-change``.

    Raises:
        ConfigError: there is no such key or section.
    """
    keys = _keys(model)
    for name in names:
        if name not in keys:
            raise ConfigError(
                f"--accept-change {name}: there is no such key; {did_you_mean(name, list(keys))}"
            )


def is_named(key: str, names: Collection[str]) -> bool:
    """Return whether a key is among names of keys and of sections that hold them."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


def unclassified(model: type[BaseModel]) -> Iterator[str]:
    """Yield the keys of a tree that are in none of the sets, or in several."""
    classes = (DEFINES, BY_CONTENT, *MAY_CHANGE.values())
    for key in _keys(model).values():
        if key.is_section:
            continue
        memberships = sum(key.path in paths for paths in classes)
        if memberships != 1:
            yield key.path
