"""The transcripts in tests/scenarios match the library; if not, run python -m tools.transcripts."""

import pytest

from tools import transcripts


@pytest.mark.parametrize("scenario", transcripts.SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_a_transcript_is_what_happens(scenario: transcripts.Scenario) -> None:
    """A new run of the scenario produces the stored transcript."""
    assert transcripts.render(scenario) == transcripts.path_of(scenario).read_text()


def test_no_transcript_is_left_over() -> None:
    """Each transcript file belongs to a scenario."""
    assert set(transcripts.FOLDER.iterdir()) == {transcripts.path_of(scenario) for scenario in transcripts.SCENARIOS}


def test_the_page_is_made_of_the_transcripts() -> None:
    """docs/verification/transcripts.md is up to date."""
    assert transcripts.PAGE.read_text() == transcripts.page()
