"""Whether a port of this machine is free: ``python -m real_runtime.port_check PORT``."""

from __future__ import annotations

import errno
import socket
import sys

from real_runtime.errors import RunError

__all__ = ["check_port"]


def check_port(port: int) -> None:
    """Check that a server may listen on a port of this machine.

    Raises:
        RunError: something listens there already, or the system does not allow it.
    """
    with socket.socket() as tried:
        # As torch's store does, so that ends of old connections do not count.
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("", port))
            tried.listen(1)
        except OSError as error:
            reason = "is in use" if error.errno == errno.EADDRINUSE else f"fails: {error.strerror}"
            host = socket.gethostname()
            raise RunError(f"port {port} of {host} {reason}; give another --port") from error


if __name__ == "__main__":
    try:
        check_port(int(sys.argv[1]))
    except RunError as error:
        print(f"hetlab: {error}", file=sys.stderr)  # noqa: T201 - this is a command
        sys.exit(error.exit_code)
