"""Who a process is, and whether another one can still be alive."""

import enum
import os
import socket
from pathlib import Path
from typing import Any, NamedTuple, Self

_PROC = Path("/proc")
_DEAD_STATES = {"Z", "X", "x"}


class Life(enum.Enum):
    """What is known of a process that once was."""

    OWN = enum.auto()  # it is this one
    ALIVE = enum.auto()
    DEAD = enum.auto()
    UNKNOWN = enum.auto()  # on another machine, or on one that does not tell


class Identity(NamedTuple):
    """A process, told from all others that ever were.

    Attributes:
      host: name of the machine, for people.
      boot_id: of the machine since it was switched on; None where that is not known.
      pid_namespace: in which `pid` counts; None where that is not known.
      pid: number of the process.
      process_start: when it began, in clock ticks since the boot; None where that is not known.
      job: what started it again and again, like `slurm/4711`; None if nothing is known to.
      restart: how often that had started it again before.
    """

    host: str
    boot_id: str | None
    pid_namespace: str | None
    pid: int
    process_start: int | None
    job: str | None
    restart: int

    @classmethod
    def of_this_process(cls) -> Self:
        """Of the process that asks."""
        slurm = os.environ.get("SLURM_JOB_ID")
        return cls(
            host=socket.gethostname(),
            boot_id=_text("sys/kernel/random/boot_id"),
            pid_namespace=_link("self/ns/pid"),
            pid=os.getpid(),
            process_start=_stat(os.getpid())[1],
            job=f"slurm/{slurm}" if slurm else None,
            restart=int(os.environ.get("SLURM_RESTART_COUNT", "0") or 0),
        )

    @classmethod
    def from_json(cls, found: Any) -> Self | None:
        """What `_asdict` has made; None if it is something else."""
        if not isinstance(found, dict) or set(found) < set(cls._fields):
            return None
        fields = {name: found[name] for name in cls._fields}
        return (
            cls(**fields) if all(isinstance(fields[n], int) for n in ("pid", "restart")) else None
        )

    def life(self) -> Life:
        """What this process can say about that one."""
        mine = Identity.of_this_process()
        if self == mine:
            return Life.OWN
        if self.job is not None and self.job == mine.job and self.restart < mine.restart:
            return Life.DEAD  # Slurm ends a job before it starts it again
        here = (mine.boot_id, mine.pid_namespace)
        if None in here or (self.boot_id, self.pid_namespace) != here:
            return Life.UNKNOWN
        state, start = _stat(self.pid)
        if state is None:
            return Life.UNKNOWN if _is_hidden(self.pid) else Life.DEAD
        if state in _DEAD_STATES or start != self.process_start:
            return Life.DEAD
        return Life.ALIVE

    def __str__(self) -> str:
        return f"{self.host}, pid {self.pid}"


def _stat(pid: int) -> tuple[str | None, int | None]:
    """State and start of a process; None where there is none."""
    text = _text(f"{pid}/stat")
    if text is None:
        return None, None
    fields = text.rpartition(")")[2].split()  # the name before it may hold anything
    return fields[0], int(fields[19])


def _is_hidden(pid: int) -> bool:
    """Whether there is a process that /proc does not show: of another user, with `hidepid`."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def _text(name: str) -> str | None:
    try:
        return (_PROC / name).read_text().strip()
    except OSError:
        return None


def _link(name: str) -> str | None:
    try:
        return str((_PROC / name).readlink())
    except OSError:
        return None
