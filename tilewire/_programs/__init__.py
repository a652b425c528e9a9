"""Programs as values, and the recording of NumPy-like code."""
