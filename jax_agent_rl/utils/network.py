"""Secrets from the environment, and addresses of this machine."""

from __future__ import annotations

import ipaddress
import os
from urllib.parse import urlsplit

from jax_agent_rl.errors import ConfigError


def token_from(variable: str | None, *, key: str) -> str | None:
    """Return the secret in an environment variable that the setting ``key`` names, or None without a name.

    Raises:
        ConfigError: the variable is not set.
    """
    if variable is None:
        return None
    if not (token := os.environ.get(variable)):
        raise ConfigError(f"{key} names {variable}, which is not set; export {variable}=<the secret>")
    return token


def is_loopback(host: str) -> bool:
    """Return whether only programs on this machine can reach the address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def names_this_machine(host_header: str, *, listening_on: str) -> bool:
    """Return whether a request's ``Host`` is this machine, or the address listened on.

    Servers without a token refuse other names: DNS rebinding lets a page in a local browser reach them.
    """
    try:
        host = urlsplit(f"//{host_header}").hostname or ""
    except ValueError:  # malformed
        return False
    return host == listening_on or is_loopback(host)
