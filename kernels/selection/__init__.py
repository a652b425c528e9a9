"""The catalogue of binaries, and the choice among them."""
