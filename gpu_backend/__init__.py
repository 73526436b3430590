"""The vLLM rollout backend. Nothing here is imported unless asked for."""
