"""
A private network namespace with nothing but the loopback.

A program in it reaches the server next to it and no host outside, whatever a client tries. Where
the system has no network namespaces, or does not permit them, dead proxy settings stop most of the
traffic.
"""

from __future__ import annotations

import shutil
import socket
import struct
import subprocess
import sys

_GET_FLAGS, _SET_FLAGS = 0x8913, 0x8914
_UP = 0x1
_REQUEST = "16sh14x"

#: For clients that obey them; no program listens on the second address.
PROXIES = {
    "NO_PROXY": "127.0.0.1,localhost",
    "HTTP_PROXY": "http://127.0.0.1:9",
    "HTTPS_PROXY": "http://127.0.0.1:9",
    "ALL_PROXY": "http://127.0.0.1:9",
}


def command_into() -> list[str] | None:
    """The command that runs another one in its own network namespace; None if none works here."""
    found = shutil.which("unshare")
    if sys.platform != "linux" or found is None:
        return None
    for command in ([found, "--net"], [found, "--net", "--map-root-user"]):
        tried = subprocess.run([*command, "true"], capture_output=True, check=False)
        if tried.returncode == 0:
            return command
    return None


def raise_loopback() -> None:
    """
    Bring up this network's loopback, which is down in a new namespace.

    Raises:
        OSError: this is not permitted.
    """
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        asked = struct.pack(_REQUEST, b"lo", 0)
        (_, flags) = struct.unpack(_REQUEST, fcntl.ioctl(one, _GET_FLAGS, asked))
        fcntl.ioctl(one, _SET_FLAGS, struct.pack(_REQUEST, b"lo", flags | _UP))


def reaches_others() -> bool:
    """Whether this network has a route to an address outside this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        try:
            # This sends nothing: it only looks up the route.
            one.connect(("192.0.2.1", 9))
        except OSError:
            return False
    return True
