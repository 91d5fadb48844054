"""Kernel bodies and the stages they share.  Importing a stage imports numba; ``geometry`` does not."""
