"""multipart/form-data, as far as a file is sent in it."""

from __future__ import annotations

import io
import logging

import python_multipart
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import File

logging.getLogger("python_multipart").addHandler(logging.NullHandler())
logging.getLogger("python_multipart").propagate = False


FORM = "multipart/form-data"


def is_form(kind: bytes) -> bool:
    return kind.partition(b";")[0].strip().lower() == FORM.encode()


class BadForm(Exception):
    """It is not what its Content-Type says."""


def file_of(kind: bytes, body: bytes, part: str) -> bytes | None:
    """What the file in this part says, the last one's where there are several; None: there is none."""
    found: list[bytes] = []

    def keep(file: File) -> None:
        if file.field_name == part.encode():
            file.file_object.seek(0)
            found.append(file.file_object.read())
        file.close()

    try:
        python_multipart.parse_form({"Content-Type": kind}, io.BytesIO(body), None, keep)
    except (FormParserError, ValueError, KeyError, LookupError) as error:
        raise BadForm(str(error)) from None
    return found[-1] if found else None
