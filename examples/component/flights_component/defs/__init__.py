"""Components, one folder each."""
