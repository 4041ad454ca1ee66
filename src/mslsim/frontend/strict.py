# SPDX-License-Identifier: MIT
"""Refuses what Apple's compiler refuses and C++ accepts."""

from __future__ import annotations

from ..report import Finding
from ..text.kernels import Found
from ..text.scopes import Function, Scopes, find_scopes
from ..text.tokens import ASSEMBLY, Stream, air_name, split_top_level
from .pointers import pointer_findings

LAST_BUFFER = 30
FIRST_BFLOAT_VERSION = 310

_BANNED = {
    "double": "'double' is not supported in Metal",
    "new": "'new' is not allowed in Metal",
    "delete": "'delete' is not allowed in Metal",
    "virtual": "virtual functions are not allowed in Metal",
    "throw": "exceptions are not allowed in Metal",
    "try": "exceptions are not allowed in Metal",
    "catch": "exceptions are not allowed in Metal",
    "dynamic_cast": "'dynamic_cast' is not allowed in Metal",
    "typeid": "'typeid' is not allowed in Metal",
    "goto": "'goto' is not allowed in Metal",
    "thread_local": "'thread_local' is not allowed in Metal",
    **dict.fromkeys(ASSEMBLY, "inline assembly is not allowed in Metal"),
}
_FOREIGN_ATTRIBUTES = frozenset({"constructor", "destructor", "ifunc", "alias"})
# Words with which a statement at program scope is no variable.
_NO_VARIABLE = frozenset(
    {
        "using", "typedef", "template", "struct", "class", "enum", "union", "namespace", "extern",
        "static_assert", "friend", "kernel", "constant", "constexpr", "operator", "sampler",
        "public", "private", "decltype", "concept", "requires",
    }
)  # fmt: skip


def strictness(s: Stream, found: Found, version: int) -> list[Finding]:
    """Findings of kind "strict", in source order."""
    scopes = find_scopes(s)
    findings = _words(s, version)
    findings += _attributes(s)
    findings += _buffers(found)
    findings += _program_scope(s, scopes)
    findings += _static_locals(s, scopes)
    findings += _recursion(s, scopes)
    findings += pointer_findings(s, scopes)
    return sorted(findings, key=lambda f: (f.file, f.line))


def finding(s: Stream, at: int, message: str) -> Finding:
    token = s.tokens[at]
    return Finding("strict", message, "", token.file, token.line)


def _words(s: Stream, version: int) -> list[Finding]:
    banned = dict(_BANNED)
    if version < FIRST_BFLOAT_VERSION:
        banned["bfloat"] = f"'bfloat' needs Metal 3.1, the source is for version {version}"
    findings = []
    for i, token in enumerate(s.tokens):
        if token.kind != "word" or token.text not in banned:
            continue
        if token.text == "delete" and s[s.before(i)] == "=":
            continue
        if token.text in ASSEMBLY and air_name(s, i):
            continue
        findings.append(finding(s, i, banned[token.text]))
    return findings


def _attributes(s: Stream) -> list[Finding]:
    """Those by which code would run before or beside a kernel."""
    findings = []
    for i, token in enumerate(s.tokens):
        if token.kind != "word" or token.text not in _FOREIGN_ATTRIBUTES:
            continue
        if s[s.before(i)] in ("(", ",", "[["):
            findings.append(finding(s, i, f"attribute '{token.text}' is not allowed in Metal"))
    return findings


def _buffers(found: Found) -> list[Finding]:
    findings = {}
    for kernel in found.kernels:
        for p in kernel.parameters:
            if p.kind == "buffer" and p.index.isdigit() and int(p.index) > LAST_BUFFER:
                message = (
                    f"buffer index must be at most {LAST_BUFFER}, got {p.index} for '{p.name}'"
                )
                findings[p.file, p.line] = Finding("strict", message, kernel.name, p.file, p.line)
    return list(findings.values())


def _program_scope(s: Stream, scopes: Scopes) -> list[Finding]:
    """Variables outside functions must be `constant`."""
    findings = []
    for start in scopes.program_statements:
        words, k, name = set(), start, -1
        while k < len(s) and s[k] not in (";", "(", "=", "{", "["):
            if s[k] == "[[":
                k = s.after(s.closing(k))
                continue
            if s.tokens[k].kind == "word":
                words.add(s[k])
                name = k
            k = s.after(k)
        if s[k] in (";", "=", "[") and len(words) >= 2 and not words & _NO_VARIABLE:
            findings.append(
                finding(
                    s,
                    start,
                    f"program scope variable '{s[name]}' must be in the constant address space",
                )
            )
    return findings


def _static_locals(s: Stream, scopes: Scopes) -> list[Finding]:
    findings = []
    for function in scopes.functions:
        for k in s.code(function.begin, function.end):
            if s[k] == "static" and s.tokens[k].kind == "word":
                following = {s[s.after(k)], s[s.after(s.after(k))]}
                if not following & {"constexpr", "constant"}:
                    findings.append(
                        finding(s, k, "static local variables are not allowed in Metal")
                    )
    return findings


def _recursion(s: Stream, scopes: Scopes) -> list[Finding]:
    """Cycles of calls, among functions whose name has one meaning."""
    named: dict[str, list[Function]] = {}
    for function in scopes.functions:
        named.setdefault(function.name, []).append(function)
    plain = {
        name: group[0]
        for name, group in named.items()
        if len(group) == 1 and not group[0].is_template and not group[0].in_type
    }
    calls: dict[str, dict[str, int]] = {}
    for name, function in plain.items():
        sites = calls.setdefault(name, {})
        for k in s.code(function.begin, function.end):
            if s[k] in plain and s[s.before(k)] not in (".", "->", "::") and _fits(s, k, plain):
                sites.setdefault(s[k], k)
    findings = []
    for name in plain:
        if name in _reached(calls, name):
            at = next(
                k for callee, k in calls[name].items() if name in {callee} | _reached(calls, callee)
            )
            findings.append(
                finding(s, at, f"recursion is not allowed in Metal: '{name}' calls itself")
            )
    return findings


def _fits(s: Stream, at: int, functions: dict[str, Function]) -> bool:
    """Whether a call has as many arguments as the function of that name in the source: a kernel
    may bear the name of a library function, and call it."""
    opening = s.after(at)
    if s[opening] != "(":
        return False
    f = functions[s[at]]
    wanted = _count(s, f.parens, f.close)
    has_defaults = "=" in (s[k] for k in s.code(f.parens, f.close))
    return has_defaults or _count(s, opening, s.closing(opening)) == wanted


def _count(s: Stream, opening: int, closing: int) -> int:
    inside = s.code(opening + 1, closing)
    return len(split_top_level((k, s[k]) for k in inside)) if inside else 0


def _reached(calls: dict[str, dict[str, int]], name: str) -> set[str]:
    reached: set[str] = set()
    pending = list(calls[name])
    while pending:
        callee = pending.pop()
        if callee not in reached:
            reached.add(callee)
            pending += calls.get(callee, {})
    return reached
