"""The tests that ``./launch/test.sh`` runs first, and those that it leaves to ``--all``, or even to
``--nightly``, and why.

A name is a file below ``tests/``, or a test in one.
"""

# ruff: noqa: E501
# Names of tests are long.

from collections.abc import Mapping

STRUCTURAL = (
    "unit/config/test_config_help.py",
    "unit/docs/test_commands.py",
    "unit/docs/test_moving_page.py",
    "unit/docs/test_named_pages.py",
    "unit/docs/test_prose.py",
    "unit/docs/test_readme.py",
    "unit/docs/test_site.py::test_every_page_is_in_the_navigation_once_and_home_comes_first",
    "unit/docs/test_site.py::test_the_reference_describes_every_name_of_a_public_package",
    "unit/docs/test_site.py::test_what_the_reference_describes_is_no_module_by_mistake",
    "unit/docs/test_testing_page.py",
    "unit/docs/test_training_page.py",
    "unit/docs/test_troubleshooting_page.py",
    "unit/packaging/test_dockerfiles.py",
    "unit/packaging/test_third_party.py",
    "unit/packaging/test_wheel.py::test_every_extra_that_a_message_page_or_script_names_exists",
    "unit/test_boundaries.py",
    "unit/test_errors.py",
    "unit/test_import.py",
    "unit/test_mixer_tables.py",
    "unit/test_recorded_files.py",
    "unit/test_structure.py",
    "unit/utils/test_names_in_the_working_directory.py::test_every_python_that_this_package_starts_is_started_so",
    "unit/utils/test_names_in_the_working_directory.py::test_no_code_asks_for_a_package_in_a_way_that_a_folder_answers",
    "unit/utils/test_near_names.py::test_nothing_else_compares_names",
)
"""Files and tests that look at all sources, pages or tables: any change may break one. They take
seconds, and run before the others."""

