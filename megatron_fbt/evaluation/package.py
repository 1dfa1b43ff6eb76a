"""lm-eval: found at run time, used offline."""

import importlib.util
import logging
import os

from megatron_fbt.errors import ConfigError


def prepare_lm_eval() -> None:
    """Make lm-eval and the libraries under it work offline and quietly; call before they are imported.

    Raises:
        ConfigError: lm-eval is not installed.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(
            "evaluation needs lm-eval, which is not installed: pip install -c constraints.txt -e '.[eval]'"
        )
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_DISABLE_PROGRESS_BARS"):
        os.environ[name] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
