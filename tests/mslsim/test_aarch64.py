# SPDX-License-Identifier: MIT
"""The machine on aarch64, cross-compiled and run under qemu."""

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest

import mslsim
from mslsim.compiler import cache_directory

QEMU = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
ZIG = importlib.util.find_spec("ziglang")
pytestmark = pytest.mark.skipif(not (QEMU and ZIG), reason="needs qemu-user and ziglang")
MACHINE = Path(mslsim.__file__).parent / "machine"

DRIVER = """
#include "machine.cpp"

#include <stdio.h>

static double g_sums[2][200];
static void add_up(msl::Collective* c) {
  double sum = 0;
  for (int i = 0; i < 32; ++i) {
    if (c->mask >> i & 1) sum += *static_cast<double*>(c->value[i]);
  }
  for (int i = 0; i < 32; ++i) {
    if (c->mask >> i & 1) *static_cast<double*>(c->value[i]) = sum;
  }
}
// Values live in floating-point registers across the switches.
static void kernel(const msl::Arguments*, const msl::Group* g, unsigned t) {
  double* shared = static_cast<double*>(msl_threadgroup_memory(1, 8 * 8, 8));
  double mine = t, product = 1.0 + t;
  msl_collective(&mine, 0, add_up, msl::kCollective, 0, 1);
  if (t % 32 == 0) shared[t / 32] = mine;
  msl_threadgroup_barrier(2, 2);
  double sum = 0;
  for (unsigned i = 0; i < g->simdgroups; ++i) sum += shared[i];
  g_sums[g->position[0]][t] = sum * product / (1.0 + t);
}
int main() {
  msl::Launch launch{};
  launch.thread = kernel;
  for (int i = 0; i < 3; ++i) launch.threads[i] = launch.group_size[i] = 1;
  launch.threads[0] = 400;
  launch.group_size[0] = 200;
  launch.synchronised = 1;
  launch.workers = 2;
  for (launch.order = 0; launch.order < 3; ++launch.order) {
    if (msl_run(&launch) || launch.failed) return 1;
    for (auto& sums : g_sums) {
      for (double s : sums) {
        if (s < 19899.999 || s > 19900.001) return 2;
      }
    }
  }
  puts("ok");
}
"""


@pytest.mark.parametrize("define", ["MSL_FIND_BY_STACK", "MSL_FIND_BY_THREAD"])
def test_a_group_of_fibers_on_aarch64(tmp_path, define):
    (tmp_path / "driver.cpp").write_text(DRIVER)
    zig = Path(next(iter(ZIG.submodule_search_locations))) / "zig"
    command = [str(zig), "c++", "-target", "aarch64-linux-musl", "-static", "-std=gnu++17", "-O2"]
    command += ["-DMSL_MACHINE", f"-D{define}", "-fno-exceptions", "-fno-threadsafe-statics"]
    command += ["-nostdlib++", "-I", str(MACHINE), str(tmp_path / "driver.cpp")]
    folder = str(cache_directory() / "zig")
    environment = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": folder, "ZIG_LOCAL_CACHE_DIR": folder}
    subprocess.run([*command, "-o", str(tmp_path / "driver")], check=True, env=environment)
    done = subprocess.run([QEMU, str(tmp_path / "driver")], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "ok\n")
