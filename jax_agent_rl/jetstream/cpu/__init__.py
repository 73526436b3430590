"""Decode kernels in C++ for engines on CPUs."""
