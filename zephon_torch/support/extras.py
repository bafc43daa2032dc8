"""Optional packages: imported where they are used, and named with their extra if absent."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from zephon_torch.errors import ConfigurationError


def require(module: str, extra: str, purpose: str) -> Any:
    """Import a module of an optional package.

    Args:
        module: dotted name.
        extra: the extra of zephon_torch that installs it.
        purpose: what needs it, as the beginning of a sentence.

    Raises:
        ConfigurationError: it is not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != package:
            raise  # it is there; something that it needs is not
        raise ConfigurationError(
            f"{purpose} needs {package}, which is not installed: pip install "
            f"'zephon-torch[{extra}]'"
        ) from error
