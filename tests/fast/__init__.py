"""Tests that need no Java and no service: together under 60 seconds."""
