"""Keys of verl, verl-tool and AgentFly, and what becomes of them here.

Some carry over with their value, some have no meaning here, and some need a decision.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

ACTOR = "actor_rollout_ref.actor."
MODEL = "actor_rollout_ref.model."
ROLLOUT = "actor_rollout_ref.rollout."
TURNS = f"{ROLLOUT}multi_turn."
AGENT = "actor_rollout_ref.agent."  # of verl-tool; its keys have the same names here

SAME: Mapping[str, str] = {
    f"{MODEL}path": "model.path",
    "data.train_files": "data.train",
    "data.val_files": "data.eval",
    "data.shuffle": "data.shuffle",
    "data.train_batch_size": "rollout.prompts_per_step",
    "data.max_prompt_length": "agent.max_prompt_length",
    "data.max_response_length": "agent.max_response_length",
    "data.apply_chat_template_kwargs": "agent.chat_template_kwargs",
    f"{ROLLOUT}n": "rollout.group_size",
    f"{ROLLOUT}temperature": "rollout.temperature",
    f"{ROLLOUT}top_p": "rollout.top_p",
    f"{ROLLOUT}max_model_len": "rollout.max_model_len",
    f"{TURNS}max_assistant_turns": "agent.max_assistant_turns",
    f"{TURNS}max_user_turns": "agent.max_user_turns",
    f"{TURNS}max_parallel_calls": "agent.max_parallel_calls",
    f"{TURNS}tool_config_path": "tools.tool_config_path",
    f"{TURNS}function_tool_path": "tools.function_tool_path",
    f"{TURNS}interaction_config_path": "interactions.interaction_config_path",
    f"{TURNS}format": "agent.tool_format",
    f"{ROLLOUT}agent.default_agent_loop": "agent.default_agent",
    f"{ACTOR}ppo_epochs": "learner.ppo_epochs",
    f"{ACTOR}grad_clip": "learner.max_grad_norm",
    f"{ACTOR}optim.lr": "learner.learning_rate",
    f"{ACTOR}optim.lr_scheduler_type": "learner.lr_scheduler_type",
    f"{ACTOR}optim.min_lr_ratio": "learner.min_lr_ratio",
    f"{ACTOR}optim.weight_decay": "learner.weight_decay",
    f"{ACTOR}clip_ratio_low": "algorithm.clip_ratio_low",
    f"{ACTOR}clip_ratio_high": "algorithm.clip_ratio_high",
    f"{ACTOR}clip_ratio_c": "algorithm.clip_ratio_c",
    f"{ACTOR}loss_agg_mode": "algorithm.loss_agg_mode",
    f"{ACTOR}loss_scale_factor": "algorithm.loss_scale_factor",
    f"{ACTOR}entropy_coeff": "algorithm.entropy_coeff",
    "algorithm.gamma": "algorithm.gamma",
    "algorithm.lam": "algorithm.lam",
    "algorithm.rollout_correction.rollout_is": "algorithm.rollout_correction.rollout_is",
    "algorithm.rollout_correction.rollout_is_threshold": (
        "algorithm.rollout_correction.rollout_is_threshold"
    ),
    "algorithm.rollout_correction.rollout_rs": "algorithm.rollout_correction.rollout_rs",
    "critic.optim.lr": "critic.learning_rate",
    "critic.cliprange_value": "critic.cliprange_value",
    "critic.model.path": "critic.path",
    "trainer.critic_warmup": "critic.critic_warmup",
    "trainer.project_name": "trainer.project_name",
    "trainer.total_training_steps": "trainer.steps",
    "trainer.max_actor_ckpt_to_keep": "trainer.keep_checkpoints",
    "custom_reward_function.path": "reward.path",
    "reward.custom_reward_function.path": "reward.path",
}
"""verl's key -> ours, where the value is the same."""

VLLM: Mapping[str, str] = {
    f"{ROLLOUT}tensor_model_parallel_size": "rollout.vllm.tensor_parallel_size",
    f"{ROLLOUT}gpu_memory_utilization": "rollout.vllm.gpu_memory_utilization",
    f"{ROLLOUT}enforce_eager": "rollout.vllm.enforce_eager",
    f"{ROLLOUT}max_num_seqs": "rollout.vllm.max_num_seqs",
}
"""The same for settings of the engine, with ``rollout.backend=vllm``."""

AGENTFLY: Mapping[str, str] = {
    "agent.num_chains": "rollout.group_size",
    "agent.max_turns": "agent.max_assistant_turns",
    "agent.init_config.max_model_len": "rollout.max_model_len",
    "agent.init_config.model_name_or_path": "model.path",
    "agent.init_config.tool_parser_name": "agent.tool_format",
}
"""The same for AgentFly, whose other keys are verl's."""

