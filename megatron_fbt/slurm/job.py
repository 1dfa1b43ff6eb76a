"""Description of a SLURM job, as its YAML file gives it."""

import re
import shlex
from dataclasses import dataclass, field
from typing import List, Literal, Optional

from megatron_fbt.config.rules import Rules, Section

TIME_FORMS = r"(?:(?P<days>[0-9]{1,6})-)?(?P<parts>[0-9]{1,6}(?::[0-9][0-9]){0,2})"
PLAIN_NAME = r"[A-Za-z0-9._-]+"
READ_BY_SBATCH = r"[\s#\"'\\]"
"""What sbatch takes for a comment, a quote or the end of a value in a line of its own."""
ENDS_AT_ONCE = ("-h", "--help", "--print_config", "--dry_run", "--json", "--feedback.schedule.help")
"""Arguments with which the training command trains nothing."""
FIELD_OF = {
    "--job-name -J": "name",
    "--partition -p": "partition",
    "--account -A": "account",
    "--qos -q": "qos",
    "--constraint -C": "constraint",
    "--reservation": "reservation",
    "--exclude -x": "exclude",
    "--nodes -N": "nodes",
    "--ntasks -n --ntasks-per-node": "devices_per_node and launcher",
    "--cpus-per-task -c": "cpus_per_device",
    "--gres": "gres",
    "--mem": "mem",
    "--array -a": "array",
    "--time -t": "time",
    "--signal": "requeue.signal_s",
    "--output -o --open-mode": "logs",
    "--chdir -D": "workdir",
    "--exclusive": "exclusive",
    "--requeue --no-requeue": "requeue.max_restarts",
    "--error -e": "logs",
}
"""Options of sbatch that a script has already or that undo it, and what in the job file says them."""
NO_JOB = ("--wrap", "--test-only", "--parsable", "--help", "-h", "--usage", "--version", "-V")
"""Options with which sbatch does not submit the script, or does not print the job's id alone."""
WITHOUT_VALUE = "HhOQsuVvW"
"""Letters of sbatch's options behind which another one may stand in the same word."""


def time_limit_s(text: str) -> Optional[int]:
    """Seconds of a time limit as SLURM writes it, 0 = none; None where it is no time limit.

    Without days the parts are minutes, minutes:seconds or hours:minutes:seconds, after days hours:minutes:seconds.
    """
    match = re.fullmatch(TIME_FORMS, text)
    if match is None:
        return None
    parts = [int(part) for part in match["parts"].split(":")]
    if match["days"] is None:
        first, *rest = parts if len(parts) == 3 else [0, *parts]
    else:
        first, *rest = [int(match["days"]) * 24 + parts[0], *parts[1:]]
    minutes, seconds = [*rest, 0, 0][:2]
    if len(parts) > 1 and (seconds > 59 or (minutes > 59 and (len(parts) == 3 or match["days"] is not None))):
        return None
    return first * 3600 + minutes * 60 + seconds


@dataclass
class ContainerConfig(Section):
    """In what the commands run."""

    runtime: Literal["none", "pyxis", "apptainer"] = "none"
    """none: on the nodes themselves; pyxis: srun's --container-image (enroot); apptainer: apptainer exec."""
    image: Optional[str] = None
    """Image of the container."""
    mounts: List[str] = field(default_factory=list)
    """Folders of the nodes that the container sees: path, or path:path_inside."""
    options: List[str] = field(default_factory=list)
    """Further options, of srun (pyxis) or of apptainer exec, such as --nv."""

    def problems(self) -> List[str]:
        """See Section."""
        rules = Rules("container", self)
        printed = [self.image, *self.mounts, *self.options] if rules.usable("image", "mounts", "options") else []
        if any(not value.isprintable() for value in printed if value is not None):
            rules.add("image", "image, mounts or options hold a line feed or the like", "give plain text")
        if rules.usable("runtime", "image"):
            if self.runtime != "none" and not self.image:
                rules.add("image", f"container.runtime = {self.runtime!r} needs one", "give the image")
            elif self.runtime == "none" and self.image:
                rules.add("image", "container.runtime = 'none' uses none", "set container.runtime, or remove it")
        return rules.problems


