# SPDX-License-Identifier: MIT
"""Takes from a process what a kernel has no need of: files, network, other processes.

A part of the worker, which is started as a script: imports nothing but the standard library. Linux
alone has what it takes: Landlock (since 5.13) for files, seccomp for system calls.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct
import sys

# System calls of (x86-64, aarch64) that running kernels, loading libraries and answering take.
_ALLOWED = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "fstat": (5, 80), "lseek": (8, 62),
    "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139),
    "pread64": (17, 67), "sched_yield": (24, 124), "mremap": (25, 216), "madvise": (28, 233),
    "getpid": (39, 172), "exit": (60, 93), "sigaltstack": (131, 132), "gettid": (186, 178),
    "futex": (202, 98), "restart_syscall": (219, 128), "clock_gettime": (228, 113),
    "exit_group": (231, 94), "newfstatat": (262, 79), "getrandom": (318, 278), "rseq": (334, 293),
}  # fmt: skip
_OPENAT, _TGKILL = (257, 56), (234, 131)
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06  # operations of BPF
_NUMBER, _ARCHITECTURE, _FIRST, _THIRD = 0, 4, 16, 32  # places in struct seccomp_data
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | 1  # as EPERM
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _FILTER_MODE = 22, 38, 2
_RULESET, _RULE, _RESTRICT, _VERSION, _PATH_BENEATH = 444, 445, 446, 1, 1
_READ_FILE = 1 << 2
# Rights over files that each version of Landlock knows.
_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
_ERROR_BYTES = 1 << 20


def enter(readable: str) -> list[str]:
    """Leaves this process the files in folder `readable`, to be read, and those that are open.
    Returns what it no longer has: "files", "network", "processes"; nothing where the system does
    not allow to give it up, or MSLSIM_ISOLATION is "off"."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_ERROR_BYTES, _ERROR_BYTES))
    machine = _ARCHITECTURES.get(platform.machine())
    if sys.platform != "linux" or machine is None or os.environ.get("MSLSIM_ISOLATION") == "off":
        return []
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        return []
    given_up = ["files"] if _keep_to_folder(libc, readable) else []
    program = _filter(*machine)
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("H6xQ", len(program) // 8, ctypes.addressof(code))
    if not libc.prctl(_PR_SET_SECCOMP, _FILTER_MODE, header, 0, 0):
        given_up += ["network", "processes"]
    return given_up


def _keep_to_folder(libc: ctypes.CDLL, folder: str) -> bool:
    """Landlock: no file can be opened but those in `folder`, and these to be read."""
    version = libc.syscall(_RULESET, None, ctypes.c_size_t(0), _VERSION)
    if version < 1:
        return False
    rights = (1 << _RIGHTS.get(version, 16)) - 1
    ruleset = libc.syscall(_RULESET, struct.pack("Q", rights), ctypes.c_size_t(8), 0)
    if ruleset < 0:
        return False
    place = os.open(folder, os.O_PATH | os.O_CLOEXEC)
    rule = struct.pack("=Qi", _READ_FILE, place)
    refused = libc.syscall(_RULE, ruleset, _PATH_BENEATH, rule, 0)
    refused = refused or libc.syscall(_RESTRICT, ruleset, 0)
    os.close(place)
    os.close(ruleset)
    return not refused


def _filter(column: int, architecture: int) -> bytes:
    """A program for the kernel's filter of system calls: those in the table pass, files can be
    opened to be read, and a signal is for this process alone. All others fail."""

    def step(operation: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
        return struct.pack("HBBI", operation, then, otherwise, value)

    refuse, allow = step(_RETURN, _REFUSE), step(_RETURN, _ALLOW)
    out = step(_LOAD, _ARCHITECTURE) + step(_EQUAL, architecture, 1, 0) + refuse
    out += step(_LOAD, _NUMBER)
    for numbers in _ALLOWED.values():
        out += step(_EQUAL, numbers[column], 0, 1) + allow
    writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    out += step(_EQUAL, _OPENAT[column], 0, 4)
    out += step(_LOAD, _THIRD) + step(_ANY_BIT, writes, 0, 1) + refuse + allow
    out += step(_EQUAL, _TGKILL[column], 0, 3)
    out += step(_LOAD, _FIRST) + step(_EQUAL, os.getpid(), 0, 1) + allow
    return out + refuse
