"""A real SLURM of two nodes on this machine: munge, a controller and two slurmd of its own in a temporary folder."""

import os
import random
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Dict, List, Optional

COMMANDS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel", "sinfo")
NODES = ("n1", "n2")
"""Names that no name service knows."""
DAEMONS = ("slurmd-n1", "slurmd-n2", "slurmctld", "munged")
ENDED = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT")
CONF = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,sched_min_interval=0
ReturnToService=2
FirstJobId={first_job}
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
SlurmdParameters=config_overrides
SlurmctldTimeout=300
SlurmdTimeout=300
KillWait=20
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8 RealMemory=4000 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8 RealMemory=4000 State=UNKNOWN
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=cpu Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP PriorityTier=5 PreemptMode=OFF
PartitionName=low Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
"""


def missing_commands() -> List[str]:
    """SLURM's and munge's commands that are not installed."""
    return [name for name in COMMANDS if shutil.which(name, path=_path()) is None]


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


class Cluster:
    """Starts the daemons, and ends them and nothing else.

    Args:
        folder: for everything they write; short, since it is part of a socket's name.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.environment: Dict[str, str] = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": _path()}
        for name in [name for name in self.environment if name.startswith(("SLURM_", "SBATCH_", "MASTER_"))]:
            if name != "SLURM_CONF":
                del self.environment[name]

    def start(self) -> None:
        """Bring it up; returns when both nodes take jobs."""
        for name in ("state", "spool", "log"):
            (self.folder / name).mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
        ports = [opened.getsockname()[1] for opened in sockets]
        for opened in sockets:
            opened.close()
        host = socket.gethostname().partition(".")[0]
        # Job ids decide the ports of jobs: two clusters on one machine must not count alike.
        first_job = random.SystemRandom().randrange(1000, 2_000_000)
        text = CONF.format(host=host, folder=self.folder, ports=ports, first_job=first_job)
        (self.folder / "slurm.conf").write_text(text)
        where = {"socket": "munge.sock", "key-file": "munge.key", "pid-file": "munged.pid", "seed-file": "munged.seed"}
        options = [f"--{name}={self.folder / file}" for name, file in where.items()]
        self.run("munged", "--force", *options, f"--log-file={self.folder / 'log' / 'munged.log'}")
        conf = str(self.folder / "slurm.conf")
        self.run("slurmctld", "-f", conf, "-i")
        for node in NODES:
            self.run("slurmd", "-f", conf, "-N", node)
        self.wait_for(
            lambda: self.run("sinfo", "-h", "-N", "-p", "cpu", "-o", "%T", check=False).split() == ["idle"] * 2, 60
        )

    def stop(self) -> None:
        """Cancel what runs, end the daemons."""
        self.run("scancel", "--user=root", check=False)
        self.wait_for(lambda: not self.run("squeue", "-h", check=False).strip(), 40, check=False)
        for name in DAEMONS:
            pid = self.folder / f"{name}.pid"
            if pid.exists():
                number = int(pid.read_text())
                os.kill(number, signal.SIGTERM)
                self.wait_for(lambda number=number: not Path(f"/proc/{number}").exists(), 20, check=False)

    def run(self, *command: str, check: bool = True, timeout: float = 60) -> str:
        """Standard output of a command; with `check` it must succeed."""
        result = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=timeout)
        assert not check or result.returncode == 0, f"{' '.join(command)}: {result.stdout}{result.stderr}"
        return result.stdout

    def submit(self, script: Path, *options: str, **environment: str) -> str:
        """Submit a batch script; its job id."""
        exported = ",".join(["ALL", *(f"{name}={value}" for name, value in environment.items())])
        return self.run("sbatch", "--parsable", f"--export={exported}", *options, str(script)).strip().partition(";")[0]

    def facts(self, job: str) -> Dict[str, str]:
        """Fields of `scontrol show job`."""
        words = self.run("scontrol", "show", "job", "-o", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def state(self, job: str) -> str:
        """State of a job, e.g. RUNNING."""
        return self.facts(job)["JobState"]

    def wait_ended(self, job: str, timeout: float) -> Dict[str, str]:
        """Wait for the end of a job that is not put back; its last facts."""
        self.wait_for(lambda: self.state(job) in ENDED, timeout, what=f"the end of job {job}")
        return self.facts(job)

    @staticmethod
    def wait_for(holds, timeout: float, check: bool = True, what: Optional[str] = None) -> None:
        """Wait until something holds."""
        deadline = time.monotonic() + timeout
        while not holds():
            if time.monotonic() > deadline:
                assert not check, f"waited {timeout:g} s in vain for {what or 'the cluster'}"
                return
            time.sleep(0.2)