@dataclass
class RequeueConfig(Section):
    """How a job goes on after its time limit, pre-emption or a failure."""

    signal_s: int = 600
    """Seconds before the time limit at which SLURM warns; must be enough for a step and a checkpoint."""
    max_failures: int = 3
    """Starts in a row without a new checkpoint after which the job ends."""
    max_restarts: Optional[int] = None
    """Returns to the queue in all; null = any number."""
    backoff_s: int = 60
    """Seconds until the next start after a failure; twice as many after each further one, an hour at most."""

    def problems(self) -> List[str]:
        """See Section."""
        rules = Rules("requeue", self)
        rules.integers("signal_s", "max_failures")
        rules.integers("signal_s", high=65535)
        rules.integers("max_restarts", "backoff_s", low=0)
        return rules.problems


@dataclass
class PreflightConfig(Section):
    """The check of the nodes before the run starts (python -m megatron_fbt.preflight)."""

    run: bool = True
    """Whether the script does it."""
    min_free_gb: float = 10.0
    """10^9 bytes that must be free where the run folder is."""
    max_clock_skew_s: float = 5.0
    """Seconds by which a node's clock may differ from the first node's."""
    slow_factor: float = 0.7
    """A node below this part of the median speed is a bad one."""

    def problems(self) -> List[str]:
        """See Section."""
        rules = Rules("preflight", self)
        rules.numbers("min_free_gb")
        rules.numbers("max_clock_skew_s", above=True)
        rules.numbers("slow_factor", high=1.0)
        return rules.problems


