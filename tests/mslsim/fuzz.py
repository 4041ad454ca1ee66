# SPDX-License-Identifier: MIT
"""What mslsim reads from strangers: Metal sources, launch files, arrays. Whatever they are, it is
read, or refused by a ValueError.

`pip install atheris`, then `python -m tests.mslsim.fuzz sources -runs=100000` (or `launches`,
`arrays`) tries what reaches new code; test_fuzz.py tries a few by hypothesis.
"""

import contextlib
import io
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mslsim import spec
from mslsim.signature import read_signatures

KERNELS = sorted((Path(__file__).parent / "kernels").glob("*/*.metal"))
_LAUNCH = 'kernel = "k"\nthreads = 32\ngroup_size = 32\n[[arguments]]\n'


def read_source(data: bytes) -> None:
    _read(lambda: read_signatures(data.decode("utf-8", "replace")))


def read_launch(data: bytes) -> None:
    """The rest of a launch file, whose arguments may be large; these are refused before."""
    _load(_LAUNCH + data.decode("utf-8", "replace"))


def read_array(data: bytes) -> None:
    _load(_LAUNCH + 'npy = "x.npy"\n', data)


def _load(text: str, array: bytes = b"") -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "launch.toml")
        path.write_text(text, encoding="utf-8")
        Path(folder, "x.npy").write_bytes(array)
        _read(lambda: spec.load(path))


def _read(reader: Callable[[], object]) -> None:
    with contextlib.suppress(ValueError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy's, of old files
        reader()


def seeds(kind: str) -> list[bytes]:
    if kind == "sources":
        return [path.read_bytes() for path in KERNELS]
    if kind == "launches":
        return [b'name = "x"\nshape = [4, 3]\ndtype = "bfloat16"\nfill = "range"\n', b"value = 1.5"]
    file = io.BytesIO()
    np.save(file, np.arange(12, dtype=np.float16).reshape(3, 4))
    return [file.getvalue()]


KINDS = {"sources": read_source, "launches": read_launch, "arrays": read_array}


def main() -> None:
    import atheris  # type: ignore[import-not-found]

    name, *options = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        for i, seed in enumerate(seeds(name)):
            Path(folder, str(i)).write_bytes(seed)
        atheris.instrument_all()
        atheris.Setup([sys.argv[0], folder, *options], KINDS[name])
        atheris.Fuzz()


if __name__ == "__main__":
    main()
