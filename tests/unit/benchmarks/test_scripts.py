"""The benchmarks start as a user starts them: as scripts, from anywhere, with nothing but the package installed."""

import os
import subprocess
import sys

RUN_ALL = """
import contextlib, io, runpy, sys
for script in sys.argv[1:]:
    path, sys.argv = list(sys.path), [script, "--help"]
    sys.path[0] = script.rpartition("/")[0]
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        assert end.code == 0 and printed.getvalue().startswith("usage: "), script
    sys.path[:] = path
"""


def test_every_script_has_a_help(repository, tmp_path):
    (tmp_path / "megatron_fbt").symlink_to(repository / "megatron_fbt")
    scripts = [path for path in sorted((repository / "benchmarks").glob("*.py")) if "argparse" in path.read_text()]
    assert len(scripts) >= 6
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL, *map(str, scripts)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