SLOW = {
    "conformance/test_conformance.py::test_engines_report_experts": "engines with experts",
    "conformance/test_conformance.py::test_an_engine_with_recurrent_layers_does_all_that_one_without_does": "the whole suite once more",
    "conformance/test_conformance.py::test_engines_see_images": "engines with a tower",
    "conformance/test_conformance.py::test_engines_serve_latents": "an engine with latents",
    "conformance/test_conformance.py::test_engines_serve_layers_that_share_keys": "another engine",
    "e2e/test_agent_examples.py": "a whole run for each agent framework",
    "e2e/test_agreement_run.py": "three whole runs with a fault; tests/unit/agreement has the same checks on engines",
    "e2e/test_async_modes.py": "whole runs of each trainer; their logic is under tests/unit/trainer",
    "e2e/test_distill_run.py": "whole runs, half of them with a server",
    "e2e/test_environment_resume.py": "runs that are killed and resumed; tests/unit/agents/test_resumed.py has the same in one process",
    "e2e/test_frozen_judge.py": "two engines",
    "e2e/test_mesh_run.py": "whole runs on simulated devices",
    "e2e/test_minimal_grpo.py::test_the_loop_learns_to_write_digits": "trains",
    "e2e/test_multihost_run.py": "whole runs of several processes, each of which compiles for itself",
    "e2e/test_picture_run.py": "a vision model, against transformers",
    "e2e/test_policy_commands.py": "a run for every command",
    "e2e/test_precision_runs.py": "whole runs in other precisions",
    "e2e/test_ray_engines.py": "starts Ray",
    "e2e/test_ray_job.py": "starts Ray, and runs of several processes",
    "e2e/test_real_model.py::test_three_steps_on_the_calculator_teach_something": "trains 135M parameters",
    "e2e/test_recipes.py": "a run for every recipe",
    "e2e/test_remote_run.py": "whole runs over HTTP",
    "e2e/test_report_page.py::test_thousands_of_trajectories_make_a_list_of_few_elements": "thousands of trajectories",
    "e2e/test_resume.py": "runs that are killed and resumed; tests/e2e/test_run.py stops and resumes one",
    "e2e/test_roles_run.py": "whole runs of each trainer, with two adapters or two engines",
    "e2e/test_sigterm.py": "a run for every phase",
    "e2e/test_step_replay.py": "whole runs of every kind, each repeated",
    "e2e/test_task_examples.py": "a run for every example, some on the real model",
    "e2e/test_tool_server_run.py::test_a_run_over_a_tool_server_trains_and_closes_every_environment": "a whole run with a server; tests/e2e/test_run.py has one without",
    "e2e/test_tpu_pod_run.py": "whole runs of two and three hosts",
    "e2e/test_tree_grpo_agents.py": "a whole run for each kind of agent",
    "e2e/test_wheel_quickstart.py": "installs a whole environment, and trains",
    "faults/test_chaos.py": "lets a system fail for a while",
    "faults/test_checkpoint_faults.py": "several runs, each resumed",
    "faults/test_disk_full.py": "several runs, each resumed",
    "faults/test_finished_run.py": "several runs that are killed",
    "faults/test_interrupt_anywhere.py": "many runs that are interrupted",
    "faults/test_kill_learner.py": "many runs that are killed",
    "faults/test_nan_batches.py": "whole runs",
    "faults/test_tpu_faults.py": "thirty launches in a made-up cloud",
    "parity/test_delta_net_vs_transformers.py": "a layer of torch; tests/unit/models has the recurrence",
    "parity/test_fp8_vs_transformers.py": "models of transformers, wide enough for blocks",
    "parity/test_gemma4_vs_transformers.py": "a model with a tower; the tests of all families have its text model",
    "parity/test_jetstream_driver.py::test_the_driver_and_the_scheduler_sample_the_same_ids": "two engines",
    "parity/test_llama_vs_transformers.py::test_the_real_model_equals_transformers_on_a_conversation": "135M parameters, twice",
    "parity/test_llama_vs_transformers.py::test_the_real_model_is_as_close_to_float64_as_transformers_is": "135M parameters in float64",
    "parity/test_qwen3_5_vs_transformers.py": "a model with a tower for each kind of network; the tests of all families have its text model",
    "parity/test_qwen_images_vs_transformers.py::test_every_field_of_a_config_is_honoured_refused_or_without_effect": "a model for every field",
    "parity/test_qwen_images_vs_transformers.py::test_every_gradient_of_tower_and_decoder_is_equal": "compiles a tower's gradient, as for Qwen2.5-VL",
    "parity/test_qwen_images_vs_transformers.py::test_the_engine_says_after_images_what_transformers_says": "compiles an engine with a tower",
    "parity/test_qwen_vl_vs_transformers.py::test_every_field_of_a_config_is_honoured_refused_or_without_effect": "a model for every field",
    "parity/test_qwen_vl_vs_transformers.py::test_every_gradient_of_tower_and_decoder_is_equal": "compiles a tower's gradient; tests/parity/test_llama_vs_transformers.py has a decoder's",
    "parity/test_qwen_vl_vs_transformers.py::test_chunks_and_steps_give_what_transformers_gives_at_once": "compiles an engine with a tower",
    "unit/agents/test_client_features.py::test_a_framework_gets_an_answer_of_the_type_it_asks_for": "frameworks that take seconds to import",
    "unit/agents/test_command_agent.py::test_a_harbor_task_runs_in_a_container_built_from_its_dockerfile": "an image",
    "unit/agents/test_command_agent.py::test_rows_without_a_folder_run_in_the_configured_image": "loads an image",
    "unit/agents/test_endpoint_images.py::test_images_of_two_turns_are_in_one_exact_trajectory_that_is_trained_on": "compiles an engine and a learner with a tower",
    "unit/agents/test_token_ids.py::test_harbors_terminus_finds_the_ids": "imports LiteLLM",
    "unit/agents/test_shell_environment.py::test_a_tree_of_forked_shells_is_the_tree_of_replayed_ones": "some twenty sandboxes, one after the other",
    "unit/agreement/test_inspection.py::test_the_first_layer_that_differs_is_named_without_keys_and_values": "diagnoses engines",
    "unit/agreement/test_inspection.py::test_the_replica_that_was_not_updated_is_named": "two engines",
    "unit/agreement/test_sampling_replay.py::test_old_logprobs_are_the_rollouts_whatever_restricted_the_draws": "an engine and a learner for every restriction",
    "unit/agreement/test_search.py::test_a_diagnosis_that_has_no_more_time_says_what_it_did_not_try": "diagnoses an engine",
    "unit/cli/test_damaged_files.py::test_a_damaged_run_is_a_message_in_every_command": "each damage",
    "unit/cli/test_json.py::test_standard_output_is_the_object_alone": "runs commands that load a model",
    "unit/data/test_mixture.py::test_a_share_too_small_for_a_row_in_1024_is_exact_on_average": "draws millions of rows",
    "unit/deploy/certify/test_certify.py::test_a_backend_that_breaks_a_rule_deviates_and_the_rule_is_named": "a conformance suite",
    "unit/deploy/certify/test_certify.py::test_a_check_that_raises_is_a_deviation_and_ends_no_other": "certifies",
    "unit/deploy/certify/test_certify.py::test_a_checkpoint_that_restores_other_numbers_deviates": "saves and restores a learner",
    "unit/deploy/certify/test_certify.py::test_a_cpu_counts_what_learner_and_engine_add_to_the_process": "measures an engine",
    "unit/deploy/certify/test_certify.py::test_a_slow_engine_deviates_from_its_ideal_time": "measures an engine",
    "unit/deploy/certify/test_certify.py::test_a_tpu_that_misses_its_prediction_either_way_deviates": "measures an engine",
    "unit/deploy/certify/test_certify.py::test_a_wrong_gradient_deviates_though_the_output_is_right": "compiles kernels",
    "unit/deploy/certify/test_certify.py::test_a_wrong_kernel_deviates_and_no_other": "compiles kernels",
    "unit/deploy/certify/test_certify.py::test_an_exchange_that_goes_wrong_deviates_on_its_axis": "compiles for eight devices",
    "unit/deploy/certify/test_certify.py::test_more_memory_than_planned_deviates": "certifies",
    "unit/deploy/certify/test_certify.py::test_the_command_writes_both_files_and_its_status_tells_of_deviations": "certifies",
    "unit/deploy/certify/test_certify.py::test_this_machines_kernels_are_within_their_limits": "compiles every kernel",
    "unit/deploy/launch/tpu/test_sky.py::test_skypilot_takes_every_slice": "SkyPilot's parser",
    "unit/deploy/launch/tpu/test_sky.py::test_skypilot_takes_the_task": "SkyPilot's parser",
    "unit/deploy/plan/test_plan_command.py": "compiles for every generation of TPUs",
    "unit/deploy/plan/test_prediction.py::test_a_large_product_is_predicted_a_little_above_its_ideal": "compiles for every generation of TPUs",
    "unit/deploy/plan/test_prediction.py::test_gradients_are_exchanged_on_sparse_cores_where_there_are_some": "compiles for TPUs",
    "unit/deploy/plan/test_replay_and_offloading.py::test_a_gradient_is_planned_for_the_supports_and_experts_a_learner_gives_it": "builds a learner with experts",
    "unit/deploy/plan/test_search.py": "compiles many programs for TPUs",
    "unit/docs/test_notebook.py::test_it_runs_and_its_reward_rises": "trains",
    "unit/docs/test_site.py::test_every_page_and_the_picture_are_there": "builds the site",
    "unit/docs/test_site.py::test_pages_load_nothing_from_elsewhere": "builds the site",
    "unit/environments/test_adapters.py::test_a_textworld_command_that_means_nothing_is_answered_and_counted": "imports TextWorld",
    "unit/environments/test_adapters.py::test_a_textworld_game_is_won_and_its_points_add_up_to_one": "makes and compiles a game",
    "unit/environments/test_openenv_server.py": "starts servers of a package that has an environment of its own",
    "unit/jetstream/cpu/test_kernels.py::test_a_second_process_finds_the_library_built": "builds the kernels",
    "unit/jetstream/cpu/test_kernels.py::test_the_engine_samples_the_same_ids_with_and_without_kernels": "an engine for each kind of layer",
    "unit/jetstream/test_data_parallel.py": "engines on simulated devices",
    "unit/jetstream/test_drafting.py::test_the_engines_draws_are_predicted_where_the_most_frequent_id_is_wrong": "an index of many sequences",
    "unit/jetstream/test_drafting.py::test_the_index_drafts_by_what_was_drawn_after_the_longest_suffix": "an index of many sequences",
    "unit/jetstream/test_engine_sleep.py": "engines on simulated devices",
    "unit/jetstream/test_external_engine.py::test_sampled_ids_follow_the_models_distribution": "thousands of draws",
    "unit/jetstream/test_images_in_the_engine.py::test_who_waits_again_for_pages_sees_its_images_again": "an engine with a tower",
    "unit/jetstream/test_kv_offloading.py::test_a_mesh_keeps_its_sharding_and_its_bits": "simulated devices",
    "unit/jetstream/test_programs.py::test_on_a_cpu_a_program_is_compiled_when_needed_together_with_the_next_one": "compiles every program of an engine",
    "unit/jetstream/test_sampling.py::test_only_allowed_ids_are_drawn_with_logprobs_of_what_is_left": "many draws for every rule",
    "unit/jetstream/test_sampling_on_a_mesh.py": "simulated devices",
    "unit/jetstream/test_tpu_programs.py": "compiles for every generation of TPUs",
    "unit/learner/losses/test_policy_losses.py::test_every_name_in_the_configuration_has_a_loss": "compiles every loss",
    "unit/learner/test_comparison.py::test_the_learner_looks_once_a_step_and_only_at_tokens_of_its_own_version": "a learner of several steps",
    "unit/learner/test_learner.py::test_constrained_tokens_are_context_like_inserted_ones": "compiles two learners",
    "unit/learner/test_learner.py::test_eight_simulated_devices_train_as_one_does": "compiles for eight devices",
    "unit/learner/test_learner.py::test_halved_rows_change_no_number_and_compile_nothing": "compiles two learners",
    "unit/learner/test_learner.py::test_observations_are_trained_on_when_asked_for_and_have_no_gap": "compiles two learners",
    "unit/learner/test_learner_state.py::test_a_checkpoint_restores_onto_other_meshes": "compiles for eight devices",
    "unit/learner/test_learner_state.py::test_the_average_follows_every_update_and_no_other_number_changes": "compiles two learners",
    "unit/learner/test_linear_logprobs.py::test_no_array_of_tokens_by_vocabulary_exists_forward_or_backward": "compiles for a large vocabulary",
    "unit/learner/test_lora.py::test_a_checkpoint_of_adapters_restores": "two learners with adapters",
    "unit/learner/test_meshes.py": "compiles for eight devices",
    "unit/learner/test_optimizer_keys.py::test_muon_moves_the_matrices_of_layers_by_orthogonalized_momentum": "compiles an optimizer for each kind",
    "unit/learner/test_precision.py": "compiles a learner for every precision",
    "unit/learner/test_lora.py::test_adapters_of_other_mixers_train_over_a_quantized_base": "compiles a learner for every kind of base",
    "unit/learner/test_padding.py::test_an_id_is_trained_where_a_context_has_it_even_if_its_called_padding": "a model of transformers",
    "unit/learner/test_qwen3_5_moe.py": "learners and engines of another mixture",
    "unit/learner/test_schedule.py::test_the_rate_follows_training_steps_whatever_each_of_them_updates": "a learner of several steps",
    "unit/learner/test_session_gradient.py": "compiles a learner for a session and for each of its calls",
    "unit/models/test_delta_decoder.py": "compiles gradients, also for eight devices",
    "unit/models/test_grouped_product.py::test_what_a_product_leaves_in_rows_of_other_shards_reaches_nothing": "compiles for eight devices",
    "unit/models/test_parameters.py::test_muon_orthogonalizes_each_matrix_of_a_stack_and_nothing_else": "compiles an optimizer for every family",
    "unit/models/test_qwen_vl.py::test_a_drawn_model_has_the_tower_of_its_config": "draws a model with a tower",
    "unit/models/test_router_correction.py::test_an_update_leaves_it_as_it_is": "a learner for each optimizer",
    "unit/models/test_gemma4.py::test_branches_of_a_tree_are_computed_as_rows_of_their_own_with_equal_gradients": "compiles two gradients",
    "unit/models/test_sharded_families.py": "compiles every family for eight devices",
    "unit/models/test_stored.py::test_any_mesh_reads_what_any_mesh_wrote_each_byte_once": "compiles for eight devices",
    "unit/observe/test_sink_libraries.py::test_wandb_offline_keeps_one_run_with_the_training_step_as_its_axis": "starts W&B's service",
    "unit/observe/test_trace_sinks.py::test_mlflow_shows_a_trace_with_its_spans": "starts MLflow",
    "unit/observe/test_trace_sinks.py::test_weave_is_sent_a_call_for_each_span": "imports Weave",
    "unit/rewards/test_function_workers.py::test_scores_come_from_another_process_and_failures_cost_one_trajectory": "a worker process for each failure",
    "unit/runtime/test_learners.py": "compiles for eight devices",
    "unit/runtime/test_multihost.py": "several processes, each of which compiles for itself",
    "unit/runtime/test_multihost_engines.py": "several processes, each of which compiles for itself",
    "unit/runtime/test_teachers.py::test_a_learner_scores_by_the_teachers_in_their_folders": "two models",
    "unit/supervised/test_train.py::test_a_resumed_run_ends_where_one_without_a_break_does": "three runs",
    "unit/supervised/test_train.py::test_a_step_that_was_trained_again_is_exported_again": "two runs",
    "unit/supervised/test_train.py::test_adapters_are_exported_with_the_alpha_they_were_trained_with": "three runs",
    "unit/supervised/test_train.py::test_an_export_does_not_replace_the_model_that_the_run_was_trained_over": "a whole run",
    "unit/supervised/test_train.py::test_another_run_is_not_resumed_and_nothing_of_this_one_changes": "a run for every change",
    "unit/supervised/test_train.py::test_the_loss_and_gradient_of_preferences_are_those_of_pytorch": "compiles a learner",
    "unit/supervised/test_train.py::test_what_is_changed_when_a_run_resumes_is_on_record": "two runs",
    "unit/test_hostile_text.py": "every reader on texts of many sizes",
    "unit/test_launch.py::test_everything_is_also_tested_on_vllm_in_an_environment_of_its_own": "makes an environment",
    "unit/test_tinker_server.py::test_a_model_does_not_need_the_checkpoint_that_it_was_loaded_from": "two servers",
    "unit/test_tinker_server.py::test_a_server_that_is_killed_while_it_finishes_an_update_repeats_it_once": "two servers for each moment",
    "unit/test_tinker_server.py::test_a_server_that_was_killed_goes_on_where_it_was": "two servers",
    "unit/test_tinker_server.py::test_a_silent_session_ends_and_leaves_named_checkpoints": "several training states",
    "unit/test_tinker_server.py::test_log_probs_of_many_prompts_are_computed_together": "compiles for many prompts",
    "unit/test_tinker_server.py::test_more_checkpoints_than_the_engine_holds_are_sampled_from_in_turn": "many checkpoints",
    "unit/test_tinker_server.py::test_samples_of_adapters_and_base_have_the_log_probs_of_their_weights": "several adapters",
    "unit/test_tinker_server.py::test_the_likeliest_ids_of_prompt_and_sample_are_those_of_the_model": "compiles for the likeliest ids",
    "unit/test_tinker_server.py::test_whole_models_are_trained_and_sampled_from_one_at_a_time": "compiles for whole models",
    "unit/testing/conformance/test_mutations.py": "the conformance suite once for each mistake",
    "unit/testing/redteam/test_redteam.py::test_a_server_that_takes_everything_is_broken": "hundreds of megabytes over loopback",
    "unit/testing/redteam/test_redteam.py::test_tests_beside_the_program_are_passed_wrongly": "a process for each attack",
    "unit/testing/redteam/test_redteam.py::test_this_installation_holds": "every attack on every part",
    "unit/testing/redteam/test_redteam.py::test_without_a_sandbox_programs_get_through": "a process for each attack",
    "unit/testing/simulate/test_kv_cache.py::test_at_equal_memory_agents_with_tools_get_more_turns_than_with_lru": "simulates thousands of sessions",
    "unit/testing/simulate/test_simulation.py::test_a_session_whose_server_is_full_moves_where_its_context_is_cheap": "simulates thousands of sessions",
    "unit/testing/simulate/test_simulation.py::test_a_session_whose_server_is_full_waits_where_its_context_is_dear": "simulates thousands of sessions",
    "unit/tool_server/test_search_plugins.py::test_a_query_in_other_words_finds_its_passage": "a model of embeddings",
    "unit/tool_server/test_server_plugins.py::test_tools_of_a_stdio_mcp_server_are_called_and_a_dead_one_comes_back": "starts a server several times",
    "unit/tool_server/test_tool_server_http.py::test_a_batch_is_answered_in_its_order_across_workers": "two workers",
    "unit/tool_server/test_tool_server_http.py::test_a_trajectory_stays_where_its_state_is": "two workers",
    "unit/tool_server/test_tool_server_soak.py": "many hostile trajectories",
    "unit/tools/test_mcp.py::test_a_server_and_a_file_with_one_name_are_both_named": "starts two servers",
    "unit/tools/test_mcp.py::test_a_server_that_dies_is_an_observation_and_is_restarted": "starts a server several times",
    "unit/tools/test_mcp.py::test_an_entry_of_verls_is_taken_as_it_is_written_there": "starts a server",
    "unit/tools/test_mcp.py::test_an_http_server_that_is_gone_is_an_observation_until_it_is_back": "starts a server several times",
    "unit/tools/test_mcp.py::test_calls_that_wait_for_their_turn_say_so_when_they_are_late": "starts a server",
    "unit/tools/test_mcp.py::test_images_arrive_as_pil_images": "starts a server",
    "unit/tools/test_mcp.py::test_tools_of_a_server_are_selected_in_the_config": "starts a server",
    "unit/utils/test_hub.py::test_a_data_set_of_the_hub_is_read_by_name_split_and_glob_alone": "processes that import the Hub's client",
    "unit/utils/test_hub.py::test_the_cache_is_used_where_the_hub_does_not_answer": "processes that import the Hub's client",
    "unit/utils/test_hub.py::test_a_model_of_the_hub_is_downloaded_once_and_its_weights_when_needed": "processes that import the Hub's client",
    "unit/utils/test_hub.py::test_the_example_downloads_gsm8k_and_says_when_it_could_not": "processes that import the Hub's client",
    "unit/utils/test_hub.py::test_what_a_data_set_does_not_have_is_said_with_what_there_is": "processes that import the Hub's client",
    "unit/utils/test_hub.py::test_without_the_hub_a_folder_is_asked_for": "processes that import the Hub's client",
    "unit/utils/test_installed_packages.py::test_a_run_uses_every_kind_of_plugin_of_an_installed_package": "a whole run",
}
"""Files and tests that only ``--all`` runs; it also runs all tests on vLLM."""

