"""The script of a job, stored beside its run and handed to sbatch."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Dict, Optional

from megatron_fbt.errors import ConfigError
from megatron_fbt.slurm.job import READ_BY_SBATCH
from megatron_fbt.slurm.job_file import load_job, run_dir_of, work_folder
from megatron_fbt.slurm.render import logs_folder, render
from megatron_fbt.slurm.starts import note_submission

KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_DEBUG_FLAGS", "SLURM_TIME_FORMAT")
"""Variables of SLURM's that say how its commands work; the others describe a job around this process."""


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
    for name, place in (("run.dir", run_dir), ("logs", folder)):
        if place and place.startswith("-"):
            raise ConfigError(f"{name} = {place!r}: would be read as an option; give ./{place}, or another folder")
    if re.search(r"[%$`]|" + READ_BY_SBATCH, folder) or not folder.isprintable():
        raise ConfigError(f"logs = {folder!r}: SLURM would read a character of it in its own way; give a plain path")
    if output is not None and (
        output.strip() in ("", "-") or "\0" in output or os.path.realpath(output) == os.path.realpath(job_file)
    ):
        raise ConfigError(f"--output {output!r}: not a place for the script; name another file")
    if dependency is not None and not dependency.strip():
        raise ConfigError(f"--dependency {dependency!r}: empty; give one such as afterok:123, or leave it out")
    if dependency is not None and output is not None:
        raise ConfigError(f"--dependency {dependency!r}: with --output nothing is submitted; give it to sbatch")
    report: Dict[str, Any] = {"script": None, "job": None, "text": render(job, job_file, run_dir)}
    for text in ("\n".join(job.setup), job.command or "", report["text"]):
        _check_shell(text, job_file)
    if dry_run:
        return report
    base = work_folder(job)
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
        if run_dir is not None:
            note_submission(base / run_dir, report["job"])
    return report


def _check_shell(text: str, job_file: str) -> None:
    """Have bash, where there is one, read the script, or setup or command alone: each may be no shell text.

    Raises:
        ConfigError: it is none.
    """
    if "\0" in text or re.search(r"[\ud800-\udfff]", text):
        raise ConfigError(f"{job_file}: holds a character that no script can have; correct setup, command and names")
    bash = shutil.which("bash")
    if bash is None:
        return
    plain = {**os.environ, "LC_ALL": "C"}
    result = subprocess.run(
        [bash, "-n"], input=text, capture_output=True, encoding="utf-8", errors="replace", env=plain
    )
    if result.returncode or result.stderr:  # a here-document without an end is only warned of
        reason = " ".join(result.stderr.split())[:300]
        raise ConfigError(f"{job_file}: the script is no shell text: {reason}; correct setup or command")


def _submit(script: Path, dependency: Optional[str]) -> str:
    """Id of the submitted job."""
    options = [f"--dependency={dependency}"] if dependency else []
    command = ["sbatch", "--parsable", *options, str(script)]
    # The new job would inherit them, and take restarts and meeting place of the job around for its own.
    around = ("SLURM_", "MASTER_") if "SLURM_JOB_ID" in os.environ else "SLURM_"
    environment = {name: value for name, value in os.environ.items() if name in KEPT or not name.startswith(around)}
    try:
        result = subprocess.run(command, capture_output=True, text=True, env=environment)
    except FileNotFoundError:
        raise ConfigError(
            f"sbatch: not found, {script} was not submitted; run this on a login node of the cluster"
        ) from None
    except OSError as error:
        raise ConfigError(f"sbatch: cannot be run ({error.strerror}), {script} was not submitted") from None
    if result.returncode:
        asked = "the job file" + (f" and --dependency {dependency}" if dependency else "")
        raise ConfigError(f"{script}: sbatch refuses it: {' '.join(result.stderr.split())}; look at {asked}")
    return result.stdout.strip().partition(";")[0]


def describe(report: Dict[str, Any]) -> str:
    """The report for a person."""
    if report["script"] is None:
        return report["text"].rstrip("\n")
    if report["job"] is None:
        return f"script: {report['script']}"
    return f"script: {report['script']}\njob: {report['job']}"
