# SPDX-License-Identifier: MIT
"""What must be there, and what must not, before anything else of metalcore is imported."""

from importlib.metadata import Distribution, PackageNotFoundError, distribution, version

DISTRIBUTION = "metalcore-torch"
OLDEST_TORCH = (2, 10)

_NEEDED = "metalcore needs torch {}.{} or newer".format(*OLDEST_TORCH)


def expect_torch() -> None:
    """Raise an ImportError of one line where there is no torch, or one that is too old."""
    try:
        import torch
    except ModuleNotFoundError as missing:
        if missing.name != "torch":
            raise
        raise ImportError(f"{_NEEDED}: pip install torch", name="torch") from None
    found = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if found < OLDEST_TORCH:
        raise ImportError(f"{_NEEDED}, got {torch.__version__}: pip install --upgrade torch")


def expect_one_owner() -> None:
    """Raise an ImportError where the distribution `metalcore`, of others, wrote to our folder."""
    other = _other()
    if other is not None and any(
        str(file) == "metalcore/__init__.py" for file in other.files or ()
    ):
        raise ImportError(
            f"metalcore: the package metalcore {other.version} is installed in the same folder as "
            f"{DISTRIBUTION}, and one has overwritten the other. To keep this one: "
            f"pip uninstall metalcore && pip install --force-reinstall --no-deps {DISTRIBUTION}"
        )


def own_version() -> str:
    """Our version; for a copy inside of another package, 0+unknown."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "0+unknown"


def _other() -> Distribution | None:
    try:
        return distribution("metalcore")
    except PackageNotFoundError:
        return None
