"""What configuration raises and warns."""

from __future__ import annotations

import warnings

__all__ = ["ConfigError", "ConfigWarning", "NotSupportedYetError", "sentence_of", "warn_config"]


class ConfigError(ValueError):
    """Configuration that can never work as it stands; the message is meant for the person who wrote it."""


class NotSupportedYetError(ConfigError):
    """Valid configuration that asks for behaviour which this version does not have."""


def sentence_of(error: ConfigError) -> str:
    """The message, and what to do where the message alone does not say it."""
    if isinstance(error, NotSupportedYetError):
        return f"{error}. Leave these at their defaults; docs/configuration.md has the state of each field"
    return str(error)


class ConfigWarning(UserWarning):
    """Configuration that works, but not quite as written: a deprecated name, a value that was adjusted."""


def warn_config(message: str) -> None:
    """Warn the author of the configuration. A UserWarning: Python hides DeprecationWarnings from users of programs."""
    warnings.warn(message, ConfigWarning, stacklevel=3)
