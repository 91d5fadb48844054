"""What the emulated and the gpu tier share: batches, devices, tolerances, and the tests written once for both."""