REPRESENTATIVES = {
    "parity/test_llama_vs_transformers.py::test_gradients_equal_those_of_transformers": (
        ("[wide heads]",),
        "compiles every architecture",
    ),
    "unit/deploy/plan/test_inventory_of_a_run.py::test_a_gradient_is_planned_for_the_arrays_a_learner_gives_it": (
        ("[policy]",),
        "compiles every learner",
    ),
    "unit/learner/losses/test_without_advantage.py": (
        ("[vanilla]", "[gspo]", "[cispo]", "sequences"),
        "compiles every loss",
    ),
    "unit/utils/test_answers.py::test_what_cannot_be_decoded_is_an_error_of_ours": (
        ("-teacher]",),
        "a server for every client",
    ),
    "unit/utils/test_answers.py::test_an_error_is_not_read_beyond_its_beginning": (
        ("-teacher]",),
        "a server for every client",
    ),
    "unit/utils/test_answers.py::test_an_answer_of_another_shape_is_an_error_of_ours": (
        ("teacher]",),
        "a server for every client",
    ),
    "conformance/test_conformance.py": (
        ("[toy]", "[jetstream]", "[remote_toy]", "test_every_file_of_the_suite_runs_here"),
        "an engine for every kind of backend",
    ),
    "e2e/test_run.py": (
        ("test_a_run_leaves", "test_bad_input", "test_a_row_of"),
        "several whole runs",
    ),
    "faults/test_kill_at_every_write.py": (
        ("writes_lines",),
        "a process for every write of every file",
    ),
    "faults/test_tpu_dry_run_holds.py::test_a_dry_run_prints_the_calls_of_a_launch_in_their_order": (
        ("[how0]",),
        "a dry run for every way",
    ),
    "parity/test_families_vs_transformers.py": (
        ("equal[qwen3]", "greedily[qwen3]"),
        "compiles every family three times",
    ),
    "parity/test_qwen_images_vs_transformers.py": (
        ("without[Qwen3VL]", "without[Qwen3_5]", "transformers[Qwen3_5]"),
        "a tower for every family",
    ),
    "unit/agents/test_client_features.py": (
        ("output_type]", "[anthropic"),
        "frameworks that take seconds to import",
    ),
    "unit/agents/test_clients.py": (
        ("[openai_chat", "[anthropic"),
        "frameworks that take seconds to import",
    ),
    "unit/agents/test_settings_of_tests.py": (("[none]",), "pytest in a sandbox for every file"),
    "unit/agreement/test_faults_by_kind.py": (
        ("[eps]", "test_min_p_is_named"),
        "an engine for every fault",
    ),
    "unit/agreement/test_faults_in_the_jax_engine.py": (
        ("[rope theta]",),
        "an engine for every fault",
    ),
    "unit/agreement/test_rounding.py": (("[latent]",), "an engine and a learner for every mixer"),
    "unit/agreement/test_healthy_engines.py": (
        ("[llama]", "test_an_engine_whose_weights_change"),
        "an engine for every family and precision",
    ),
    "unit/chat/test_template_families.py::test_sampled_ids_never_change_and_every_turn_is_a_prefix_of_the_next": (
        ("[qwen3-", "[gpt-oss-", "[smollm2-"),
        "each template many times",
    ),
    "unit/cli/test_damaged_files.py::test_a_run_with_other_bytes_in_a_file_is_a_message_in_every_command": (
        ("trajectories.jsonl-binary", "checkpoints/4-a file"),
        "every command on each damage of each file",
    ),
    "unit/docs/test_written_pages.py::test_its_programs_run_through": (
        ("[backend-]", "[reward-]", "[tool-]"),
        "a model is trained",
    ),
    "unit/jetstream/test_attention_kernels.py": (
        ("float32-1]", "is_not_read[float32]"),
        "kernels for every type",
    ),
    "unit/jetstream/test_decode_in_place.py": (
        ("CPU", "NONE"),
        "an engine for every kind of kernels",
    ),
    "unit/jetstream/test_deterministic.py": (
        ("in_any_batch", "full_passes"),
        "an engine and a learner for every way",
    ),
    "unit/jetstream/test_eight_bits.py": (
        ("int8-dense", "cut", "int8-0.1"),
        "an engine for every type and family",
    ),
    "unit/jetstream/test_engine_mesh.py": (("[dense",), "compiles for eight devices"),
    "unit/jetstream/test_gemma4.py": (
        ("cpu-shared keys", "hold_none"),
        "an engine for every path of a request",
    ),
    "unit/jetstream/test_layers_of_different_kinds.py": (
        ("what_the_learner_does",),
        "an engine for each",
    ),
    "unit/jetstream/test_olmo3.py": (("scored[cpu]",), "an engine for every kind of kernels"),
    "unit/jetstream/test_recurrent_engine.py": (
        ("any_length", "next_turn", "samples", "branch", "stop_", "aborted", "[3]"),
        "an engine of other shapes for each",
    ),
    "unit/jetstream/test_latent_attention.py": (
        ("are_scored[latent]", "in_rows[None]"),
        "an engine for every path of a request",
    ),
    "unit/jetstream/test_images_and_states.py": (
        ("share_no_state",),
        "an engine for every number of slots and pages",
    ),
    "unit/jetstream/test_routed_experts.py": (("choose_alike",), "an engine with experts for each"),
    "unit/jetstream/test_sampling.py::test_draws_follow_the_distribution_and_logprobs_are_of_it": (
        ("{'top_k': 5}",),
        "many draws for every rule",
    ),
    "unit/jetstream/test_speculation.py": (
        ("[xla-0.0]", "accepted_run_end_it[xla"),
        "an engine for every kernel and rule",
    ),
    "unit/learner/test_algorithms.py": (("test_values_are",), "compiles every loss"),
    "unit/learner/test_distillation.py": (
        ("test_with_the_whole_vocabulary", "in_float64"),
        "compiles every layout",
    ),
    "unit/learner/test_image_packing.py": (("passes[delta net]",), "compiles every layout"),
    "unit/learner/test_learner.py::test_the_gradient_does_not_depend_on_the_layout": (
        ("'remat': 'full'", "'pack_length': 40"),
        "compiles every layout",
    ),
    "unit/learner/test_learner.py::test_the_gradient_over_supports_does_not_depend_on_the_layout": (
        ("{'share_prefixes': True}",),
        "compiles every layout",
    ),
    "unit/learner/test_linear_logprobs.py": (("67", "among_its_ids"), "compiles every layout"),
    "unit/learner/test_lora.py::test_only_adapters_change_and_have_optimizer_state": (
        ("[none]",),
        "a learner for every base",
    ),
    "unit/learner/test_lora.py::test_the_files_load_in_peft_and_give_the_merged_models_logits": (
        ("[llama]", "[glm4_moe]"),
        "a model of transformers for every family",
    ),
    "unit/learner/test_nonfinite_updates.py": (
        ("test_steps_are_counted",),
        "compiles every kind of learner",
    ),
    "unit/learner/test_router_loss.py": (("test_it_falls",), "compiles every layout"),
    "unit/learner/test_router_replay.py": (("test_in_float32",), "compiles every layout"),
    "unit/learner/test_sequence_learner.py": (
        ("cross_entropy", "adamw", "refused", "nothing_compiles", "twins"),
        "compiles every loss",
    ),
    "unit/models/test_attention.py": (("[100-False]",), "compiles every size"),
    "unit/models/test_delta_kernel.py": (
        ("far_chunks[single heads]",),
        "compiles kernels for every shape",
    ),
    "unit/models/test_delta_net.py::test_chunks_equal_the_recurrence_at_every_boundary": (
        ("[75]",),
        "compiles every size",
    ),
    "unit/models/test_layer_scan.py::test_every_layer_has_its_own_parameters_and_gives_them_their_gradient": (
        ("[DDDADDDADD]",),
        "compiles every pattern",
    ),
    "unit/models/test_layers_of_different_kinds.py": (
        ("test_a_parameter_is", "test_files_name", "[none]"),
        "compiles every layout",
    ),
    "unit/models/test_tree_kernel.py": (("test_outputs_and_gradients",), "compiles every kernel"),
    "unit/supervised/test_train.py::test_a_run_learns_its_rows_and_others_use_its_checkpoint": (
        ("SftConfig",),
        "a run for every kind",
    ),
    "unit/test_routes.py::test_many_small_values_are_refused_before_they_are_objects": (
        ("[endpoint]",),
        "large bodies for every route",
    ),
    "unit/tool_server/sandbox/test_assertions.py::test_an_error_of_the_program_ends_no_loop_of_the_tests": (
        ("[a zip of maps]", "[a loop over a map]", "[an asynchronous loop]"),
        "a sandbox for every loop",
    ),
    "unit/tool_server/sandbox/test_assertions.py::test_an_error_that_the_tests_expect_passes": (
        ("StopIteration]",),
        "a sandbox for every error",
    ),
    "unit/tool_server/sandbox/test_assertions.py::test_an_honest_program_passes": (
        (
            "[a class]",
            "[exceptions]",
            "[generators]",
            "[threads that call back]",
            "[unittest]",
            "[arrays]",
        ),
        "a sandbox for every program",
    ),
    "unit/tool_server/sandbox/test_assertions.py::test_tests_are_understood_however_they_are_written": (
        ("[MBPP's]", "[called tests]", "[unittest]", "[a dunder main]"),
        "programs that import test frameworks",
    ),
    "unit/tool_server/test_tool_server_workers.py": (
        ("test_a_tool_that_kills_its_worker",),
        "servers whose workers die",
    ),
    "unit/tools/test_mcp.py::test_a_call_that_hangs_is_left_and_others_go_on": (
        ("[stdio]",),
        "starts a server for every transport",
    ),
    "unit/trainer/test_unbiased_resume.py": (("[sync]",), "fifty kills for every trainer"),
    "unit/utils/test_hub.py::test_what_the_hub_refuses_is_said_with_the_fix": (
        ("closed",),
        "processes that import the Hub's client",
    ),
}
"""Files and tests that run in part without ``--all``: parts of these tests' names, and why."""


