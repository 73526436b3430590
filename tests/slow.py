"""The tests that ``./launch/test.sh`` leaves to ``--all``, and why. A name ends a file's, or a test's in it."""

# ruff: noqa: E501
# Names of tests are long.

SLOW = {
    "e2e/test_agent_examples.py": "a whole run for each agent framework",
    "e2e/test_agreement_run.py": "three whole runs with a fault; tests/unit/agreement has the same checks on engines",
    "e2e/test_async_modes.py": "whole runs of each trainer; their logic is under tests/unit/trainer",
    "e2e/test_distill_run.py": "whole runs, half of them with a server",
    "e2e/test_frozen_judge.py": "two engines",
    "e2e/test_mesh_run.py": "whole runs on simulated devices",
    "e2e/test_multihost_run.py": "whole runs of several processes, each of which compiles for itself",
    "e2e/test_picture_run.py": "a vision model, against transformers",
    "e2e/test_precision_runs.py": "whole runs in other precisions",
    "e2e/test_ray_engines.py": "starts Ray",
    "e2e/test_ray_job.py": "starts Ray, and runs of several processes",
    "e2e/test_real_model.py::test_three_steps_on_the_calculator_teach_something": "trains 135M parameters",
    "e2e/test_recipes.py": "a run for every recipe",
    "e2e/test_remote_run.py": "whole runs over HTTP",
    "e2e/test_roles_run.py": "whole runs of each trainer, with two adapters or two engines",
    "e2e/test_task_examples.py": "a run for every example, some on the real model",
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
    "parity/test_llama_vs_transformers.py::test_the_real_model_is_as_close_to_float64_as_transformers_is": "135M parameters in float64",
    "parity/test_qwen3_vl_vs_transformers.py::test_every_field_of_a_config_is_honoured_refused_or_without_effect": "a model for every field",
    "parity/test_qwen3_vl_vs_transformers.py::test_the_engine_continues_in_chunks_and_steps_as_transformers_does_at_once": "compiles an engine with a tower",
    "parity/test_qwen_vl_vs_transformers.py::test_every_field_of_a_config_is_honoured_refused_or_without_effect": "a model for every field",
    "unit/agents/test_command_agent.py::test_a_harbor_task_runs_in_a_container_built_from_its_dockerfile": "an image",
    "unit/cli/test_damaged_files.py::test_a_damaged_run_is_a_message_in_every_command": "each damage",
    "unit/agents/test_command_agent.py::test_rows_without_a_folder_run_in_the_configured_image": "loads an image",
    "unit/deploy/certify/test_certify.py::test_a_checkpoint_that_restores_other_numbers_deviates": "saves and restores a learner",
    "unit/deploy/certify/test_certify.py::test_an_exchange_that_goes_wrong_deviates_on_its_axis": "compiles for eight devices",
    "unit/deploy/certify/test_certify.py::test_this_machines_kernels_are_within_their_limits": "compiles every kernel",
    "unit/docs/test_notebook.py::test_it_runs_and_its_reward_rises": "trains",
    "unit/jetstream/test_data_parallel.py::test_engines_that_verify_drafts_say_what_one_says_without": "two engines",
    "unit/jetstream/test_engine_sleep.py::test_asleep_neither_cache_nor_weights_are_on_the_device": "engines on simulated devices",
    "unit/learner/test_learner.py::test_eight_simulated_devices_train_as_one_does": "compiles for eight devices",
    "unit/learner/test_learner.py::test_observations_are_trained_on_when_asked_for_and_have_no_gap": "compiles two learners",
    "unit/testing/conformance/test_mutations.py": "the conformance suite once for each mistake",
    "unit/learner/test_learner_state.py::test_a_checkpoint_restores_onto_other_meshes": "compiles for eight devices",
    "unit/learner/test_meshes.py": "compiles for eight devices",
    "unit/models/test_sharded_families.py": "compiles every family for eight devices",
    "unit/deploy/plan/test_plan_command.py": "compiles for every generation of TPUs",
    "unit/deploy/plan/test_search.py": "compiles many programs for TPUs",
    "unit/runtime/test_multihost_engines.py": "several processes, each of which compiles for itself",
    "unit/runtime/test_multihost.py": "several processes, each of which compiles for itself",
}
"""Beside these: all generations of TPUs but one in ``unit/jetstream/test_tpu_programs.py``, and all tests on vLLM."""

