"""The cursor of a sensor, which Dagster stores from one tick to the next.

A sensor ignores what it cannot read in a cursor, such as one that another version of this library wrote.
"""

import json
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError


class Cursor(BaseModel):
    """The cursor of a sensor, stored as JSON.

    Every field has a safe default: if a value is lost, the sensor may repeat a report, but never a run. `version` is
    increased if a field changes its meaning. Added or removed fields need no new version.
    """

    model_config = ConfigDict(extra="ignore", strict=True)

    version: Literal[1] = 1

    @classmethod
    def read(cls, text: str | None) -> Self:
        """Parse a cursor; ignore one of another version, and single fields of another type."""
        try:
            return cls.model_validate_json(text or "{}")
        except ValidationError as error:
            wrong = {problem["loc"][0] for problem in error.errors() if problem["loc"]}
        if not wrong or "version" in wrong:
            return cls()
        fields = json.loads(text or "{}")
        return cls.model_validate({name: value for name, value in fields.items() if name not in wrong})
