"""Check that the documentation matches the library: public names, commands and their options."""

import ast
import re
import shlex
from collections import Counter
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from typer.main import get_command

import marshal_dagster
from marshal_dagster.cli.main import COMMANDS, app, load_command
from tests.pages import commands_of, python_blocks

DOCS = Path(__file__).parents[2] / "docs"
SHORT = 4
"""Sentences of so few parts may be in several pages."""
TUTORIAL = Path(__file__).parents[2] / "examples" / "tutorial"
METRIC = r"`(marshal_[a-z_]+)`"
UNIT = r"(_seconds)?(_total|_bucket)?$"
OTHER_OPTIONS = frozenset(
    {
        "--additional-python-modules",
        "--command-config",
        "--extra-jars",
        "--help",
        "--no-deps",
        "--packages",
        "--python-modules-installer-option",
    }
)
"""Options of AWS Glue, Kafka's tools, pip and spark-submit, and the one that Typer adds to each command."""


def commands() -> list[str]:
    """Return each call of `marshal-dagster` in a page's blocks or lines, except calls with options only."""
    text = "\n".join(path.read_text() for path in [*DOCS.rglob("*.md"), DOCS.parent / "README.md"])
    in_blocks = re.findall(r"^(?:.+ \| )?marshal-dagster (\w[^|>\n]*)", "\n".join(commands_of(text)), re.MULTILINE)
    in_lines = re.findall(r"`marshal-dagster (\w[^`]*)`", text)
    return sorted({*in_blocks, *in_lines})


def parse(arguments: list[str]) -> None:
    """Parse a command line as the program does, and execute nothing."""
    command: Any = load_command(arguments.pop(0))
    while arguments and hasattr(command, "commands"):
        command = command.commands[arguments.pop(0)]
    if arguments:
        command.make_context("marshal-dagster", arguments)


@pytest.mark.parametrize("command", commands())
def test_a_command_in_the_docs_is_one(command: str) -> None:
    """Its name, options and number of arguments are accepted; a name alone refers to any call."""
    parse(shlex.split(command, comments=True))


def test_a_command_that_is_none_is_found() -> None:
    """A wrong name and a wrong option are errors."""
    with pytest.raises(ModuleNotFoundError):
        parse(["stop"])
    with pytest.raises(Exception, match="No such option"):
        parse(["pause", "shops", "--since", "2h"])


def options_of(command: Any) -> set[str]:  # noqa: ANN401 - typer names no type for them
    """Return the options of a command, or of all commands of a group."""
    options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    return options.union(*map(options_of, getattr(command, "commands", {}).values()))


def test_an_option_in_the_docs_is_one() -> None:
    """Each option that a page names without its command belongs to a command, or to another program."""
    known = OTHER_OPTIONS.union(options_of(get_command(app)), *(options_of(load_command(name)) for name in COMMANDS))
    named = {
        (path.name, option)
        for folder in ("concepts", "how-to", "operate", "reference", "tutorials")
        for path in (DOCS / folder).rglob("*.md")
        for option in re.findall(r"`(--[a-z][a-z-]+)[^`]*`", path.read_text())
    }
    assert [(page, option) for page, option in sorted(named) if option not in known] == []


def test_a_metric_in_the_docs_is_one() -> None:
    """Each name of a metric in a page is in the code, with dots or underscores, or in the rules of alerts."""
    sources = [*(DOCS.parent / "marshal_dagster").rglob("*.py"), *(DOCS.parent / "observability").glob("*.yml")]
    known = "\n".join(path.read_text() for path in sources)
    known += known.replace(".", "_")
    named = {(path.name, name) for path in DOCS.rglob("*.md") for name in re.findall(METRIC, path.read_text())}
    assert [(page, name) for page, name in sorted(named) if re.sub(UNIT, "", name) not in known] == []


def test_the_tutorial_shows_the_files_that_are_run() -> None:
    """The page contains each file of the example unchanged."""
    page = (DOCS / "tutorials" / "first-batch.md").read_text()
    blocks = python_blocks(page)
    assert sorted(blocks) == sorted(path.read_text() for path in TUTORIAL.glob("*.py"))


def test_the_readme_shows_the_files_that_are_run() -> None:
    """README.md contains each file of the quick start unchanged."""
    blocks = python_blocks((DOCS.parent / "README.md").read_text())
    example = Path(__file__).parents[2] / "examples" / "quick_start"
    assert sorted(blocks) == sorted(path.read_text() for path in example.glob("*.py"))