REPRESENTATIVES = {
    "conformance/test_conformance.py": (
        ("[toy]", "[jetstream]", "[remote_toy]", "test_every_file_of_the_suite_runs_here"),
        "an engine for every kind of backend",
    ),
    "e2e/test_policy_commands.py": (
        ("test_eval_of_a_checkpoint", "test_a_checkpoint_is_served", "test_view_shows"),
        "a run for every command",
    ),
    "e2e/test_resume.py": (
        ("test_a_run_that_was_killed_before_its_first_checkpoint",),
        "runs of twenty steps",
    ),
    "e2e/test_run.py": (
        ("test_a_run_leaves", "test_stopping_and_resuming", "test_bad_input", "test_a_row_of"),
        "several whole runs",
    ),
    "e2e/test_sigterm.py": (("[save]",), "a run for every phase"),
    "faults/test_kill_at_every_write.py": (
        ("writes_lines",),
        "a process for every write of every file",
    ),
    "parity/test_families_vs_transformers.py": (
        ("[llama]", "[qwen3]"),
        "compiles every family three times",
    ),
    "unit/agents/test_clients.py": (
        ("[openai", "[anthropic"),
        "frameworks that take seconds to import",
    ),
    "unit/agents/test_client_features.py": (
        ("[openai", "[anthropic"),
        "frameworks that take seconds to import",
    ),
    "unit/agents/test_settings_of_tests.py": (
        ("[pytest.ini]", "[none]"),
        "pytest in a sandbox for every file",
    ),
    "unit/agreement/test_faults_by_kind.py": (
        ("[eps]", "[back]", "[not themselves]", "test_min_p_is_named"),
        "an engine for every fault",
    ),
    "unit/agreement/test_faults_in_the_jax_engine.py": (
        ("[zeros]", "[rope theta]", "[int8]", "test_a_fault_between_request_and_answer"),
        "an engine for every fault",
    ),
    "unit/agreement/test_healthy_engines.py": (
        ("[llama]", "[dtype=bfloat16]", "test_an_engine_whose_weights_change"),
        "an engine for every family and precision",
    ),
    "unit/deploy/certify/test_certify.py::test_a_wrong_kernel_deviates_and_no_other": (
        ("tree_attention",),
        "the kernels' checks once for each",
    ),
    "unit/deploy/plan/test_prediction.py::test_gradients_are_exchanged_on_sparse_cores_where_there_are_some": (
        ("v5e:2x2",),
        "compiles for every generation of TPUs",
    ),
    "unit/docs/test_written_pages.py::test_its_programs_run_through": (
        ("[backend-]", "[reward-]", "[tool-]"),
        "a model is trained",
    ),
    "unit/jetstream/test_cpu_kernels.py::test_the_engine_samples_the_same_ids_with_and_without_kernels": (
        ("[plain]",),
        "an engine for each kind of layer",
    ),
    "unit/jetstream/test_engine_mesh.py": (("[dense",), "compiles for eight devices"),
    "unit/learner/test_algorithms.py::test_gradients_do_not_depend_on_packing_sharing_or_splitting": (
        ("[gspo+entropy+kl]",),
        "compiles every loss",
    ),
    "unit/learner/test_distillation.py": (
        ("test_with_the_whole_vocabulary", "test_the_advantage_has", "in_float64"),
        "compiles every layout",
    ),
    "unit/jetstream/test_attention_kernels.py": (("float32",), "kernels for every type"),
    "unit/jetstream/test_speculation.py": (
        ("[xla", "test_the_distribution_is", "test_drafts_know"),
        "an engine for every kernel and rule",
    ),
    "unit/learner/test_image_packing.py": (
        ("test_log_probs_are_those", "[True]"),
        "compiles every layout",
    ),
    "unit/learner/test_linear_logprobs.py": (
        ("67", "no_array", "among_its_ids"),
        "compiles every layout",
    ),
}
"""Files and tests of which only some run without ``--all``: parts of these tests' names, and why not all."""


def is_slow(nodeid: str) -> bool:
    """Return whether only ``--all`` runs a test."""
    file, _, test = nodeid.removeprefix("tests/").partition("::")
    function = f"{file}::{test.partition('[')[0]}"
    if file in SLOW or function in SLOW:
        return True
    for name in (file, function):
        quick, _ = REPRESENTATIVES.get(name, ((), ""))
        if quick and not any(part in test for part in quick):
            return True
    return False
