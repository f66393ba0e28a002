"""What a sensor remembers from tick to tick, read so that no deploy of another version stops it."""

import json
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError


class Cursor(BaseModel):
    """A sensor's memory as JSON. Every field has a safe default: what is lost is reported again, never run again.

    `version` is raised when a field comes to mean something else; a field that is added or left out needs none.
    """

    model_config = ConfigDict(extra="ignore", strict=True)

    version: Literal[1] = 1

    @classmethod
    def read(cls, text: str | None) -> Self:
        """Read a cursor: one of another version is dropped, and so is each field of another shape, alone."""
        try:
            return cls.model_validate_json(text or "{}")
        except ValidationError as error:
            wrong = {problem["loc"][0] for problem in error.errors() if problem["loc"]}
        if not wrong or "version" in wrong:
            return cls()
        fields = json.loads(text or "{}")
        return cls.model_validate({name: value for name, value in fields.items() if name not in wrong})
