"""One tree of exceptions, in one module, drawn whole."""

import importlib
import pkgutil

import jax_agent_rl
from jax_agent_rl import errors

PROGRAMS = {
    "program_side",
    "tests_side",
}  # of the sandbox: they import what lies beside them in its working folder
WITH_HARBOR = {
    "jax_agent_rl.agents.harbor.environment",
    "jax_agent_rl.agents.harbor.trial",
}  # which is in an environment of its own
WITHOUT_JAX = (
    "agents",
    "chat",
    "collect",
    "deploy.launch",
    "rewards",
    "rollout",
    "tool_server",
    "tools",
)


def descendants(cls: type) -> set[type]:
    return {cls}.union(*(descendants(child) for child in cls.__subclasses__()))


def test_every_exception_lives_in_errors_and_stands_in_its_drawing():
    for name in WITHOUT_JAX:
        package = importlib.import_module(f"jax_agent_rl.{name}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            is_program = module.name.rpartition(".")[2] in PROGRAMS
            if not is_program and module.name not in WITH_HARBOR:
                importlib.import_module(module.name)
    classes = [
        cls
        for cls in descendants(errors.JaxAgentRLError)
        if cls.__module__.startswith(jax_agent_rl.__name__)
    ]
    assert [cls.__qualname__ for cls in classes if cls.__module__ != errors.__name__] == []
    drawn = errors.__doc__.split("Two questions")[0].split()
    assert [cls.__name__ for cls in classes if cls.__name__ not in drawn] == []
