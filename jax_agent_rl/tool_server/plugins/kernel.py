"""The interpreter of a trajectory: runs inside the sandbox, standard library only.

It reads one JSON object per line from stdin, ``{"code": …, "mark": …}``, runs the code in one
namespace, and ends the code's output with the mark and ``0`` (it ran) or ``1`` (it raised). The
code itself finds an empty stdin.
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
    # Tracebacks look up source lines here.
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    try:
        tree = ast.parse(code, name)
        last_expression = None
        if tree.body and isinstance(tree.body[-1], ast.Expr):
            last_expression = ast.Interactive(body=[tree.body.pop()])

        exec(compile(tree, name, "exec"), namespace)
        if last_expression is not None:
            exec(compile(last_expression, name, "single"), namespace)
    except SystemExit as error:
        return not error.code
    except BaseException as error:
        frames = error.__traceback__
        if frames is not None:
            frames = frames.tb_next  # the first frame is this function's
        traceback.print_exception(type(error), error, frames)
        return False
    return True


def main() -> None:
    """Serve requests until stdin ends."""
    # Requests come from a copy of stdin; the code's own stdin is empty.
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8", newline="\n")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    # A module of its own, so that what the code defines can be pickled.
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module

    kernel_pid = os.getpid()
    for count, line in enumerate(requests, start=1):
        request = json.loads(line)
        ok = _run(request["code"], vars(module), f"<action {count}>")
        if os.getpid() != kernel_pid:  # the code forked, and this is its child: it ends here
            os._exit(0)

        for stream in {sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__}:
            # The code may have put anything there, or closed it.
            with contextlib.suppress(Exception):
                stream.flush()
        os.write(1, f"{request['mark']} {0 if ok else 1}\n".encode())


if __name__ == "__main__":
    main()
