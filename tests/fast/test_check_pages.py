"""The check of the pages finds long sentences, wide code and prompts, and nothing in the pages as they are."""

import pytest

from tools import check_pages
from tools.check_pages import LongSentence

SHORT = "A sentence. "
LONG = f"It has {'many ' * 40}words. "


def problems(page: str, place: str = "docs/index.md", allowed: tuple[LongSentence, ...] = ()) -> list[str]:
    """Return the messages for a page."""
    found = [*check_pages.sentence_problems(place, page, allowed), *check_pages.code_problems(place, page)]
    return [result[1] for result in found if not isinstance(result, LongSentence)]


@pytest.mark.parametrize(
    ("page", "problem"),
    [
        (LONG, "43 words, at most 40 are allowed"),
        ("One two three four five six seven eight nine ten eleven twelve. " * 10, ""),
        (f"It has {'many ' * 17}words. " * 10, "its sentences have 20.0 words on average"),
        (f"{SHORT}`code` begins the {'next ' * 35}sentence. ", ""),
        (f"```python\n{'x' * 89}\n```\n", "89 columns of code, at most 88 are allowed"),
        (f"- A list:\n\n    ```sql\n    {'x' * 88}\n    ```\n", ""),
        (f"```text\n{'x' * 200}\n```\n", ""),
        ("```bash\n$ ls\n```\n", "a prompt, which would be copied"),
        ("```console\nls\n```\n", "a console block"),
    ],
)
def test_what_is_wrong_with_a_page_is_found(page: str, problem: str) -> None:
    """Each page has one problem, or none."""
    found = problems(page)
    assert len(found) == bool(problem)
    assert problem in "".join(found)


def test_an_entry_allows_its_sentence_only() -> None:
    """An exception counts for its page and the beginning of its sentence."""
    entry = LongSentence("docs/index.md", "It has", "a test")
    assert problems(LONG, allowed=(entry,)) == []
    assert len(problems(LONG, "docs/how-to/use.md", (entry,))) == 1
    assert len(problems(f"But {LONG}", allowed=(entry,))) == 1


def test_some_pages_may_have_wide_code_or_long_sentences() -> None:
    """The listed pages have an exception."""
    assert problems(f"```json\n{'x' * 200}\n```\n", next(iter(check_pages.WIDE_CODE))) == []
    assert problems(f"It has {'many ' * 17}words. " * 10, next(iter(check_pages.LONG_PAGES))) == []


@pytest.mark.slow
def test_the_pages_are_right(capsys: pytest.CaptureFixture[str]) -> None:
    """The pages of the repository have no finding."""
    assert check_pages.main() == 0, capsys.readouterr().out
