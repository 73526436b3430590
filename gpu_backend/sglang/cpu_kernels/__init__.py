"""A folder for ``PYTHONPATH`` of SGLang's server on CPUs: see ``sgl_kernel`` in it."""
