"""Reports and their figures as files: JSON, and PNG without a display. Figures need matplotlib (the extra `plots`)."""

import json
from pathlib import Path
from typing import Any, Dict, Tuple

from megatron_fbt.errors import ConfigError
from megatron_fbt.training.metrics import json_ready, replace_file

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Distinct for colour-blind readers too (Okabe and Ito)."""


def require_matplotlib() -> None:
    """Refuse work that will end in a plot where none can be drawn.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "plots need matplotlib, which is not installed: pip install -c constraints.txt -e '.[plots]'"
        ) from error


def new_figure(panels: int, title: str) -> Tuple[Any, Any]:
    """A figure with panels side by side, and the list of their axes.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5 * panels, 4.8), layout="constrained", dpi=110)
    FigureCanvasAgg(figure)
    figure.suptitle(plain_text(title), fontsize=12)
    axes = [figure.add_subplot(1, panels, number + 1) for number in range(panels)]
    for axis in axes:
        axis.grid(True, which="major", color="#dddddd", linewidth=0.7)
        axis.set_axisbelow(True)
    return figure, axes


def plain_text(text: str) -> str:
    """Text that matplotlib shows as it is: no formula between dollars, and a label that a legend does not leave out."""
    return (" " if text.startswith("_") else "") + text.replace("$", r"\$")


def model_name(folder: str) -> str:
    """How a plot calls an exported model: its folder, and the one that this lies in."""
    return "/".join(Path(folder).absolute().parts[-2:])


def save_report(report: Dict[str, Any], path: Path) -> None:
    """Write a report as strict JSON; what is not finite becomes null.

    Raises:
        ConfigError: The file cannot be written.
    """
    try:
        replace_file(path, json.dumps(json_ready(report), indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror or error})") from error


def save(figure: Any, path: Path) -> None:
    """Write the figure.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror or error})") from error


def output_folder(path: str) -> Path:
    """Make the folder that results go to.

    Raises:
        ConfigError: It cannot be made.
    """
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"output {path}: no folder can be made there ({error.strerror})") from error
    return Path(path)