NIGHTLY = {
    "conformance/test_conformance.py::test_engines_report_experts[remote]": "an engine with experts behind a server; `--all` has one in the process",
    "e2e/test_agent_examples.py::test_a_program_in_the_sandbox_trains_on_task_folders[swe_mini": "a run in sandboxes; `--all` has another on task folders",
    "e2e/test_agent_examples.py::test_an_example_trains_with_every_trajectory_accounted_for[openai_agent]": "a run; `--all` has LangGraph's example, and tests/unit/agents/test_clients.py OpenAI's agent",
    "e2e/test_async_modes.py::test_a_run_that_was_ended_goes_on_and_loses_and_doubles_nothing[keep": "two runs; `--all` ends the other modes",
    "e2e/test_async_modes.py::test_a_run_that_was_ended_goes_on_and_loses_and_doubles_nothing[one_step_off-interrupt]": "two runs; `--all` kills one, and interrupts other trainers in tests/faults",
    "e2e/test_async_modes.py::test_a_run_trains_on_every_row_once_and_within_its_bound[recompute]": "a run; `--all` has the others, and tests/unit/trainer what is recomputed",
    "e2e/test_mesh_run.py::test_an_engine_on_each_of_the_learners_devices[one_step_off]": "a run on four devices; `--all` has the synchronous one",
    "e2e/test_mesh_run.py::test_learner_and_engine_on_meshes_side_by_side[sync]": "a run on six devices; `--all` has the asynchronous one",
    "e2e/test_multihost_run.py::test_a_full_disk_on_one_process_ends_the_run_with_a_message_and_it_resumes[1]": "three runs; `--all` fills the disk of process 0",
    "e2e/test_multihost_run.py::test_two_processes_run_to_the_end_and_one_goes_on_from_their_checkpoint[fully_async]": "three runs; `--all` has the synchronous ones",
    "e2e/test_ray_engines.py::test_an_actor_that_is_killed_costs_time_and_no_trajectory[one of two, fully_async]": "a run; `--all` kills the only engine in two others",
    "e2e/test_ray_engines.py::test_every_placement_samples_the_same_trajectories[asleep]": "a run; `--all` has another whose engine sleeps",
    "e2e/test_ray_job.py::test_nodes_that_stall_die_or_come_late_cost_no_trajectory": "waits five minutes; `--all` has a learner that is killed",
    "e2e/test_real_model.py::test_three_steps_on_the_calculator_teach_something": "trains 135M parameters, as the wheel's quickstart does",
    "e2e/test_recipes.py::test_a_recipe_trains_and_accounts_for_everything[arpo]": "a run of a tree; `--all` has TreeRL's",
    "e2e/test_recipes.py::test_a_recipe_trains_and_accounts_for_everything[constrained_calls]": "a run of what the quickstart trains; `--all` has that one",
    "e2e/test_recipes.py::test_a_recipe_trains_and_accounts_for_everything[dapo]": "a run; `--all` has CISPO's, with the same filters and updates",
    "e2e/test_recipes.py::test_a_recipe_trains_and_accounts_for_everything[dr_grpo]": "a run; tests/unit/learner has its advantages and loss",
    "e2e/test_recipes.py::test_a_recipe_trains_and_accounts_for_everything[grpo_kl]": "a run; `--all` has GiGPO's, with the same divergence in its loss",
    "e2e/test_recipes.py::test_a_recipe_trains_and_accounts_for_everything[gspo]": "a run; `--all` has CISPO's with as many updates, tests/unit/learner has its loss",
    "e2e/test_recipes.py::test_a_recipe_trains_and_accounts_for_everything[mt_grpo]": "a run; tests/unit/learner has its advantages",
    "e2e/test_recipes.py::test_a_recipe_trains_and_accounts_for_everything[off_policy]": "a run; `--all` has the asynchronous one, with the same corrections",
    "e2e/test_recipes.py::test_a_recipe_trains_and_accounts_for_everything[one_step_off]": "a run; `--all` has others of this trainer",
    "e2e/test_recipes.py::test_a_recipe_trains_and_accounts_for_everything[reinforce_plus_plus]": "a run; `--all` has PPO's with the same divergence, tests/unit/learner has its advantages",
    "e2e/test_recipes.py::test_a_recipe_trains_and_accounts_for_everything[remax]": "a run; tests/unit/trainer has its greedy samples, tests/unit/learner its advantages",
    "e2e/test_recipes.py::test_a_recipe_trains_and_accounts_for_everything[tpu_8b]": "a run; `--all` has another in bfloat16",
    "e2e/test_recipes.py::test_a_recipe_trains_and_accounts_for_everything[tree_grpo]": "a run of a tree; `--all` has TreeRL's",
    "e2e/test_remote_run.py::test_a_server_added_by_command_takes_over_from_the_one_that_is_removed": "two servers; `--all` has a run with one",
    "e2e/test_remote_run.py::test_eval_on_a_rollout_server_samples_what_the_engine_here_does": "a server; `--all` has a run with one",
    "e2e/test_resume.py::test_twenty_steps_are_ten_a_kill_and_ten_more[ppo": "forty steps of PPO; `--all` has forty of GRPO",
    "e2e/test_roles_run.py::test_a_frozen_role_is_on_record_and_not_trained[fully_async]": "a run; `--all` has the synchronous one",
    "e2e/test_roles_run.py::test_a_frozen_role_is_on_record_and_not_trained[one_step_off]": "a run; `--all` has the other trainers",
    "e2e/test_run.py::test_ctrl_c_leaves_a_checkpoint_that_resumes": "two runs; `--all` interrupts others in tests/faults",
    "e2e/test_run.py::test_the_same_seed_gives_the_same_trajectories_and_another_does_not": "three runs; `--all` compares others of one seed in e2e/test_step_replay.py",
    "e2e/test_sigterm.py::test_sigterm_saves_in_every_phase[compile the learner]": "two runs; `--all` stops the engine's compilation",
    "e2e/test_sigterm.py::test_sigterm_saves_in_every_phase[evaluate]": "two runs; `--all` stops the rollout",
    "e2e/test_step_replay.py::test_steps_of_every_kind_are_equal_to_the_bit[penalties of long responses]": "a run; `--all` has other kinds",
    "e2e/test_step_replay.py::test_steps_of_every_kind_are_equal_to_the_bit[several updates in a step, clipped]": "a run; `--all` has other kinds",
    "e2e/test_task_examples.py::test_an_example_runs[kuhn_poker]": "a run; `--all` has another of two roles",
    "e2e/test_task_examples.py::test_an_example_runs[reasoning_gym]": "a run; `--all` has another in an environment",
    "e2e/test_task_examples.py::test_an_example_runs[simulated_user]": "a run; tests/unit/environments has its users",
    "e2e/test_task_examples.py::test_an_example_with_a_tool_server_calls_it_and_learns_from_it[python_agent]": "trains 135M parameters; `--all` has the SQL agent",
    "e2e/test_task_examples.py::test_an_example_with_a_tool_server_calls_it_and_learns_from_it[search_agent]": "trains 135M parameters; `--all` has the SQL agent",
    "e2e/test_tpu_pod_run.py::test_a_managed_job_on_two_hosts_recovers_with_every_step_once": "two runs of two hosts; `--all` has one that loses its slice",
    "e2e/test_tree_grpo_agents.py::test_one_step_of_tree_grpo[search_agent]": "a run; `--all` has another agent whose tools are behind a server",
    "e2e/test_tree_grpo_agents.py::test_one_step_of_tree_grpo[text_tool_agent]": "a run; `--all` has another agent with tools",
    "faults/test_disk_full.py::test_a_run_that_cannot_write_a_step_ends_with_a_message_and_can_resume[trajectories.jsonl]": "two runs; `--all` fails to write metrics",
    "faults/test_finished_run.py::test_killed_after_it_was_resumed_with_more_steps_it_has_lost_nothing[goes back]": "five runs; `--all` has those that go on",
    "faults/test_interrupt_anywhere.py::test_an_interrupted_run_saves_its_last_step_and_leaves_nothing[one_step_off]": "three runs; `--all` interrupts the other trainers",
    "gpu_backend/test_training.py::test_a_run_needs_only_another_backend[placement=separate]": "a run with Ray; `--all` has the script's, and one that broadcasts",
    "parity/test_qwen_images_vs_transformers.py::test_every_field_of_a_config_is_honoured_refused_or_without_effect[Qwen3_5Moe]": "a model for every field; `--all` has the dense one's",
    "parity/test_qwen_images_vs_transformers.py::test_every_gradient_of_tower_and_decoder_is_equal[Qwen3_5Moe]": "compiles a tower's gradient; `--all` has the dense one's",
    "parity/test_qwen_images_vs_transformers.py::test_the_engine_says_after_images_what_transformers_says[Qwen3_5Moe]": "compiles an engine with a tower; `--all` has the dense one's",
    "unit/agents/test_clients.py::test_an_unmodified_agent_is_one_exact_trajectory_that_is_trained_on[smolagents]": "takes long to import; `--all` has the other clients",
    "unit/agents/test_endpoint_images.py::test_images_of_two_turns_are_in_one_exact_trajectory_that_is_trained_on[gemini]": "compiles an engine and a learner with a tower; `--all` has two other clients",
    "unit/agents/test_endpoint_images.py::test_images_of_two_turns_are_in_one_exact_trajectory_that_is_trained_on[responses]": "compiles an engine and a learner with a tower; `--all` has two other clients",
    "unit/agreement/test_faults_by_kind.py::test_a_tensor_that_is_used_wrongly_is_named_by_log_probs_alone[experts]": "compiles experts for every hypothesis",
    "unit/agreement/test_faults_in_the_jax_engine.py::test_a_healthy_engine_agrees_to_its_tolerance_and_all_its_layers_do[gemma3_text]": "an engine; unit/agreement/test_healthy_engines.py has it of each kind of layer",
    "unit/agreement/test_faults_in_the_jax_engine.py::test_a_healthy_engine_agrees_to_its_tolerance_and_all_its_layers_do[qwen3_moe]": "an engine; unit/agreement/test_healthy_engines.py has it of each kind of layer",
    "unit/agreement/test_faults_in_the_jax_engine.py::test_a_setting_that_differs_is_named[expert weights]": "an engine; `--all` has another setting of experts",
    "unit/agreement/test_faults_in_the_jax_engine.py::test_a_setting_that_differs_is_named[rope scaling]": "an engine; `--all` has another rotary setting",
    "unit/agreement/test_faults_in_the_jax_engine.py::test_a_setting_that_differs_is_named[window]": "an engine; `--all` names windows in test_faults_by_kind.py",
    "unit/agreement/test_faults_in_the_jax_engine.py::test_an_engine_of_a_coarser_precision_than_it_says_is_named[int8]": "an engine; `--all` has bfloat16",
    "unit/deploy/plan/test_prediction.py::test_a_large_product_is_predicted_a_little_above_its_ideal[v5p": "compiles for another generation of TPUs",
    "unit/deploy/plan/test_prediction.py::test_gradients_are_exchanged_on_sparse_cores_where_there_are_some[v5p": "compiles for another generation of TPUs",
    "unit/jetstream/test_attention_kernels.py::test_whole_tiles_are_written_together_as_each_alone[0-bfloat16]": "a kernel; `--all` has other types",
    "unit/jetstream/test_attention_kernels.py::test_whole_tiles_are_written_together_as_each_alone[0-int8]": "a kernel; `--all` has it from another place on",
    "unit/jetstream/test_attention_kernels.py::test_whole_tiles_are_written_together_as_each_alone[1073741824-bfloat16]": "a kernel; `--all` has other types",
    "unit/jetstream/test_attention_kernels.py::test_whole_tiles_are_written_together_as_each_alone[1073741824-float32]": "a kernel; `--all` has it from another place on",
    "unit/jetstream/test_eight_bits.py::test_log_probs_are_those_of_the_rounded_matrices[fp8-dense]": "an engine; `--all` has int8 of it",
    "unit/jetstream/test_eight_bits.py::test_log_probs_are_those_of_the_rounded_matrices[fp8-latent]": "an engine; `--all` has int8 of it",
    "unit/jetstream/test_eight_bits.py::test_log_probs_are_those_of_the_rounded_matrices[int8-experts]": "an engine; `--all` has fp8 of it",
    "unit/jetstream/test_eight_bits.py::test_log_probs_are_those_of_the_rounded_matrices[int8-shared expert]": "an engine; `--all` has fp8 of it",
    "unit/jetstream/test_engine_mesh.py::test_tokens_and_logprobs_are_those_of_one_device_over_turns_and_updates[few KV heads": "compiles for eight devices; `--all` has experts, with fewer heads than devices for their keys",
    "unit/jetstream/test_engine_mesh.py::test_tokens_and_logprobs_are_those_of_one_device_over_turns_and_updates[latents": "compiles for eight devices; `--all` has them on a learner's mesh",
    "unit/jetstream/test_gemma4.py::test_an_adapter_of_every_matrix_computes_what_the_merged_matrices_do[heads]": "an engine; `--all` has those that share keys and have experts",
    "unit/jetstream/test_gemma4.py::test_chunked_shared_and_preempted_contexts_are_sampled_as_they_are_scored[cpu-experts]": "an engine; `--all` has it without kernels",
    "unit/jetstream/test_gemma4.py::test_chunked_shared_and_preempted_contexts_are_sampled_as_they_are_scored[xla-heads]": "an engine; `--all` has it with kernels",
    "unit/jetstream/test_gemma4.py::test_chunked_shared_and_preempted_contexts_are_sampled_as_they_are_scored[xla-shared keys]": "an engine; `--all` has it with kernels",
    "unit/jetstream/test_gemma4.py::test_eight_bits_round_weights_and_keys_only_a_little[fp8-": "an engine; `--all` has int8, and fp8 in test_eight_bits.py",
    "unit/jetstream/test_gemma4.py::test_eight_bits_round_weights_and_keys_only_a_little[none-int8-experts]": "an engine; `--all` has the one that shares keys",
    "unit/jetstream/test_gemma4.py::test_pages_come_back_from_the_host_with_all_heads[experts]": "an engine; `--all` has the one that shares keys",
    "unit/jetstream/test_gemma4.py::test_speculated_ids_are_those_of_plain_decoding[experts-cpu]": "two engines; `--all` has them without kernels",
    "unit/jetstream/test_gemma4.py::test_speculated_ids_are_those_of_plain_decoding[shared keys-xla]": "two engines; `--all` has them with kernels",
    "unit/jetstream/test_images_and_states.py::test_speculation_after_an_image_leaves_the_state_after_the_accepted_ids[100]": "an engine; `--all` has other mistakes",
    "unit/jetstream/test_latent_attention.py::test_an_adapter_of_every_matrix_computes_what_the_merged_matrices_do[direct queries]": "an engine; `--all` has queries of a low rank, whose matrices are more",
    "unit/jetstream/test_latent_attention.py::test_latents_in_8_bits_are_attended_to_as_they_are_restored[fp8]": "an engine; `--all` has int8",
    "unit/jetstream/test_olmo3.py::test_an_adapter_of_every_matrix_computes_what_the_merged_matrices_do[xla]": "an engine; `--all` has it with kernels",
    "unit/jetstream/test_recurrent_engine.py::test_adapters_are_added_to_the_matrices_of_delta_nets[True]": "an engine; `--all` has separate matrices",
    "unit/jetstream/test_recurrent_engine.py::test_speculation_leaves_the_state_after_the_accepted_ids[100]": "an engine; `--all` has other mistakes",
    "unit/jetstream/test_speculation.py::test_each_request_keeps_its_adapter[cpu]": "two engines; `--all` has them without kernels",
    "unit/jetstream/test_speculation.py::test_experts_are_those_of_plain_decoding[cpu]": "two engines; `--all` has them without kernels",
    "unit/jetstream/test_speculation.py::test_ids_are_those_of_plain_decoding_and_log_probs_those_of_full_passes[cpu-0.0]": "two engines; `--all` has it without kernels, and draws with them",
    "unit/jetstream/test_speculation.py::test_ids_are_those_of_plain_decoding_and_log_probs_those_of_full_passes[xla-0.7]": "two engines; `--all` has it with kernels, and greedily without",
    "unit/jetstream/test_speculation.py::test_nothing_is_compiled_after_warm_up[cpu]": "every program of an engine; `--all` has those without kernels",
    "unit/jetstream/test_speculation.py::test_rejected_positions_of_an_aborted_request_are_never_read[xla]": "an engine; `--all` has it with kernels",
    "unit/jetstream/test_speculation.py::test_siblings_and_later_samples_draft_for_each_other[xla]": "an engine; `--all` has it with kernels",
    "unit/jetstream/test_speculation.py::test_weights_that_change_between_dispatches_are_those_of_the_next_ids[xla]": "an engine; `--all` has it with kernels",
    "unit/jetstream/test_tpu_programs.py::test_a_product_with_experts_compiles_to_two_kernels[v5e:2x2-bf16]": "compiles for TPUs; `--all` has int8",
    "unit/jetstream/test_tpu_programs.py::test_an_engines_attention_compiles_to_kernels_and_turns_no_cache_around[v5e:2x2-fp8]": "compiles for TPUs; `--all` has other types",
    "unit/jetstream/test_tpu_programs.py::test_chunks_compile_to_a_kernel[v5e:2x2-prefill-bfloat16-64-256]": "compiles for TPUs; `--all` has it for verification",
    "unit/jetstream/test_tpu_programs.py::test_chunks_compile_to_a_kernel[v5e:2x2-prefill-int8-64-None]": "compiles for TPUs; `--all` has it for verification",
    "unit/jetstream/test_tpu_programs.py::test_chunks_compile_to_a_kernel[v5e:2x2-verification-bfloat16-128-None]": "compiles for TPUs; `--all` has it for prefill",
    "unit/jetstream/test_tpu_programs.py::test_small_pages_and_heads_compile_to_kernels_too[v5e:2x2-int8]": "compiles for TPUs; `--all` has bfloat16",
    "unit/learner/test_algorithms.py::test_gradients_do_not_depend_on_packing_sharing_or_splitting[geo_mean]": "compiles a loss in every layout; `--all` has another of sequences",
    "unit/learner/test_distillation.py::test_the_gradient_over_candidates_does_not_depend_on_the_layout[False-{'pack_length': 40": "compiles two layouts; `--all` has them of the whole vocabulary",
    "unit/learner/test_distillation.py::test_the_gradient_over_candidates_does_not_depend_on_the_layout[True-{'share_prefixes': True}]": "compiles two layouts; `--all` has them of candidates",
    "unit/learner/test_image_packing.py::test_adapters_leave_the_tower_alone[model0-": "compiles a learner with a tower; `--all` has another",
    "unit/learner/test_image_packing.py::test_an_update_changes_the_tower_unless_it_is_frozen[attention-True]": "compiles a learner with a tower; `--all` freezes another",
    "unit/learner/test_image_packing.py::test_an_update_changes_the_tower_unless_it_is_frozen[delta net-False]": "compiles a learner with a tower; `--all` updates another",
    "unit/learner/test_image_packing.py::test_gradients_of_tower_and_decoder_do_not_depend_on_the_layout[attention]": "compiles two gradients with a tower; `--all` has a model with both kinds of layers",
    "unit/learner/test_learner.py::test_the_gradient_does_not_depend_on_the_layout[{'remat': 'dots'}-": "compiles a layout; `--all` recomputes everything",
    "unit/learner/test_learner.py::test_the_gradient_does_not_depend_on_the_layout[{'share_prefixes': True}-": "compiles a layout; `--all` has shared prefixes in longer rows",
    "unit/learner/test_lora.py::test_adapters_of_other_mixers_train_over_a_quantized_base[delta nets-int8": "a learner; `--all` has eight bits below latent attention",
    "unit/learner/test_lora.py::test_adapters_of_other_mixers_train_over_a_quantized_base[latent attention-nf4": "a learner; `--all` has four bits below delta nets",
    "unit/learner/test_lora.py::test_only_adapters_change_and_have_optimizer_state[int8]": "a learner; `--all` has four bits",
    "unit/learner/test_lora.py::test_the_files_load_in_peft_and_give_the_merged_models_logits[gemma4 small]": "a model of transformers; `--all` has another Gemma 4",
    "unit/learner/test_lora.py::test_the_files_load_in_peft_and_give_the_merged_models_logits[olmo3]": "a model of transformers; `--all` has others with names like its",
    "unit/learner/test_lora.py::test_the_files_load_in_peft_and_give_the_merged_models_logits[qwen2_5_vl]": "a model of transformers; `--all` has others with names like its",
    "unit/learner/test_lora.py::test_the_files_load_in_peft_and_give_the_merged_models_logits[qwen3_5]": "a model of transformers; `--all` has Qwen3-Next's, with its mixers",
    "unit/learner/test_meshes.py::test_a_mesh_gives_the_loss_and_gradient_of_one_device[experts and other axes]": "compiles for eight devices; `--all` has experts on two other meshes",
    "unit/learner/test_meshes.py::test_a_mesh_gives_the_loss_and_gradient_of_one_device[int8]": "compiles for eight devices; tests/unit/learner/test_precision.py has eight bits on one",
    "unit/learner/test_meshes.py::test_a_mesh_gives_the_loss_and_gradient_of_one_device[nf4]": "compiles for eight devices; tests/unit/learner/test_precision.py has four bits on one",
    "unit/learner/test_meshes.py::test_a_mesh_gives_the_loss_and_gradient_of_one_device[one axis]": "compiles for eight devices four times; `--all` has these axes together",
    "unit/learner/test_nonfinite_updates.py::test_a_trajectory_without_a_free_token_leaves_the_kl_to_the_others[advantage]": "compiles a learner; `--all` has the divergence in the reward and in the loss",
    "unit/learner/test_nonfinite_updates.py::test_half_a_step_trains_its_half[1]": "compiles a learner; `--all` has the other half",
    "unit/learner/test_router_loss.py::test_loss_and_gradient_do_not_depend_on_the_layout[{'pack_length': 300": "compiles a layout; `--all` has another",
    "unit/learner/test_router_loss.py::test_loss_and_gradient_do_not_depend_on_the_layout[{'pack_length': 64": "compiles a layout; `--all` has another",
    "unit/learner/test_router_replay.py::test_the_gradient_does_not_depend_on_the_layout[{'pack_length': 300": "compiles a layout; `--all` has others",
    "unit/learner/test_router_replay.py::test_the_gradient_does_not_depend_on_the_layout[{'pack_length': 40": "compiles a layout; `--all` has another with the router's loss",
    "unit/learner/test_sequence_learner.py::test_loss_and_gradient_are_those_of_pytorch[cispo]": "compiles a loss; `--all` has others of ratios",
    "unit/learner/test_sequence_learner.py::test_loss_and_gradient_are_those_of_pytorch[dro]": "compiles a loss; `--all` has others of ratios",
    "unit/learner/test_sequence_learner.py::test_loss_and_gradient_are_those_of_pytorch[importance_sampling]": "compiles a loss; `--all` has others of ratios",
    "unit/models/test_delta_kernel.py::test_outputs_and_gradients_of_any_forest_equal_those_of_its_paths[single heads]": "kernels for every forest; `--all` has pairs of heads",
    "unit/models/test_sharded_families.py::test_a_mesh_reads_and_trains_a_family_as_one_device_does[gemma4_text, experts]": "compiles another family for eight devices; `--all` has another Gemma 4, and others with experts",
    "unit/models/test_sharded_families.py::test_a_mesh_reads_and_trains_a_family_as_one_device_does[glm4_moe": "compiles two families for eight devices; `--all` has others with their kinds of layers",
    "unit/models/test_sharded_families.py::test_a_mesh_reads_and_trains_a_family_as_one_device_does[olmo3": "compiles two families for eight devices; `--all` has others with their kinds of layers",
    "unit/models/test_sharded_families.py::test_a_mesh_reads_and_trains_a_family_as_one_device_does[qwen2": "compiles three families for eight devices; `--all` has others with their kinds of layers",
    "unit/models/test_sharded_families.py::test_a_mesh_reads_and_trains_a_family_as_one_device_does[qwen3_5": "compiles another family for eight devices; `--all` has Qwen3-Next, with its kinds of layers",
    "unit/runtime/test_multihost.py::test_adapters_train_on_two_processes_as_on_one": "three processes; `--all` has adapters on a mesh, and two processes without",
    "unit/runtime/test_multihost.py::test_one_and_four_processes_go_on_from_what_two_saved": "seven processes; `--all` has one that goes on from what two saved",
    "unit/runtime/test_multihost_engines.py::test_two_processes_sample_what_all_four_devices_have_trained[data]": "a run of two processes; `--all` has the one whose engines split a model",
    "unit/testing/simulate/test_simulation.py::test_a_session_whose_server_is_full_waits_where_its_context_is_dear": "simulates thousands of sessions; `--all` has those that move",
    "unit/trainer/test_unbiased_resume.py::test_whenever_a_run_is_killed_it_trains_on_every_row_once[one_step_off]": "fifty kills; `--all` has them of the other trainers",
}
"""What ``--all`` leaves to ``--nightly``: how a test's name with parameters begins, and why."""