NO_MEANING: Mapping[str, str] = {
    r"data\.(filter_overlong_prompts.*|return_raw_chat|truncation)": (
        "messages are kept, and trajectories with too long a prompt dropped and counted"
    ),
    r"data\.val_batch_size": "data.eval_limit rows are evaluated together",
    rf"{ROLLOUT}val_kwargs\.(top_p|top_k)": (
        "evaluations in a run sample from the whole distribution; `jax-agent-rl eval` has --top-p"
        " and --top-k"
    ),
    rf"{ROLLOUT}agent\.num_workers": "all agent loops of a process run in one event loop",
    rf"{TURNS}tokenization_sanity_check_mode": (
        "sampled ids are kept, and text is never tokenized again"
    ),
    rf"{MODEL}(use_remove_padding|trust_remote_code|use_fused_kernels|use_shm)": (
        "rows are always packed, and code of a checkpoint never runs"
    ),
    rf"{ACTOR}checkpoint\.\w+_contents": (
        "checkpoints hold all that a run resumes from; `export` writes Hugging Face files"
    ),
    rf"{AGENT}max_start_length": "agent.max_prompt_length limits the prompt",
    rf"{AGENT}retokenization": "sampled ids are kept, and text is never tokenized again",
    r"actor_rollout_ref\.hybrid_engine": "rollout.placement is colocated by default",
    r"agent\.(use_agent|init_config\.(backend|template))": (
        "a row's agent_name, or agent.default_agent, selects the agent; the model's chat template"
        " applies"
    ),
    (
        r".*\.(use_dynamic_bsz|log_prob_use_dynamic_bsz|\w*max_token_len_per_gpu"
        r"|log_prob_micro_batch_size(_per_gpu)?)"
    ): "rows are packed to learner.pack_length",
    (
        r".*(\.|_)(param_offload|optimizer_offload|grad_offload|use_torch_compile|strategy"
        r"|forward_prefetch)"
    ): "JAX compiles and shards the learner's step",
    (
        rf"{ROLLOUT}(mode|free_cache_engine|enable_chunked_prefill|calculate_log_probs|dtype"
        r"|load_format|layered_summon)"
    ): "the engine always works asynchronously, prefills in chunks and reports log-probs",
    r"reward\.(num_workers|reward_manager\.name)": (
        "functions are called by their parameters, in reward.workers processes"
    ),
    (
        r"trainer\.(val_before_train|default_hdfs_dir|balance_batch|\w+_data_dir"
        r"|log_val_generations)"
    ): "a run evaluates first if data.eval is set, and keeps trajectories in its folder",
}
"""Pattern of verl's keys -> why there is no such key here."""

CHOICES: Mapping[str, str] = {
    r"(actor_rollout_ref\.actor|critic)\.ppo_micro_batch_size(_per_gpu)?": (
        "set learner.micro_batch_size, which counts packed rows of learner.pack_length tokens, by"
        " the memory"
    ),
    r".*\.(fsdp_size|ulysses_sequence_parallel_size)|trainer\.(n_gpus_per_node|nnodes)": (
        "set learner.mesh.fsdp and learner.mesh.context for your devices"
    ),
    rf"{MODEL}enable_gradient_checkpointing": "set learner.remat (default dots) by the memory",
    rf"{TURNS}max_tool_response_length": (
        "verl counts characters; set agent.max_tool_response_length in tokens"
    ),
    "|".join(map(re.escape, VLLM)): (
        "a setting of vLLM's engine: set rollout.backend=vllm and its key in rollout.vllm"
    ),
    rf"{ROLLOUT}agent\.agent_loop_config_path": (
        "register the loop with @register_agent in a file, and set agent.module"
        " (docs/write/agent.md)"
    ),
    r"data\.custom_cls\.(path|name)": (
        "write the rows that the class makes as JSON Lines or Parquet, and name them in data.train"
        " (docs/write/data.md)"
    ),
    rf"{ROLLOUT}val_kwargs\.n": (
        "a run evaluates one trajectory per row; `jax-agent-rl eval mine.yaml -n N` samples several"
    ),
    rf"{ACTOR}clip_ratio": "set algorithm.clip_ratio_low and algorithm.clip_ratio_high",
    rf"{ACTOR}optim\.lr_warmup_steps_ratio": "set learner.lr_warmup_steps in training steps",
    r"trainer\.total_epochs": "set trainer.steps = epochs * rows / rollout.prompts_per_step",
    r"trainer\.resume_mode": "resume with the option --resume of train",
    r"(reward\.)?custom_reward_function\.name": (
        "name the function compute_score, or register it with @register_reward"
    ),
    r"custom_reward_function\..*|(reward|reward_model)\.(?!.*overlong_buffer).*": (
        "register the function with @register_reward in a file, and set reward.path"
    ),
    r"data\.gen_batch_size": (
        "refills draw as many prompts as are missing; see algorithm.max_resample_rounds"
    ),
    r"agent\.init_config\.agent_type": (
        "set agent.default_agent: tool_agent, react_agent or text_tool_agent"
    ),
    r"agent\.init_config\.tools": (
        "decorate the tools with @function_tool, and set tools.function_tool_path"
    ),
    r"agent\.init_config\.reward_name": (
        "register the function with @register_reward, and set reward.path"
    ),
    r"agent\.init_config\.system_prompt": "put it into the rows, as their first message",
    r"agent\.generation_config\.max_tokens": (
        "set agent.max_response_length, for all turns and results together"
    ),
}
"""Pattern of verl's keys -> what to decide."""

DEFAULTS: Mapping[str, Any] = {
    "algorithm.clip_ratio_high": 0.2,
    "algorithm.filter_zero_variance": False,
    "algorithm.segment_weight": "segment",
    "algorithm.policy_loss.ppo_kl_coef": 0.1,
    "algorithm.adv_estimator": "gae",
    "rollout.group_size": 1,
    "rollout.prompts_per_step": 1024,
    "learner.num_minibatches": 4,
    "learner.adam_b2": 0.999,
    "learner.weight_decay": 0.01,
    "critic.adam_b2": 0.999,
    "critic.weight_decay": 0.01,
}
"""Key of this project -> verl's default, where the defaults differ and so would results."""
