# SPDX-License-Identifier: MIT
"""What Mesa's compiler for M1 and M2 makes of a kernel, where $MSLSIM_AGX names it (asahi_clc).

The kernel's C++ goes through clang 19, opt and llvm-spirv, found beside asahi_clc or on PATH: the
machine's functions become those of OpenCL, and the address spaces that C++ does not have come back
by inference.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from .compiler import PACKAGE
from .frontend.rewrite import symbol
from .text.kernels import Kernel

# Passes of opt: first the collectives must be seen with what they do, then address spaces.
_INLINE = "always-inline,inline,function(sroa,early-cse,simplifycfg)"
_OPTIMISE = (
    "internalize,globaldce,always-inline,inline,function(sroa,infer-address-spaces),default<O2>,"
    "function(infer-address-spaces,sroa,instcombine,simplifycfg),globaldce"
)
_OPT = [
    "-assume-default-is-flat-addrspace",
    "-internalize-public-api-list=KERNEL",
    "-vectorize-slp=0",
    "-vectorize-loops=0",
    "-inline-threshold=100000000",
    "-unroll-threshold=800",
    "-pragma-unroll-threshold=10000000",
]
_CLANG = ["--target=spir64", "-std=gnu++17", "-O2", "-Xclang", "-disable-llvm-passes", "-fdeclspec"]
_CLANG += ["-fno-builtin", "-fno-math-errno", "-fno-trapping-math", "-fno-exceptions", "-fno-rtti"]
# asahi_clc wants parameters to have names
_CLANG += ["-fno-discard-value-names", "-w", "-x", "c++", "-S", "-emit-llvm", "-", "-o", "-"]
_SECONDS = 300
_GROUP = 256

_COLLECTIVE = re.compile(
    r"call (?:spir_func )?void @msl_collective\(ptr (?:\w+ )*(\S+), i32 (?:\w+ )*(\S+), "
    r"ptr (?:\w+ )*@(\w+), i32 (?:\w+ )*(\d+), i32 (?:\w+ )*\S+\)"
)
_SERVE = re.compile(r"msl_serve_(reduce|scan|shuffle|first|ballot|nothing|multiply)(?:I(.*))?")
_ELEMENT = re.compile(r"^(?:NS_3vecI)?(f|DF16_|Dh|[ij]|[st]|[ahc])(?:Li(\d)E)?")
_ELEMENTS = {"f": "f", "DF16_": "h", "Dh": "h", **dict.fromkeys("ij", "i")}
_ELEMENTS |= {**dict.fromkeys("st", "s"), **dict.fromkeys("ahc", "c")}
_BLOCK = re.compile(
    r"(%\S+) = (?:tail )?call (?:spir_func )?(?:\w+ |align \d+ |dereferenceable\(\d+\) )*ptr "
    r"@msl_threadgroup_memory\(i32 (?:\w+ )*(\d+), i64 (?:\w+ )*(\d+), i64 (?:\w+ )*(\d+)\)[^\n]*"
)
_MATH = re.compile(r"call (?:[a-z]+ )*float @llvm\.(exp2|exp|log2|log10|log|sqrt|sin|cos)\.f32\(")
# Keeps all of agx.h up to here, and no longer.
_USED = re.compile(r"^@llvm\.(?:compiler\.)?used = .*\n", re.MULTILINE)
_STATISTICS = re.compile(r"shader: (.*), (\d+):\d+ spills:fills")


class Figures(NamedTuple):
    """Half registers of a thread, bytes of code, and values kept in memory."""

    half_registers: int
    code_bytes: int
    spills: int


class AgxFailed(Exception):
    """A step of the way does not take the kernel."""


def compiler() -> Path | None:
    """asahi_clc, if $MSLSIM_AGX names it."""
    name = os.environ.get("MSLSIM_AGX")
    if not name:
        return None
    if not os.access(name, os.X_OK):
        raise ValueError(f"MSLSIM_AGX={name} is no program; it should be the path of asahi_clc")
    return Path(name)


def figures(program: Path, kernel: Kernel, cpp: str, machine: str) -> Figures:
    """Of a kernel, whose C++ and machine headers are `cpp` and `machine`, as one text each."""
    own = (PACKAGE / "machine" / "agx.h").read_text()
    text = "\n".join((machine, own, _thread(cpp), _entry(kernel)))
    text = _run(program, "clang++", _CLANG, text.encode()).decode()
    text = _run(program, "opt", ["-S", f"-passes={_INLINE}", "-"], text.encode()).decode()
    text = _replaced(text)
    text = _run(program, "opt", ["-S", f"-passes={_OPTIMISE}", *_OPT, "-"], text.encode()).decode()
    module = _run(program, "opt", ["-"], _as_kernel(text).encode())
    binary = _run(program, "llvm-spirv", ["--spirv-max-version=1.4", "-", "-o", "-"], module)
    return _measured(program, binary)


def _run(program: Path, tool: str, arguments: list[str], given: bytes) -> bytes:
    names = [str(program.with_name(f"{tool}-19")), f"{tool}-19", tool]
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        raise ValueError(f"MSLSIM_AGX needs {tool} of LLVM 19, on PATH or beside asahi_clc")
    done = subprocess.run([path, *arguments], input=given, capture_output=True, timeout=_SECONDS)
    if done.returncode:
        raise AgxFailed(f"{tool}: {done.stderr.decode(errors='replace').strip()[:300]}")
    return done.stdout


def _thread(cpp: str) -> str:
    """The kernel's function for a thread, which asks OpenCL where it is."""
    place = ", ".join(f"unsigned(get_local_id({i}))" for i in range(3))
    cpp = cpp.replace("const msl::Thread t(g, i);", f"const msl::Thread t(i, {place});")
    return re.sub(r"extern const int msl_table_.*?\}\};", "", cpp, flags=re.DOTALL)