OF_EACH_KIND = (
    "[llama]",
    "[qwen3]",
    "[glm4_moe with groups]",
    "[deepseek_v3]",
    "[gpt_oss]",
    "[gemma4 small]",
    "[gemma4]",
    "[qwen3_5_moe_text]",
    "[olmo3]",
)
"""Configs that have every kind of layer between them; all others are variations of theirs."""

PARTS_OF_ALL = {
    "conformance/test_conformance.py": (
        (
            "toy]",
            "toy_upload]",
            "[jetstream]",
            "[jetstream_int8]",
            "[jetstream_speculative]",
            "[ray_jetstream]",
            "[external_engine]",
            "[vllm]",
            "[ray_vllm]",
            "test_data_parallel",
            "test_every_file",
            "test_what_a_rounded",
            "test_engines_",
            "test_an_engine_",
        ),
        "engines over HTTP, which the toy is tested over, and tests/e2e/test_remote_run.py an engine",
    ),
    "gpu_backend/test_families.py": (("[qwen3_moe]", "[gemma3]"), "an engine for every family"),
    "gpu_backend/test_faults.py::test_a_setting_that_differs_is_named": (
        ("[rope theta]", "[raw log-probs]"),
        "an engine for every setting",
    ),
    "parity/test_families_vs_transformers.py::test_every_gradient_is_equal": (
        OF_EACH_KIND,
        "compiles a gradient for every config; `--all` compares all their logits",
    ),
    "parity/test_families_vs_transformers.py::test_the_engine_decodes_what_transformers_generates_greedily": (
        OF_EACH_KIND,
        "an engine for every config; `--all` compares all their logits",
    ),
    "parity/test_families_vs_transformers.py::test_every_field_of_a_config_is_honoured_refused_or_without_effect": (
        ("[llama]", "[qwen3]", "[qwen3_moe]", "[gpt_oss]"),
        "a model for every field",
    ),
    "unit/cli/test_damaged_files.py::test_a_damaged_run_is_a_message_in_every_command": (
        (
            "config.json",
            "summary.json-half",
            "summary.json-gone",
            "metadata-binary",
            "metadata-a list",
        ),
        "every command on each damage of each file",
    ),
    "unit/deploy/plan/test_plan_command.py": (
        (
            "[v5e",
            "refused_with_the_fix",
            "test_a_search",
            "test_what_does_not_fit",
            "test_a_compiler",
            "test_whoever",
        ),
        "compiles for every generation of TPUs",
    ),
    "unit/jetstream/test_tpu_programs.py": (("v5e",), "compiles for every generation of TPUs"),
    "unit/agreement/test_faults_by_kind.py::test_a_number_of_the_config_that_differs_is_named": (
        ("eps]", "[activation]", "[pairs]", "[windowed layers]", "[norms around]", "[biases]"),
        "an engine for every number",
    ),
    "unit/agreement/test_faults_by_kind.py::test_other_ids_from_a_later_turn_on_are_named": (
        ("[dropped]", "[BOS]", "[padding]", "[all inserted]"),
        "an engine for every fault",
    ),
    "unit/agreement/test_faults_by_kind.py::test_positions_that_are_shifted_from_a_later_turn_on_are_named": (
        ("[further]", "[restart]", "[within a turn]"),
        "an engine for every fault",
    ),
    "unit/agreement/test_faults_by_kind.py::test_a_head_that_is_read_from_the_embeddings_of_an_untied_model_is_named": (
        ("[dropped-log-probs alone]", "[not read-inspected]"),
        "an engine for every fault",
    ),
    "unit/agreement/test_healthy_engines.py::test_an_engine_of_any_family_agrees_in_its_log_probs_tensors_and_layers": (
        ("[llama]", "[gemma4 small]", "[glm4_moe]", "[gpt_oss]", "[gemma3]"),
        "an engine for every family",
    ),
    "unit/agreement/test_healthy_engines.py::test_an_engine_of_a_coarser_precision_agrees_as_far_as_that_goes": (
        ("[dtype=bfloat16]", "[kv_dtype=int8]", "[quantize=fp8]"),
        "an engine for every precision",
    ),
    "unit/jetstream/test_sampling.py::test_draws_follow_the_distribution_and_logprobs_are_of_it": (
        ("[{}]", "{'top_k': 5}", "'min_p': 0.3"),
        "many draws for every rule",
    ),
    "unit/models/test_parameters.py::test_muon_orthogonalizes_each_matrix_of_a_stack_and_nothing_else": (
        ("[gemma4 with experts]", "[gpt_oss]", "[deepseek_v3]", "[qwen3_5_moe]"),
        "compiles an optimizer for every family",
    ),
    "unit/learner/test_linear_logprobs.py": (
        ("101-4", "67", "among_its_ids", "softcapped", "kept_logits", "without_valid", "no_array"),
        "compiles every size",
    ),
    "unit/utils/test_answers.py::test_an_error_is_not_read_beyond_its_beginning": (
        ("-teacher]", "[400-", "[503-"),
        "a server for every client and status",
    ),
}
"""Files and tests that run in part without ``--nightly``: parts of these tests' names, and why."""

