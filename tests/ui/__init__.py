"""Dagster's pages as a user sees them: a real Chromium on the demo's deployment and on one with assets."""
