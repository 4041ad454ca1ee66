# SPDX-License-Identifier: MIT
"""What a compiled kernel takes from elsewhere, though Metal does not have it."""

from __future__ import annotations

import re
from functools import lru_cache

_OWN = re.compile(r"llvm\.|msl_|__(?:tsan|ubsan|extend|trunc|float|fix|gnu|sanitizer_cov)")


def foreign(ir: str, math: str) -> list[str]:
    """What a module takes from elsewhere that is neither the machine's nor a function that the
    text `math` of its header names."""
    names = re.findall(r'^declare [^@]*@"?([^"(]+)"?\(', ir, re.MULTILINE)
    names += re.findall(r'^@"?([^" ]+)"? = external ', ir, re.MULTILINE)
    names = [n for n in names if not _OWN.match(n) and n not in _math_functions(math)]
    # _Z6systemPKc
    return sorted(n[m.end() :][: int(m[1])] if (m := re.match(r"_Z(\d+)", n)) else n for n in names)


@lru_cache(maxsize=1)
def _math_functions(math: str) -> frozenset[str]:
    """Of the C library: those that the machine declares, and what a compiler calls by itself."""
    declared = re.findall(r"^(?:float|double) (\w+)\(", math, re.MULTILINE)
    builtin = re.findall(r"__builtin_(\w+)\(", math)
    return frozenset(declared + builtin + ["memcpy", "memset", "memmove", "bzero", "bcmp"])
