"""Access to files of an Iceberg table that needs the credentials that its catalog has given out with it."""

import os
from pathlib import Path
from typing import Final

from pyiceberg.io.pyarrow import PyArrowFile, PyArrowFileIO

VENDED: Final = {
    "s3.access-key-id": "vended-key",
    "s3.secret-access-key": "vended-secret",
    "s3.session-token": "vended-token",
}
"""The credentials that the catalog gives out with each table."""
WITNESSES: Final = "marshal-test.witnesses"
"""The property with a folder in which each process that has written a data file leaves a file named by its id."""


class VendedFileIO(PyArrowFileIO):
    """Refuses to write a data file without the credentials."""

    def new_output(self, location: str) -> PyArrowFile:
        """Return the file, if the credentials are there."""
        if location.endswith(".parquet"):
            missing = [name for name, text in VENDED.items() if self.properties.get(name) != text]
            if missing:
                raise PermissionError(f"without {missing}")
            Path(self.properties[WITNESSES], str(os.getpid())).touch()
        return super().new_output(location)
