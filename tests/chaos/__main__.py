"""``python -m tests.chaos``: a small real system under injected faults, and what must hold.

python -m tests.chaos --seconds 120 --seed 3 --soak
python -m tests.chaos --only kill_engine
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys

from rich.console import Console

from jax_agent_rl.cli.options import print_object
from jax_agent_rl.errors import JaxAgentRLError
from jax_agent_rl.utils.shutdown import EXIT_CODE
from jax_agent_rl.utils.startup import ignore_absent_tpus, quiet_logging
from tests.chaos.run import run_command


def main() -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=45.0,
        help="total time of the run without faults and the run with faults",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of faults, rows and tokens")
    parser.add_argument(
        "--only", action="append", default=[], help="only this fault; may be repeated"
    )
    parser.add_argument(
        "--soak",
        action="store_true",
        help="measure memory, descriptors and tasks, with fewer faults",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object; all else goes to standard error",
    )
    arguments = parser.parse_args()

    quiet_logging()
    ignore_absent_tpus()
    # Lost servers and calls are expected.
    logging.getLogger("jax_agent_rl").setLevel(logging.CRITICAL)
    try:
        report = run_command(
            arguments.seconds,
            arguments.seed,
            arguments.only,
            soak=arguments.soak,
            console=Console(stderr=arguments.json),
        )
    except (asyncio.CancelledError, KeyboardInterrupt):
        return EXIT_CODE
    except JaxAgentRLError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    if arguments.json:
        print_object(report)
    return 1 if report["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
