"""Measurements on a GPU.  Each module is run with ``python -m benchmarks.NAME``; see README.md."""
