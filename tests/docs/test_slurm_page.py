"""docs/slurm.md lists every field of a job file, every exit code, every example, with their true values."""

import dataclasses
import re
import signal
import stat

from megatron_fbt.slurm.job import JobConfig
from megatron_fbt.slurm.nodes import LOWEST_PORT, PORT_PAIRS
from megatron_fbt.slurm.requeue import MEANINGS
from tests.docs import readme

PAGE = "docs/slurm.md"
SECTIONS = ("container", "requeue", "preflight")


def rows_of(header):
    rows = [line.strip("|").split("|") for line in readme.pages()[PAGE].splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in row] for row in rows]
    start = next(index for index, row in enumerate(cells) if row[0] == header)
    found = []
    for row in cells[start + 2 :]:
        if re.fullmatch("-+", row[0]) or len(row) != len(cells[start]):
            break
        found.append(row)
    return found


def test_every_field_of_a_job_file():
    rows = rows_of("field")[: len(dataclasses.fields(JobConfig))]
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row[0])]
    assert sorted(listed) == sorted(field.name for field in dataclasses.fields(JobConfig))


def test_defaults():
    job = JobConfig()
    for names, default, meaning in rows_of("field"):
        for name in re.findall(r"`(\w+)`", names):
            value = getattr(job, name)
            if name in SECTIONS:
                fields = dataclasses.asdict(value)
                assert sorted(re.findall(r"`(\w+)`", meaning)) == sorted(fields), name
                for field, written in re.findall(r"`(\w+)` \(([\d.]+)\)", meaning):
                    assert float(written) == fields[field], field
            else:
                shown = "none" if value is None or value == [] else str(value).lower()
                assert default == shown, name


def test_every_exit_code():
    cells = [row[0] for row in rows_of("run's exit code")]
    codes = {int(code) for cell in cells for code in re.findall(r"\b\d+\b", cell)}
    warned = {128 + signal.SIGUSR1, 128 + signal.SIGTERM}
    assert codes == {0, 75, 128, *warned, *MEANINGS}


def test_every_example(repository):
    listed = {name for row in rows_of("job file and script of the same name") for name in re.findall(r"`(.+)`", row[0])}
    assert listed == {str(path.relative_to(repository)) for path in (repository / "examples" / "slurm").glob("*.yaml")}


def test_the_rule_of_the_port():
    assert f"{LOWEST_PORT} + 2 × (id mod {PORT_PAIRS})" in readme.pages()[PAGE]


def test_the_script_of_continuous_integration_can_be_run(repository):
    assert (repository / ".ci" / "run").stat().st_mode & stat.S_IXUSR
