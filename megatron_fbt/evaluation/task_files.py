"""Tasks by name or by YAML file, ready to be evaluated."""

from pathlib import Path
from typing import Any, Dict, List

from megatron_fbt.errors import ConfigError, FBTError
from megatron_fbt.evaluation.options import EvaluationOptions

READY = Path(__file__).with_name("tasks")
"""Folder of the task files that come with this package."""


def ready_tasks() -> List[str]:
    """Names of the task files that come with this package."""
    return sorted(path.stem for path in READY.glob("*.yaml"))


def load_tasks(options: EvaluationOptions) -> Dict[str, Any]:
    """{name: lm-eval task} in the order asked for, with what the options change in them.

    Raises:
        ConfigError: A task is unknown or cannot be loaded, or it runs generated code and that is not allowed.
        DataError: A task's data cannot be used.
    """
    tasks: Dict[str, Any] = {}
    for name in options.tasks:
        for found in _load(name, options.data_dir):
            if found.task_name in tasks:
                raise ConfigError(f"tasks: {found.task_name} is given twice")
            tasks[found.task_name] = found
    for name, task in tasks.items():
        if getattr(task, "UNSAFE_CODE", False) and not options.allow_code_execution:
            raise ConfigError(
                f"task {name}: runs programs that the model writes, on this machine; add --allow_code_execution to "
                "allow that (see docs/evaluation.md for what keeps them in)"
            )
        _apply(options, name, task)
    return tasks


def _load(name: str, data_dir: str) -> List[Any]:
    """The tasks of one name: one, or those of a group or tag of lm-eval."""
    from lm_eval.tasks import TaskManager

    path = Path(name)
    is_path = path.suffix in (".yaml", ".yml")
    if is_path and not path.is_file():
        raise ConfigError(f"tasks: {name}: no such file")
    if not is_path and name in ready_tasks():
        path, is_path = READY / f"{name}.yaml", True
    try:
        manager = TaskManager(include_defaults=not is_path, metadata={"data_dir": data_dir})
        if not is_path and name not in manager.all_tasks:
            raise ConfigError(
                f"tasks: {name} is unknown; there are {', '.join(ready_tasks())}, those of lm-eval whose data is in "
                "the local cache, and paths of .yaml files"
            )
        return list(manager.load([str(path.resolve()) if is_path else name])["tasks"].values())
    except FBTError:
        raise
    except Exception as error:  # lm-eval, datasets and jinja raise whatever comes up for a wrong file
        reason = (str(error).splitlines() or [""])[0]
        raise ConfigError(f"task {name}: cannot be loaded ({type(error).__name__}: {reason})") from error


def _apply(options: EvaluationOptions, name: str, task: Any) -> None:
    """Options over the task's own configuration; its metadata `chat` holds what differs with a chat template."""
    if options.apply_chat_template:
        for key, value in ((task.config.metadata or {}).get("chat") or {}).items():
            task.set_config(key=key, value=value)
    if options.num_fewshot is not None:
        task.set_config(key="num_fewshot", value=options.num_fewshot)
    elif task.get_config("num_fewshot") is None:
        task.set_config(key="num_fewshot", value=0)
    if task.OUTPUT_TYPE != "generate_until":
        for option in ("temperature", "max_gen_toks"):
            if getattr(options, option) is not None:
                raise ConfigError(f"{option}: task {name} generates nothing, it is {task.OUTPUT_TYPE}; leave it out")
        return
    changes: Dict[str, Any] = {}
    if options.max_gen_toks is not None:
        changes["max_gen_toks"] = options.max_gen_toks
    if options.temperature is not None:
        changes.update(do_sample=options.temperature > 0, temperature=options.temperature)
    if changes:
        task.set_config(key="generation_kwargs", value=changes, update=True)
    if options.samples > 1:
        task.set_config(key="repeats", value=options.samples)
