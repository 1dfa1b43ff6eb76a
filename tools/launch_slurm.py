#!/usr/bin/env python3
"""Make a batch script for SLURM from a job file, store it beside the run and submit it.

example:
  python tools/launch_slurm.py --job examples/slurm/multi_node.yaml --dry_run
  python tools/launch_slurm.py --job examples/slurm/multi_node.yaml
  python tools/launch_slurm.py --job examples/slurm/multi_node.yaml --output job.sh

The job file says how many nodes, for how long, and which configuration is trained; its fields are listed below. The
configuration is checked for the job's number of ranks before anything is submitted.
Exit codes: 0 done, 2 job file, configuration or sbatch.
"""

import argparse
import signal
import sys

from megatron_fbt.data.tool import run_report
from megatron_fbt.slurm.job_file import describe_fields


def main(argv=None) -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, epilog=describe_fields(), formatter_class=form)
    parser.add_argument("--job", required=True, metavar="YAML", help="the job file")
    parser.add_argument("--dry_run", action="store_true", help="print the script; store and submit nothing")
    parser.add_argument("--output", metavar="FILE", help="store the script there, and do not submit it")
    parser.add_argument("--dependency", help="start after another job, as sbatch writes it: afterok:123")
    parser.add_argument("--json", action="store_true", help="print one JSON object: script, job, text")
    args = parser.parse_args(argv)
    from megatron_fbt.slurm.submit import describe, launch

    return run_report(lambda: launch(args.job, args.output, args.dry_run, args.dependency), describe, args.json)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader such as head may leave first
    sys.exit(main())
