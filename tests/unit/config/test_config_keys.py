"""No key is dead: each is read by the program, and either declares when it is used or has a test of
what it does.

A new key without a condition goes into :data:`EFFECTS`, with the test that shows what another value
changes. A key with a condition is refused wherever that does not hold, see
``test_config_conditions``.
"""

import re
from functools import cache
from pathlib import Path

import pytest

from jax_agent_rl.config import Config, TrainerConfig
from tests.config_reads import Reads
from tests.config_values import all_conditions, keys

ROOT = Path(__file__).parents[3]
KEYS = {path: (section, name) for path, section, name in keys(Config)}

READ_OTHERWISE = {
    # Another name of rollout.group_size, resolved when a configuration is made.
    "agent.n": "jax_agent_rl/config/run.py",
    **dict.fromkeys(
        (f"algorithm.filters.{name}" for name in
         ("void_turn", "void_trajectory", "all_tool_calls_failed", "overlong", "repetition")),
        "jax_agent_rl/collect/filters.py",  # by name, from FILTER_NAMES
    ),
}  # fmt: skip
"""Keys that are read without an attribute of that name, and where."""

EFFECTS = {
    "seed": "e2e/test_run.py::test_the_same_seed_gives_the_same_trajectories_and_another_does_not",
    "run_dir":
        "e2e/test_run.py::"
        "test_stopping_and_resuming_gives_the_trajectories_of_an_uninterrupted_run",
    "model.path":
        "e2e/test_picture_run.py::"
        "test_engine_learner_and_transformers_agree_before_and_after_an_update",
    "data.train": "e2e/test_run.py::test_bad_input_is_one_message_and_no_traceback",
    "data.shuffle":
        "unit/data/test_data.py::"
        "test_rows_that_are_not_shuffled_come_in_their_order_in_every_epoch",
    "data.shuffle_row_groups":
        "unit/data/test_dataset.py::"
        "test_no_more_row_groups_than_allowed_are_in_memory_whatever_is_done_with_them",
    "data.eval":
        "e2e/test_policy_commands.py::"
        "test_doctor_is_content_with_it_and_fails_where_something_is_missing",
    "rollout.placement":
        "unit/runtime/test_engine_placement.py::test_each_placement_has_its_engines",
    "rollout.sleep_during_update":
        "unit/runtime/test_engine_placement.py::"
        "test_sleep_that_an_engine_cannot_do_is_refused_at_start",
    "rollout.backend":
        "e2e/test_remote_run.py::test_eval_on_a_rollout_server_samples_what_the_engine_here_does",
    "rollout.urls":
        "e2e/test_remote_run.py::test_eval_on_a_rollout_server_samples_what_the_engine_here_does",
    "rollout.prompts_per_step":
        "unit/trainer/test_sync.py::test_groups_that_are_left_out_are_refilled_from_new_prompts",
    "rollout.group_size":
        "unit/agents/test_server_tool_settings.py::test_n_is_another_name_of_the_group_size",
    "rollout.strategy.name": "unit/collect/test_strategies.py::test_strategies_are_made_by_name",
    "rollout.max_in_flight":
        "unit/collect/test_collector.py::test_no_more_than_max_in_flight_run_at_once",
    "rollout.trajectory_timeout":
        "unit/trainer/test_progress.py::"
        "test_a_trajectory_that_never_ends_is_dropped_by_name_and_every_step_ends",
    "rollout.max_in_flight_per_server":
        "unit/rollout/test_request_queue.py::"
        "test_no_server_exceeds_its_limit_and_waiting_requests_go_in_order_of_sessions",
    "rollout.recovery_seconds":
        "unit/rollout/test_pool.py::test_without_recovery_a_loss_is_final_and_reported_at_once",
    "rollout.wait_for_server_seconds":
        "unit/rollout/test_request_queue.py::"
        "test_one_that_is_cancelled_in_the_moment_all_hope_is_lost_is_cancelled",
    "rollout.stall_seconds":
        "unit/rollout/test_pool.py::"
        "test_an_engine_that_accepts_and_never_answers_is_lost_and_its_requests_move_on",
    "rollout.max_model_len":
        "unit/trainer/test_sampling_of_a_run.py::"
        "test_each_has_its_temperature_and_both_the_length_of_the_engines_context",
    "rollout.temperature":
        "unit/trainer/test_sampling_of_a_run.py::"
        "test_each_has_its_temperature_and_both_the_length_of_the_engines_context",
    **dict.fromkeys(
        ("rollout.top_p", "rollout.top_k", "rollout.min_p"),
        "unit/trainer/test_sampling_of_a_run.py::"
        "test_training_samples_from_a_part_of_the_vocabulary_and_evaluation_does_not",
    ),
    "rollout.eval_temperature":
        "unit/trainer/test_sampling_of_a_run.py::"
        "test_each_has_its_temperature_and_both_the_length_of_the_engines_context",
    "rollout.deterministic":
        "e2e/test_precision_runs.py::"
        "test_a_deterministic_run_has_a_gap_of_exactly_zero_and_compiles_nothing_late",
    "agent.default_agent":
        "unit/agents/test_agent_loops.py::test_the_row_chooses_and_the_default_fills_in",
    "agent.max_model_len":
        "unit/agents/test_server_tool_settings.py::test_max_model_len_bounds_the_whole_context",
    "agent.adapter":
        "unit/agents/test_adapters.py::"
        "test_a_row_or_the_configuration_names_the_adapter_of_every_request",
    "agent.n": "unit/agents/test_server_tool_settings.py::test_n_is_another_name_of_the_group_size",
    "agent.val_max_response_length":
        "unit/agents/test_server_tool_settings.py::test_val_settings_hold_in_evaluations_only",
    "agent.tool_format":
        "unit/chat/test_formats_vs_templates.py::"
        "test_a_template_of_an_unknown_format_is_refused_with_the_key_to_set",
    "agent.max_prompt_length":
        "unit/agents/test_server_tool_settings.py::test_max_prompt_length_drops_a_longer_prompt",
    "agent.max_response_length":
        "unit/agents/test_server_tool_settings.py::test_val_settings_hold_in_evaluations_only",
    "agent.module":
        "unit/deploy/doctor/test_config_checks.py::"
        "test_several_faults_are_told_together_and_hide_no_other",
    "agent.chat_template_kwargs":
        "unit/agents/test_template_kwargs.py::test_arguments_reach_the_template_and_add_up",
    "agent.role_models": "e2e/test_roles_run.py::test_a_frozen_role_is_on_record_and_not_trained",
    "agent.role_adapters":
        "unit/collect/test_roles.py::"
        "test_an_adapter_plays_its_role_and_the_model_below_it_is_frozen",
    "reward.path": "unit/rewards/test_reward_registry.py::test_a_users_file_registers_functions",
    "reward.workers":
        "unit/runtime/test_scoring_services.py::"
        "test_synchronous_functions_of_reward_path_run_in_as_many_workers_as_configured",
    "reward.timeout":
        "unit/rewards/test_reward_registry.py::"
        "test_a_function_that_hangs_is_given_up_and_others_go_on",
    "reward.remote.url":
        "unit/rewards/test_remote.py::test_retries_end_and_the_message_names_the_url_and_the_key",
    "reward.remote.data_sources":
        "unit/runtime/test_scoring_services.py::"
        "test_the_reward_server_takes_the_data_sources_it_is_named_for",
    "reward.remote.timeout":
        "unit/rewards/test_remote.py::test_an_attempt_has_its_time_however_the_answer_trickles_in",
    "reward.remote.max_retries":
        "unit/rewards/test_remote.py::test_retries_end_and_the_message_names_the_url_and_the_key",
    "reward.remote.retry_delay":
        "unit/rewards/test_remote.py::test_each_repetition_waits_twice_as_long",
    "reward.remote.max_concurrency":
        "unit/rewards/test_remote.py::test_only_so_many_requests_are_in_flight",
    "reward.remote.requests_per_second":
        "unit/rewards/test_remote.py::"
        "test_starts_are_spaced_to_the_rate_and_the_server_may_ask_for_more",
    "reward.sandbox":
        "unit/deploy/doctor/test_config_checks.py::"
        "test_a_ground_truth_is_tried_in_the_form_its_reward_function_wants",
    "reward.judge.model":
        "unit/runtime/test_scoring_services.py::"
        "test_a_judge_nobody_asks_for_is_not_started_and_one_that_is_missing_is_named",
    "reward.judge.max_tokens":
        "unit/runtime/test_scoring_services.py::test_the_policy_may_be_the_judge",
    "reward.judge.temperature":
        "unit/runtime/test_scoring_services.py::test_the_policy_may_be_the_judge",
    "reward.judge.chat_template_kwargs":
        "unit/agents/test_template_kwargs.py::test_a_judge_has_arguments_of_its_own",
    "reward.judge.max_in_flight":
        "unit/rewards/test_judge.py::test_only_so_many_questions_are_in_flight",
    "algorithm.adv_estimator":
        "unit/learner/test_algorithms.py::"
        "test_gradients_do_not_depend_on_packing_sharing_or_splitting",
    "algorithm.policy_loss.loss_mode":
        "unit/learner/test_algorithms.py::test_decoupled_ppo_reads_all_three_policies",
    "algorithm.loss_agg_mode":
        "unit/learner/test_algorithms.py::"
        "test_gradients_do_not_depend_on_packing_sharing_or_splitting",
    "algorithm.entropy_coeff":
        "unit/learner/test_algorithms.py::test_the_entropy_bonus_raises_the_entropy",
    "algorithm.kl.where":
        "unit/learner/test_algorithms.py::test_kl_in_the_reward_is_taken_off_token_by_token",
    "algorithm.rollout_correction.rollout_is":
        "unit/learner/test_correction.py::test_importance_weights_match_a_peer",
    "algorithm.rollout_correction.rollout_rs":
        "unit/learner/test_algorithms.py::"
        "test_a_step_of_which_every_token_is_rejected_changes_nothing_to_the_bit",
    "algorithm.rollout_correction.rollout_rs_threshold":
        "unit/learner/test_algorithms.py::"
        "test_a_step_of_which_every_token_is_rejected_changes_nothing_to_the_bit",
    "algorithm.rollout_correction.bypass_mode":
        "unit/learner/test_algorithms.py::"
        "test_bypass_takes_the_rollouts_logprobs_as_old_and_saves_the_scoring_pass",
    "algorithm.filter_zero_variance":
        "unit/config/test_config_algorithm.py::"
        "test_zero_variance_groups_are_kept_where_equal_totals_hide_differences",
    "algorithm.max_resample_rounds":
        "unit/trainer/test_sync.py::test_refilling_ends_after_its_rounds",
    "algorithm.filters.void_turn":
        "unit/collect/test_filters.py::test_a_turn_is_void_without_a_tool_call_or_an_answer",
    "algorithm.filters.void_trajectory":
        "unit/collect/test_filters.py::test_a_turn_is_void_without_a_tool_call_or_an_answer",
    "algorithm.filters.all_tool_calls_failed":
        "unit/collect/test_filters.py::test_all_tool_calls_failed_needs_calls",
    "algorithm.filters.overlong":
        "unit/collect/test_filters.py::"
        "test_mask_keeps_a_reward_in_the_baseline_and_drop_takes_it_out",
    "algorithm.filters.repetition":
        "unit/collect/test_filters.py::test_repetition_looks_at_sampled_tokens_only",
    "algorithm.shaping.overlong_buffer":
        "unit/collect/test_shaping.py::test_penalties_come_off_the_reward_and_are_on_record",
    "algorithm.shaping.repetition_factor":
        "unit/collect/test_shaping.py::test_penalties_come_off_the_reward_and_are_on_record",
    **{
        f"learner.{name}": "unit/learner/test_optimizer_keys.py::test_a_key_changes_what_is_learnt"
        for name in (
            "optimizer", "learning_rate", "lr_scheduler_type", "lr_warmup_steps", "lr_decay_ratio",
            "min_lr_ratio", "weight_decay", "no_weight_decay", "adam_b1", "adam_b2", "adam_eps",
            "max_grad_norm",
        )
    },
    "distill.teachers":
        "unit/learner/test_distillation.py::"
        "test_each_trajectory_is_scored_by_the_first_teacher_of_its_data_source",
    "learner.num_minibatches":
        "unit/learner/test_learner.py::test_old_logprobs_are_those_of_plain_full_passes",
    "learner.ppo_epochs":
        "unit/learner/test_learner_state.py::"
        "test_several_updates_are_undone_when_one_of_them_fails",
    "learner.pack_length":
        "unit/learner/test_learner.py::test_the_gradient_does_not_depend_on_the_layout",
    "learner.micro_batch_size":
        "unit/learner/test_learner.py::test_the_gradient_does_not_depend_on_the_layout",
    "learner.share_prefixes":
        "unit/learner/test_batch.py::test_a_group_with_one_prompt_pays_for_it_once",
    "learner.remat":
        "unit/deploy/plan/test_advice.py::test_the_key_to_change_is_the_one_of_what_takes_most",
    "learner.compute_dtype":
        "e2e/test_precision_runs.py::test_engine_and_learner_in_bfloat16_agree_to_its_rounding",
    "learner.router_aux_loss_coef":
        "unit/learner/test_router_loss.py::"
        "test_the_router_learns_from_it_and_without_it_nothing_changes",
    "learner.max_nonfinite_steps":
        "unit/learner/test_learner.py::"
        "test_a_nonfinite_gradient_changes_nothing_and_three_in_a_row_stop_the_run",
    "learner.lora.rank":
        "unit/learner/test_lora.py::test_the_files_load_in_peft_and_give_the_merged_models_logits",
    "learner.lora.alpha":
        "unit/learner/test_lora.py::test_the_files_load_in_peft_and_give_the_merged_models_logits",
    "learner.lora.targets":
        "unit/learner/test_lora.py::test_only_adapters_change_and_have_optimizer_state",
    "learner.lora.quantize": "unit/learner/test_lora.py::test_a_quantised_base_is_near_the_model",
    "learner.lora.seed": "unit/learner/test_lora.py::test_the_seed_draws_the_first_values",
    **{
        f"learner.mesh.{axis}":
            "unit/learner/test_meshes.py::test_a_mesh_gives_the_loss_and_gradient_of_one_device"
        for axis in ("data", "fsdp", "expert", "context", "tensor")
    },
    "learner.multihost.coordinator":
        "unit/runtime/test_multihost.py::test_without_a_coordinator_a_process_is_alone",
    "learner.multihost.num_processes":
        "unit/runtime/test_multihost.py::test_a_process_waits_for_the_others_as_long_as_configured",
    "learner.multihost.process_id":
        "unit/runtime/test_multihost.py::test_a_process_waits_for_the_others_as_long_as_configured",
    "learner.multihost.timeout":
        "unit/runtime/test_multihost.py::test_a_process_waits_for_the_others_as_long_as_configured",
    "trainer.logger": "unit/observe/test_sinks.py::test_a_wrong_logger_is_refused_with_the_fix",
    "trainer.prometheus_port":
        "unit/observe/test_prometheus.py::test_a_port_in_use_is_a_setting_to_change",
    "trainer.mode": "unit/trainer/test_async.py::test_tokens_are_as_old_as_the_mode_says",
    "trainer.max_staleness": "unit/trainer/test_async.py::test_tokens_are_as_old_as_the_mode_says",
    "trainer.steps":
        "e2e/test_precision_runs.py::"
        "test_a_run_with_adapters_resumes_and_exports_merged_and_for_peft",
    "trainer.checkpoint_every": "e2e/test_run.py::test_ctrl_c_leaves_a_checkpoint_that_resumes",
    "trainer.keep_checkpoints": "unit/learner/test_checkpoint.py::test_only_the_newest_are_kept",
    "trainer.on_disagreement":
        "unit/trainer/test_agreement_watch.py::"
        "test_with_warn_the_run_goes_on_and_every_step_says_what_was_compared",
    "trainer.agreement_tolerance":
        "unit/trainer/test_agreement_watch.py::test_a_tolerance_of_ones_own_holds",
    "trainer.checkpoint_dir":
        "unit/runtime/test_resume.py::test_checkpoints_of_another_run_are_not_written_over",
    "trainer.keep_trajectories":
        "unit/observe/test_sample_and_filters.py::"
        "test_a_run_writes_no_more_of_a_step_than_it_keeps",
    "trainer.max_failed_batches":
        "unit/environments/test_pool.py::test_a_run_that_loses_every_batch_stops_and_says_why",
    "trace.sinks": "unit/observe/test_trace_sinks.py::test_mlflow_shows_a_trace_with_its_spans",
}  # fmt: skip