Parts = Mapping[str, tuple[tuple[str, ...], str]]


def is_structural(nodeid: str) -> bool:
    """Return whether a test looks at all sources, pages or tables."""
    name = nodeid.removeprefix("tests/")
    return _file(name) in STRUCTURAL or _function(name) in STRUCTURAL


def has_structural(file: str) -> bool:
    """Return whether one of a file's tests looks at all sources, pages or tables."""
    return any(_file(name) == file for name in STRUCTURAL)


def is_nightly(nodeid: str) -> bool:
    """Return whether only ``--nightly`` runs a test."""
    name = nodeid.removeprefix("tests/")
    return name.startswith(tuple(NIGHTLY)) or _is_left_out(name, PARTS_OF_ALL)


def is_slow(nodeid: str) -> bool:
    """Return whether the quick tests leave a test out."""
    name = nodeid.removeprefix("tests/")
    is_listed = _file(name) in SLOW or _function(name) in SLOW
    return is_listed or is_nightly(nodeid) or _is_left_out(name, REPRESENTATIVES)


def _is_left_out(name: str, parts: Parts) -> bool:
    """Return whether a test is of a listed file or function, and has none of the parts that run."""
    test = name.partition("::")[2]
    for listed in (_file(name), _function(name)):
        if listed in parts:
            running, _ = parts[listed]
            if not any(part in test for part in running):
                return True
    return False


def _file(name: str) -> str:
    return name.partition("::")[0]


def _function(name: str) -> str:
    """Return a test's name without its parameters, which may hold colons."""
    file, _, test = name.partition("::")
    return f"{file}::{test.partition('[')[0]}"