def test_the_links_of_the_readme_exist() -> None:
    """Each relative link of README.md and CONTRIBUTING.md names a file, and a heading of it if there is an anchor."""
    for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md"):
        for target, _, anchor in re.findall(
            r"\]\((?!https?:)([^)#\s]*)(#([^)\s]*))?\)", (DOCS.parent / name).read_text()
        ):
            page = DOCS.parent / (target or name)
            assert page.is_file(), (name, target)
            headings = re.findall(r"^#+ (.*)$", page.read_text() if anchor else "", re.MULTILINE)
            slugs = {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading.lower())) for heading in headings}
            assert not anchor or anchor in slugs, (name, target, anchor)


def test_the_page_of_sinks_shows_the_example() -> None:
    """The page contains the sink and its test unchanged."""
    page = (DOCS / "how-to" / "sinks.md").read_text()
    blocks = python_blocks(page)
    example = Path(__file__).parents[2] / "examples" / "sqlite_sink"
    assert sorted(blocks[2:]) == sorted(path.read_text() for path in example.glob("*.py"))


@pytest.mark.parametrize(
    ("tutorial", "subject", "files"),
    [
        ("outbox-events", "outbox", ["delays.py", "consumer.py"]),
        ("several-deployments", "coordinator", ["parcels.py"]),
        ("postgres", "postgres", ["shop_orders.py", "create_tables.py", "events.py"]),
        (
            "dg-project",
            "dg_project",
            ["process.py", "test_orders.py", "../tutorial/orders.py", "shop_totals.py"],
        ),
    ],
)
def test_the_page_of_an_example_shows_it(tutorial: str, subject: str, files: list[str]) -> None:
    """The page contains the code locations and a consumer unchanged."""
    page = (DOCS / "tutorials" / f"{tutorial}.md").read_text()
    blocks = python_blocks(page)
    example = Path(__file__).parents[2] / "examples" / subject
    assert blocks == [(example / name).read_text() for name in files]


def test_the_page_of_plain_python_shows_the_example() -> None:
    """The page contains the script and the task unchanged."""
    page = (DOCS / "how-to" / "plain-python.md").read_text()
    blocks = python_blocks(page)
    example = Path(__file__).parents[2] / "examples" / "plain_python"
    assert sorted(blocks) == sorted(path.read_text() for path in example.glob("*.py"))


def test_the_page_of_tests_shows_the_example() -> None:
    """The page contains the code location and its tests unchanged."""
    page = (DOCS / "how-to" / "test-your-job.md").read_text()
    blocks = python_blocks(page)
    example = Path(__file__).parents[2] / "examples" / "testing"
    assert sorted(blocks) == sorted(path.read_text() for path in example.glob("*.py"))


def test_the_page_of_assets_shows_the_check_of_freshness() -> None:
    """The page contains the check unchanged."""
    path = Path(__file__).parents[2] / "examples" / "freshness" / "up_to_date.py"
    assert f"```python\n{path.read_text()}```\n" in (DOCS / "how-to" / "assets.md").read_text()


def test_the_page_of_pipes_shows_both_sides() -> None:
    """The page contains the code location and the script unchanged."""
    page = (DOCS / "how-to" / "pipes.md").read_text()
    blocks = python_blocks(page)
    for path in (Path(__file__).parents[2] / "examples" / "pipes").glob("*.py"):
        assert path.read_text() in blocks


PLATFORMS = sorted((DOCS / "how-to").glob("pipes-*.md"))


@pytest.mark.parametrize("path", PLATFORMS, ids=lambda path: path.stem)
def test_the_page_of_a_platform_has_code_and_what_was_tried(path: Path) -> None:
    """Its blocks are Python and import public names only; the overview links to it."""
    page = path.read_text()
    assert "## What was tried\n" in page
    assert f"]({path.name}" in (DOCS / "how-to" / "pipes.md").read_text()
    blocks = [ast.parse(block) for block in python_blocks(page)]
    imports = [node for block in blocks for node in ast.walk(block) if isinstance(node, ast.ImportFrom)]
    names = {alias.name for node in imports if node.module == "marshal_dagster" for alias in node.names}
    assert {"RemoteSink", "marshal_asset", "run_with_pipes"} <= names <= set(marshal_dagster.__all__)


