# SPDX-License-Identifier: MIT
"""`make test-neon`: the kernels of arm64 on this machine, emulated by qemu.

First the programs of tests/cpu, which need a cross compiler and qemu alone. Then the tests of every
op's CPU kernel with torch 2.10 for arm64, whose Python comes from Debian by mmdebstrap; they run
from the wheel that `make wheels TARGETS=aarch64` built.

`python release/neon.py tests/linalg -k qr` runs these tests alone.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import toolchain

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build/neon"
QEMU = "qemu-aarch64-static"
# The first of these that there is; else that of ziglang, which first builds a C++ library.
COMPILERS = ("aarch64-linux-gnu-g++", "aarch64-linux-gnu-g++-12")
PYTHON = "3.11"
# 2.10 is the newest torch whose wheel for arm64 is one for CPUs. It comes without what it asks for,
# which pip would choose for this machine and not for that.
TORCH = "torch==2.10.0"
PACKAGES = (
    *("numpy", "sympy", "networkx", "jinja2", "fsspec", "filelock", "typing-extensions"),
    *("setuptools", "pytest", "hypothesis", "expecttest", "typer", "rich", "gguf"),
)
FAMILIES = sorted(p.parent.name for p in ROOT.glob("src/metalcore/ops/*/__init__.py"))
# What starts compilers, and what is the same on every CPU, is tested where it is not emulated.
LEFT_OUT = "compile or export or opcheck or simulat or metal or gpu or device or registration"


def main() -> None:
    if shutil.which(QEMU) is None:
        sys.exit(f"test-neon: needs {QEMU}: apt-get install qemu-user-static")
    FOLDER.mkdir(parents=True, exist_ok=True)
    if not sys.argv[1:]:
        for name in ("simd", "math"):
            run_program(name)
    python = emulated_python()
    subprocess.run([python, "-m", "metalcore", "doctor"], check=True)
    subprocess.run([python, str(ROOT / "release/smoke.py")], check=True)
    tests = [f"tests/{family}" for family in FAMILIES]
    options = sys.argv[1:] or [*tests, "-k", f"not ({LEFT_OUT})"]
    command = [python, "-m", "pytest", "-q", "--backend=cpu", "-p", "no:cacheprovider", *options]
    sys.exit(subprocess.run(command, cwd=ROOT).returncode)


def run_program(name: str) -> None:
    """Compile a program of tests/cpu for arm64 and run it."""
    program = FOLDER / name
    gcc = next(filter(None, map(shutil.which, COMPILERS)), None)
    zig = [sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-linux-musl"]
    command = [*([gcc] if gcc else zig), "-static", "-Wno-psabi"]
    command += ["-std=c++20", "-O2", "-ffp-contract=off", "-Wall", "-Wextra"]
    command += ["-isystem", str(Path(sysconfig.get_path("purelib"), "torch/include"))]
    source = ROOT / f"tests/cpu/{name}.cpp"
    subprocess.run([*command, "-o", str(program), str(source)], check=True)
    shown = subprocess.run([QEMU, program], capture_output=True, text=True)
    print(f"{name}: {shown.stdout}", end="", flush=True)
    if shown.stdout != "registers of 16 bytes: right\n":
        sys.exit(1)


def emulated_python() -> Path:
    """A Python for arm64 with torch and our wheel; the file is a script that starts qemu."""
    root, site = FOLDER / "root", FOLDER / "site"
    if not (root / "usr/bin").exists():
        if shutil.which("mmdebstrap") is None:
            sys.exit("test-neon: needs a Python for arm64: apt-get install mmdebstrap")
        packages = f"python{PYTHON},libpython{PYTHON}-stdlib,libstdc++6,libgomp1"
        command = ["mmdebstrap", "--variant=extract", "--architectures=arm64"]
        command += ["--aptopt=Acquire::Check-Valid-Until false", f"--include={packages}"]
        subprocess.run([*command, "bookworm", str(root)], check=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(site)]
    pip += [f"--platform=manylinux_2_{n}_aarch64" for n in (28, 27, 17)]
    pip += ["--platform=manylinux2014_aarch64", f"--python-version={PYTHON}"]
    if not (site / "torch").exists():
        subprocess.run([*pip, "--only-binary=:all:", *PACKAGES], check=True)
        subprocess.run([*pip, "--only-binary=:all:", "--no-deps", TORCH], check=True)
    target = next(t for t in toolchain.TARGETS if t.name == "aarch64")
    wheel = max((ROOT / "dist").glob(f"metalcore_torch-*{target.platform}.whl"), default=None)
    if wheel is None:
        sys.exit("test-neon: needs the wheel: make wheels TARGETS=aarch64")
    for package in ("metalcore", *(p.name for p in site.glob("metalcore_torch-*"))):
        shutil.rmtree(site / package, ignore_errors=True)
    # the platform of the wheel is not that of this Python: unpacked, not installed
    shutil.unpack_archive(wheel, site, "zip")
    return _script(root, site)


def _script(root: Path, site: Path) -> Path:
    # OpenBLAS takes qemu's CPU for one with SVE, and its kernels for that are wrong there.
    variables = {
        "OPENBLAS_CORETYPE": "ARMV8",
        "PYTHONHOME": str(root / "usr"),
        "PYTHONPATH": f"{site}:{ROOT / 'src'}",
        "OMP_NUM_THREADS": "1",
        "METALCORE_STRICT": "1",
        "HOME": os.environ.get("HOME", "/"),
    }
    file = FOLDER / "python"
    program = root / f"usr/bin/python{PYTHON}"
    assignments = " ".join(f"{name}={value}" for name, value in variables.items())
    file.write_text(
        f'#!/bin/sh\nexec env {assignments} {QEMU} -0 {file} -L {root} {program} "$@"\n'
    )
    file.chmod(0o755)
    return file


if __name__ == "__main__":
    main()
