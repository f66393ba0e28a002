"""The repository's `definitions.py` as a component: see `defs/flights/defs.yaml`."""