def test_the_pages_of_pipes_repeat_no_sentence() -> None:
    """What holds on each platform is in the overview."""
    pages = [re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL) for path in PLATFORMS]
    pages.append((DOCS / "how-to" / "pipes.md").read_text())
    sentences = [
        sentence
        for page in pages
        for paragraph in re.split(r"\n\n|^- |^\|", page, flags=re.MULTILINE)
        for sentence in set(re.split(r"(?<=[.:])\s+", " ".join(paragraph.split())))
    ]
    repeated = {sentence: count for sentence, count in Counter(sentences).items() if count > 1}
    assert not {sentence for sentence in repeated if len(sentence.split()) > SHORT}


def test_each_public_name_is_in_the_reference_once() -> None:
    """The pages of `docs/reference/api` and the page of errors list all public names, and no others of that level."""
    pages = "\n".join(path.read_text() for path in (DOCS / "reference" / "api").glob("*.md"))
    errors = (DOCS / "reference" / "errors.md").read_text()
    names = re.findall(r"^::: marshal_dagster\.(\w+)$", pages, re.MULTILINE)
    names += re.findall(r"^## (\w+Error)$", errors, re.MULTILINE)
    assert Counter(names) == Counter(marshal_dagster.__all__)


@pytest.mark.parametrize("path", [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))], ids=lambda path: path.stem)
def test_the_python_of_a_page_can_be_parsed(path: Path) -> None:
    """Each Python block is valid Python, so that a reader can paste it."""
    for block in re.findall(r"^ *```py(?:thon)?\n(.*?)^ *```$", path.read_text(), re.MULTILINE | re.DOTALL):
        ast.parse(dedent(block))


def links_of(page: Path) -> set[Path]:
    """Return the pages that a page links to."""
    targets = re.findall(r"\]\(([^)\s#]+\.md)(?:#[^)]*)?\)", page.read_text())
    return {(page.parent / target).resolve() for target in targets if "://" not in target}


def reachable_from(home: Path) -> set[Path]:
    """Return the pages that a reader can reach from a page by links, with that page."""
    found, unread = {home}, [home]
    while unread:
        new = links_of(unread.pop()) - found
        found |= new
        unread += new
    return found


def test_each_page_is_reachable_from_home() -> None:
    """A reader finds every page by links in the pages, without the navigation and the search."""
    pages = {path.resolve() for path in DOCS.rglob("*.md")}
    assert {path.relative_to(DOCS).as_posix() for path in pages - reachable_from(DOCS / "index.md")} == set()


def test_home_links_to_each_page_that_is_no_decision() -> None:
    """Two clicks suffice: home links to each page, and the list of decisions to each decision."""
    pages = {path.resolve() for path in DOCS.rglob("*.md") if "decisions" not in path.parts} - {DOCS / "index.md"}
    assert pages - links_of(DOCS / "index.md") == set()


def test_a_page_without_a_link_is_not_reachable(tmp_path: Path) -> None:
    """Links to other sites, to anchors and from unreachable pages do not count."""
    (tmp_path / "index.md").write_text("[a](notes.md#b) [far](https://example.org/setup.md) [here](#here)")
    (tmp_path / "notes.md").write_text("[home](index.md)")
    (tmp_path / "setup.md").write_text("[home](index.md)")
    reachable = reachable_from(tmp_path / "index.md")
    assert {path.name for path in reachable} == {"index.md", "notes.md"}


def test_the_glossary_is_in_order() -> None:
    """Each term is in it once, from A to Z, with a link to the page that explains it."""
    terms = re.findall(r"^\| \[([^\]]+)\]\([^)]+\) \|", (DOCS / "concepts" / "glossary.md").read_text(), re.MULTILINE)
    assert terms == sorted(set(terms), key=str.lower)
    assert {"claim", "epoch", "generation", "harvester", "lease", "plan", "rationalizer", "world state"} <= set(terms)


def test_the_code_map_has_each_package() -> None:
    """Each package of the library is in the table once, and no other."""
    page = (DOCS / "contributing" / "index.md").read_text()
    table = page[page.index("## Packages") : page.index("## Other folders")]
    library = Path(marshal_dagster.__file__).parent
    packages = {path.stem for path in library.iterdir() if (path / "__init__.py").exists()}
    modules = {"component", "pipes"}
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == sorted(packages | modules)
