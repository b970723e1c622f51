"""Tools that test what a store does when the disk, the system or its own process fails.

`Recorder` records what an operation changes on the disk; `crash_states` rebuilds each state in
which a crash can leave it; `Faults` makes one system call of an operation fail. All of them take
the place of the system calls of every store of the process while `installed` is entered.

Examples
--------
>>> recorder = Recorder(root)                                                  # doctest: +SKIP
>>> with installed(recorder):                                                  # doctest: +SKIP
...     store.flush()
>>> for state in crash_states(recorder):                                       # doctest: +SKIP
...     state.build(empty_directory)
"""

from hybridmem._fileio import Syscalls
from hybridmem.testing._crashes import CrashState, crash_states
from hybridmem.testing._faults import KINDS, Faults
from hybridmem.testing._hooks import NAMES, Hooked, installed
from hybridmem.testing._recorder import Recorder

__all__ = [
    "KINDS",
    "NAMES",
    "CrashState",
    "Faults",
    "Hooked",
    "Recorder",
    "Syscalls",
    "crash_states",
    "installed",
]
