# SPDX-License-Identifier: MIT
"""`make wheels`: builds all that is published, for every machine, on this one; then checks it.

`python release/wheels.py aarch64 macos` builds these alone.
"""

import argparse
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import macho
import toolchain
from toolchain import TARGETS, Target

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build/wheels"
DIST = ROOT / "dist"
# One of each minor version that is served.
TORCHES = ("2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
# Of the C++ library beside what torch uses: members of a class that every libc++ exports whole.
_ISTREAM = {
    f"__ZNSt3__113basic_istreamIcNS_11char_traitsIcEEE{m}" for m in ("4peekEv", "rsERd", "rsERx")
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", help="of x86_64, aarch64, macos; default all")
    parser.add_argument("--sets", help="instruction sets to build, such as avx2; default all")
    chosen = parser.parse_args()
    DIST.mkdir(exist_ok=True)
    names = [t for t in TARGETS if not chosen.targets or t.name in chosen.targets]
    for target in names:
        print(f"building {target.platform}", flush=True)
        build_wheel(target, chosen.sets)
    if not chosen.targets:
        print("building the source distribution and mslsim", flush=True)
        build_sources()
    import check

    sys.exit(check.report(DIST))


def build_wheel(target: Target, sets: str | None = None) -> Path:
    """The wheel for `target`, in dist/."""
    folder = BUILD / target.name
    torch = Path(sysconfig.get_path("purelib"), "torch")
    torch_names, cxx_names = macos_names() if target.is_macos else (set(), set())
    arguments = toolchain.make(target, folder, torch, torch_names, cxx_names)
    arguments += ["-DMETALCORE_WERROR=ON"]
    arguments += [f"-DMETALCORE_SETS={sets.replace(',', ';')}"] if sets else []
    _remove(DIST, f"metalcore_torch-*{target.platform}.whl")
    settings = {
        "cmake.args": ";".join(a.replace(";", "\\;") for a in arguments),
        "build-dir": str(folder / "cmake"),
        "wheel.tags": f"py3-none-{target.platform}",
        "install.strip": "false",
    }
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps"]
    command += [f"--config-settings={key}={value}" for key, value in settings.items()]
    subprocess.run([*command, "--wheel-dir", str(DIST), str(ROOT)], check=True)
    return next(DIST.glob(f"metalcore_torch-*{target.platform}.whl"))


def build_sources() -> None:
    """The source distributions, and the wheel of mslsim."""
    _remove(DIST, "*.tar.gz")
    _remove(DIST, "mslsim-*.whl")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(DIST)]
    for arguments in (["--sdist", str(ROOT)], [str(ROOT / "release/mslsim")]):
        subprocess.run([*build, *arguments], check=True, stdout=subprocess.DEVNULL)


def macos_names() -> tuple[set[str], set[str]]:
    """What every libtorch_cpu of macOS exports, and what any takes of the C++ library: all of them
    are for macOS 14 or older, so that it has these names there."""
    libraries = [macos_torch(version) for version in TORCHES]
    exported = [{n for n in lib.exports if re.match("_(aoti_)?torch_", n)} for lib in libraries]
    used = [{i.name for i in lib.imports if "libc++" in i.library} for lib in libraries]
    return set.intersection(*exported), _ISTREAM.union(*used)


def macos_torch(version: str) -> macho.Library:
    """libtorch_cpu of torch's wheel for macOS, which is downloaded once."""
    folder = BUILD / "torch"
    library = folder / f"libtorch_cpu-{version}.dylib"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary=:all:", "--python-version=3.12", "--dest", str(folder)]
        command += ["--platform=macosx_11_0_arm64", "--platform=macosx_14_0_arm64"]
        subprocess.run([*command, f"torch=={version}"], check=True)
        wheel = next(folder.glob(f"torch-{version}-*.whl"))
        part = library.with_suffix(".part")
        with zipfile.ZipFile(wheel) as z, part.open("wb") as out:
            shutil.copyfileobj(z.open("torch/lib/libtorch_cpu.dylib"), out)
        part.rename(library)
        wheel.unlink()
    return macho.read(library.read_bytes())


def _remove(folder: Path, pattern: str) -> None:
    for file in folder.glob(pattern):
        file.unlink()


if __name__ == "__main__":
    main()
