"""What the Makefile and CI run to check the repository itself; not in the wheel."""