SPELLED = {"trainer.keep_checkpoints": "keep"}
"""Keys under another name where their test is."""


@cache
def reads() -> frozenset:
    return frozenset(Reads().found)


def dead(keys_of_a_tree, found) -> list[str]:
    return [
        path
        for path, (section, name) in keys_of_a_tree.items()
        if (section.__name__, name) not in found
    ]


def test_every_key_is_read_by_the_program():
    assert set(dead(KEYS, reads())) == set(READ_OTHERWISE)
    for path, file in READ_OTHERWISE.items():
        names = (path.rpartition(".")[2], "FILTER_NAMES")
        assert any(re.search(rf"\b{name}\b", (ROOT / file).read_text()) for name in names)


def test_a_key_that_nothing_reads_is_found():
    assert dead({"trainer.no_such": (TrainerConfig, "no_such")}, reads()) == ["trainer.no_such"]


def test_every_key_says_when_it_is_used_or_has_a_test_of_what_it_does():
    unconditional = {path for path in KEYS if not all_conditions(Config, path)}
    assert sorted(EFFECTS) == sorted(unconditional)


@pytest.mark.parametrize("path", EFFECTS)
def test_the_test_of_a_key_exists_and_names_it(path: str):
    file, _, test = EFFECTS[path].partition("::")
    text = (ROOT / "tests" / file).read_text()
    assert f"def {test}(" in text
    assert re.search(rf"\b{SPELLED.get(path, KEYS[path][1])}\b", text)
