"""Writes the C source of the Python binding: cffi, API mode, declarations taken from the headers as they stand."""

import re
import sys
from pathlib import Path

from cffi import FFI

MODULE = "broker._native"


def declarations(header: str) -> str:
    """What cffi's parser understands of a header: everything but the preprocessor's lines."""
    return re.sub(r"^#.*$", "", header, flags=re.MULTILINE)


def main(out: str) -> None:
    ffi = FFI()
    for header in ("wire.h", "cache.h", "board.h"):
        ffi.cdef(declarations((Path(__file__).parent / header).read_text()))
    ffi.set_source(MODULE, '#include "board.h"')
    ffi.emit_c_code(out)


if __name__ == "__main__":
    main(sys.argv[1])
