"""Optional GPU libraries: found at run time, never required."""

import importlib
import importlib.util
import sys
from typing import Optional


def transformer_engine_problem() -> Optional[str]:
    """Why Transformer Engine cannot be imported here, or None if it can."""
    if "transformer_engine" in sys.modules and sys.modules["transformer_engine"] is None:
        return "its installation is broken"
    if importlib.util.find_spec("transformer_engine") is None:
        return "not installed"
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # whatever a third-party import raises means "not usable"
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return None


def hide_broken_transformer_engine() -> None:
    """Let Megatron-Core import as if Transformer Engine were absent where its installation is broken.

    PyPI's empty `transformer-engine` package raises RuntimeError on import; Megatron-Core guards against ImportError.
    """
    if transformer_engine_problem() not in (None, "not installed"):
        sys.modules["transformer_engine"] = None
