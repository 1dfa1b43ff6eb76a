"""The versions of Megatron-Core that this package works with; setup.py and constraints.txt name the same."""

import sys
from importlib import metadata

from megatron_fbt.errors import ConfigError

LOWEST_MEGATRON_CORE = (0, 16, 1)
"""First supported release."""
FIRST_UNSUPPORTED_MEGATRON_CORE = (0, 20)
"""First release beyond the supported range."""


def check_megatron_core_version() -> str:
    """Check the installed Megatron-Core without importing it.

    Returns:
        The installed version.

    Raises:
        ConfigError: if it is missing or outside 0.16.1 <= version < 0.20.
    """
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    pin = "0.19.2" if sys.version_info >= (3, 12) else "0.16.1"
    remedy = f"on Python {python} install it with: pip install megatron-core=={pin}"
    try:
        found = metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        raise ConfigError(f"Megatron-Core is not installed; {remedy}") from None
    release = _release(found)
    if not LOWEST_MEGATRON_CORE <= release < FIRST_UNSUPPORTED_MEGATRON_CORE:
        raise ConfigError(f"Megatron-Core {found} is not supported: 0.16.1 <= version < 0.20 is needed; {remedy}")
    return found


def _release(version: str) -> tuple:
    """The numbers of a version, without any suffix: 0.19.0rc1 -> (0, 19, 0)."""
    from packaging.version import Version

    return Version(version).release
