"""What all servers and clients of this package do alike: secrets from the environment, loopback, an orderly end."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import signal
from urllib.parse import urlsplit

from jax_agent_rl.errors import ConfigError


def token_from(variable: str | None, *, key: str) -> str | None:
    """The secret in an environment variable; None if none is named.

    Args:
        key: the setting that names the variable, for the message.

    Raises:
        ConfigError: it is named and not set.
    """
    if variable is None:
        return None
    if not (token := os.environ.get(variable)):
        raise ConfigError(f"{key} names {variable}, which is not set; export {variable}=<the secret>")
    return token


async def told_to_stop() -> None:
    """Returns at the first SIGINT or SIGTERM of the process, which it does not die of."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await stop.wait()


def is_loopback(host: str) -> bool:
    """Whether only programs of the same machine can reach this address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def names_this_machine(host_header: str, *, listening_on: str) -> bool:
    """Whether a request's ``Host`` is this machine, or the address that is listened on.

    A page in a local browser comes under another name, which was made to resolve here (DNS rebinding): servers that ask
    for no token refuse it.
    """
    try:
        return urlsplit(f"//{host_header}").hostname in ("localhost", "127.0.0.1", "::1", listening_on)
    except ValueError:  # malformed
        return False
