"""Servers that speak the APIs of sandbox providers, in the formats that their own SDKs read.

::

    Harbor ──► the provider's SDK ──HTTP──► DaytonaServer, E2BServer ──► CloudMachine: a folder

- ``machine``: a sandbox of a provider, and what a test may let go wrong with it.
- ``daytona``, ``e2b``: the APIs. They import the SDKs, which are in the environment of Harbor.
"""