@dataclass
class JobConfig(Section):
    """One job: a training run (config), or other commands (command)."""

    name: str = "fbt"
    """Name in the queue, and of the log."""
    config: Optional[str] = None
    """Configuration of a training run; null = the job runs `command`."""
    overrides: List[str] = field(default_factory=list)
    """Further arguments of the training command: --section.field value."""
    command: Optional[str] = None
    """Shell text of a job that does not train; one process on the first node."""
    nodes: int = 1
    """Nodes of the job."""
    devices_per_node: int = 1
    """Ranks on each node: its GPUs, or processes on CPUs."""
    cpus_per_device: int = 1
    """CPU cores for each rank."""
    gres: Optional[str] = None
    """Name of the devices in SLURM, for example gpu or gpu:h100; null = CPUs alone."""
    launcher: Literal["torchrun", "srun"] = "torchrun"
    """torchrun: a launcher once on each node (megatron_fbt.launch); srun: one task for each rank."""
    wait_s: int = 30
    """Seconds after the end of the first task in which the others must end, too; then they are killed."""
    time: str = "24:00:00"
    """Time limit as SLURM writes it: minutes, h:mm:ss, d-hh:mm:ss."""
    partition: Optional[str] = None
    """Where it runs; null = the cluster's default, as for the following ones."""
    account: Optional[str] = None
    """Whom it is charged to."""
    qos: Optional[str] = None
    """Quality of service."""
    constraint: Optional[str] = None
    """Features of the nodes."""
    reservation: Optional[str] = None
    """Reserved nodes."""
    exclude: Optional[str] = None
    """Nodes to stay away from, as the preflight suggests."""
    mem: Optional[str] = None
    """Memory of each node; 0 = all of it."""
    exclusive: bool = True
    """No other job on the nodes."""
    array: Optional[str] = None
    """Tasks of a job array (with `command`), for example 0-7 or 0-99%10."""
    sbatch: List[str] = field(default_factory=list)
    """Further options of sbatch, each with its dashes."""
    workdir: Optional[str] = None
    """Folder that the job runs in, and that relative paths are meant from; null = that of the submission."""
    setup: List[str] = field(default_factory=list)
    """Shell lines before everything else: modules, the virtual environment, NCCL's variables."""
    python: str = "python"
    """Interpreter, on the nodes or in the container."""
    logs: Optional[str] = None
    """Folder of the job's logs; null = slurm/ in the run folder (training), or runs/slurm."""
    container: ContainerConfig = field(default_factory=ContainerConfig)
    requeue: RequeueConfig = field(default_factory=RequeueConfig)
    preflight: PreflightConfig = field(default_factory=PreflightConfig)

    @property
    def world_size(self) -> int:
        """Ranks of the whole job."""
        return self.nodes * self.devices_per_node

    def problems(self) -> List[str]:
        """See Section."""
        rules = Rules("job", self)
        rules.integers("nodes", "devices_per_node", "cpus_per_device", "wait_s")
        if rules.usable("config", "command"):
            if (self.config is None) == (self.command is None):
                rules.add("config", "a job either trains or runs other commands", "give config or command")
            elif self.command is not None and not self.command.strip():
                rules.add("command", "empty", "give shell text")
        if rules.usable("config", "array") and self.config and self.array:
            rules.add("array", "the tasks of an array would train in one folder", "remove it, or give command")
        self._check_texts(rules)
        self._check_arguments(rules)
        self._check_time(rules)
        nested = (self.container, self.requeue, self.preflight)
        return rules.problems + [problem for section in nested for problem in section.problems()]

    def _check_time(self, rules: Rules) -> None:
        if not rules.usable("time") or self.requeue.problems():
            return
        limit, warning = time_limit_s(self.time), self.requeue.signal_s
        rules.require(limit is not None, "time", "no time limit of SLURM's", "give minutes, h:mm:ss or d-hh:mm:ss")
        if self.config is not None and limit:
            rules.require(
                limit > warning,
                "time",
                f"SLURM's warning, {warning} s before the end (requeue.signal_s), would come at the start of the job",
                "give more time, or set requeue.signal_s lower",
            )

    def _check_texts(self, rules: Rules) -> None:
        """What would break a line of the script."""
        if rules.usable("name"):
            holds = re.fullmatch(PLAIN_NAME, self.name) is not None
            rules.require(holds, "name", "not one plain word", "use letters, digits, dots, dashes and underscores")
        if rules.usable("sbatch"):
            rules.require(
                all(map(_is_option, self.sbatch)),
                "sbatch",
                "one is not one option as sbatch reads it",
                'give options such as --mail-type=END or --comment="two words", without # and backslashes',
            )
        one_word = ("partition", "account", "qos", "constraint", "reservation", "exclude", "mem", "array", "gres")
        for name in (*one_word, "workdir", "logs"):
            if rules.usable(name) and getattr(self, name) is not None:
                value = getattr(self, name)
                holds = re.search(READ_BY_SBATCH, value) is None and value.isprintable() and value != ""
                wrong = "empty, or with white space, #, quotes or backslashes"
                rules.require(holds, name, wrong, "give one plain word")
        if rules.usable("gres") and self.gres is not None:
            counted = re.fullmatch(r".*:[0-9]+", self.gres) is not None
            rules.require(not counted, "gres", "has a count, which is devices_per_node", "give the name alone")
        if rules.usable("python"):
            holds = self.python.isprintable() and re.search(r"\s", self.python) is None and self.python != ""
            remedy = "give a program without options; setup can export variables such as PYTHONUNBUFFERED=1"
            rules.require(holds, "python", "not one word", remedy)
        words = [self.config or "", *self.overrides] if rules.usable("config", "overrides") else []
        holds = all(word.isprintable() for word in words)
        rules.require(holds, "overrides", "one of them or config holds a line feed or the like", "give plain text")

    def _check_arguments(self, rules: Rules) -> None:
        """What the script says itself, or what would keep the run from training."""
        if rules.usable("overrides"):
            names = [word.partition("=")[0] for word in self.overrides]
            ends = next((name for name in names if name in ENDS_AT_ONCE), None)
            if ends:
                rules.add("overrides", f"with {ends!r} nothing would be trained", "leave it out")
            elif "--parallel.world_size" in names:
                rules.add("overrides", "'--parallel.world_size' is nodes x devices_per_node", "set nodes, leave it out")
        if rules.usable("sbatch"):
            given = [name for option in self.sbatch for name in _names(option)]
            own = {name: field for names, field in FIELD_OF.items() for name in names.split()}
            taken = next(((name, full) for name in given for full in own if _abbreviates(name, full)), None)
            if taken:
                rules.add("sbatch", f"{taken[0]!r} is in the script already", f"set {own[taken[1]]}, leave it out")
            elif any(_abbreviates(name, full) for name in given for full in NO_JOB):
                rules.add("sbatch", "with one of them sbatch would not submit the script as it is", "leave it out")


def _is_option(text: str) -> bool:
    """Whether sbatch reads a line as one option: a word, or a name and a value."""
    if re.match(r"--?[A-Za-z]", text) is None or not text.isprintable() or re.search(r"[#\\]", text):
        return False
    try:
        words = shlex.split(text)
    except ValueError:
        return False
    return len(words) == 1 or (len(words) == 2 and "=" not in words[0])


def _names(option: str) -> List[str]:
    """`--out=x` as --out, `-vD /tmp` as -v and -D."""
    if option.startswith("--"):
        return [re.split(r"[\s=]", option)[0]]
    letters = re.match(f"-([{WITHOUT_VALUE}]*.?)", option)
    return [f"-{letter}" for letter in letters[1]] if letters else []


def _abbreviates(name: str, full: str) -> bool:
    """Whether sbatch may read an option as another one: it takes the beginning of a long one for the whole."""
    return full.startswith(name) if name.startswith("--") else full == name
