"""Tests of Dagster's pages in a real Chromium, on the demo's deployment and a code location with assets."""
