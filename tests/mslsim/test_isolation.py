# SPDX-License-Identifier: MIT
"""What a checked kernel cannot reach, where the system allows to take it away."""

import platform
import sys

import numpy as np
import pytest

import mslsim
from mslsim import isolated

# System calls of x86-64, made by assembly, which strict=False lets pass.
ATTACK = """#include <metal_stdlib>
using namespace metal;
long ask(long n, long a, long b, long c) {
  long r;
  __asm__ volatile("syscall" : "=a"(r) : "a"(n), "D"(a), "S"(b), "d"(c) : "rcx", "r11", "memory");
  return r;
}
kernel void attack(device long* out [[buffer(0)]], device uchar* path [[buffer(1)]]) {
  out[0] = ask(257, -100, (long)path, 0);     // openat, to read
  out[1] = ask(257, -100, (long)path, 0101);  // openat, to create
  out[2] = ask(41, 2, 1, 0);                  // socket
  out[3] = ask(57, 0, 0, 0);                  // fork
  out[4] = ask(59, (long)path, 0, 0);         // execve
  out[5] = ask(87, (long)path, 0, 0);         // unlink
  out[6] = ask(62, 1, 0, 0);                  // kill
  out[7] = ask(2, (long)path, 0, 0);          // open
}
"""


def given_up():
    with isolated.lock:
        return isolated.worker().isolation()


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="needs x86-64 Linux"
)
def test_a_kernel_reaches_neither_files_nor_network(tmp_path):
    if "network" not in given_up():
        pytest.skip("this system has no seccomp")
    secret = tmp_path / "secret"
    secret.write_text("secret")
    path, out = np.frombuffer(bytes(secret) + b"\0", np.uint8).copy(), np.ones(8, np.int64)
    report = mslsim.run(ATTACK, "attack", [out, path], 1, 1, strict=False, checks={"bounds"})
    assert report.ok, str(report)
    assert (out[1:] < 0).all(), out
    assert secret.exists()
    if "files" in given_up():
        assert out[0] < 0


def test_assembly_is_refused_to_begin_with():
    findings = mslsim.lint(ATTACK)
    assert findings
    assert {f.kind for f in findings} == {"strict"}


def test_the_worker_follows_the_cache(tmp_path, monkeypatch):
    """It can read one folder, and is another process for another one."""
    text = "kernel void one(device float* x [[buffer(0)]]) { x[0] = 1; }"
    for name in ("a", "b"):
        monkeypatch.setenv("MSLSIM_CACHE", str(tmp_path / name))
        x = np.zeros(1, np.float32)
        mslsim.compile_shader(text).one(x, threads=1)
        assert x[0] == 1


def test_the_environment_is_not_passed_on(monkeypatch):
    monkeypatch.setenv("MSLSIM_SECRET", "1")
    isolated.worker().stop()
    with isolated.lock:
        isolated.worker().isolation()
    process = isolated.worker()._process
    if sys.platform == "linux":
        with open(f"/proc/{process.pid}/environ", "rb") as file:
            assert b"MSLSIM_SECRET" not in file.read()
