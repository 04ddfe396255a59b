"""Bind a process to the one that started it, so that neither outlives the other. Imports no torch.

Only Linux has that. Elsewhere torchrun and its ranks go on where the command that watches them is
killed by SIGKILL; every other signal it hears, and ends them.

``python -m real_runtime.parent PROCESS COMMAND...`` becomes the command, bound to the process.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

__all__ = ["PARENT", "bind"]

PARENT = "HETLAB_PARENT"
"""Environment variable with the process number of torchrun."""
PR_SET_PDEATHSIG = 1


def bind(parent: int) -> None:
    """Have the kernel end this process by SIGKILL once its parent is gone (prctl(2)).

    Args:
        parent: process number; where it is the parent no more this process ends at once. 0 when
            unknown.

    Raises:
        OSError: the kernel refuses.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = [ctypes.c_ulong(n) for n in (signal.SIGKILL, 0, 0, 0)]
    if libc.prctl(PR_SET_PDEATHSIG, *arguments):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "PR_SET_PDEATHSIG")
    if parent and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    bind(int(sys.argv[1]))
    os.environ[PARENT] = str(os.getpid())
    os.execv(sys.argv[2], sys.argv[2:])
