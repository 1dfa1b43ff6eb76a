"""The script of a job, stored beside its run and handed to sbatch."""

import re
import subprocess
from pathlib import Path
from typing import Any, Dict, Optional

from megatron_fbt.errors import ConfigError
from megatron_fbt.slurm.job_file import load_job, run_dir_of
from megatron_fbt.slurm.render import logs_folder, render


def launch(
    job_file: str, output: Optional[str] = None, dry_run: bool = False, dependency: Optional[str] = None
) -> Dict[str, Any]:
    """Render a job file, store the script and submit it.

    Args:
        job_file: path of the YAML file.
        output: store the script there and do not submit it.
        dry_run: neither store nor submit.
        dependency: as sbatch takes it, for example afterok:123.

    Returns:
        `script` (its path, or None), `job` (its id, or None) and `text`.

    Raises:
        ConfigError: the job file or the run's configuration is wrong, or sbatch refuses the script.
    """
    job = load_job(job_file)
    run_dir = run_dir_of(job) if job.config is not None else None
    folder = logs_folder(job, run_dir)
    if re.search(r"[\s%\"'$`\\]", folder):
        raise ConfigError(f"logs = {folder!r}: SLURM would read a character of it in its own way; give a plain path")
    report: Dict[str, Any] = {"script": None, "job": None, "text": render(job, job_file, run_dir)}
    if dry_run:
        return report
    base = Path(job.workdir or ".")
    path = Path(output) if output else base / folder / f"{job.name}.sh"
    try:
        (base / folder).mkdir(parents=True, exist_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(report["text"], encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror}); name another place") from None
    report["script"] = str(path)
    if not output:
        report["job"] = _submit(path, dependency)
    return report


def _submit(script: Path, dependency: Optional[str]) -> str:
    """Id of the submitted job."""
    options = [f"--dependency={dependency}"] if dependency else []
    try:
        result = subprocess.run(["sbatch", "--parsable", *options, str(script)], capture_output=True, text=True)
    except FileNotFoundError:
        raise ConfigError(
            f"sbatch: not found, {script} was not submitted; run this on a login node of the cluster"
        ) from None
    if result.returncode:
        raise ConfigError(f"{script}: sbatch refuses it: {' '.join(result.stderr.split())}; correct the job file")
    return result.stdout.strip().partition(";")[0]


def describe(report: Dict[str, Any]) -> str:
    """The report for a person."""
    if report["script"] is None:
        return report["text"].rstrip("\n")
    if report["job"] is None:
        return f"script: {report['script']}"
    return f"script: {report['script']}\njob: {report['job']}"
