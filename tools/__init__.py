"""Checks of the repository, which the Makefile and CI run, and generators of pages. Not in the wheel."""
