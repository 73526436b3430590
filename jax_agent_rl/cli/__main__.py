from jax_agent_rl.cli import main

main()
