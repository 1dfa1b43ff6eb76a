"""lm-eval: found at run time, used offline."""

import importlib.util
import logging
import os

from megatron_fbt.errors import ConfigError


def work_offline() -> None:
    """Keep Hugging Face's libraries and lm-eval from the network, and their progress bars quiet.

    They read these variables when they are imported, so this comes first.
    """
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_DISABLE_PROGRESS_BARS"):
        os.environ[name] = "1"
    os.environ["TQDM_DISABLE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    logging.getLogger("lm_eval").setLevel(logging.ERROR)


def require_lm_eval() -> None:
    """Refuse work that needs lm-eval where there is none.

    Raises:
        ConfigError: lm-eval is not installed.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(
            "evaluation needs lm-eval, which is not installed: pip install -c constraints.txt -e '.[eval]'"
        )
