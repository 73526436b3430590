"""The interpreter of a trajectory: runs inside the sandbox, standard library only.

Reads one JSON object a line from stdin, ``{"code": …, "mark": …}``, runs the code in one namespace,
and ends its output with the mark and ``0`` (it ran) or ``1`` (it raised). The code itself finds an
empty stdin.
"""

import ast
import contextlib
import json
import linecache
import os
import sys
import traceback
import types


def _run(code: str, namespace: dict, name: str) -> bool:
    """Run code like an interactive interpreter: the value of a last expression is printed."""
    linecache.cache[name] = (
        len(code),
        None,
        code.splitlines(keepends=True),
        name,
    )  # for tracebacks
    try:
        tree = ast.parse(code, name)
        last = (
            ast.Interactive(body=[tree.body.pop()])
            if tree.body and isinstance(tree.body[-1], ast.Expr)
            else None
        )
        exec(compile(tree, name, "exec"), namespace)
        if last is not None:
            exec(compile(last, name, "single"), namespace)
    except SystemExit as error:
        return not error.code
    except BaseException as error:
        shown = (
            error.__traceback__.tb_next if error.__traceback__ else None
        )  # without this function's own frame
        traceback.print_exception(type(error), error, shown)
        return False
    return True


def main() -> None:
    """Serve requests until stdin ends."""
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8", newline="\n")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    kernel = os.getpid()
    module = sys.modules["__main__"] = types.ModuleType(
        "__main__"
    )  # so that pickling what the code defines works
    for count, line in enumerate(requests, start=1):
        request = json.loads(line)
        ok = _run(request["code"], vars(module), f"<action {count}>")
        if os.getpid() != kernel:  # the code forked: its child is done
            os._exit(0)
        for stream in {sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__}:
            with contextlib.suppress(
                Exception
            ):  # the code may have put anything there, or closed it
                stream.flush()
        os.write(1, f"{request['mark']} {0 if ok else 1}\n".encode())


if __name__ == "__main__":
    main()
