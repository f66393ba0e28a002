"""Tests: `fast` needs neither Java nor a service, `real` runs on services that the suite starts itself."""
