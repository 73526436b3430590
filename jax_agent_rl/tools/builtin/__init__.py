"""Tools that come with the package; name one of these modules in ``tools.function_tool_path``."""
