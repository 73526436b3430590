"""What servers and clients share: secrets from the environment, and which addresses are this machine."""

from __future__ import annotations

import ipaddress
import os
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
        host = urlsplit(f"//{host_header}").hostname or ""
    except ValueError:  # malformed
        return False
    return host == listening_on or is_loopback(host)
