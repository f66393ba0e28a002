"""A seeded simulator of whole groups: the library's own code on a virtual clock, faults, and independent checkers."""
