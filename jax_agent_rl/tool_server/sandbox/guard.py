"""Runs inside the sandbox just before the program: sets hard limits and drops every privilege.

It is passed to ``python -I -S -c`` as source, so that nothing of the host has to be visible:
standard library only. Its arguments are a JSON object and the program's command. On the lifeline, a
socket that the program does not get, it reports that it is ready and then, if the program still
cannot be started, why. (A program's own output proves nothing.)
"""

import json
import os
import resource
import select
import stat
import sys


def _limit(limits: dict) -> None:
    """Set the hard limits of this process, which the program inherits."""
    values = {
        resource.RLIMIT_AS: limits["memory_bytes"],
        resource.RLIMIT_NPROC: limits["processes"],
        resource.RLIMIT_FSIZE: limits["disk_bytes"],
        resource.RLIMIT_NOFILE: limits["open_files"],
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 16 * limits["processes"],  # queued signals and timers
    }
    for which, value in values.items():
        value = _allowed(which, value)
        resource.setrlimit(which, (value, value))

    # The soft limit's signal distinguishes CPU time from other kills; the hard limit ends whoever
    # ignores it.
    hard_cpu = _allowed(resource.RLIMIT_CPU, limits["cpu_seconds"] + 1)
    resource.setrlimit(resource.RLIMIT_CPU, (min(limits["cpu_seconds"], hard_cpu), hard_cpu))


def _allowed(which: int, value: int) -> int:
    """Return a limit, or this process's present one if that is lower."""
    _, hard_limit = resource.getrlimit(which)
    if hard_limit == resource.RLIM_INFINITY:
        return value
    return min(value, hard_limit)


def _become(uid: int) -> None:
    """Switch from root to an unused uid: the process limit counts by user, and never binds root."""
    for fd in (0, 1, 2):
        if stat.S_ISFIFO(os.fstat(fd).st_mode):
            os.fchmod(fd, 0o666)  # otherwise opening /dev/stdout is refused
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def _has_parent(lifeline: int) -> bool:
    """Return whether the process that started this one still holds its end of the lifeline.

    The kernel ends this process with its parent only once that is requested; an earlier death
    leaves no other trace.
    """
    poll = select.poll()
    poll.register(lifeline, select.POLLRDHUP)
    return not poll.poll(0)


def main() -> None:
    """Set limits, drop privileges and execute the program."""
    options = json.loads(sys.argv[1])
    argv = sys.argv[2:]
    lifeline = options["lifeline"]
    os.set_inheritable(lifeline, False)
    try:
        if not _has_parent(lifeline):
            return
        _limit(options["limits"])
        if options["uid"] is not None:
            _become(options["uid"])
        os.write(lifeline, b"ready")
        os.execvp(argv[0], argv)
    except OSError as error:
        os.write(lifeline, f": {argv[0]}: {error}".encode())
    sys.exit(1)


if __name__ == "__main__":
    main()
