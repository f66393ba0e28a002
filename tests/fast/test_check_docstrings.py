"""Tests of `tools.check_docstrings`, which finds public functions, classes and fields with incomplete documentation."""

import ast
from pathlib import Path

import pytest

from tools import check_docstrings
from tools.check_docstrings import findings, locate, public_names, sections_of

LOAD = '''
LIMIT = 1

@overload
def load(topic: str) -> str:
    """Load a topic."""

def load(): pass
class Loader:
    """A loader."""
    def close(self): pass
    def load(self): pass
'''


def found(source: str) -> list[str]:
    """Return the findings of the first definition in `source`."""
    definition = ast.parse(source).body[0]
    assert isinstance(definition, ast.ClassDef | ast.FunctionDef)
    return [reason for _, reason in findings(definition)]


DOCUMENTED = '''
def load(topic: str, *names: str, limit: int = 1, _clock: object = None) -> list[str]:
    """Load the records of a topic.

    Args:
        topic (str): The data topic.
        *names: Names.
            continued: in a second line.
        limit: How many.

    Returns:
        The records.

    Raises:
        ValueError: No topic.
    """
'''


def test_a_documented_function_gives_no_finding() -> None:
    """Each parameter has an entry; the result has a section, or the first line starts with Return."""
    assert found(DOCUMENTED) == []
    assert found('def load() -> int:\n    """Return the offset."""\n') == []
    assert found('def load() -> None:\n    """Load the offsets."""\n') == []


def test_entries_are_those_at_the_first_depth_of_their_section() -> None:
    """A continued line is not an entry, and a section ends at the first line that is indented less."""
    docstring = ast.get_docstring(ast.parse(DOCUMENTED).body[0])  # type: ignore[arg-type]
    assert sections_of(docstring or "") == {
        "Args": {"topic", "names", "limit"},
        "Returns": set(),
        "Raises": {"ValueError"},
    }


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("def load(): pass", "load has no docstring"),
        ('def load(topic, group):\n    """Load."""', "load does not document topic, group"),
        (
            'def load():\n    """Load.\n\n    Args:\n        topic: None.\n    """',
            "load documents topic, which it does not take",
        ),
        ('def load() -> int:\n    """Load."""', "load does not document what it returns"),
        ("class Batch: pass", "Batch has no docstring"),
        ('class Batch:\n    """A batch."""\n    offset: int', "Batch.offset has no description"),
        ('class Mode:\n    """A mode."""\n    FAST = "fast"', "Mode.FAST has no description"),
        (
            'class Batch:\n    """A batch."""\n    def __init__(self, topic): pass',
            "Batch does not document topic",
        ),
        ('class Batch:\n    """A batch."""\n    def load(self): pass', "Batch.load has no docstring"),
        ('class Batch:\n    """A batch."""\n    @property\n    def end(self): pass', "Batch.end has no docstring"),
    ],
)
def test_what_is_missing_is_found(source: str, reason: str) -> None:
    """Undocumented parameters, results and fields are reported, and missing docstrings."""
    assert found(source) == [reason]


@pytest.mark.parametrize(
    "body",
    [
        'offset: int\n    """The next offset."""',
        'offset: int = Field(description="The next offset.")',
        "_offset: int",
        "def _load(self, topic): pass",
        '@property\n    def end(self) -> int:\n        """The end."""',
        'def __init__(self, topic):\n        """Make it.\n\n        Args:\n            topic: The topic.\n        """',
    ],
)
def test_described_and_private_members_give_no_finding(body: str) -> None:
    """A field is described below it, by `description=` or in its class; private members are ignored."""
    assert found(f'class Batch:\n    """A batch."""\n    {body}\n') == []


def test_fields_may_be_described_in_the_class() -> None:
    """`Attributes:` and `Args:` of the class describe its fields and the parameters of `__init__`."""
    assert (
        found('class Batch:\n    """A batch.\n\n    Attributes:\n        offset: Next.\n    """\n    offset: int\n')
        == []
    )


def test_a_function_that_only_raises_has_no_result() -> None:
    """A result is documented unless the function always raises; an abstract method documents what overrides return."""
    body = 'def load() -> int:\n    """Refuse."""\n    raise {}\n'
    assert found(body.format('ValueError("no")')) == []
    assert found(body.format("NotImplementedError")) == ["load does not document what it returns"]


def test_hidden_members_give_no_finding() -> None:
    """Methods and fields that the API reference hides need no documentation."""
    (definition,) = ast.parse('class Batch:\n    """A batch."""\n    offset: int\n    def load(self): pass').body
    assert isinstance(definition, ast.ClassDef)
    assert list(findings(definition, hidden=["offset", "load"])) == []


def test_the_command_follows_the_public_names_through_re_exports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Public names are read from the package's `__init__`; hidden members and constants are not checked."""
    files = {
        "tools/api_reference.py": 'INTERNAL: Final = {"batches.load.Loader": "load"}\n',
        "marshal_dagster/__init__.py": '_NAMES: dict[str, str] = {"batches": "load Loader LIMIT"}\n',
        "marshal_dagster/batches/__init__.py": "from marshal_dagster.batches.load import Loader, load as load\n",
        "marshal_dagster/batches/load.py": LOAD,
    }
    for place, text in files.items():
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(text)
    monkeypatch.setattr(check_docstrings, "__file__", f"{tmp_path}/tools/check_docstrings.py")
    assert check_docstrings.main() == 1
    assert capsys.readouterr().out.splitlines() == [
        "marshal_dagster/batches/load.py:8: load has no docstring",
        "marshal_dagster/batches/load.py:11: Loader.close has no docstring",
    ]
    assert locate(tmp_path, "marshal_dagster.batches", "LIMIT") is None


@pytest.mark.thorough
def test_each_public_name_of_the_library_is_located() -> None:
    """All public names are functions and classes, so none is left unchecked."""
    top = Path(check_docstrings.__file__).parents[1]
    names = public_names((top / "marshal_dagster" / "__init__.py").read_text())
    places = {
        name: locate(top, f"marshal_dagster.{module}", name) for module, listed in names.items() for name in listed
    }
    assert [name for name, place in places.items() if place is None] == []
