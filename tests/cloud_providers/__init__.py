"""Servers that speak the APIs of sandbox providers, in the formats that their own SDKs read.

::

    Harbor ──► the provider's SDK ──HTTP, gRPC──► DaytonaServer, … ──► CloudMachine: a folder

- ``machine``: a sandbox of a provider, and what a test may let go wrong with it.
- ``daytona``, ``e2b``, ``gke``, ``modal``: the APIs. Where they import an SDK, for its messages, it
  is in the environment of Harbor.
"""