def _entry(kernel: Kernel) -> str:
    """A function whose parameters have address spaces, to be the kernel."""
    parameters: list[str] = []
    values: list[str] = []
    for p in kernel.parameters:
        if p.kind == "position":
            continue
        space = 3 if p.kind == "threadgroup" else 2 if "constant" in p.declared.split() else 1
        name = f"{p.kind}{len(values)}"
        parameters.append(f"__attribute__((address_space({space}))) char* {name}")
        values.append(f"a.{p.kind}[{p.index}] = (void*){name};")
    # asahi_clc takes what OpenCL would tell of sizes for zero
    parameters += [
        f"unsigned {name}{i}" for name in ("size", "threads", "groups") for i in range(3)
    ]
    sizes = "".join(
        f"g.position[{i}] = get_group_id({i}); g.size[{i}] = g.dispatch_size[{i}] = size{i};"
        f"g.grid_threads[{i}] = threads{i}; g.grid_groups[{i}] = groups{i};"
        for i in range(3)
    )
    return (
        f'extern "C" void KERNEL({", ".join(parameters)}) {{ msl::Arguments a; msl::Group g;'
        f"{' '.join(values)} {sizes} g.threads = size0 * size1 * size2;"
        "g.simdgroups = (g.threads + 31) / 32;"
        f"msl_thread_{symbol(kernel.name)}(&a, &g, unsigned(get_local_id(0))); }}\n"
    )


def _replaced(ir: str) -> str:
    """The machine's functions by those of agx.h, and its threadgroup memory by variables."""
    ir = _COLLECTIVE.sub(_collective, ir)
    ir = _MATH.sub(r"call spir_func float @msl_agx_\1(", ir)
    blocks: dict[str, str] = {}

    def block(match: re.Match[str]) -> str:
        result, slot, size, align = match.groups()
        name = f"@msl_shared_{slot}"
        blocks[slot] = f"{name} = internal addrspace(3) global [{size} x i8] undef, align {align}\n"
        return f"{result} = addrspacecast ptr addrspace(3) {name} to ptr"

    ir = _BLOCK.sub(block, _USED.sub("", ir))
    return ir + "".join(blocks.values())


def _collective(match: re.Match[str]) -> str:
    value, number, served, kind = match.groups()
    found = _SERVE.search(served)
    operation, types = (found[1], found[2] or "") if found else ("nothing", "")
    if operation == "nothing":
        name = "simd_barrier" if kind == "1" else "nothing"
    elif operation == "multiply":
        # the sum's type, and that of the factors
        name = "multiply_hh" if types[:1] != "f" else f"multiply_f{'fh'[types[1:2] != 'f']}"
    elif operation == "ballot":
        name = operation
    else:
        element = _ELEMENT.match(types)
        letter, count = (_ELEMENTS[element[1]], element[2] or "1") if element else ("i", "1")
        name = f"{'shuffle' if operation == 'first' else operation}_{letter}{count}"
    return f"call spir_func void @msl_agx_{name}(ptr {value}, i32 {number})"


def _as_kernel(ir: str) -> str:
    """The function marked as OpenCL has it."""
    known = [int(n) for n in re.findall(r"^!(\d+) =", ir, re.MULTILINE)]
    free = max(known, default=-1) + 1
    ir = re.sub(r"define [^@\n]*void @KERNEL\(", "define spir_kernel void @KERNEL(", ir)
    ir = re.sub(
        r"(define spir_kernel void @KERNEL\([^{]*?)(\s*\{)",
        rf"\1 !reqd_work_group_size !{free}\2",
        ir,
        count=1,
    )
    return ir + (
        f"\n!{free} = !{{i32 {_GROUP}, i32 1, i32 1}}\n"
        f"!opencl.ocl.version = !{{!{free + 1}}}\n!{free + 1} = !{{i32 3, i32 0}}\n"
    )


def _measured(program: Path, binary: bytes) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        files = [str(Path(folder) / name) for name in ("kernel.spv", "out.h", "out.c")]
        Path(files[0]).write_bytes(binary)
        environment = {**os.environ, "AGX_MESA_DEBUG": "shaderdb,internal"}
        done = subprocess.run(
            [str(program), *files], capture_output=True, env=environment, timeout=_SECONDS
        )
    said = (done.stdout + done.stderr).decode(errors="replace")
    found = _STATISTICS.search(said)
    if not found:
        raise AgxFailed(f"asahi_clc: {said.strip()[-300:] or f'ended with {done.returncode}'}")
    numbers = {name: int(n) for n, name in re.findall(r"(\d+) (\w+)", found[1])}
    return Figures(numbers["regs"], numbers["bytes"], int(found[2]))
