"""The Tilewire client: NumPy arrays in, NumPy arrays out, over HTTP. Needs httpx and NumPy only."""
