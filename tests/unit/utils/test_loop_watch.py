"""Whose code holds the event loop is read off the stack, and only code of others is named."""

import asyncio
import functools
import sys
import sysconfig
from pathlib import Path

import pytest

import jax_agent_rl
from jax_agent_rl.utils.loop_watch import line_of_others

PACKAGE = Path(jax_agent_rl.__file__).parent
FILES = {
    "user": "/home/somebody/project/my_tools.py",
    "script": str(Path(sysconfig.get_path("scripts")) / "jax-agent-rl"),
    "own": str(PACKAGE / "learners" / "step.py"),
    "own_engine": str(PACKAGE.parent / "gpu_backend" / "engine.py"),
    "plugin": f"{sysconfig.get_path('purelib')}/some_tools/search.py",
    "library": f"{sysconfig.get_path('purelib')}/jax/compiler.py",
    "standard": f"{sysconfig.get_path('stdlib')}/json/decoder.py",
}


CALL = """
async def act():
    result = inner()
    return await result if hasattr(result, "__await__") else result
"""


def called_by(layer: str, inner):
    """Return a function of a file that calls ``inner``.

    ``async user``: a coroutine function that awaits it. ``import user``: the import of the file,
    which calls it.
    """
    how, _, owner = layer.rpartition(" ")
    names = {"inner": inner, "__name__": owner}
    if how == "import":
        module = compile("inner()", FILES[owner], "exec")
        return functools.partial(exec, module, names)
    source = CALL if how == "async" else "def act(): return inner()"
    exec(compile(source, FILES[owner], "exec"), names)
    return names["act"]


def line_told(inside: str, *, outside: str = "script", is_named: bool = False) -> str | None:
    """Return what is told of a loop that is held by layers of calls, the outermost first."""
    told = []

    def look():
        told.append(line_of_others(sys._getframe().f_back, is_named=is_named))

    act = look
    for layer in reversed(inside.split(" > ")):
        act = called_by(layer, act)

    def run():
        with asyncio.Runner() as runner:
            if inside.startswith("async"):
                runner.run(act())
            else:
                runner.get_loop().call_soon(act)
                runner.run(asyncio.sleep(0))

    called_by(outside, run)()
    (line,) = told
    return line


@pytest.mark.parametrize("outside", ["script", "user", "own"])
@pytest.mark.parametrize(
    "inside",
    [
        "own",
        "own > library",
        "async own > own > library",
        "async own > own_engine > standard",
        "library > standard",
        "async user > async own > library",  # a script's main, or an agent that awaits the policy
        "async user > async own > own > standard",
        "async own > own > import user > library",  # the start of a run
        "own > standard > import user > user",
    ],
)
def test_own_work_is_never_told_of_whoever_called_the_loop(inside, outside):
    assert line_told(inside, outside=outside) is None
    assert line_told(inside, outside=outside, is_named=True) is None


@pytest.mark.parametrize(
    "inside",
    [
        "user",
        "async user",
        "async own > async user > user > library",
        "async own > own > async user > standard",
        "async own > async user > import user > library",
        # A blocking function of this package, called by a coroutine of the user's.
        "async user > own > library",
    ],
)
def test_code_of_the_user_is_told_of_with_its_line(inside):
    assert line_told(inside).partition(":")[0] == FILES["user"]


@pytest.mark.parametrize(
    "inside", ["async own > async plugin > library", "async own > own > async plugin"]
)
def test_a_coroutine_of_an_installed_package_is_named(inside):
    assert line_told(inside, is_named=True).partition(":")[0].endswith("some_tools/search.py")
    assert line_told(inside, is_named=False) is None
